"""What several routers share, and the seam behind which it is kept: in this process, in another, or in Redis.

A store keeps two things: of each session the last notes on its homes, so that a router that does not know it can ask;
and a line of messages, by which every router learns what the others do. Nothing of it is needed to serve a request:
callers set their own limits of time, and go on by what they know themselves when a call raises `StoreError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from policies.sharing import Note, Own

MAX_NOTES = 64
"""Homes remembered under one session key: of 16 branches 4 each, as in a router's directory. The oldest go first."""

MAX_MESSAGES = 20_000
"""Messages that are kept for routers that were away; older ones are lost to them."""


class StoreError(Exception):
    """The store did not do what it was asked for: not reachable, full, no permission, or an answer that makes no sense.

    The message says which and what to do.
    """


@dataclass(frozen=True, slots=True)
class Remembered:
    """A note that was stored before."""

    note: Note
    age_s: float
    """Seconds since, by the store's own clock: those of routers need not agree."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a router tells the others at one time."""

    sender: str
    """The router's name, another one each time it starts."""
    notes: Sequence[Note] = ()
    loads: Mapping[str, Own] = field(default_factory=dict)
    """By replica: those that changed, or all of them."""
    whole: bool = False
    """`loads` are of all replicas on which it has anything."""
    controls: Mapping[str, bytes | None] = field(default_factory=dict)
    """What operators ordered, to be kept until it is ordered otherwise; None takes it back. See `router.orders`."""
    leaving: bool = False
    """It stops: it has nothing under way any more."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Messages that came, in order."""

    messages: Sequence[Message]
    cursor: str
    """Where to go on reading."""
    lost: bool = False
    """Messages before these may be missing: they were dropped, or the store began anew."""


class Store(Protocol):
    """One contract suite (tests/store) holds for every implementation. All calls may raise StoreError."""

    async def claim(self, note: Note) -> Sequence[Remembered]:
        """Store the note if nothing is known of its session, in one step, and answer with nothing.

        Else change nothing but how long the session is kept, and answer with what is known of it, the latest first.
        """
        ...

    async def tell(self, message: Message) -> None:
        """Store each note in its session's place, and the controls; then pass the message on to all who read.

        A note of no tokens takes the home that it names out.
        """
        ...

    async def restore(self, notes: Sequence[Note]) -> None:
        """Store notes where nothing is known of that very home, as older than what is. They are passed on to nobody."""
        ...

    async def hear(self, cursor: str, wait_s: float) -> Heard:
        """Messages after the cursor, one's own among them; waits so long for the first. After "": those yet to come."""
        ...

    async def controls(self) -> Mapping[str, bytes]:
        """What operators have ordered."""
        ...

    async def epoch(self, offered: str) -> str:
        """The mark of this store's memory; `offered` becomes it when there is none. If it changes, the store forgot."""
        ...

    async def close(self) -> None:
        """Let go of what it holds. No error."""
        ...
