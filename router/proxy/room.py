"""The wait room as the data plane drives it: requests that may not start yet, and when they are looked at again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from policies.admission import Admission, Priority, Ticket
from policies.lease import Lease
from policies.types import OUTCOMES, Cause, Phase

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange
    from router.proxy.proxy import Proxy

log = logging.getLogger("warmroute.proxy")

PRIORITIES: Mapping[bytes, Priority] = {priority.encode(): priority for priority in Priority}
"""The values of the priority header, in lower case."""


class Room:
    """Between the proxy and the core's `Admission`, which knows no loop and no connections."""

    __slots__ = ("_due", "_gated", "_proxy", "admission")

    def __init__(self, proxy: Proxy, admission: Admission) -> None:
        self._proxy = proxy
        self.admission = admission
        self._due = False
        """A look at it is on the loop's list already."""
        self._gated = False
        """Whether the KV gate acted when last looked at."""

    def enter(self, exchange: Exchange, priority: Priority, now: float) -> Lease | None:
        """A place for a request's first try; None when it has to wait. Raises Shed and NoReplica."""
        place = self.admission.enter(exchange.request, now, priority)
        if isinstance(place, Lease):
            return place
        place.context = exchange
        exchange.ticket = place
        return None

    def freed(self) -> None:
        """Something ended: whoever waits may be able to start. Not at once, as we may be in the midst of an end."""
        if self.admission.waiting and not self._due:
            self._due = True
            self._proxy.loop.call_soon(self.look)

    def look(self) -> None:
        """Start or refuse who can be. To be called once a second, too: deadlines and the KV gate are seen to here."""
        self._due = False
        settled = self.admission.due(self._proxy.clock())
        self._note_gate()
        for ticket in settled:
            exchange = ticket.context
            try:
                exchange.called(ticket)
            except Exception:  # one request's trouble must not cost the others their turn
                log.exception("starting a request that waited failed in a way it should not")
                self._abandon(ticket)

    def _note_gate(self) -> None:
        """One line when the KV gate begins to hold sessions back, and one when it ends."""
        gate = self.admission.gate
        if gate.active is self._gated:
            return
        self._gated = gate.active
        if gate.active:
            told = "the KV gate acts: live sessions do not fit the KV caches of %d tokens, and are let in up to %d"
            log.warning(told, gate.capacity_tokens, gate.limit_tokens)
        else:
            log.info("the KV gate is open: no session is held back any more")

    def _abandon(self, ticket: Ticket) -> None:
        if ticket.lease is not None:
            ticket.lease.finish(OUTCOMES[Cause.ROUTER, Phase.QUEUE], None, self._proxy.clock())
        ticket.context.downstream.abort()
