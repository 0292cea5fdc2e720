"""The queue of one replica against closed forms, through the whole simulator."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from sim.hardware import Decode, Hardware, Prefill
from sim.measure import Measure
from sim.replica import Limits
from sim.workload import Conversation, Turn
from sim.world import Fleet, World

SECONDS_PER_TOKEN = 1e-3
TIMES = Hardware(
    Prefill(0.0, SECONDS_PER_TOKEN, 0.0, 0.0), Decode((0.0, 1e6), (0.0, 1e3), ((0.01, 0.01), (0.01, 0.01)))
)
"""A prompt takes a time that is proportional to its length; nothing else takes any."""


def waits(arrivals: list[tuple[float, int]], until: float) -> list[float]:
    """Seconds from arrival to the beginning of service of requests of one token's answer."""

    def sessions() -> Iterator[tuple[float, Conversation]]:
        for index, (at, tokens) in enumerate(arrivals):
            yield at, Conversation(str(index), b"%d" % index, True, iter([Turn(0.0, [], tokens, 1, 1)]), 1.0)

    measure = Measure(0.0, until)
    fleet = Fleet(1, TIMES, Limits(10_000_000, 256, max_running=10_000))
    world = World("round_robin", {}, fleet, sessions(), Random(1), measure)
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
