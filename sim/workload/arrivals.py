"""When sessions come: as many as leave (closed loop), or at a rate whatever becomes of them (open loop)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Population:
    """How sessions come: so many from the start, then as many as leave on average.

    `burst_share` of the sessions that come later do so within five seconds, `burst_size` at a time.
    """

    live: int
    session_seconds: float
    """Mean length of a session; infinite when none ends, so that none follows."""
    spread_s: float = 300.0
    """Over how long those of the start begin."""
    burst_share: float = 0.3
    burst_size: int = 9


def arrivals(population: Population, random: Random, until: float) -> Iterator[tuple[float, int, bool]]:
    """(time, index of the session, whether it is one of the start), in order of time."""
    times = [(random.uniform(0.0, population.spread_s), True) for _ in range(population.live)]
    rate = population.live / population.session_seconds or 1e-300
    for share, size, width in (
        (1 - population.burst_share, 1, 0.0),
        (population.burst_share, population.burst_size, 5.0),
    ):
        time = 0.0
        while share > 0:
            time += random.expovariate(rate * share / size)
            if time >= until:
                break
            times += [(time + random.uniform(0.0, width), False) for _ in range(size)]
    times.sort()
    for index, (time, initial) in enumerate(times):
        yield time, index, initial


@dataclass(frozen=True, slots=True)
class Rate:
    """Sessions that come at a rate, however many are there: a fleet that falls behind is not spared.

    Times between two are gamma-distributed. A `cv` (standard deviation over mean) of 1 is a Poisson process, more comes
    in bursts. ServeGen (arXiv 2505.09999) finds 1.05, 1.53 and 2.70 as quartiles of the clients of Alibaba's `m-large`,
    and 1.65 on average by requests.
    """

    per_s: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.per_s <= 1000.0:
            raise ValueError(f"per_s must be more than 0 and at most 1000, got {self.per_s}")
        if not 0.01 <= self.cv <= 100.0:
            raise ValueError(f"cv must be from 0.01 to 100, got {self.cv}")


def open_arrivals(rate: Rate, random: Random, until: float) -> Iterator[tuple[float, int, bool]]:
    """As `arrivals` tells them; none is one of the start."""
    shape = 1.0 / rate.cv**2
    scale = 1.0 / (rate.per_s * shape)
    time, index = random.gammavariate(shape, scale), 0
    while time < until:
        yield time, index, False
        time += random.gammavariate(shape, scale)
        index += 1
