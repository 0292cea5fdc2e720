"""Replicas that are being emptied: how, since when, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from policies.types import State


class Homes(StrEnum):
    """What becomes of the sessions that live on a replica that drains."""

    MOVE = "move"
    """Their next turn goes elsewhere, for the price of a prefill."""
    FINISH = "finish"
    """They go on there until they end; only what is new goes elsewhere."""

    @property
    def state(self) -> State:
        """What the replica is in meanwhile."""
        return State.FINISHING if self is Homes.FINISH else State.DRAINING


@dataclass(frozen=True, slots=True)
class Drain:
    """An operator's word on a replica. It holds until it is taken back, or the replica leaves."""

    homes: Homes
    since: float
    """Seconds since the epoch."""
    who: str
    """Asked for it."""
