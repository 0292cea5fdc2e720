"""The other end: conversations that are being had, and their requests on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from policies.admission import Ticket
from policies.lease import Lease
from policies.types import Request
from sim.measure import Served
from sim.server import Server
from sim.work import Work
from sim.workload import Conversation, Turn

if TYPE_CHECKING:
    from sim.front import Router


@dataclass(eq=False, slots=True)
class Thread:
    """A conversation that is being had."""

    conversation: Conversation
    parent: Thread | None = None
    ever: set[int] = field(default_factory=set)
    """Pages of its session that were ever computed anywhere; forks share their parent's."""
    turns: int = 0
    last: Server | None = None
    """Where its last turn went."""
    held: int = 0
    """Pages that its last turn left behind."""
    waits_for: int = 0
    """Forks not yet ended."""
    fingerprint: int = 0
    """Of its last turn."""
    joined: int = 0
    """Scale-outs that its turns have been looked at for."""
    block_pages: list[int] = field(default_factory=list)
    """The last page of each of its last turn's blocks; before its first, of its parent's."""
    blocks: tuple[int, ...] = ()
    """Those blocks, by the router's names."""


class Call:
    """A request on its way."""

    def __init__(self, thread: Thread, turn: Turn, request: Request, served: Served, known: int) -> None:
        self.thread = thread
        self.turn = turn
        self.request = request
        self.served = served
        self.known = known
        """Leading pages of its prompt that had ever been computed when its prefill began."""
        self.router: Router | None = None
        self.ticket: Ticket | None = None
        """While it waits to be placed."""
        self.lease: Lease | None = None
        self.places: tuple[Server, ...] = ()
        """The leased one, and the others that work on it."""
        self.work: Work | None = None
        self.at: Server | None = None
        """Where that work is."""
        self.closed = False
