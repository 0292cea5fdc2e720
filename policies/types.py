"""The plain values that pass between a driver, the Balancer and a policy.

Of those that each request or report makes anew the `__init__` is written out: what `dataclass` makes of one is run by
Python even where all is compiled, and takes ten times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Flag, StrEnum, auto
from math import inf
from typing import Any, NamedTuple

from policies.residency import Shadow
from policies.speed import Speed


class Reason(StrEnum):
    """Why a replica was chosen. A closed set: metric label, log field, header and explain output alike."""

    HOME = "home"
    """The session's KV cache is there; or the session lives there, and begins a new conversation."""
    NEW = "new"
    """Nothing is known of the conversation: placed by expected seconds."""
    MOVED = "moved"
    """Its KV cache is elsewhere, and computing it again is expected to be quicker than waiting there."""
    SPLIT = "split"
    """As `moved`, for a request that comes while others of its session are under way: the home stays."""
    EVICTED = "evicted"
    """The session is known, but its KV cache is believed to be gone from every replica."""
    HOME_LOST = "home_lost"
    """The session's home cannot take it (gone, ejected, draining, cache cleared, or failed just now)."""
    NO_SESSION = "no_session"
    """The request names no session and none could be derived: placed by load."""
    HASH = "hash"
    """A pure function of the key and the fleet."""
    SPILLED = "spilled"
    """The replica the key or the prefix leads to has too much to do: the next in order."""
    PREFIX = "prefix"
    """The replica that holds the longest part of the prompt."""
    SCORE = "score"
    """The best sum of the policy's scores or costs."""
    ROTATION = "rotation"
    """Its turn."""
    RANDOM = "random"
    """Drawn by lot."""
    LEAST_LOADED = "least_loaded"
    """Fewest requests in flight."""


class Needs(Flag):
    """What a policy wants to know of a request. The driver looks no further than that."""

    NOTHING = 0
    SESSION = auto()
    """The affinity key; from headers, else from the body."""
    FINGERPRINT = auto()
    """The conversation's fingerprint: the body's head is looked at in every request."""
    BLOCKS = auto()
    """Chained hashes of the raw body's blocks."""


class State(StrEnum):
    """Whether a replica may be sent requests."""

    READY = "ready"
    DRAINING = "draining"
    """Finishes what it has; gets nothing new."""
    FINISHING = "finishing"
    """Drains as its sessions end: they still go there, nothing else does."""
    EJECTED = "ejected"
    """Failing or not answering; gets nothing until it is seen well again."""
    HALF_OPEN = "half_open"
    """Was ejected as its requests failed, and is on trial: gets `TRIALS` requests at a time."""


TRIALS = 2
"""Requests that a replica on trial has in flight at most: enough that one huge prompt does not hold up the verdict."""


@dataclass(init=False, slots=True)
class Load:
    """What an engine last said of itself. Absent numbers are None, never zero: unknown is not idle."""

    at: float
    """When it was said, seconds of the driver's clock."""
    running: int | None
    """Requests in the running batch."""
    waiting: int | None
    """Requests queued in the engine."""
    waiting_tokens: int | None
    """Prompt tokens queued that are not in its cache."""
    used_tokens: int | None
    """KV tokens in use by running requests."""
    capacity_tokens: int | None
    """KV tokens that fit its GPU memory."""
    host_capacity_tokens: int | None
    """KV tokens that fit its host tier."""
    prefill_tokens_per_s: float | None
    """Measured prefill speed."""
    own_running: int
    """Our own requests there when it was said, so that others' can be told apart."""
    own_tokens: int
    """Our own unprefilled tokens there when it was said."""

    def __init__(
        self,
        at: float,
        running: int | None = None,
        waiting: int | None = None,
        waiting_tokens: int | None = None,
        used_tokens: int | None = None,
        capacity_tokens: int | None = None,
        host_capacity_tokens: int | None = None,
        prefill_tokens_per_s: float | None = None,
        own_running: int = 0,
        own_tokens: int = 0,
    ) -> None:
        self.at = at
        self.running = running
        self.waiting = waiting
        self.waiting_tokens = waiting_tokens
        self.used_tokens = used_tokens
        self.capacity_tokens = capacity_tokens
        self.host_capacity_tokens = host_capacity_tokens
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.own_running = own_running
        self.own_tokens = own_tokens


