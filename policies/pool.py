"""A named set of replicas beside the default one: candidates of their own, judged and chosen among by themselves."""

from __future__ import annotations

from typing import NamedTuple

from policies.policy import Policy
from policies.types import Replica


class Counts(NamedTuple):
    """Of a pool's replicas together; each as `Replica` has it."""

    served: int
    in_flight: int
    in_flight_tokens: int
    pending: int
    prefilled_s: float
    regretted_tokens: int


class Pool:
    """What the Balancer keeps for one name. The default pool has none, and the Balancer itself holds what is of it."""

    __slots__ = ("policy", "ready", "shadow", "size")

    def __init__(self, policy: Policy, shadow: Policy | None) -> None:
        """`policy` and `shadow` are those of the default pool: here others of their kind learn."""
        self.policy = alike(policy)
        self.shadow = None if shadow is None else alike(shadow)
        self.ready: tuple[Replica, ...] = ()
        """Replicas of it that may be sent requests, in order of id. The same object until one of them changes."""
        self.size = 0
        """Replicas of it, in any state."""


def alike(policy: Policy) -> Policy:
    """Another one with the same parameters, which has learned nothing."""
    return type(policy)(policy.config)
