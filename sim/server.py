"""One replica of a world, and what happens to it from outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sim.engine import Engine
from sim.fleet import Group
from sim.replica import Replica, Work

if TYPE_CHECKING:
    from sim.client import Call

Observer = Callable[["Server", Work, float], None]


class Server:
    """A replica that is driven by an engine's clock, and can die and come back empty."""

    def __init__(self, number: int, group: Group, engine: Engine, observer: Observer) -> None:
        self.id = f"{group.name}{number:03}"
        self.group = group
        self.born = engine.now
        self.up = True
        self.leaving = False
        self.boots = 0
        self.calls: dict[Work, Call] = {}
        """What it computes."""
        self.engaged = 0
        """Calls that have a place on it: computed here, to be, or leased to it and computed elsewhere."""
        self.tokens = 0
        """Of the prompts of those calls."""
        self.link_free_at = 0.0
        """When what it sends to other replicas will have been sent."""
        self.replica: Replica
        self._engine = engine
        self._observer = observer
        self._wake_at: float | None = None
        self._wake_later: Callable[[float], None] = self._wake  # made once
        self.boot()

    @property
    def serves(self) -> bool:
        """It takes new requests."""
        return self.up and not self.leaving

    def boot(self) -> None:
        """Starts its engine, empty."""
        self.boots += 1
        observer = partial(self._observer, self)
        self.replica = Replica(self.group.hardware, self.group.limits, bulk=True, observer=observer)
        self._wake_at = None

    def submit(self, work: Work, call: Call) -> None:
        """Takes a request. Raises QueueFull."""
        self.calls[work] = call
        try:
            self.replica.submit(work, self._engine.now)
        except Exception:
            del self.calls[work]
            raise
        self._schedule()

    def catch_up(self) -> None:
        """Completes what is due by now."""
        self.replica.advance(self._engine.now)
        self._schedule()

    def abort(self, work: Work) -> None:
        """Ends a request; the caller has caught up."""
        self.calls.pop(work, None)
        self.replica.abort(work, self._engine.now)
        self._schedule()

    def _schedule(self) -> None:
        due = self.replica.next_time
        if due != self._wake_at:
            self._wake_at = due
            if due is not None:
                self._engine.at(due, self._wake_later, due)

    def _wake(self, due: float) -> None:
        if self._wake_at == due:
            self.replica.advance(due)
            self._schedule()
