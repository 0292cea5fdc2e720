"""Policies by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from policies.least_loaded import LeastLoaded
from policies.policy import Policy
from policies.random import Random
from policies.rendezvous import Rendezvous
from policies.round_robin import RoundRobin
from policies.session_affinity import SessionAffinity

POLICIES: dict[str, type[Policy]] = {p.name: p for p in (SessionAffinity, Rendezvous, LeastLoaded, RoundRobin, Random)}


def parameters(name: str) -> dict[str, object]:
    """The policy's parameters with their defaults. Raises ValueError for an unknown name."""
    signature = inspect.signature(_find(name).__init__)
    return {p.name: p.default for p in signature.parameters.values() if p.default is not inspect.Parameter.empty}


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
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            raise ValueError(f"policy {name}: parameter {key!r} must be {wanted.__name__}, got {value!r}")
        values[key] = value
    return cls(**values)


def _find(name: str) -> type[Policy]:
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; known policies: {', '.join(POLICIES)}") from None
