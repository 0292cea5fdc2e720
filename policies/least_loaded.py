"""Fewest requests in flight."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter

from policies.policy import Policy
from policies.types import Choice, Reason, Replica, Request

_last_lease = attrgetter("last_lease")


def fewest_in_flight(candidates: Sequence[Replica]) -> Replica:
    """The replica with the fewest of our own requests in flight for its weight; among equals, the one left longest.
    One without weight is the last resort.

    The second rule keeps a quiet fleet from sending everything to the first replica (SGLang PR 27547).
    """
    loads = [r.in_flight / r.weight if r.weight > 0.0 else inf for r in candidates]
    least = min(loads)
    if least == inf:  # none has weight
        loads = [r.in_flight for r in candidates]
        least = min(loads)
    return min((r for r, load in zip(candidates, loads, strict=True) if load == least), key=_last_lease)


class LeastLoaded(Policy):
    """The replica with the fewest of our own requests in flight, whatever the session."""

    name = "least_loaded"

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        return Choice(fewest_in_flight(candidates), Reason.LEAST_LOADED)
