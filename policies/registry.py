"""Policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from policies.bounded_load import BoundedLoad
from policies.consistent_hash import ConsistentHash
from policies.dual_choice import DualChoice
from policies.kv_cost import KvCost
from policies.least_loaded import LeastLoaded
from policies.policy import Policy
from policies.power_of_two import PowerOfTwo
from policies.prefix_aware import PrefixAware
from policies.random import Random
from policies.rendezvous import Rendezvous
from policies.round_robin import RoundRobin
from policies.session_affinity import SessionAffinity
from policies.sticky import Sticky
from policies.weighted_score import WeightedScore

POLICIES: dict[str, type[Policy]] = {
    p.name: p
    for p in (
        SessionAffinity,
        DualChoice,
        Sticky,
        PrefixAware,
        KvCost,
        WeightedScore,
        BoundedLoad,
        Rendezvous,
        ConsistentHash,
        PowerOfTwo,
        LeastLoaded,
        RoundRobin,
        Random,
    )
}


def parameters(name: str) -> dict[str, object]:
    """The policy's parameters with their defaults. Raises ValueError for an unknown name."""
    return {field.name: field.default for field in fields(_find(name).Config)}


def make(name: str, given: Mapping[str, object] | None = None) -> Policy:
    """Build a policy. Raises ValueError that names the key, the value and what is allowed."""
    cls = _find(name)
    known = parameters(name)
    values: dict[str, object] = {}
    for key, value in (given or {}).items():
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise ValueError(f"policy {name}: unknown parameter {key!r}; known parameters: {allowed}")
        default = known[key]
        wanted = type(default)
        if wanted is float and type(value) is int and value.bit_length() < 1024:  # more would not fit
            value = float(value)
        if type(value) is not wanted:
            raise ValueError(f"policy {name}: parameter {key!r} must be {wanted.__name__}, got {value!r}")
        values[key] = value
    return cls(cls.Config(**values))


def _find(name: str) -> type[Policy]:
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; known policies: {', '.join(POLICIES)}") from None
