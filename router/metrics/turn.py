"""Where a turn went, seen from its conversation's KV cache. Told of any policy alike, whatever reasons it gives."""

from __future__ import annotations

from enum import StrEnum

from policies.lease import Lease


class Turn(StrEnum):
    """What became of a conversation's home with one of its turns."""

    NEW = "new"
    """Nothing was known of the conversation."""
    STAYED = "stayed"
    """Where it was served last."""
    RETURNED = "returned"
    """To a replica that held it from an earlier time."""
    MOVED = "moved"
    """Away from its KV, which could have been used."""
    SPLIT = "split"
    """The same, while others of its conversation were under way."""
    LOST = "lost"
    """Its home could not take it: gone, ejected, draining, cleared, or failed just now."""
    EVICTED = "evicted"
    """Its KV was believed to be nowhere any more."""


def turn_of(lease: Lease) -> Turn | None:
    """None for what is no turn of a session: nothing stays of it."""
    if lease.home is None:
        return None
    request, replica = lease.request, lease.replica
    residents = request.residents
    if residents:
        if residents[0].replica is replica:
            return Turn.STAYED
        if any(resident.replica is replica for resident in residents):
            return Turn.RETURNED
        return Turn.SPLIT if request.concurrent else Turn.MOVED
    if request.lost:
        return Turn.LOST
    return Turn.EVICTED if request.once_tokens else Turn.NEW
