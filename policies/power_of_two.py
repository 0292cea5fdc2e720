"""The better of two drawn by lot."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from policies.events import Event, Routed
from policies.least_loaded import fewest_in_flight
from policies.policy import Policy
from policies.scoring import draw
from policies.types import Choice, Reason, Replica, Request


@dataclass(frozen=True, slots=True)
class PowerOfTwoConfig:
    """Parameters of `power_of_two`."""

    seed: int = 0
    """Of the draws: the same seed and the same requests give the same choices."""


class PowerOfTwo(Policy):
    """Of two replicas drawn by lot, in proportion to their weights, the one with fewer requests in flight.

    Nearly as even as asking all, at the cost of asking two (Mitzenmacher 2001). The draws come from hashing a counter
    with the seed, so that a run can be repeated.
    """

    name = "power_of_two"
    Config = PowerOfTwoConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._seed = str(self.config.seed)
        self._draws = 0
        self._candidates: Sequence[Replica] = ()
        self._urn = Urn(())

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        if candidates is not self._candidates:
            self._urn = Urn(candidates)
            self._candidates = candidates if isinstance(candidates, tuple) else ()
        chances = (draw(n, self._seed) for n in (self._draws, self._draws + 1))
        return Choice(fewest_in_flight(self._urn.two(*chances)), Reason.LEAST_LOADED)

    def observe(self, event: Event) -> None:
        if type(event) is Routed:
            self._draws += 2


class Urn:
    """What is drawn from: all candidates with weight; if none has any, all, with equal chances."""

    __slots__ = ("replicas", "sums")

    def __init__(self, candidates: Sequence[Replica]) -> None:
        self.replicas = tuple(r for r in candidates if r.weight > 0.0) or tuple(candidates)
        self.sums = list(accumulate(r.weight if r.weight > 0.0 else 1.0 for r in self.replicas))

    def two(self, chance: float, other: float) -> Sequence[Replica]:
        """Two of the replicas, or the only one, by two numbers in (0, 1)."""
        replicas, sums = self.replicas, self.sums
        last = len(replicas) - 1
        if last == 0:
            return replicas
        first = min(bisect_right(sums, chance * sums[-1]), last)
        before = sums[first - 1] if first else 0.0
        weight = sums[first] - before
        place = other * (sums[-1] - weight)  # among the others, laid side by side
        second = min(bisect_right(sums, place if place < before else place + weight), last)
        if second == first:  # by rounding
            second = first - 1 if first else 1
        return replicas[first], replicas[second]
