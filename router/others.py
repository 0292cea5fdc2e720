"""The other routers' own requests on each replica, as they tell of them; one that falls silent is forgotten."""

from __future__ import annotations

from collections.abc import Callable

from policies.balancer import Balancer
from policies.sharing import Own, total
from router.store import Message

SILENT_S = 3.0
"""After so long without a message a router counts for nothing: it stopped, or cannot be heard. By our own clock."""


class _Other:
    __slots__ = ("at", "loads")

    def __init__(self) -> None:
        self.at = 0.0
        self.loads: dict[str, Own] = {}


class Others:
    """Adds up what they have, and tells the Balancer."""

    def __init__(self, balancer: Balancer, clock: Callable[[], float]) -> None:
        self._balancer = balancer
        self._clock = clock
        self._others: dict[str, _Other] = {}

    def __len__(self) -> int:
        return len(self._others)

    def ages(self) -> dict[str, float]:
        """Seconds since each of them was heard, by name."""
        now = self._clock()
        return {sender: now - other.at for sender, other in self._others.items()}

    def heard(self, message: Message) -> None:
        """Take one router's word."""
        if message.leaving:
            self._forget(message.sender)
            return
        other = self._others.setdefault(message.sender, _Other())
        other.at = self._clock()
        changed = set(message.loads)
        if message.whole:  # also of what did not change: it is told anew that it holds
            changed |= other.loads.keys()
            other.loads.clear()
        for replica_id, own in message.loads.items():
            if own[0]:
                other.loads[replica_id] = own
            else:
                other.loads.pop(replica_id, None)
        self._tell(changed)

    def fade(self) -> None:
        """Forget whoever has been silent for too long."""
        oldest = self._clock() - SILENT_S
        for sender in [sender for sender, other in self._others.items() if other.at < oldest]:
            self._forget(sender)

    def _forget(self, sender: str) -> None:
        other = self._others.pop(sender, None)
        if other is not None:
            self._tell(set(other.loads))

    def _tell(self, changed: set[str]) -> None:
        now = self._clock()
        for replica_id in changed:
            replica = self._balancer.replicas.get(replica_id)
            if replica is None:
                continue
            told = [other.loads[replica_id] for other in self._others.values() if replica_id in other.loads]
            self._balancer.hear_load(replica, *total(told), now)
