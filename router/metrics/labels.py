"""The labels there are, and their values."""

from __future__ import annotations

from policies.registry import POLICIES
from policies.types import Cause, Phase, Reason, State
from router import errors
from router.breaker import Circuit
from router.errors import Refusal
from router.metrics.family import Label
from router.metrics.turn import Turn
from router.sharing import CLAIMS, DIRECTIONS, OPS

REFUSALS = tuple(
    sorted(
        {each.reason for each in vars(errors).values() if isinstance(each, Refusal)}
        | {*errors.NO_REPLICA, *errors.SHED, errors.malformed("").reason}
    )
)
FAILURES = ("connect", "connect_timeout", "reset", "silent", "invalid", "busy", "queue_full")
"""Of a replica that was sent a request and passed nothing on."""

KEY = Label("key", "who holds [the API key](#keys); only those that are accepted")
REPLICA = Label("replica", "the replica's `id`; only those in the fleet")
POOL = Label("pool", "[a pool](#pools), by its name; only where there are several")
REASON = Label("reason", "[why it was chosen](#why-a-replica-was-chosen)", tuple(Reason))
SHADOW_REASON = Label("shadow_reason", "the same of the shadow policy", tuple(Reason))
REFUSAL = Label("reason", "a code of [refusals](#refusals)", REFUSALS)
CAUSE = Label("cause", "who ended it", tuple(Cause))
PHASE = Label("phase", "how far it had come", tuple(Phase))
WHY = Label("why", "how the replica before failed it", FAILURES)
CIRCUIT = Label("state", "[state of a circuit breaker](#circuit-breaker)", tuple(Circuit))
STATE = Label("state", "[state](#health)", tuple(State))
TURN = Label("turn", "[where a turn went](#where-turns-go)", tuple(Turn))
TERM = Label("term", "until its prefill begins, and for it", ("queue", "prefill"))
KIND = Label("kind", "another replica held them, or one had held them before", ("elsewhere", "evicted"))
SAME = Label("same", "whether both chose the same replica", ("true", "false"))
ROLE = Label("role", "in charge, or beside it", ("live", "shadow"))
POLICY = Label("policy", "[a policy](policies.md)", tuple(POLICIES))
OUTCOME = Label(
    "outcome",
    "nobody knew the session, another router did, no answer in `store.wait_s`, a fault, the store was away or too slow",
    CLAIMS,
)
DIRECTION = Label(
    "direction",
    "to the others, from them, never told for want of room, given back to a store that had forgotten",
    DIRECTIONS,
)
OP = Label("op", "after it was away, for a first request, to pass on, to read, to give back what it forgot", OPS)
SOURCE = Label("source", "[where replicas are found](#discovery): kind and name, as configured")
RESULT = Label("result", "whether it was put in force", ("applied", "refused"))
VERSION = Label("version", "warmroute's")
PYTHON = Label("python", "the interpreter's")
