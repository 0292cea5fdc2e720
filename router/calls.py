"""The lines of the decision journal: one for each call of the Balancer, and a header. See docs/operations.md."""

from __future__ import annotations

from typing import Any

import msgspec

from policies.types import State

FORMAT = 1
"""Of the lines; another number when what they mean changes."""


class Call(msgspec.Struct, tag_field="call", omit_defaults=True):
    """One line. `at` is the driver's `now`, seconds; `replica` a number from its `join`, `lease` one from `acquire`."""


class Header(Call, tag="journal"):
    """At the beginning of a file and behind every gap: what is in force, and the fleet as it stands."""

    at: float
    format: int
    version: str
    time: float
    """Of `at`, seconds since the epoch."""
    part: int
    """Files begun since the router started before this one."""
    lost: int
    """Lines missing since then. When they are more than in the header before, some are missing in between."""
    policy: dict[str, Any]
    directory: dict[str, Any]
    """Its bounds."""
    replicas: list[Join]


class Join(Call, tag="join"):
    at: float
    """In a header: since when its cache counts, as in `Replica.since`."""
    replica: int
    id: str
    weight: float
    state: State
    pool: str = ""
    """Empty for the default one."""


class Leave(Call, tag="leave"):
    at: float
    replica: int


class SetState(Call, tag="set_state"):
    at: float
    replica: int
    state: State


class SetWeight(Call, tag="set_weight"):
    at: float
    replica: int
    weight: float


class Report(Call, tag="report"):
    at: float
    replica: int
    load: dict[str, float]
    """Fields of `Load` that were reported."""


class Hear(Call, tag="hear"):
    """Another router told of a conversation's home, as `policies.sharing.Note` has it; or it was told, by
    this router's own answers or another, that the replica issued a response."""

    at: float
    replica: int
    key: str
    tokens: int
    counted: int
    fingerprint: str | None = None
    chain: bytes = b""
    """4 bytes for each link, of which the last 4 of every fourth of a request's `blocks` are one."""
    fork: bool = False
    ratio: float = 1.0


class HearLoad(Call, tag="hear_load"):
    """What the other routers have on a replica, by their own word."""

    at: float
    replica: int
    running: int
    tokens: int
    pending_s: float


class CacheCleared(Call, tag="cache_cleared"):
    at: float
    replica: int


class Switch(Call, tag="switch"):
    at: float
    policy: dict[str, Any]


class Asked(Call):
    """A request. Of what no policy needs nothing was looked at: then key, fingerprint or blocks are missing."""

    at: float
    key: str | None = None
    parent: str | None = None
    fingerprint: str | None = None
    prompt_tokens: int = 0
    """Estimated."""
    turn: bool = True
    failed: list[int] = []
    blocks: bytes = b""
    """8 bytes for each: as chained as the request's own."""
    response: str | None = None
    """Key of the response of `/v1/responses` that it names."""
    pool: str = ""
    """Empty for the default one."""


class Acquire(Asked, tag="acquire"):
    proposed: int | None = None
    """Replica that was proposed for its session before."""
    lease: int | None = None
    replica: int | None = None
    """Chosen."""
    reason: str | None = None
    refused: str | None = None
    """Why there was none to choose."""


class Explain(Asked, tag="explain"):
    """What would be chosen was asked, by the admin port or to be proposed to the store. It changes nothing, but the
    policy may have rounded on the way."""


class FirstToken(Call, tag="first_token"):
    at: float
    lease: int


class Finish(Call, tag="finish"):
    at: float
    lease: int
    cause: str
    phase: str
    timed: bool = True
    """As `Lease.timed`."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
