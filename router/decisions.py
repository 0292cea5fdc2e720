"""The latest decisions, for people who watch: what was expected of each choice, and how it went."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from policies.types import Outcome, Reason, Replica, Request, Resident, Usage

if TYPE_CHECKING:
    from policies.lease import Lease
    from router.proxy.exchange import Exchange

KEPT = 1024
"""Decisions remembered, some 300 KB: enough to find the few that are not of the common kind."""

_NO_ROOM = (429, 503)

_LEFT_HOME = (Reason.MOVED, Reason.SPLIT)


class Decision(msgspec.Struct, gc=False):
    """One choice, or one refusal for want of a replica. Plain values alone: no request, body or replica is kept alive.

    Not tracked by the garbage collector, as there is nothing in it that could lead back to it.
    """

    at: float
    """When it was made, seconds of the router's clock."""
    key: bytes | None
    """The affinity key, a digest."""
    prompt_tokens: int
    """Estimated."""
    replica: str = ""
    """Empty: refused."""
    reason: str = ""
    """Of the choice, or of the refusal."""
    resident_tokens: int = 0
    wait_s: float = 0.0
    """Seconds of waiting expected there."""
    prefill_s: float = 0.0
    """Seconds of prefill expected there."""
    tries: int = 0
    """Replicas tried for the request, this one included."""
    left: str = ""
    """The home that it moved or split off from."""
    failed: str = ""
    """Why the replica did not serve it."""
    cause: str = ""
    """Who ended it; empty while it is under way."""
    first_byte_s: float = -1.0
    """From the whole request to the answer's first byte; negative until then."""
    cached_tokens: int = -1
    """Prompt tokens that the engine had in its cache; negative while it has not said so."""
    told_prompt_tokens: int = -1
    """Prompt tokens as the engine counted them; negative likewise."""


class Decisions:
    """A bounded ring, the oldest forgotten first."""

    def __init__(self, kept: int = KEPT) -> None:
        self._ring: deque[Decision] = deque(maxlen=kept)
        self.total = 0
        """Ever made."""

    def placed(self, exchange: Exchange, lease: Lease, now: float) -> None:
        """A replica was chosen for the exchange's request. Called in the data path: a microsecond is much here."""
        choice = lease.choice
        request = lease.request
        reason = choice.reason
        decision = Decision(
            now,
            request.key,
            request.prompt_tokens,
            choice.replica.id,
            reason,
            choice.resident_tokens,
            choice.wait_s,
            choice.prefill_s,
            exchange.tries,
        )
        if reason in _LEFT_HOME:
            home = home_left(request, choice.replica)
            decision.left = "" if home is None else home.replica.id
        if exchange.decision is not None:
            exchange.decision.failed = exchange.why
        exchange.decision = decision
        self._ring.append(decision)
        self.total += 1

    def finished(self, exchange: Exchange, outcome: Outcome, usage: Usage | None, now: float) -> None:
        """The exchange is over: note how it went. A refusal for want of a replica or of room is one more decision."""
        refusal = exchange.refusal
        decision = exchange.decision
        if refusal is not None and refusal.status in _NO_ROOM:
            if decision is not None:
                decision.failed = exchange.why
            key = exchange.identity.key if exchange.identity is not None else None
            refused = Decision(now, key, exchange.request.prompt_tokens, "", refusal.reason, tries=exchange.tries)
            refused.cause = outcome.cause
            self._ring.append(refused)
            self.total += 1
        elif decision is not None:
            decision.cause = outcome.cause
            if exchange.first_byte_at:
                decision.first_byte_s = exchange.first_byte_at - exchange.received_at
            if usage is not None and usage.cached_tokens is not None:
                decision.cached_tokens = usage.cached_tokens
            if usage is not None and usage.prompt_tokens is not None:
                decision.told_prompt_tokens = usage.prompt_tokens

    def latest(self) -> Iterator[tuple[int, Decision]]:
        """Each with its number, the latest first. Numbers are never used again."""
        for back, decision in enumerate(reversed(self._ring)):
            yield self.total - back, decision


def home_left(request: Request, chosen: Replica) -> Resident | None:
    """The home that a request does not go to, its own before those of others that share its beginning."""
    homes = [resident for resident in request.residents if resident.replica is not chosen]
    return max(homes, key=lambda resident: (resident.own, resident.tokens), default=None)
