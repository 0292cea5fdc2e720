"""A replica: waiting queue, KV pool, running batch and the time they take. Pure and synchronous.

Time is whatever the caller passes, in seconds: the emulator drives a replica in scaled wall-clock time and the
simulator in virtual time. The scheduler is SGLang's default: first come first served, and prefill goes before decode
steps. A prefill pass takes `CHUNK_TOKENS` of whatever waits: the rest of a prompt that was begun, then the next ones,
the last of them cut. All whose prompts end in a pass have their first token when it ends. Decoding rests meanwhile
unless chunks are mixed.

The emulator wants to see every token and every chunk. The simulator wants only what changes the course of things, so
with `bulk` a replica goes over all passes that one prompt fills, and all decode steps up to the next end, at once, and
is stopped at the next boundary when a request arrives or is aborted. Times and tokens are the same either way.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.batch import Batch
from sim.hardware import CHUNK_TOKENS, Hardware
from sim.new_token_ratio import CLIP_TOKENS
from sim.step import Step
from sim.work import Limits, QueueFull, Stage, Totals, Work

__all__ = ["Limits", "QueueFull", "Replica", "Stage", "Totals", "Work"]


class Replica:
    """Model of one replica. Callers pass a time that never goes back, and `advance` to it before anything else."""

    def __init__(
        self,
        hardware: Hardware,
        limits: Limits,
        *,
        bulk: bool = False,
        observer: Callable[[Work, float], None] | None = None,
    ) -> None:
        """`observer` is told when a request's prefill first begins, its first token is there, and it is done.

        It is called in the middle of a step, so it must not call the replica back. Raises ValueError when chunks are to
        be mixed with speculative decoding, with which SGLang turns that off.
        """
        if limits.mixed_chunk and hardware.accept_length != 1.0:
            raise ValueError(
                f"mixed_chunk: not with speculative decoding (accept_length {hardware.accept_length}); "
                "set accept_length to 1"
            )
        self.limits = limits
        self.hardware = hardware
        """May be exchanged for another; steps under way are not changed."""
        self._batch = batch = Batch(limits)
        self.cache = batch.cache
        self.totals = batch.totals
        self.waiting = batch.waiting
        self.running = batch.running
        """In the order of admission; those still in prefill are the last."""
        self.paused = False
        self.last_step_seconds = 0.0
        """Time of the last decode step; 0 when none has run."""
        self._bulk = bulk
        self._observer = observer
        self._step: Step | None = None

    @property
    def next_time(self) -> float | None:
        """When the current step ends; None when nothing runs."""
        return None if self._step is None else self._step.end

    @property
    def new_token_ratio(self) -> float:
        """Share of what running requests may yet produce for which KV is kept back."""
        return self._batch.ratio.value

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.running and not self.waiting

    @property
    def used_tokens(self) -> int:
        """Tokens in pages that running requests hold or share; cached and unused ones are not counted."""
        return self._batch.used_tokens

    @property
    def waiting_uncached_tokens(self) -> int:
        """Estimate of the prompt tokens to be computed for what waits, plus the rest of the prompts in prefill."""
        return self._batch.waiting_uncached_tokens

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether the pool could hold such a request alone."""
        return self._batch.fits(prompt_tokens, output_tokens)

    def submit(self, work: Work, now: float) -> None:
        """Takes a request; QueueFull when the limit is reached, ValueError when the pool could not hold it alone.

        The limit counts what has no slot in the running batch, so a burst of up to `max_running + max_queued`
        requests is taken whole. (SGLang counts its whole waiting queue, which in a burst, for the moment until its
        next batch, also holds requests that have a slot.)
        """
        if not self.fits(work.prompt_tokens, work.output_tokens):
            raise ValueError(
                f"a request of {work.prompt_tokens} + {work.output_tokens} tokens does not fit kv_tokens "
                f"{self.limits.kv_tokens}: use a machine that holds more, or shorter sessions"
            )
        queued = self.limits.max_queued
        if queued is not None and len(self.waiting) + len(self.running) >= self.limits.max_running + queued:
            self.totals.rejected += 1
            raise QueueFull
        work.arrived = now
        self.waiting.append(work)
        if self._step is None:
            self._begin(now)
        elif self._bulk and not self._step.prefill and not self._batch.full:
            self._cut(now)

    def abort(self, work: Work, now: float) -> None:
        """Ends a request early and frees what it held; its tokens so far stay cached. Nothing when it has ended."""
        if work.stage in (Stage.DONE, Stage.ABORTED):
            return
        if self._bulk and self._step is not None:
            self._cut(now)
        if work.stage is Stage.WAITING:
            self.waiting.remove(work)
            self._batch.full = False  # it may have been the one that was refused
        else:
            self._batch.leave(work)
        work.stage = Stage.ABORTED
        work.finished = now
        self.totals.aborted += 1
        if self._step is None:
            self._begin(now)

    def pause(self) -> None:
        """No further step begins; the one under way ends in its time."""
        self.paused = True

    def resume(self, now: float) -> None:
        """Undoes `pause`."""
        self.paused = False
        if self._step is None:
            self._begin(now)

    def advance(self, now: float, max_steps: int | None = None) -> bool:
        """Completes the steps that end at or before `now`; True when one did.

        With `max_steps`, at most so many: `next_time` then says whether there is more to do.
        """
        done = 0
        while self._step is not None and self._step.end <= now and done != max_steps:
            self._complete(self._step)
            done += 1
        return done > 0

    def settle(self, now: float) -> None:
        """Books what is complete by `now` of a step in bulk, so that counts can be read."""
        self.settle_prefill(now)
        step = self._step
        if step is not None and step.count > 1:
            done = min(step.count - 1, step.decode_steps(now - step.start))
            if done > 0:
                self._batch.grow(done + 1)
                seconds = step.decode_seconds(done)
                self._decoded(step, done, step.start + seconds)
                step.start += seconds
                step.first += done * step.slope
                step.count -= done

    def settle_prefill(self, now: float) -> None:
        """Books the prefill passes that are complete by `now`; for decode steps see `settle`."""
        step = self._step
        if step is None or not step.prefill:
            return
        work = step.prefill[0]
        while step.tokens[0] > CHUNK_TOKENS:
            seconds = step.load_seconds + self.hardware.prefill_seconds(CHUNK_TOKENS, work.prefilled_tokens)
            if step.start + seconds > now:
                return
            self._computed(work, CHUNK_TOKENS)
            self.totals.prefill_seconds += seconds
            step.start += seconds
            step.tokens[0] -= CHUNK_TOKENS
            step.load_seconds = 0.0

    def _cut(self, now: float) -> None:
        """Lets a step in bulk end at the first boundary from `now` on."""
        self.settle(now)
        step = self._step
        assert step is not None
        if step.prefill:
            if step.tokens[0] > CHUNK_TOKENS:
                step.tokens[0] = CHUNK_TOKENS
                chunk = self.hardware.prefill_seconds(CHUNK_TOKENS, step.prefill[0].prefilled_tokens)
                step.end = step.start + step.load_seconds + chunk
        elif step.count > 1:
            step.count = 1
            step.end = step.start + step.first

    # What to do next

    def _begin(self, now: float) -> None:
        if self.paused:
            return
        if self._batch.prefilling or (self.waiting and not self._batch.full):
            self._step = self._prefill_step(now)
        if self._step is None:
            if self.running:
                self._step = self._decode_step(now)
            else:
                self._batch.ratio.reset()

    def _prefill_step(self, now: float) -> Step | None:
        """Fills a pass; None when nothing can be admitted.

        As SGLang's `PrefillAdder` (managers/schedule_policy.py): whole pages are counted, and the prompt that does not
        fit any more is cut at a page. Of what is computed to its end in this pass, all that it may produce is kept back
        when others are admitted.
        """
        page, limits = self.limits.page_size, self.limits
        beside = len(self._batch.decoding()) if limits.mixed_chunk else 0
        room, kept, loading = CHUNK_TOKENS - beside, 0, 0
        works: list[Work] = []
        tokens: list[int] = []
        while room >= page:
            work = self._batch.prefilling[0] if self._batch.prefilling and not works else self._admit(now, kept)
            if work is None:
                break
            if work.transferred:
                continue
            rest = work.fill_tokens - work.prefilled_tokens
            part = min(rest, room if room == CHUNK_TOKENS else room // page * page)
            if part == rest:
                kept += min(work.max_new_tokens - work.produced, CLIP_TOKENS)
            room -= -(-part // page) * page
            loading += work.loading_tokens
            works.append(work)
            tokens.append(part)
        if not works:
            return None
        hardware = self.hardware
        load = loading / limits.load_back_tokens_per_s
        if beside and self._batch.missing_pages(1) <= self.cache.available_pages:
            self._batch.grow(1)
            seconds = self._pass_seconds(works, tokens) + self._beside_seconds(beside)
            step = Step(now, now + load + seconds, works, tokens)
            step.load_seconds, step.mixed = load, True
            return step
        if self._bulk and not beside and len(works) == 1 and rest > CHUNK_TOKENS:
            tokens[0] = (rest - 1) // CHUNK_TOKENS * CHUNK_TOKENS  # others may come into the last pass
            seconds = hardware.prefill.seconds(tokens[0], works[0].prefilled_tokens)
        else:
            seconds = self._pass_seconds(works, tokens)
        step = Step(now, now + load + seconds, works, tokens)
        step.load_seconds = load
        return step

    def _pass_seconds(self, works: list[Work], tokens: list[int]) -> float:
        """One pass over parts of several prompts: its fixed time once, and what each part takes beyond it."""
        prefill = self.hardware.prefill
        seconds = 0.0
        for i, work in enumerate(works):
            seconds += prefill.chunk_seconds(tokens[i], work.prefilled_tokens)
        return seconds - (len(works) - 1) * prefill.a

    def _beside_seconds(self, decoding: int) -> float:
        """What decoding adds to a prefill pass: its step without what the pass does anyway, reading the weights.

        No measurement of mixed passes is at hand: the weights' share is taken to be a step of one request without
        context.
        """
        context = sum([work.context_tokens for work in self._batch.decoding()]) / decoding
        hardware = self.hardware
        return max(0.0, hardware.token_seconds(decoding, context) - hardware.token_seconds(1, 0.0))

    def _decode_step(self, now: float) -> Step:
        running = self.running
        missing = 0
        for work in running:
            if work.room < 0:
                missing += 1
        if missing:
            if missing > self.cache.available_pages:
                self._batch.retract(speculating=self.hardware.accept_length != 1.0)
            self._batch.grow(1)
        # A loop, as lists for `sum` and `min` would take several times as long when compiled.
        tokens, count = 0, running[0].output_tokens
        for work in running:
            tokens += work.prompt_tokens + work.produced
            left = work.output_tokens - work.produced
            if left < count:
                count = left
        batch = len(running)
        context = tokens / batch
        first, slope, straight_to = self.hardware.token_line(batch, context)
        step = Step(now, now + first, [], [])
        step.count, step.first, step.slope = 1, first, slope
        if self._bulk:
            if context + count > straight_to:
                count = min(count, int(straight_to - context) + 1)
            step.count = self._batch.steps_with_room(count)
            step.end = now + step.decode_seconds(step.count)
        return step

    # What happens to requests

    def _admit(self, now: float, kept: int) -> Work | None:
        """The next request of the queue, if it is let in. One whose KV came with it has its first token at once."""
        work = self._batch.admit(kept)
        if work is None:
            return None
        if work.started is None:
            work.started = now
            if self._observer is not None:
                self._observer(work, now)
        if work.transferred:
            self._prefilled(work, now)
        return work

    def _complete(self, step: Step) -> None:
        self._step = None
        if not step.prefill:
            if step.count > 1:
                self._batch.grow(step.count)
            self._decoded(step, step.count, step.end)
        else:
            self.totals.prefill_seconds += step.end - step.start
            for i, work in enumerate(step.prefill):
                left = step.tokens[i]
                while left > 0:
                    part = min(CHUNK_TOKENS, left)
                    self._computed(work, part)
                    left -= part
            if step.mixed:
                self._produced(1, step.end)
            ready = [work for work in self._batch.prefilling if work.prefilled_tokens == work.fill_tokens]
            del self._batch.prefilling[: len(ready)]
            for work in ready:
                self._prefilled(work, step.end)
        self._begin(step.end)

    def _computed(self, work: Work, tokens: int) -> None:
        """A pass over a prompt has ended.

        If more of it is to come, this part is stored by itself, and so can be evicted by itself (SGLang:
        `cache_unfinished_req` in mem_cache/radix_cache.py).
        """
        self.totals.prefill_tokens += tokens
        if work.stage is Stage.PREFILL:
            work.prefilled_tokens += tokens
            work.loading_tokens = 0
            if work.prefilled_tokens < work.fill_tokens:
                self._batch.store(work, work.prefilled_tokens, unfinished=True)

    def _prefilled(self, work: Work, now: float) -> None:
        assert work.node is not None
        work.stage = Stage.DECODE
        if work.produced + 1 < work.output_tokens:
            self._batch.store(work, work.prefilled_tokens)
        work.produced += 1
        work.room = (work.node.end + work.pages_held) * self.limits.page_size - work.context_tokens
        self.totals.output_tokens += 1
        if work.first_token is None:
            work.first_token = now
            if self._observer is not None:
                self._observer(work, now)
        if work.produced == work.output_tokens:
            self._finish(work, now)

    def _decoded(self, step: Step, count: int, now: float) -> None:
        totals = self.totals
        batch = len(self.running)
        seconds = step.decode_seconds(count)
        totals.decode_steps += count
        totals.decode_batch += count * batch
        totals.decode_batch_squared += count * batch * batch
        totals.decode_seconds += seconds
        totals.decode_batch_seconds += batch * seconds
        self.last_step_seconds = step.first + (count - 1) * step.slope
        self._batch.ratio.decoded(count)
        self._produced(count, now)

    def _produced(self, count: int, now: float) -> None:
        """Every decoding request has so many more tokens."""
        ended = []
        decoding = self._batch.decoding()
        for work in decoding:
            work.produced += count
            work.room -= count
            if work.produced == work.output_tokens:
                ended.append(work)
        self.totals.output_tokens += count * len(decoding)
        for work in ended:
            self._finish(work, now)

    def _finish(self, work: Work, now: float) -> None:
        self._batch.leave(work)
        work.stage = Stage.DONE
        work.finished = now
        self.totals.finished += 1
        if self._observer is not None:
            self._observer(work, now)