@dataclass(slots=True, eq=False)
class Replica:
    """One engine, as the core sees it. Identity is the object: a replica that leaves and returns is a new one."""

    id: str
    """Stable name, equal on all routers and across restarts: the URL unless configured."""
    weight: float = 1.0
    """Share of traffic relative to others, for policies that honour it."""
    pool: str = ""
    """Only requests of the same pool go there; the default one has no name. It does not change while in the fleet."""
    address: Any = None
    """What the driver reaches it by. The core never looks inside."""
    state: State = State.READY
    since: float = 0.0
    """When it joined, or its KV cache was last seen to be empty, in seconds: older residency does not count."""
    started: float = 0.0
    """When it joined, or was last made ready again, in seconds. Only the Balancer changes it."""
    in_flight: int = 0
    """Leases open on it. Only Lease changes it."""
    in_flight_tokens: int = 0
    """Prompt tokens of the same leases. Only Lease changes it."""
    held_tokens: int = 0
    """KV tokens that prompts of the same leases take or wait for, shared ones counted once. Only Lease changes it."""
    prefill_tokens: int = 0
    """Estimated tokens of open leases that await their first token. Only Lease changes it."""
    pending: int = 0
    """Open leases that await their first token. Only Lease changes it."""
    pending_s: float = 0.0
    """Expected prefill seconds of the same leases, the overhead of passes not counted. Only Lease changes it."""
    prefill_ends: float = 0.0
    """When its prefills sent so far are expected to be done, seconds. Only Lease changes it."""
    prefilled_s: float = 0.0
    """Expected prefill seconds of all leases that had their first token. Only Lease changes it."""
    load: Load | None = None
    """The engine's last report, None until there is one."""
    others_running: int = 0
    """Requests of others there: what other routers tell of, and what the last two reports both saw beyond all these."""
    others_tokens: int = 0
    """Tokens that await prefill there and are of nobody we know, likewise."""
    others_at: float = -inf
    """When that was last told by anyone, seconds. Only the Balancer changes it."""
    routers: tuple[int, int] = (0, 0)
    """Requests and waiting tokens of the other routers there, by their own word. Only the Balancer changes it."""
    routers_s: float = 0.0
    """Expected prefill seconds of those waiting tokens, counted in `prefill_ends`. Only the Balancer changes it."""
    routers_at: float = -inf
    """When these were told, seconds. Only the Balancer changes it."""
    foreign: tuple[int, int] = (0, 0)
    """Those of nobody we know, as the last two reports both saw them. Only the Balancer changes it."""
    incarnation: str = ""
    """The engine's process, equal on all routers; empty while unknown. Set by the driver."""
    keeps_responses: bool = True
    """Unless its engine says that it keeps no responses to go on from. Set by the driver."""
    reports_cached: bool = False
    """It was seen to report cached tokens: its 0 means none, not unknown."""
    speed: Speed = field(default_factory=Speed, repr=False)
    cache: Shadow = field(default_factory=Shadow, repr=False)
    present: bool = False
    """It is in the fleet. Only the Balancer changes it."""
    trials: int = 0
    """Leases open on it that began while it was on trial. Only the Balancer changes it."""
    served: int = 0
    """Leases ever opened on it."""
    regretted_tokens: int = 0
    """Tokens that it computed again, see `policies.regret`."""
    salt: bytes = field(init=False, repr=False)
    """What rendezvous hashing appends to a key for this replica."""
    last_foreign: tuple[int, int] | None = field(default=None, repr=False)
    """As `foreign`, in the last report alone."""
    last_lease: int = 0
    """Number, among all the fleet's, of the lease opened last on it: among equals, the lowest was left longest."""

    def __post_init__(self) -> None:
        self.salt = b"\x00" + self.id.encode()


@dataclass(init=False, slots=True)
class Resident:
    """A candidate that holds KV of the request's conversation."""

    replica: Replica
    tokens: int
    """Prompt tokens believed to be in its cache, either tier."""
    gpu_tokens: int
    """Those of them that need not be loaded from the host tier."""
    own: bool
    """Held for this very branch; else for one that shares its beginning."""
    whole: bool
    """The prompt goes on from all that was computed there, not from a part of it."""

    def __init__(self, replica: Replica, tokens: int, gpu_tokens: int, own: bool = True, whole: bool = True) -> None:
        self.replica = replica
        self.tokens = tokens
        self.gpu_tokens = gpu_tokens
        self.own = own
        self.whole = whole


