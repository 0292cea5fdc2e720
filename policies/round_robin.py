"""Each replica in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.events import Event, Routed
from policies.policy import Policy
from policies.types import Choice, Reason, Replica, Request


class RoundRobin(Policy):
    """Requests go to the replicas in order of id, one each. Knows neither sessions nor load."""

    name = "round_robin"

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._turn = 0

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        return Choice(candidates[self._turn % len(candidates)], Reason.ROTATION)

    def observe(self, event: Event) -> None:
        if type(event) is Routed:
            self._turn += 1
