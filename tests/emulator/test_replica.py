"""The replica model in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sim import hardware
from sim.hardware import CHUNK_TOKENS
from sim.prefix_cache import PrefixCache
from sim.replica import Limits, QueueFull, Replica, Stage, Work

PAGE = 16
TIMES = hardware.load()


def make(**limits: int) -> Replica:
    return Replica(TIMES, Limits(**{"kv_tokens": 100_000, "page_size": PAGE, **limits}))


def work(prompt: int, output: int = 1, name: int = 0, shared: int = 0, stem: int = 0) -> Work:
    """A request whose first `shared` pages are those of every request with the same `stem`, the others its own."""
    count = (prompt + output - 1) // PAGE
    pages = [hash((stem if page < shared else ("own", name), page)) for page in range(count)]
    return Work(pages, prompt, output)


def finish(replica: Replica, now: float = 0.0) -> float:
    """Runs until nothing is left to do; returns the time."""
    while (due := replica.next_time) is not None:
        replica.advance(due)
        now = due
    return now


@given(st.integers(1, 4000), st.integers(1, 50))
def test_a_repeated_prompt_is_cached_up_to_its_last_full_page(prompt: int, output: int) -> None:
    replica = make()
    replica.submit(work(prompt, output), 0.0)
    now = finish(replica)
    again = work(prompt, output)
    replica.submit(again, now)
    finish(replica, now)
    assert again.cached_tokens == (prompt - 1) // PAGE * PAGE
    assert again.cached_tokens < prompt


@given(st.integers(1, 2000), st.integers(1, 300), st.integers(1, 500))
def test_the_next_turn_finds_prompt_and_answer(prompt: int, output: int, new: int) -> None:
    replica = make()
    replica.submit(work(prompt, output), 0.0)
    now = finish(replica)
    following = work(prompt + output + new)
    replica.submit(following, now)
    finish(replica, now)
    # The last output token's KV was never computed.
    assert following.cached_tokens == (prompt + output - 1) // PAGE * PAGE


@given(st.integers(1, 30_000), st.integers(0, 200))
def test_time_to_the_first_token_alone(prompt: int, resident_pages: int) -> None:
    replica = make()
    now = 0.0
    if resident_pages:
        replica.submit(work(resident_pages * PAGE, name=1, shared=resident_pages), now)
        now = finish(replica)
    request = work(prompt, name=2, shared=resident_pages)
    replica.submit(request, now)
    finish(replica)
    cached = min(resident_pages, (prompt - 1) // PAGE) * PAGE
    assert request.cached_tokens == cached
    assert request.first_token is not None
    assert request.first_token - now == pytest.approx(TIMES.prefill.seconds(prompt - cached, cached))


def test_time_between_tokens() -> None:
    replica = make()
    request = work(1000, 5)
    replica.submit(request, 0.0)
    end = finish(replica)
    assert request.first_token is not None
    steps = sum(TIMES.token_seconds(1, 1000 + produced) for produced in range(1, 5))
    assert end - request.first_token == pytest.approx(steps)
    assert request.stage is Stage.DONE


def test_first_come_first_served_and_prefills_before_decoding() -> None:
    replica = make()
    requests = [work(CHUNK_TOKENS, 100, name) for name in range(4)]
    for request in requests:
        replica.submit(request, 0.0)
    finish(replica)
    firsts = [request.first_token or 0.0 for request in requests]
    assert all(later - earlier == pytest.approx(firsts[0]) for earlier, later in pairwise(firsts))
    assert replica.totals.decode_batch == 4 * replica.totals.decode_steps


def test_a_prompt_is_computed_in_chunks() -> None:
    replica = make()
    request = work(2 * CHUNK_TOKENS + 5)
    replica.submit(request, 0.0)
    seen = []
    while (due := replica.next_time) is not None:
        replica.advance(due)
        seen.append(request.prefilled_tokens)
    assert seen == [CHUNK_TOKENS, 2 * CHUNK_TOKENS, 2 * CHUNK_TOKENS + 5]


def test_running_and_queue_limits() -> None:
    replica = make(max_running=2, max_queued=3)
    requests = [work(100, 10, name) for name in range(5)]
    for request in requests:
        replica.submit(request, 0.0)
    with pytest.raises(QueueFull):
        replica.submit(work(100, 10, 9), 0.0)
    most = 0
    while (due := replica.next_time) is not None:
        replica.advance(due)
        most = max(most, len(replica.running))
    assert most == 2
    assert replica.totals.finished == 5
    assert replica.totals.rejected == 1


def test_the_head_of_the_queue_waits_for_kv_and_nobody_overtakes() -> None:
    replica = make(kv_tokens=1600)
    big, bigger, small = work(800, 400, 1), work(800, 400, 2), work(16, 1, 3)
    for request in (big, bigger, small):
        replica.submit(request, 0.0)
    finish(replica)
    assert bigger.started == big.finished
    assert (small.started or 0.0) >= (bigger.started or 0.0)


@pytest.mark.parametrize("stage", [Stage.WAITING, Stage.PREFILL, Stage.DECODE])
def test_abort_frees_the_slot_and_the_kv(stage: Stage) -> None:
    replica = make(max_running=1)
    victim, other = work(20_000, 1000, 1), work(500, 10, 2)
    order = (other, victim) if stage is Stage.WAITING else (victim, other)
    for request in order:
        replica.submit(request, 0.0)
    now = 0.0
    while stage is Stage.DECODE and victim.produced < 3:
        now = replica.next_time or now
        replica.advance(now)
    assert victim.stage is stage
    replica.abort(victim, now)
    finish(replica, now)
    assert (victim.stage, other.stage) == (Stage.ABORTED, Stage.DONE)
    assert replica.idle
    assert replica.cache.pinned_pages == replica.cache.allocated_pages == 0


def test_what_an_aborted_request_computed_stays_cached() -> None:
    replica = make()
    victim = work(20_000, 100)
    replica.submit(victim, 0.0)
    now = replica.next_time or 0.0
    replica.advance(now)
    replica.abort(victim, now)
    again = work(20_000, 100)
    replica.submit(again, now)
    finish(replica)
    assert again.cached_tokens == CHUNK_TOKENS


@given(st.integers(1, 100), st.integers(1, 60))
def test_kv_of_the_last_token_so_far_does_not_exist(prompt: int, produced: int) -> None:
    replica = make()
    victim = work(prompt, 100)
    replica.submit(victim, 0.0)
    now = 0.0
    while victim.produced < produced:
        now = replica.next_time or now
        replica.advance(now)
    replica.abort(victim, now)
    following = work(prompt + 100)
    replica.submit(following, now)
    finish(replica, now)
    assert following.cached_tokens == (prompt + produced - 1) // PAGE * PAGE


@given(st.integers(1, 20), st.integers(0, 20), st.integers(1, 20))
def test_what_is_pinned_is_never_evicted(stem: int, tail: int, other: int) -> None:
    """A pinned stem stays when its tail, and all else, must go, however long ago it was used."""
    cache = PrefixCache(60)
    pinned, unpinned = work(stem * PAGE + 1), work(other * PAGE + 1, name=1)
    longer = [*pinned.pages, *work(tail * PAGE + 1, name=2).pages]
    for pages in (pinned.pages, longer, unpinned.pages):
        assert cache.allocate(len(pages))
        cache.insert(pages, len(pages), len(pages))
        if pages is pinned.pages:
            node, _ = cache.match(pages, stem)
            cache.pin(node)
    assert cache.cached_pages == stem + tail + other
    assert not cache.allocate(60 - stem + 1)
    assert cache.allocate(60 - stem)
    assert cache.match(longer, len(longer))[1] == stem
    assert cache.match(unpinned.pages, other)[1] == 0
    cache.release(60 - stem)
    cache.unpin(node)
    assert cache.allocate(60)
    assert cache.cached_pages == 0


def test_pause() -> None:
    replica = make()
    request = work(100, 5)
    replica.pause()
    replica.submit(request, 0.0)
    assert replica.next_time is None
    replica.resume(7.0)
    finish(replica)
    assert request.started == 7.0


def test_eviction_takes_the_least_recently_used() -> None:
    replica = make(kv_tokens=100 * PAGE)
    now = 0.0
    for name in (1, 2, 1, 3):  # 40 pages each: the third name needs room
        replica.submit(work(40 * PAGE, 1, name), now)
        now = finish(replica, now)
    cached = {}
    for name in (1, 3, 2):
        request = work(40 * PAGE, 1, name)
        replica.submit(request, now)
        now = finish(replica, now)
        cached[name] = request.cached_tokens
    assert cached == {1: 39 * PAGE, 3: 39 * PAGE, 2: 0}


def test_waiting_work_is_estimated_from_the_hit_rate() -> None:
    """As in the recorded load: 1,552 hits of 2,527 tokens so far, four requests of 31 tokens wait: 4 * 11."""
    replica = make()
    replica.pause()
    replica.totals.prompt_tokens, replica.totals.cached_tokens = 2527, 1552
    for name in range(4):
        replica.submit(work(31, 10, name), 0.0)
    assert replica.waiting_uncached_tokens == 44


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(0, 3)), max_size=40))
def test_cache_agrees_with_a_set_of_prefixes(operations: list[tuple[int, int, int]]) -> None:
    """Without eviction, the cached pages of a sequence are those of the longest prefix that was stored."""
    cache = PrefixCache(10_000)
    stored: set[tuple[int, ...]] = set()
    for stem, length, fork in operations:
        pages = [hash((stem, page if page < 10 else (fork, page))) for page in range(length)]
        known = max((count for count in range(length + 1) if tuple(pages[:count]) in stored or count == 0), default=0)
        assert cache.match(pages, length)[1] == known
        assert cache.allocate(length)
        cache.insert(pages, length, length)
        stored |= {tuple(pages[:count]) for count in range(1, length + 1)}
        assert cache.cached_pages == len(stored)
        assert cache.allocated_pages == 0


@dataclass
class Sent:
    requests: list[Work] = field(default_factory=list)


class Life(RuleBasedStateMachine):
    """Requests come, go and are aborted in a pool that is too small; nothing is lost, and nothing pinned evicted."""

    @initialize(kv_pages=st.integers(20, 80), running=st.integers(1, 4), queued=st.integers(0, 4))
    def start(self, kv_pages: int, running: int, queued: int) -> None:
        self.replica = make(kv_tokens=kv_pages * PAGE, max_running=running, max_queued=queued)
        self.now = 0.0
        self.sent = Sent()

    @rule(prompt=st.integers(1, 250), output=st.integers(1, 60), stem=st.integers(0, 2), shared=st.integers(0, 12))
    def submit(self, prompt: int, output: int, stem: int, shared: int) -> None:
        if not self.replica.fits(prompt, output):
            return
        request = work(prompt, output, len(self.sent.requests), shared, stem)
        try:
            self.replica.submit(request, self.now)
        except QueueFull:
            return
        self.sent.requests.append(request)

    @rule(steps=st.integers(1, 5))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.replica.next_time is not None:
                self.now = self.replica.next_time
                self.replica.advance(self.now)

    @precondition(lambda self: self.sent.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.replica.abort(data.draw(st.sampled_from(self.sent.requests)), self.now)

    @rule()
    def rest(self) -> None:
        """Whatever was taken comes to an end, and nothing is held then."""
        self.now = finish(self.replica, self.now)
        assert self.replica.idle
        assert all(request.stage in (Stage.DONE, Stage.ABORTED) for request in self.sent.requests)
        assert self.replica.cache.allocated_pages == self.replica.cache.pinned_pages == 0
        totals = self.replica.totals
        assert totals.finished + totals.aborted == len(self.sent.requests)

    @invariant()
    def the_pool_adds_up(self) -> None:
        if not hasattr(self, "replica"):
            return
        cache = self.replica.cache
        assert cache.free_pages >= 0
        assert 0 <= cache.pinned_pages <= cache.cached_pages
        assert cache.allocated_pages >= 0
        assert self.replica.used_tokens <= cache.capacity_pages * PAGE
        assert len(self.replica.running) <= self.replica.limits.max_running

    @invariant()
    def what_runs_keeps_its_pages(self) -> None:
        if not hasattr(self, "replica"):
            return
        for request in self.replica.running:
            held = request.cached_tokens if request.stage is Stage.PREFILL else request.prompt_tokens
            assert self.replica.cache.match(request.pages, held // PAGE)[1] == held // PAGE


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30)
