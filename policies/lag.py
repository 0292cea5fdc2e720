"""By how much a replica lags behind what is expected of it, compared with its fleet: whether it is slow.

`Speed.factor` is learned from prompts that found the replica idle, and is right as long as such prompts come. A replica
that is never idle, or slow in what no prefill explains (a throttled host, a bad link, memory that runs out), shows in
every first token: the seconds it took against those that were expected, queue included. What is common to a fleet is no
replica's fault (a table that is wrong for the engine, overload), so each is measured by the median.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from policies.types import Replica

SLACK_S: Final = 0.25
"""Added to both sides of a comparison: what is quicker says little of the replica, and much of steps and networks."""

MOST_LATE: Final = log(4.0)
"""Of one observation, either way: one that hung for minutes is no more than late."""

FORGETTING: Final = 0.95
"""Weight of what was known at each new observation: about the last twenty count."""

TAU_S: Final = 60.0
"""In which what was observed loses its weight: a replica that gets hardly any requests is tried again."""

PRIOR: Final = 5.0
"""Observations that it takes to outweigh the belief that it is as quick as all others."""

SLOW: Final = log(2.0)
RECOVERED: Final = log(1.3)
"""Beyond the first it is slow, and back below the second it is not any more."""

JUDGED_EVERY_S: Final = 1.0
"""Between two looks at all replicas."""


class Lag:
    """Of one replica: the mean logarithm of seconds observed over seconds expected."""

    __slots__ = ("_at", "_sum", "_weight")

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0
        self._at = 0.0

    def observe(self, expected_s: float, observed_s: float, now: float) -> None:
        """An answer began `observed_s` after it was sent for, `expected_s` being expected at a slowness of 1."""
        late = log((max(0.0, observed_s) + SLACK_S) / (max(0.0, expected_s) + SLACK_S))
        kept = FORGETTING * self._kept(now)
        self._sum = self._sum * kept + min(max(late, -MOST_LATE), MOST_LATE)
        self._weight = self._weight * kept + 1.0
        self._at = max(self._at, now)

    def explained(self, step: float) -> None:
        """So much of it is now in the replica's factor: it must not count twice."""
        self._sum -= step * self._weight

    def mean(self, now: float) -> tuple[float, float]:
        """As of now, and the weight of what it is the mean of."""
        weight = self._weight
        return (self._sum / weight, weight * self._kept(now)) if weight else (0.0, 0.0)

    def _kept(self, now: float) -> float:
        return exp(min(0.0, self._at - now) / TAU_S)


def judge(replicas: Iterable[Replica], now: float) -> list[Replica]:
    """Set the slowness of each by all of them. Returns those whose slowness has changed.

    Slow is what lags behind what is expected of it and behind the others alike: prompts to be computed whole may be
    quicker than expected and short ones later, and replicas that get more of the one than of the other are not slow.
    The median of an even number is the lower of the two in the middle: of two replicas the quicker one is the measure.
    """
    seen, suspect = [], False
    for replica in replicas:
        mean, weight = replica.speed.lag.mean(now)
        seen.append((mean, weight, replica))
        if mean > SLOW or replica.speed.slowness != 1.0:
            suspect = True
    if not suspect:
        return []  # as mostly: who is not late by himself is not later than the others
    means = sorted([mean for mean, weight, _ in seen if weight >= 1.0])
    median = means[(len(means) - 1) // 2] if means else 0.0
    changed = []
    for mean, weight, replica in seen:
        speed = replica.speed
        late = (mean - max(0.0, median)) * weight / (weight + PRIOR)
        slowness = exp(late) if late > (SLOW if speed.slowness == 1.0 else RECOVERED) else 1.0
        if slowness != speed.slowness:
            speed.slowness = slowness
            changed.append(replica)
    return changed
