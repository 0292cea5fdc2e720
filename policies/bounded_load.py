"""Consistent hashing with bounded loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policies.least_loaded import fewest_in_flight
from policies.policy import Policy
from policies.ring import Rings, check_virtual_nodes, place, weight_of
from policies.types import Choice, Needs, Reason, Replica, Request

MAX_FACTOR = 1_000_000
"""A bound that binds nobody any more."""


@dataclass(frozen=True, slots=True)
class BoundedLoadConfig:
    """Parameters of `bounded_load`."""

    hash_balance_factor: int = 125
    """Requests in flight that a replica may have, in percent of the mean: HAProxy's and Envoy's name, KubeAI's value
    (its `meanLoadFactor`)."""
    virtual_nodes: int = 256
    """Points on the ring for each unit of weight, as in KubeAI (its `replication`)."""

    def __post_init__(self) -> None:
        if not 100 <= self.hash_balance_factor <= MAX_FACTOR:
            raise ValueError(
                f"hash_balance_factor must be 100 to {MAX_FACTOR} percent of the mean, got {self.hash_balance_factor}"
            )
        check_virtual_nodes(self.virtual_nodes)


class BoundedLoad(Policy):
    """The first replica on the ring, from the session's place on, that is not full.

    A replica is full when, with one more, it would have more than its share by weight of `hash_balance_factor`
    percent of all requests in flight, this one included, rounded up (Mirrokni, Thorup and Zadimoghaddam 2018,
    arXiv 1608.01350). There is always one that is not. Requests without a key go to the replica with the fewest in
    flight.
    """

    name = "bounded_load"
    needs = Needs.SESSION
    Config = BoundedLoadConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._rings = Rings(self.config.virtual_nodes)

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        if request.key is None:
            return Choice(fewest_in_flight(candidates), Reason.NO_SESSION)
        ring = self._rings.of(candidates, request.failed)
        allowed = self.config.hash_balance_factor * (1 + sum([r.in_flight for r in ring.replicas]))
        whole = 100 * ring.weight
        reason = Reason.HASH
        for replica in ring.clockwise(place(request.key)):
            # Less than its share of what is allowed is, in whole requests, no more than that rounded up with one more.
            if replica.in_flight * whole < allowed * weight_of(replica):
                return Choice(replica, reason)
            reason = Reason.SPILLED
        return Choice(fewest_in_flight(candidates), reason)  # only where the sum of the weights is infinite
