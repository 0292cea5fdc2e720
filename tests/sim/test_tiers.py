"""The prefix cache with a host tier, and its least-recently-used order against an independent cache."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import hardware
from sim.prefix_cache import HostWrite, PrefixCache
from sim.replica import Limits, Replica, Work

SIZE = 5


def use(cache: PrefixCache, pages: list[int]) -> tuple[int, int]:
    """As a request that is served at once. Returns what the GPU had, and what both tiers had."""
    node, found = cache.match(pages, len(pages))
    cache.pin(node)
    assert cache.allocate(len(pages) - found)
    lowest, total = cache.match_host(node, pages, len(pages))
    if total > found:
        cache.load_back(lowest)
        cache.pin(lowest)
        cache.unpin(node)
        node = lowest
    stored = cache.insert(pages, len(pages), len(pages) - total, node)
    cache.unpin(node)
    assert cache.allocated_pages == 0
    cache.pin(stored)
    cache.unpin(stored)
    return found, total


@given(st.lists(st.integers(0, 9), max_size=80), st.integers(1, 4), st.integers(0, 4))
def test_two_tiers_of_equal_items_are_two_lru_caches(names: list[int], gpu: int, more: int) -> None:
    """The host tier holds all that is on the GPU, and both forget by last use."""
    cache = PrefixCache(gpu * SIZE, (gpu + more) * SIZE)
    tiers = [(OrderedDict[int, None](), gpu), (OrderedDict[int, None](), gpu + more)]
    for name in names:
        hits = []
        for tier, capacity in tiers:
            hits.append(SIZE if name in tier else 0)
            tier[name] = None
            tier.move_to_end(name)
            if len(tier) > capacity:
                tier.popitem(last=False)
        assert use(cache, [name * 100 + page for page in range(SIZE)]) == tuple(hits)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(0, 3)), max_size=60),
    st.integers(12, 30),
    st.integers(0, 40),
)
def test_pages_add_up(operations: list[tuple[int, int, int]], gpu: int, more: int) -> None:
    cache = PrefixCache(gpu, gpu + more)
    for stem, length, fork in operations:
        pages = [stem * 100 + page if page < 6 else 1000 * (fork + 1) + stem * 100 + page for page in range(length)]
        resident = cache.resident(pages, length)
        assert use(cache, pages)[1] == resident
        assert cache.resident(pages, length) == length
        assert cache.pinned_pages == 0
        assert cache.cached_pages <= gpu
        assert cache.cached_pages <= cache.tree_pages <= gpu + more
    cache.clear()
    assert cache.cached_pages == cache.tree_pages == 0


def test_the_host_holds_what_the_gpu_drops_and_takes_time_to_give_it_back() -> None:
    times = hardware.load()
    limits = Limits(40_000, 64, host_tokens=200_000, load_back_tokens_per_s=100_000.0)
    replica = Replica(times, limits, bulk=True)
    now = 0.0
    works = []
    for name in (1, 2, 1):
        work = Work([name * 10_000 + page for page in range(500)], 32_000, 1)
        works.append(work)
        replica.submit(work, now)
        while (due := replica.next_time) is not None:
            replica.advance(due)
            now = due
    cold, _, again = works
    assert (again.cached_tokens, again.host_tokens) == (499 * 64, 499 * 64)
    took = (again.first_token or 0.0) - (again.started or 0.0)
    assert took == pytest.approx(499 * 64 / 100_000 + times.prefill.seconds(64, 499 * 64))
    assert replica.totals.prefill_tokens == 2 * cold.prompt_tokens + 64


def test_a_host_tier_smaller_than_the_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="at least capacity_pages 100, got 99"):
        PrefixCache(100, 99)


def stored(cache: PrefixCache, name: int) -> list[int]:
    pages = [name * 100 + page for page in range(SIZE)]
    use(cache, pages)
    return pages


def test_what_was_stored_once_goes_when_the_policy_is_selective() -> None:
    cache = PrefixCache(2 * SIZE, 2 * SIZE, HostWrite.WRITE_THROUGH_SELECTIVE)
    once, twice = stored(cache, 1), stored(cache, 2)
    assert cache.copied_pages == 0
    stored(cache, 2)
    assert cache.copied_pages == SIZE
    for name in (3, 4):
        stored(cache, name)
    assert [cache.resident(pages, SIZE) for pages in (once, twice)] == [0, SIZE]
    assert cache.cached_pages == 2 * SIZE


def test_with_write_back_the_host_holds_what_the_gpu_dropped_and_nothing_else() -> None:
    cache = PrefixCache(2 * SIZE, 3 * SIZE, HostWrite.WRITE_BACK)
    pages = [stored(cache, name) for name in range(6)]
    assert [cache.resident(p, SIZE) for p in pages] == [0, SIZE, SIZE, SIZE, SIZE, SIZE]
    assert (cache.cached_pages, cache.copied_pages) == (2 * SIZE, 3 * SIZE)
    # Written through, the host would have held what the GPU holds, too.
    through = PrefixCache(2 * SIZE, 3 * SIZE)
    for name in range(6):
        stored(through, name)
    assert [through.resident(p, SIZE) for p in pages] == [0, 0, 0, SIZE, SIZE, SIZE]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(0, 3)), max_size=60),
    st.sampled_from([HostWrite.WRITE_BACK, HostWrite.WRITE_THROUGH_SELECTIVE]),
    st.integers(1, 40),
)
def test_pages_add_up_whatever_the_policy(
    operations: list[tuple[int, int, int]], host_write: HostWrite, host: int
) -> None:
    cache = PrefixCache(15, host, host_write)
    for stem, length, fork in operations:
        pages = [stem * 100 + page if page < 6 else 1000 * (fork + 1) + stem * 100 + page for page in range(length)]
        resident = cache.resident(pages, length)
        gpu, total = use(cache, pages)
        assert gpu <= total <= resident
        assert cache.resident(pages, length) == length
        assert cache.pinned_pages == 0
        assert cache.cached_pages <= 15
        assert cache.copied_pages <= host
        assert cache.tree_pages <= cache.cached_pages + cache.copied_pages
    cache.clear()
    assert cache.cached_pages == cache.tree_pages == cache.copied_pages == 0
