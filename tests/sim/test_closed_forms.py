"""The simulator against what is known without simulating: queues, Little's law, conservation, LRU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.fleet import Fleet, Group
from sim.hardware import Decode, Hardware, Prefill
from sim.measure import Measure
from sim.prefix_cache import PrefixCache
from sim.replica import Limits, Replica, Stage, Work
from sim.workload import Conversation, Turn
from sim.world import World

SECONDS_PER_TOKEN = 1e-3
TIMES = Hardware(
    Prefill(0.0, SECONDS_PER_TOKEN, 0.0, 0.0), Decode((0.0, 1e6), (0.0, 1e3), ((0.01, 0.01), (0.01, 0.01))), 1.0
)
"""A prompt takes a time that is proportional to its length, and a decode step 10 ms."""


def queue(arrivals: list[tuple[float, int]], until: float) -> tuple[World, Measure]:
    """Requests of one token's answer at one replica, through the whole simulator."""

    def sessions() -> Iterator[tuple[float, Conversation]]:
        for index, (at, tokens) in enumerate(arrivals):
            yield at, Conversation(str(index), b"%d" % index, True, iter([Turn(0.0, [], tokens, 1, 1)]), 1.0)

    measure = Measure(0.0, until)
    measure.keep = True
    # One at a time: several short prompts would be computed together.
    fleet = Fleet((Group(1, TIMES, Limits(10_000_000, 256, max_running=1)),))
    return World("round_robin", {}, fleet, sessions(), Random(1), measure), measure


def waits(arrivals: list[tuple[float, int]], until: float) -> list[float]:
    """Seconds from arrival to the beginning of service."""
    world, measure = queue(arrivals, until)
    world.run(until)
    assert world.live == 0
    return [
        served.first_token - served.arrived - served.prompt_tokens * SECONDS_PER_TOKEN
        for served in measure.served
        if served.first_token is not None
    ]


def poisson(rate: float, count: int, tokens: Random, mean: int, *, exponential: bool) -> list[tuple[float, int]]:
    random, now, found = Random(7), 0.0, []
    for _ in range(count):
        now += random.expovariate(rate)
        found.append((now, max(1, round(tokens.expovariate(1 / mean))) if exponential else mean))
    return found


@pytest.mark.parametrize(("exponential", "factor"), [(True, 1.0), (False, 0.5)], ids=["M/M/1", "M/D/1"])
def test_mean_wait(exponential: bool, factor: float) -> None:
    """Pollaczek and Khinchine: rho / (1 - rho) services for exponential ones, half of that for equal ones."""
    rho, mean = 0.6, 1000
    arrivals = poisson(rho, 20_000, Random(3), mean, exponential=exponential)
    found = waits(arrivals, arrivals[-1][0] + 200.0)
    assert len(found) == len(arrivals)
    assert sum(found) / len(found) == pytest.approx(factor * rho / (1 - rho), rel=0.08)


def test_a_regular_queue() -> None:
    """D/D/1: below capacity nobody waits; above it each waits longer than the one before by what is missing."""
    assert waits([(2.0 * i, 1000) for i in range(50)], 200.0) == pytest.approx([0.0] * 50, abs=1e-9)
    assert waits([(0.5 * i, 1000) for i in range(50)], 200.0) == pytest.approx([0.5 * i for i in range(50)], abs=1e-9)


def test_littles_law() -> None:
    """Requests in the system on average: arrivals a second times seconds that each stays."""
    arrivals = poisson(0.7, 5_000, Random(5), 1000, exponential=True)
    end = arrivals[-1][0] + 300.0
    world, measure = queue(arrivals, end)
    world.run(end)
    assert world.live == 0
    stays = sum(s.finished - s.arrived for s in measure.served if s.finished is not None)
    # Sampled every second, so with the error of a mean over as many samples.
    assert measure.result()["inflight_mean"] == pytest.approx(stays / end, rel=0.03)


ASKED = st.tuples(
    st.floats(0.0, 1.0), st.integers(1, 3000), st.integers(1, 200), st.integers(0, 4), st.none() | st.floats(0.0, 4.0)
)


@given(st.lists(ASKED, max_size=25), st.floats(0.0, 8.0), st.sampled_from([0, 8192]))
def test_requests_and_tokens_are_conserved(
    asked: list[tuple[float, int, int, int, float | None]], until: float, host_tokens: int
) -> None:
    """At any moment: submitted = finished + aborted + in the system, and what has been computed was asked for."""
    page = 16
    limits = Limits(8192, page, max_running=8, host_tokens=host_tokens, schedule_conservativeness=0.1)
    replica = Replica(TIMES, limits, bulk=True)
    works, happens, now = [], [], 0.0
    for index, (after, prompt, output, stem, aborted) in enumerate(asked):
        now += after
        pages = [10_000 * (stem if page < 20 else 10 + index) + page for page in range((prompt + output - 1) // page)]
        work = Work(pages, prompt, output)
        happens.append((now, False, work))
        if aborted is not None:
            happens.append((now + aborted, True, work))
    for at, abort, work in sorted(happens, key=lambda h: h[:2]):
        if at > until:
            break
        replica.advance(at)
        if abort:
            replica.abort(work, at)
        else:
            works.append(work)
            replica.submit(work, at)
    replica.advance(until)
    replica.settle(until)
    totals = replica.totals
    assert len(works) == totals.finished + totals.aborted + len(replica.waiting) + len(replica.running)
    assert totals.output_tokens == sum(work.produced for work in works)
    begun = [work for work in works if work.started is not None]
    assert totals.prompt_tokens == sum(work.prompt_tokens for work in begun)
    whole = [work for work in begun if work.stage is Stage.DONE]
    for work in whole:
        assert work.produced == work.output_tokens
        assert work.prefilled_tokens == work.fill_tokens
    if len(whole) == len(works):
        assert totals.prompt_tokens + totals.refill_tokens == totals.cached_tokens + totals.prefill_tokens
    else:
        # A pass that was under way when its request was aborted ends all the same.
        assert totals.prefill_tokens <= totals.prompt_tokens + totals.refill_tokens - totals.cached_tokens


class Lru:
    """A cache of equal items that knows nothing of pages, trees or heaps."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.items: OrderedDict[int, None] = OrderedDict()

    def use(self, name: int) -> bool:
        hit = name in self.items
        self.items[name] = None
        self.items.move_to_end(name)
        if len(self.items) > self.capacity:
            self.items.popitem(last=False)
        return hit


def use(cache: PrefixCache, name: int, size: int) -> bool:
    pages = [name * 1000 + page for page in range(size)]
    node, found = cache.match(pages, size)
    assert found in (0, size)
    cache.pin(node)
    assert cache.allocate(size - found)
    cache.pin(cache.insert(pages, size, size - found, node))
    cache.unpin(node)
    cache.unpin(cache.match(pages, size)[0])
    return found == size


@given(st.lists(st.integers(0, 30), max_size=300), st.integers(1, 20), st.integers(1, 6))
def test_equal_sequences_hit_as_in_a_plain_lru_cache(names: list[int], capacity: int, size: int) -> None:
    cache, plain = PrefixCache(capacity * size), Lru(capacity)
    assert [use(cache, name, size) for name in names] == [plain.use(name) for name in names]


def test_the_hit_rate_of_independent_references() -> None:
    """Of equally likely items, the share that is cached."""
    random, cache = Random(1), PrefixCache(30 * 4)
    hits = [use(cache, random.randrange(100), 4) for _ in range(20_000)]
    assert sum(hits[1000:]) / len(hits[1000:]) == pytest.approx(0.3, abs=0.015)