@dataclass(init=False, slots=True)
class Request:
    """What is known of a request when it must be placed."""

    key: bytes | None
    """Affinity key: digest of session (and agent), or of the conversation. None: nothing to hold on to."""
    parent: bytes | None
    """Key of the session or agent that spawned this one."""
    fingerprint: int
    """Of the conversation's beginning; 0 when it was not looked at."""
    prompt_tokens: int
    """Estimated prompt size; corrected by the Balancer for conversations it knows."""
    blocks: tuple[int, ...]
    """Chained hashes of the raw body's blocks; empty when they were not asked for."""
    turn: bool
    """It is a turn of a conversation, so that its KV stays. Others (lists, embeddings, token counts) go home too."""
    pool: str
    """Whose replicas it may be sent to. Keys of two pools are never equal: the driver sees to that."""
    proposed: Choice | None
    """Of `Balancer.propose`, when the driver has told others of it: it holds while nothing is known of the session."""
    residents: tuple[Resident, ...]
    """Set by the Balancer: the branch's own homes first, each replica once. Only candidates."""
    known: bool
    """Set by the Balancer: the session is remembered, whether or not its homes can be used now."""
    lost: bool
    """Set by the Balancer: a home of its conversation cannot take it now."""
    concurrent: bool
    """Set by the Balancer: other requests of its conversation are under way."""
    last_home: Replica | None
    """Set by the Balancer when the conversation is not known, but its session is and nothing of it is under way: the
    candidate that served the session last."""
    once_tokens: int
    """Set by the Balancer: the most of its prompt that any one replica ever held."""
    failed: tuple[Replica, ...]
    """Replicas already tried for this request; never candidates again. While it is placed, those at a cap, too."""
    estimate_tokens: int
    """Set by the Balancer: `prompt_tokens` as the driver estimated them."""
    response: bytes | None
    """Key of the response that it goes on from, asks for or cancels, see `policies.responses`."""
    issuer: Replica | None
    """Set by the Balancer: the replica that has that response, when it was chosen for that alone."""

    def __init__(
        self,
        key: bytes | None = None,
        parent: bytes | None = None,
        fingerprint: int = 0,
        prompt_tokens: int = 0,
        blocks: tuple[int, ...] = (),
        turn: bool = True,
        pool: str = "",
        proposed: Choice | None = None,
        residents: tuple[Resident, ...] = (),
        known: bool = False,
        lost: bool = False,
        concurrent: bool = False,
        last_home: Replica | None = None,
        once_tokens: int = 0,
        failed: tuple[Replica, ...] = (),
        estimate_tokens: int = -1,
        response: bytes | None = None,
        issuer: Replica | None = None,
    ) -> None:
        self.key = key
        self.parent = parent
        self.fingerprint = fingerprint
        self.prompt_tokens = prompt_tokens
        self.blocks = blocks
        self.turn = turn
        self.pool = pool
        self.proposed = proposed
        self.residents = residents
        self.known = known
        self.lost = lost
        self.concurrent = concurrent
        self.last_home = last_home
        self.once_tokens = once_tokens
        self.failed = failed
        self.estimate_tokens = estimate_tokens
        self.response = response
        self.issuer = issuer


@dataclass(slots=True)
class Candidate:
    """One replica as a policy weighed it."""

    replica: Replica
    cost: float
    """What the policy compares, in the choice's unit; the least wins."""
    terms: dict[str, float]
    """What the cost is the sum of, by name."""


@dataclass(init=False, slots=True)
class Choice:
    """A policy's answer."""

    replica: Replica
    reason: Reason
    wait_s: float
    """Expected seconds in the queue before it, as far as the policy reckons in seconds."""
    resident_tokens: int
    """Prompt tokens believed to be in its KV cache already, either tier."""
    prefill_s: float
    """Expected seconds to prefill the rest there; 0 when the policy does not say."""
    candidates: tuple[Candidate, ...]
    """From `explain` only: the best few, the chosen one among them, by cost."""
    unit: str
    """Of the candidates' costs: seconds, or what the policy counts in; empty for a mere score."""

    def __init__(
        self,
        replica: Replica,
        reason: Reason,
        wait_s: float = 0.0,
        resident_tokens: int = 0,
        prefill_s: float = 0.0,
        candidates: tuple[Candidate, ...] = (),
        unit: str = "s",
    ) -> None:
        self.replica = replica
        self.reason = reason
        self.wait_s = wait_s
        self.resident_tokens = resident_tokens
        self.prefill_s = prefill_s
        self.candidates = candidates
        self.unit = unit


class Cause(StrEnum):
    """Who ended a request."""

    DONE = "done"
    CLIENT = "client"
    UPSTREAM = "upstream"
    TIMEOUT = "timeout"
    ROUTER = "router"


class Phase(StrEnum):
    """How far a request had come when it ended."""

    REQUEST = "request"
    """Receiving it."""
    QUEUE = "queue"
    CONNECT = "connect"
    HEADERS = "headers"
    """Sent; nothing of the answer passed on yet."""
    BODY = "body"
    """The answer was being passed on, or was complete."""


class Outcome(NamedTuple):
    """How a request ended: HAProxy's grid of termination states, in words."""

    cause: Cause
    phase: Phase


OUTCOMES = {(cause, phase): Outcome(cause, phase) for cause in Cause for phase in Phase}
"""One object for each: drivers take these rather than make a new one for every request."""


@dataclass(init=False, slots=True)
class Usage:
    """What an engine reported of one answer, in tokens. None: not reported."""

    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None

    def __init__(
        self, prompt_tokens: int | None = None, cached_tokens: int | None = None, completion_tokens: int | None = None
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.completion_tokens = completion_tokens


@dataclass(slots=True)
class Snapshot:
    """A policy's own state for people to look at."""

    policy: str
    parameters: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
