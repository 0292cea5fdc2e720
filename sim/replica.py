"""A replica: waiting queue, KV pool, running batch and the time they take. Pure and synchronous.

Time is whatever the caller passes, in seconds: the emulator drives a replica in scaled wall-clock time and the
simulator in virtual time. The scheduler is SGLang's default without mixed chunks: first come first served, a prefill
goes before decode steps, one prompt after the other in chunks, and decoding rests meanwhile.

The emulator wants to see every token and every chunk. The simulator wants only what changes the course of things, so
with `bulk` a replica goes over all chunks of a prompt, and all decode steps up to the next end, at once, and is
stopped at the next boundary when a request arrives or is aborted. Times and tokens are the same either way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import sqrt

from sim.hardware import CHUNK_TOKENS, Hardware
from sim.prefix_cache import Node, PrefixCache


class QueueFull(Exception):
    """The waiting queue is at its limit; the request was not taken."""


class Stage(Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a replica can hold."""

    kv_tokens: int
    page_size: int = 16
    max_running: int = 256
    max_queued: int | None = None
    """Requests that may wait beyond those that have a slot in the running batch; None is no limit, SGLang's default."""
    host_tokens: int = 0
    """KV tokens of a host tier that everything is written through to; 0 is none, else at least `kv_tokens`."""
    load_back_tokens_per_s: float = 700_000.0
    """From the host tier to the GPU."""


@dataclass(slots=True, eq=False)
class Work:
    """A request and how far it has come. Times are those of the caller's clock; None until it happened."""

    pages: Sequence[int]
    """Chained hashes of the full pages of prompt and output, without the last output token, whose KV is never computed.
    May end with the prompt's when the output is not to be reused."""
    prompt_tokens: int
    output_tokens: int
    """Tokens it will produce, at least 1."""
    arrived: float = 0.0
    stage: Stage = Stage.WAITING
    cached_tokens: int = 0
    """Prompt tokens found in either tier."""
    host_tokens: int = 0
    """Of those, the ones that were only in the host tier."""
    prefilled_tokens: int = 0
    """Prompt tokens whose KV exists, cached ones included."""
    produced: int = 0
    """Output tokens so far."""
    started: float | None = None
    """When its prefill began."""
    first_token: float | None = None
    finished: float | None = None
    _node: Node | None = field(default=None, repr=False)
    _pages_held: int = field(default=0, repr=False)
    """Pages allocated for it outside the tree."""
    _pages_stored: int = field(default=0, repr=False)
    """Leading pages of `pages` that are in the tree."""

    @property
    def context_tokens(self) -> int:
        """Tokens of KV it holds."""
        return self.prefilled_tokens + self.produced


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    output_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    prefill_seconds: float = 0.0
    decode_steps: int = 0
    decode_batch: int = 0
    """Sum of batch sizes over the decode steps; the sums below are of the same steps."""
    decode_batch_squared: int = 0
    decode_seconds: float = 0.0
    decode_batch_seconds: float = 0.0


