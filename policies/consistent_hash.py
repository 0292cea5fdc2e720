"""A hash ring over the fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policies.least_loaded import fewest_in_flight
from policies.policy import Policy
from policies.ring import Rings, check_virtual_nodes, place
from policies.types import Choice, Needs, Reason, Replica, Request


@dataclass(frozen=True, slots=True)
class ConsistentHashConfig:
    """Parameters of `consistent_hash`."""

    virtual_nodes: int = 160
    """Points on the ring for each unit of weight, as in vLLM's router and uhashring; more share more evenly."""

    def __post_init__(self) -> None:
        check_virtual_nodes(self.virtual_nodes)


class ConsistentHash(Policy):
    """The owner of the session's place on a ring of hashes: the same on every router, with nothing to remember.

    Blind to load. Requests without a key go to the replica with the fewest in flight.
    """

    name = "consistent_hash"
    needs = Needs.SESSION
    Config = ConsistentHashConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._rings = Rings(self.config.virtual_nodes)

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        if request.key is None:
            return Choice(fewest_in_flight(candidates), Reason.NO_SESSION)
        return Choice(self._rings.of(candidates, request.failed).owner(place(request.key)), Reason.HASH)
