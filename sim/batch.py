"""Who waits and who runs on a replica, and the KV that they hold. It knows no time.

KV is taken as it is needed: the prompt's at admission, a page for the answer when the last one is full. How many
requests are let in is decided by `NewTokenRatio`; when decoding runs out of KV all the same, requests are retracted:
they wait again, and what they have produced is then computed like a prompt, as far as it is not cached.
"""

from __future__ import annotations

from collections import deque

from sim.new_token_ratio import CLIP_TOKENS, RETRACT_STEPS, NewTokenRatio
from sim.prefix_cache import PrefixCache
from sim.work import Limits, Stage, Totals, Work


class Batch:
    """The waiting queue, the running batch and the pool."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.cache = PrefixCache(
            limits.kv_tokens // limits.page_size, limits.host_tokens // limits.page_size, limits.host_write
        )
        self.totals = Totals()
        self.waiting: deque[Work] = deque()
        self.running: list[Work] = []
        """In the order of admission; those still in prefill are the last."""
        self.prefilling: list[Work] = []
        """In the pass under way; between passes at most one, whose prompt was cut."""
        self.full = False
        """The head of the queue was refused, and nothing has left the batch since (SGLang: `batch_is_full`)."""
        self.ratio = NewTokenRatio(limits.schedule_conservativeness)

    @property
    def used_tokens(self) -> int:
        """Tokens in pages that running requests hold or share; cached and unused ones are not counted."""
        page, private = self.limits.page_size, self.cache.allocated_pages
        for work in self.prefilling:  # of these only what is computed so far
            assert work.node is not None
            private += max(0, -(-work.context_tokens // page) - work.node.end) - work.pages_held
        return (self.cache.pinned_pages + private) * page

    @property
    def waiting_uncached_tokens(self) -> int:
        """Estimate of the prompt tokens to be computed for what waits, plus the rest of the prompts in prefill.

        As SGLang under its default policy: length times (1 - hit rate so far), without looking into the cache. (The
        recorded load of 4 waiting requests of 31 tokens after 1,552 hits in 2,527 tokens says 44 = 4 * 11.)
        """
        rest = sum([work.fill_tokens - work.prefilled_tokens for work in self.prefilling]) if self.prefilling else 0
        if not self.waiting:
            return rest
        totals = self.totals
        miss = 1.0 - totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 1.0
        return rest + sum([int(work.fill_tokens * miss) for work in self.waiting])

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether the pool could hold such a request alone."""
        return -(-(prompt_tokens + output_tokens) // self.limits.page_size) <= self.cache.capacity_pages

    def decoding(self) -> list[Work]:
        """Those of the batch that are not in prefill."""
        return self.running[: len(self.running) - len(self.prefilling)] if self.prefilling else self.running

    def missing_pages(self, steps: int) -> int:
        """Pages that so many decode steps need beyond those that the decoding requests hold."""
        page = self.limits.page_size
        missing = 0
        for work in self.decoding():
            short = steps - 1 - work.room
            if short > 0:
                missing += -(-short // page)
        return missing

    def grow(self, steps: int) -> None:
        """Takes pages for so many decode steps; there are enough."""
        page = self.limits.page_size
        for work in self.decoding():
            short = steps - 1 - work.room
            if short > 0:
                pages = -(-short // page)
                taken = self.cache.allocate(pages)
                assert taken
                work.pages_held += pages
                work.room += pages * page

    def steps_with_room(self, most: int) -> int:
        """For how many decode steps, at least 1 and at most `most`, the pool has pages."""
        available = self.cache.available_pages
        if len(self.running) * (most // self.limits.page_size + 1) <= available:
            return most
        least = 1
        while least < most:
            middle = (least + most + 1) // 2
            if self.missing_pages(middle) <= available:
                least = middle
            else:
                most = middle - 1
        return least

    def admit(self, kept: int) -> Work | None:
        """Moves the head of the queue into the running batch, when there is a slot and KV; else marks the batch full.

        As SGLang's `PrefillAdder.add_one_req` (managers/schedule_policy.py): what is not on the GPU, all that it may
        produce up to a bound, and a page must be less than what is free or evictable and not kept back for others:
        `kept` tokens for those in the same pass, and by the ratio for those that decode.
        """
        if not self.waiting or self.full:
            return None
        if len(self.running) >= self.limits.max_running:
            self.full = True
            return None
        work, cache, page = self.waiting[0], self.cache, self.limits.page_size
        fill = work.fill_tokens
        # At least one token is always computed: its logits give the next output token.
        limit = min((fill - 1) // page, len(work.pages))
        node, cached = cache.match(work.pages, limit)
        needed = -(-fill // page) - cached
        cache.pin(node)
        if self.running:
            wanted = fill - cached * page + min(work.max_new_tokens - work.produced, CLIP_TOKENS) + page
            if wanted >= cache.available_pages * page - kept - self.ratio.reserve(self.decoding()):
                cache.unpin(node)
                self.full = True
                return None
        taken = cache.allocate(needed)
        assert taken, "an admitted request must fit"
        if cached < limit and self.limits.host_tokens and not work.transferred:
            lowest, found = cache.match_host(node, work.pages, limit)
            if found > cached:
                cache.load_back(lowest)
                cache.pin(lowest)
                cache.unpin(node)
                work.loading_tokens = (found - cached) * page
                needed -= found - cached
                node, cached = lowest, found
        self.waiting.popleft()
        # Those in prefill stay the last.
        self.running.insert(len(self.running) - (len(self.prefilling) if work.transferred else 0), work)
        work.node, work.pages_held = node, needed
        work.stage = Stage.PREFILL
        work.prefilled_tokens = fill if work.transferred else cached * page
        totals = self.totals
        if work.transferred:
            totals.transferred_tokens += fill
        elif work.recomputed:
            totals.refill_tokens += fill - work.prefilled_tokens
        if work.started is None and not work.transferred:
            work.cached_tokens, work.host_tokens = work.prefilled_tokens, work.loading_tokens
            totals.prompt_tokens += work.prompt_tokens
            totals.cached_tokens += work.cached_tokens
            totals.host_tokens += work.host_tokens
        if not work.transferred:
            self.prefilling.append(work)
        return work

    def retract(self, *, speculating: bool) -> None:
        """Takes requests out of the batch until the others have room for some steps.

        Without speculation those with the shortest answers so far go first, among equals those with the longest
        prompts; with it, those that were admitted last. Their answers' KV is given up; their prompts' stays cached, but
        may be evicted. (SGLang: `retract_decode` in managers/schedule_batch.py.)
        """
        staying = list(self.running)
        if not speculating:
            staying.sort(key=lambda work: (-work.produced, work.prompt_tokens))
        page = self.limits.page_size
        while len(staying) > 1:
            work = staying.pop()
            self.running.remove(work)
            self._release(work)
            work.stage = Stage.WAITING
            work.transferred = False
            work.recomputed = work.produced
            work.prefilled_tokens = 0
            self.waiting.append(work)
            self.totals.retracted += 1
            available = self.cache.available_pages
            if available * page >= len(staying) * RETRACT_STEPS and self.missing_pages(1) <= available:
                break
        self.full = False
        self.ratio.retracted(staying)

    def leave(self, work: Work) -> None:
        """Takes a request out of the batch, keeping its full pages in the tree."""
        self.running.remove(work)
        if work.stage is Stage.PREFILL:
            self.prefilling.remove(work)
        # The last token's KV is not computed.
        self.store(work, work.context_tokens - (work.stage is Stage.DECODE))
        self._release(work)
        self.full = False

    def _release(self, work: Work) -> None:
        """Gives back what a request holds and has not stored."""
        assert work.node is not None
        self.cache.unpin(work.node)
        self.cache.release(work.pages_held)
        work.node, work.pages_held = None, 0

    def store(self, work: Work, tokens: int, *, unfinished: bool = False) -> None:
        """Hands the full pages of the first `tokens` over to the tree and pins them for the request."""
        old = work.node
        assert old is not None
        count = max(min(tokens // self.limits.page_size, len(work.pages)), old.end)
        handed = count - old.end
        work.node = self.cache.insert(work.pages, count, handed, old, unfinished=unfinished)
        if handed:
            self.cache.pin(work.node)
            self.cache.unpin(old)
            work.pages_held -= handed
