"""Fewest requests in flight."""

from __future__ import annotations

from collections.abc import Sequence

from policies.policy import Policy
from policies.types import Choice, Reason, Replica, Request


class LeastLoaded(Policy):
    """The replica with the fewest of our own requests in flight for its weight; among equals, the one left longest.
    One without weight is the last resort.

    The second rule keeps a quiet fleet from sending everything to the first replica (SGLang PR 27547).
    """

    name = "least_loaded"

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        replica = min(candidates, key=lambda r: (r.weight <= 0.0, r.in_flight / max(r.weight, 1e-9), r.last_lease))
        return Choice(replica, Reason.LEAST_LOADED)
