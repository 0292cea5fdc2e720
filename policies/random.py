"""By lot."""

from __future__ import annotations

from collections.abc import Sequence

from policies.events import Event, Routed
from policies.hashing import uniform
from policies.policy import Policy
from policies.types import Choice, Reason, Replica, Request, Snapshot


class Random(Policy):
    """Every replica is as likely as any other, whatever the session or the load.

    The draws come from hashing a counter with the seed, so that a run can be repeated.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._draws = 0

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        draw = uniform(self._draws.to_bytes(8, "big"), str(self.seed))
        return Choice(candidates[int(draw * len(candidates))], Reason.RANDOM)

    def observe(self, event: Event) -> None:
        if type(event) is Routed:
            self._draws += 1

    def snapshot(self) -> Snapshot:
        return Snapshot(self.name, {"seed": self.seed})
