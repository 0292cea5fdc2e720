"""The wait room: fair between sessions, by shares between classes, and how fast it empties."""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import StrEnum
from math import ceil
from typing import TYPE_CHECKING, Any

from policies.lease import Lease
from policies.types import Request

if TYPE_CHECKING:
    from policies.admission.admission import Admission

SHARES = {
    ("high", True): 12,
    ("high", False): 4,
    ("normal", True): 6,
    ("normal", False): 2,
    ("low", True): 3,
    ("low", False): 1,
}
"""Of places, while all wait, by priority and whether the KV cache is warm. A warm turn is done in a tenth of the time
of a cold one: letting three of four before it shortens the mean wait, and the fourth starves nobody. Priorities are
shares for the same reason."""

RATE_WINDOW_S = 30.0
"""Over which the drain rate is taken, as long as someone waited."""

SURE_DEPARTURES, SURE_S = 8, 10.0
"""Fewer departures, or a shorter time, say too little of the rate to refuse anyone by it."""

RETRY_S = (1, 60)
"""Bounds of `retry-after`: the OpenAI and Anthropic clients obey less than a minute only (seen with real agents)."""


class Priority(StrEnum):
    """How much a request's waiting matters. A closed set."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class ShedReason(StrEnum):
    """Why a request was refused. A closed set: metric label, log field and body alike."""

    ROOM_FULL = "room_full"
    """As many wait as may."""
    WAIT_TOO_LONG = "wait_too_long"
    """It has waited as long as one may, or would have to."""
    KV_FULL = "kv_full"
    """The same, of a session that is held back as the live ones do not fit the fleet's KV caches."""


class Shed(Exception):
    """Refused. The client may come again after `retry_after_s`, whole seconds."""

    def __init__(self, reason: ShedReason, retry_after_s: int) -> None:
        super().__init__(f"{reason}, retry after {retry_after_s} s")
        self.reason = reason
        self.retry_after_s = retry_after_s


class Ticket:
    """A request that waits. Settled once: by `Admission.due`, with a lease or an error, by `cancel` or `withdraw`."""

    __slots__ = (
        "_admission",
        "context",
        "deadline",
        "entered_at",
        "error",
        "held",
        "lease",
        "priority",
        "request",
        "session",
        "warm",
    )

    def __init__(
        self, admission: Admission, request: Request, priority: Priority, warm: bool, now: float, deadline: float
    ) -> None:
        self._admission = admission
        self.request = request
        self.priority = priority
        self.session = request.key if request.parent is None else request.parent
        """Whose turn it takes. What names no session shares one."""
        self.warm = warm
        """Most of its prompt is believed to be in a replica's KV cache."""
        self.entered_at = now
        self.deadline = deadline
        self.held = False
        """By the gate, not by a cap."""
        self.lease: Lease | None = None
        self.error: Exception | None = None
        """`Shed`, `NoReplica`, or what placing it raised."""
        self.context: Any = None
        """The driver's own. The core never looks."""

    def cancel(self, now: float) -> None:
        """Its client has left. Does nothing when it is settled."""
        self._admission.cancel(self, now)

    def withdraw(self) -> None:
        """It is to wait elsewhere. Does nothing when it is settled."""
        self._admission.withdraw(self)


class Room:
    """Those that wait for a cap. Rings of sessions: each in its turn sends one request."""

    def __init__(self) -> None:
        self.waiting = 0
        self._rings: dict[tuple[str, bool], OrderedDict[bytes | None, deque[Ticket]]] = {
            each: OrderedDict() for each in SHARES
        }
        self._credit = dict.fromkeys(SHARES, 0)
        self._next: Ticket | None = None
        self._busy_since = 0.0
        self._departures: deque[float] = deque(maxlen=256)

    def add(self, ticket: Ticket, now: float) -> None:
        """It waits behind its session's others, in its class."""
        if not self.waiting:
            self._busy_since = now
            self._departures.clear()
        self._ring(ticket).setdefault(ticket.session, deque()).append(ticket)
        self.waiting += 1

    def next(self) -> Ticket | None:
        """Whose turn it is: the same one until it is taken out."""
        if self._next is None and self.waiting:
            self._next = self._choose()
        return self._next

    def place(self, ticket: Ticket, now: float) -> None:
        """Take out the one whose turn it is: it has been placed."""
        self._departures.append(now)
        ring = self._ring(ticket)
        self.remove(ticket)
        if ticket.session in ring:
            ring.move_to_end(ticket.session)

    def remove(self, ticket: Ticket) -> None:
        """Take out any one."""
        ring = self._ring(ticket)
        waiting = ring[ticket.session]
        waiting.remove(ticket)
        if not waiting:
            del ring[ticket.session]
        self.waiting -= 1
        if self._next is ticket:
            self._next = None

    def _ring(self, ticket: Ticket) -> OrderedDict[bytes | None, deque[Ticket]]:
        return self._rings[ticket.priority, ticket.warm]

    def _choose(self) -> Ticket:
        """Smooth weighted round robin (as nginx spreads over upstreams) between classes, plain between sessions."""
        credit, most, best = self._credit, 0, None
        for each, ring in self._rings.items():
            if not ring:
                credit[each] = 0
                continue
            credit[each] += SHARES[each]
            most += SHARES[each]
            if best is None or credit[each] > credit[best]:
                best = each
        assert best is not None
        credit[best] -= most
        return next(iter(self._rings[best].values()))[0]

    def rate(self, now: float) -> float | None:
        """Requests a second that got a place lately while others waited; None when too little is known."""
        since = max(self._busy_since, now - RATE_WINDOW_S)
        left = sum([at >= since for at in self._departures])
        if left == self._departures.maxlen:
            since = self._departures[0]
        if left < SURE_DEPARTURES or now - since < SURE_S:
            return None
        return left / (now - since)

    def least_wait_s(self, ticket: Ticket, now: float) -> float:
        """Before it would have its turn at the present rate, at the least; 0 when too little is known.

        Every session in its ring goes once before it, and its own session's others go before it.
        """
        ring, rate = self._ring(ticket), self.rate(now)
        if rate is None:
            return 0.0
        return (len(ring) + len(ring.get(ticket.session, ()))) / rate

    def retry_after_s(self, now: float, max_wait_s: float) -> int:
        """When about all that wait now will have left: by the present rate, and by their deadlines in any case."""
        rate = self.rate(now)
        return bounded(min(self.waiting / rate, max_wait_s) if rate else max_wait_s)


def bounded(seconds: float) -> int:
    """As `retry-after` tells it."""
    return ceil(min(max(seconds, RETRY_S[0]), RETRY_S[1]))
