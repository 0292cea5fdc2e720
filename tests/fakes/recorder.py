"""A policy that remembers what it was told."""

from __future__ import annotations

from collections.abc import Sequence

from policies.events import Event
from policies.least_loaded import LeastLoaded
from policies.policy import Policy
from policies.types import Choice, Replica, Request


class Recorder(Policy):
    """Chooses as `inner` does (least loaded unless given) and keeps every event, oldest first."""

    name = "recorder"

    def __init__(self, inner: Policy | None = None) -> None:
        self.inner = inner if inner is not None else LeastLoaded()
        self.events: list[Event] = []

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        return self.inner.pick(request, candidates, now)

    def observe(self, event: Event) -> None:
        self.events.append(event)
        self.inner.observe(event)

    def told(self, kind: type[Event]) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if type(event) is kind]
