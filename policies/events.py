"""What a policy is told. It learns from nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from policies.types import Choice, Load, Outcome, Replica, Request, State, Usage


@dataclass(init=False, slots=True)
class Routed:
    """A choice was carried out: a lease is open."""

    at: float
    request: Request
    choice: Choice

    def __init__(self, at: float, request: Request, choice: Choice) -> None:
        self.at = at
        self.request = request
        self.choice = choice


@dataclass(init=False, slots=True)
class FirstToken:
    """The first byte of the answer arrived."""

    at: float
    request: Request
    replica: Replica
    waited_s: float
    """Seconds since it was routed."""
    choice: Choice | None
    """What it was routed by; None when it is not known any more."""

    def __init__(
        self, at: float, request: Request, replica: Replica, waited_s: float, choice: Choice | None = None
    ) -> None:
        self.at = at
        self.request = request
        self.replica = replica
        self.waited_s = waited_s
        self.choice = choice


@dataclass(init=False, slots=True)
class Finished:
    """A lease was closed."""

    at: float
    request: Request
    replica: Replica
    outcome: Outcome
    usage: Usage | None
    choice: Choice | None
    """What it was routed by; None when it is not known any more."""
    first_token_at: float | None
    """When the first byte of the answer arrived; None when none did."""

    def __init__(
        self,
        at: float,
        request: Request,
        replica: Replica,
        outcome: Outcome,
        usage: Usage | None,
        choice: Choice | None = None,
        first_token_at: float | None = None,
    ) -> None:
        self.at = at
        self.request = request
        self.replica = replica
        self.outcome = outcome
        self.usage = usage
        self.choice = choice
        self.first_token_at = first_token_at


@dataclass(slots=True)
class RoutedElsewhere:
    """Another router sent work there."""

    at: float
    replica: Replica
    prefill_s: float
    """Expected seconds of what it sent since it told before."""


@dataclass(slots=True)
class ReplicaAdded:
    at: float
    replica: Replica


@dataclass(slots=True)
class ReplicaRemoved:
    at: float
    replica: Replica


@dataclass(slots=True)
class ReplicaChanged:
    """Its state changed from `was` to `replica.state`; when they are equal, something else of it that placing heeds."""

    at: float
    replica: Replica
    was: State


@dataclass(init=False, slots=True)
class LoadReported:
    """It, or other routers, told what it has to do."""

    at: float
    replica: Replica
    load: Load | None
    """The engine's report; None when it was routers that told."""

    def __init__(self, at: float, replica: Replica, load: Load | None) -> None:
        self.at = at
        self.replica = replica
        self.load = load


@dataclass(slots=True)
class CacheCleared:
    """Its KV cache is empty: it restarted, or was flushed."""

    at: float
    replica: Replica


Event = (
    Routed
    | RoutedElsewhere
    | FirstToken
    | Finished
    | ReplicaAdded
    | ReplicaRemoved
    | ReplicaChanged
    | LoadReported
    | CacheCleared
)