@dataclass(slots=True)
class _Step:
    """A prefill chunk or a decode step under way; with bulk, all chunks of a prompt or several decode steps."""

    start: float
    end: float
    prefill: Work | None = None
    tokens: int = 0
    """Prompt tokens, in prefill."""
    load_seconds: float = 0.0
    """Before the first chunk, for what comes from the host tier."""
    count: int = 0
    """Decode steps."""
    first: float = 0.0
    """Seconds of the first of them."""
    slope: float = 0.0
    """Seconds by which each is longer than the one before, as contexts grow."""

    def decode_seconds(self, count: int) -> float:
        """Of the first `count` steps."""
        return count * self.first + self.slope * (count * (count - 1) / 2)


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
        """`observer` is told when a request's prefill begins, its first token is there, and it is done.

        It is called in the middle of a step, so it must not call the replica back.
        """
        self.limits = limits
        self.hardware = hardware
        """May be exchanged for another; steps under way are not changed."""
        self.cache = PrefixCache(limits.kv_tokens // limits.page_size, limits.host_tokens // limits.page_size)
        self.totals = Totals()
        self.waiting: deque[Work] = deque()
        self.running: list[Work] = []
        """In the order of admission; the last may still be in prefill."""
        self.paused = False
        self.last_step_seconds = 0.0
        """Time of the last decode step; 0 when none has run."""
        self._bulk = bulk
        self._observer = observer
        self._prefilling: Work | None = None
        self._step: _Step | None = None

    @property
    def next_time(self) -> float | None:
        """When the current step ends; None when nothing runs."""
        return None if self._step is None else self._step.end

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.running and not self.waiting

    @property
    def used_tokens(self) -> int:
        """Tokens in pages that running requests hold or share; cached and unused ones are not counted."""
        page = self.limits.page_size
        private = sum(-(-work.context_tokens // page) - work._pages_stored for work in self.running)
        return (self.cache.pinned_pages + max(private, 0)) * page

    @property
    def waiting_uncached_tokens(self) -> int:
        """Estimate of the prompt tokens to be computed for what waits, plus the rest of the prompt in prefill.

        As SGLang under its default policy: length times (1 - hit rate so far), without looking into the cache. (The
        recorded load of 4 waiting requests of 31 tokens after 1,552 hits in 2,527 tokens says 44 = 4 * 11.)
        """
        rest = 0 if self._prefilling is None else self._prefilling.prompt_tokens - self._prefilling.prefilled_tokens
        totals = self.totals
        miss = 1.0 - totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 1.0
        return rest + sum(int(work.prompt_tokens * miss) for work in self.waiting)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether the pool could hold such a request alone."""
        return -(-(prompt_tokens + output_tokens) // self.limits.page_size) <= self.cache.capacity_pages

    def submit(self, work: Work, now: float) -> None:
        """Takes a request; QueueFull when the limit is reached.

        The limit counts what has no slot in the running batch, so a burst of up to `max_running + max_queued`
        requests is taken whole. (SGLang counts its whole waiting queue, which in a burst, for the moment until its
        next batch, also holds requests that have a slot.)
        """
        queued = self.limits.max_queued
        if queued is not None and len(self.waiting) + len(self.running) >= self.limits.max_running + queued:
            self.totals.rejected += 1
            raise QueueFull
        work.arrived = now
        self.waiting.append(work)
        if self._step is None:
            self._begin(now)
        elif self._bulk and self._step.prefill is None and len(self.waiting) == 1:
            self._cut(now)

    def abort(self, work: Work, now: float) -> None:
        """Ends a request early and frees what it held; its tokens so far stay cached. Nothing when it has ended."""
        if work.stage in (Stage.DONE, Stage.ABORTED):
            return
        if self._bulk and self._step is not None:
            self._cut(now)
        if work.stage is Stage.WAITING:
            self.waiting.remove(work)
        else:
            self._leave(work)
        if work is self._prefilling:
            self._prefilling = None
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

    def _begin(self, now: float) -> None:
        if self.paused:
            return
        if self._prefilling is None:
            self._prefilling = self._admit(now)
        if self._prefilling is not None:
            self._step = self._prefill_step(self._prefilling, now)
        elif self.running:
            self._step = self._decode_step(now)

    def _prefill_step(self, work: Work, now: float) -> _Step:
        rest, prefix = work.prompt_tokens - work.prefilled_tokens, work.prefilled_tokens
        load = work.host_tokens / self.limits.load_back_tokens_per_s if prefix == work.cached_tokens else 0.0
        if self._bulk:
            return _Step(now, now + load + self.hardware.prefill.seconds(rest, prefix), work, rest, load)
        tokens = min(CHUNK_TOKENS, rest)
        return _Step(now, now + load + self.hardware.prefill_seconds(tokens, prefix), work, tokens, load)

    def _decode_step(self, now: float) -> _Step:
        running = self.running
        batch = len(running)
        context = sum([work.prefilled_tokens + work.produced for work in running]) / batch
        first, slope, straight_to = self.hardware.token_line(batch, context)
        step = _Step(now, now + first, count=1, first=first, slope=slope)
        if self._bulk:
            step.count = min([work.output_tokens - work.produced for work in running])
            if context + step.count > straight_to:
                step.count = min(step.count, int(straight_to - context) + 1)
            step.end = now + step.decode_seconds(step.count)
        return step

    def settle(self, now: float) -> None:
        """Books what is complete by `now` of a step in bulk, so that counts can be read."""
        step = self._step
        if step is None:
            return
        if step.prefill is not None:
            self._settle_prefill(step, step.prefill, now)
        elif step.count > 1:
            done = min(step.count - 1, _steps(step, now - step.start))
            if done > 0:
                seconds = step.decode_seconds(done)
                self._decoded(step, done, step.start + seconds)
                step.start += seconds
                step.first += done * step.slope
                step.count -= done

    def _settle_prefill(self, step: _Step, work: Work, now: float) -> None:
        while step.tokens > CHUNK_TOKENS:
            seconds = step.load_seconds + self.hardware.prefill_seconds(CHUNK_TOKENS, work.prefilled_tokens)
            if step.start + seconds > now:
                return
            self._computed(work, CHUNK_TOKENS, seconds)
            step.start += seconds
            step.tokens -= CHUNK_TOKENS
            step.load_seconds = 0.0

    def _cut(self, now: float) -> None:
        """Lets a step in bulk end at the first boundary from `now` on."""
        self.settle(now)
        step = self._step
        assert step is not None
        if step.prefill is not None:
            if step.tokens > CHUNK_TOKENS:
                step.tokens = CHUNK_TOKENS
                chunk = self.hardware.prefill_seconds(CHUNK_TOKENS, step.prefill.prefilled_tokens)
                step.end = step.start + step.load_seconds + chunk
        elif step.count > 1:
            step.count = 1
            step.end = step.start + step.first

    def _complete(self, step: _Step) -> None:
        self._step = None
        work = step.prefill
        if work is None:
            self._decoded(step, step.count, step.end)
        else:
            self._computed(work, step.tokens, step.end - step.start)
            if work is self._prefilling and work.prefilled_tokens == work.prompt_tokens:
                self._prefilled(work, step.end)
        self._begin(step.end)

    def _admit(self, now: float) -> Work | None:
        """Moves the head of the queue into the running batch, when there is a slot and KV for all it will hold.

        KV for the whole output is set aside at once, so nothing is ever retracted. SGLang reserves a share of it and
        retracts requests when that was too little.
        """
        if not self.waiting or len(self.running) >= self.limits.max_running:
            return None
        work = self.waiting[0]
        page = self.limits.page_size
        # At least one token of the prompt is always computed: its logits give the first output token.
        limit = min((work.prompt_tokens - 1) // page, len(work.pages))
        node, cached = self.cache.match(work.pages, limit)
        needed = -(-(work.prompt_tokens + work.output_tokens) // page) - cached
        self.cache.pin(node)
        if not self.cache.allocate(needed):
            self.cache.unpin(node)
            return None
        if limit > cached and self.limits.host_tokens:
            lowest, found = self.cache.match_host(node, cached, work.pages, limit)
            if found > cached:
                self.cache.load_back(lowest)
                self.cache.pin(lowest)
                self.cache.unpin(node)
                work.host_tokens = (found - cached) * page
                needed -= found - cached
                node, cached = lowest, found
        self.waiting.popleft()
        self.running.append(work)
        work._node, work._pages_held, work._pages_stored = node, needed, cached
        work.cached_tokens = work.prefilled_tokens = cached * page
        work.stage = Stage.PREFILL
        work.started = now
        self.totals.prompt_tokens += work.prompt_tokens
        self.totals.cached_tokens += work.cached_tokens
        self.totals.host_tokens += work.host_tokens
        if self._observer is not None:
            self._observer(work, now)
        return work

    def _computed(self, work: Work, tokens: int, seconds: float) -> None:
        self.totals.prefill_tokens += tokens
        self.totals.prefill_seconds += seconds
        if work is self._prefilling:
            work.prefilled_tokens += tokens

    def _prefilled(self, work: Work, now: float) -> None:
        self._prefilling = None
        work.stage = Stage.DECODE
        work.first_token = now
        self._store(work, work.prompt_tokens)
        if self._observer is not None:
            self._observer(work, now)
        self._produced(work, 1, now)

    def _decoded(self, step: _Step, count: int, now: float) -> None:
        totals = self.totals
        batch = len(self.running)
        seconds = step.decode_seconds(count)
        totals.decode_steps += count
        totals.decode_batch += count * batch
        totals.decode_batch_squared += count * batch * batch
        totals.decode_seconds += seconds
        totals.decode_batch_seconds += batch * seconds
        self.last_step_seconds = step.first + (count - 1) * step.slope
        for work in tuple(self.running):
            self._produced(work, count, now)

    def _produced(self, work: Work, count: int, now: float) -> None:
        work.produced += count
        self.totals.output_tokens += count
        if work.produced >= work.output_tokens:
            self._leave(work)
            work.stage = Stage.DONE
            work.finished = now
            self.totals.finished += 1
            if self._observer is not None:
                self._observer(work, now)

    def _leave(self, work: Work) -> None:
        """Takes a request out of the batch, keeping its full pages in the tree."""
        self.running.remove(work)
        self._store(work, work.prefilled_tokens + max(work.produced - 1, 0))
        assert work._node is not None
        self.cache.unpin(work._node)
        self.cache.release(work._pages_held)
        work._node, work._pages_held = None, 0

    def _store(self, work: Work, tokens: int) -> None:
        """Hands the full pages of the first `tokens` over to the tree and pins them for the request."""
        count = min(tokens // self.limits.page_size, len(work.pages))
        if count <= work._pages_stored:
            return
        handed = count - work._pages_stored
        old = work._node
        assert old is not None
        work._node = self.cache.insert(work.pages, count, handed, old, work._pages_stored)
        self.cache.pin(work._node)
        self.cache.unpin(old)
        work._pages_held -= handed
        work._pages_stored = count


def _steps(step: _Step, seconds: float) -> int:
    """How many whole decode steps fit into `seconds`."""
    half = step.slope / 2
    if half * step.count < 1e-9 * step.first:
        count = int(seconds / step.first)
    else:  # count * first + half * count * (count - 1) = seconds
        linear = step.first - half
        count = int((sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half))
    while count > 0 and step.decode_seconds(count) > seconds:
        count -= 1
    while step.decode_seconds(count + 1) <= seconds:
        count += 1
    return count
