"""The wait room as the data plane drives it: requests that may not start yet, and when they are looked at again."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from policies.admission import Admission, AdmissionConfig, Priority, Ticket
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

    __slots__ = ("_due", "_gated", "_proxy", "admission", "pools")

    def __init__(self, proxy: Proxy, admission: Admission) -> None:
        self._proxy = proxy
        self.admission = admission
        """The default pool's."""
        self.pools: dict[str, Admission] = {}
        """Those of the other ones: who waits in one holds up nobody in another."""
        self._due = False
        """A look at it is on the loop's list already."""
        self._gated: set[Admission] = set()
        """Those whose KV gate acted when last looked at."""

    @property
    def all(self) -> list[Admission]:
        """Of every pool."""
        return [self.admission, *self.pools.values()]

    def serve(self, pools: Iterable[str], *, anew: bool) -> None:
        """There are these from now on, by the core's names, and nobody waits in one that is no more.

        `anew`: the names stand for others than before, and what was seen of these tells nothing.
        """
        config, balancer = self.admission.config, self._proxy.balancer
        kept = {} if anew else {name: each for name, each in self.pools.items() if name in pools}
        gone = [each for name, each in self.pools.items() if name not in kept]
        if anew:
            gone.append(self.admission)
            self.admission = Admission(balancer, config)
        for each in gone:
            self.admission.inherit(each)
        self.pools = {name: kept.get(name) or Admission(balancer, config, name) for name in pools if name}

    def configure(self, config: AdmissionConfig, now: float) -> None:
        """Keep to something else from now on, each pool for itself."""
        for admission in self.all:
            admission.configure(config, now)

    def enter(self, exchange: Exchange, priority: Priority, now: float) -> Lease | None:
        """A place for a request's first try; None when it has to wait. Raises Shed and NoReplica."""
        admission = self.admission
        if exchange.request.pool:
            admission = self.pools.get(exchange.request.pool, admission)
        place = admission.enter(exchange.request, now, priority)
        if isinstance(place, Lease):
            return place
        place.context = exchange
        exchange.ticket = place
        return None

    def freed(self) -> None:
        """Something ended: whoever waits may be able to start. Not at once, as we may be in the midst of an end."""
        waiting = self.admission.waiting or (self.pools and any(each.waiting for each in self.pools.values()))
        if waiting and not self._due:
            self._due = True
            self._proxy.loop.call_soon(self.look)

    def look(self) -> None:
        """Start or refuse who can be. To be called once a second, too: deadlines and the KV gate are seen to here."""
        self._due = False
        now = self._proxy.clock()
        settled = [ticket for admission in self.all for ticket in admission.due(now)]
        self._note_gates()
        for ticket in settled:
            exchange = ticket.context
            try:
                exchange.called(ticket)
            except Exception:  # one request's trouble must not cost the others their turn
                log.exception("starting a request that waited failed in a way it should not")
                self._abandon(ticket)

    def _note_gates(self) -> None:
        """One line when a KV gate begins to hold sessions back, and one when it ends."""
        acting = {admission for admission in self.all if admission.gate.active}
        for admission in acting - self._gated:
            gate = admission.gate
            told = "the KV gate%s acts: live sessions do not fit the KV caches of %d tokens, and are let in up to %d"
            log.warning(told, self._whose(admission), gate.capacity_tokens, gate.limit_tokens)
        for admission in self._gated - acting:
            log.info("the KV gate%s is open: no session is held back any more", self._whose(admission))
        self._gated = acting

    def _whose(self, admission: Admission) -> str:
        pools = self._proxy.pools
        return "" if pools is None else f" of pool {pools.shown(admission.pool)}"

    def _abandon(self, ticket: Ticket) -> None:
        if ticket.lease is not None:
            ticket.lease.finish(OUTCOMES[Cause.ROUTER, Phase.QUEUE], None, self._proxy.clock())
        ticket.context.downstream.abort()
