"""Asked before the Balancer: what may be placed now, what waits for it, and what is refused.

Sans-IO like the Balancer: every call carries `now`, and nothing happens between calls. What a request counts for is its
lease's, and is given back with it; here is only who waits.
"""

from __future__ import annotations

from policies.admission.config import AdmissionConfig
from policies.admission.gate import Gate
from policies.admission.room import Priority, Room, Shed, ShedReason, Ticket
from policies.balancer import Balancer
from policies.lease import Lease
from policies.lookup import look_up
from policies.types import Replica, Request


class Admission:
    """Of one router, or of one of its pools: whose requests are full is no matter to those of another."""

    def __init__(self, balancer: Balancer, config: AdmissionConfig | None = None, pool: str = "") -> None:
        self.config = AdmissionConfig() if config is None else config
        """Changed by `configure` only."""
        self.gate = Gate(balancer, self.config.max_hold_s, pool)
        self.sheds = dict.fromkeys(ShedReason, 0)
        self.waited = 0
        """Requests that were placed after waiting."""
        self.left = 0
        """Requests whose client left while they waited."""
        self._balancer = balancer
        self.pool = pool
        self._room = Room()
        self._tickets: dict[Ticket, None] = {}
        """All that wait, for a cap or at the gate, by deadline."""
        self._settled: list[Ticket] = []
        self._caps = self.config.caps
        self._watchful = self._caps
        """Whether anything but placing is to be done."""

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._tickets)

    def configure(self, config: AdmissionConfig, now: float) -> None:
        """Keep to something else from now on. Nothing is ended by it, and who waits keeps the deadline."""
        self.config = config
        self.gate.line.max_hold_s = config.max_hold_s
        self._caps = config.caps
        if not config.kv_gate:
            self._pass(self.gate.open(), now)
        self._watchful = self._caps or self.gate.active or bool(self._tickets)

    # Requests

    def enter(self, request: Request, now: float, priority: Priority = Priority.NORMAL) -> Lease | Ticket:
        """A place for a request that comes, or in the room. Raises Shed when there is none in either, and NoReplica.

        Not for one that a replica has failed: `Balancer.acquire` places it at once, as it has waited before.
        """
        balancer, gate = self._balancer, self.gate
        if not self._watchful or (not balancer.ready_in(self.pool) and self._alone(request, now) is None):
            return balancer.acquire(request, now)  # with none to wait for it says why
        if gate.active and not gate.passes(request, now):
            return self._hold(request, now, priority)
        if self._room.waiting or (full := self._full(request, now)) is None:
            return self._wait(request, now, priority)
        return self._acquire(request, full, now)

    def cancel(self, ticket: Ticket, now: float) -> None:
        """Its client has left. Does nothing when it is settled."""
        if self.withdraw(ticket):
            self.left += 1

    def withdraw(self, ticket: Ticket) -> bool:
        """It is to wait elsewhere. False when it is settled."""
        waits = ticket in self._tickets
        if waits:
            self._take_out(ticket)
        return waits

    def inherit(self, other: Admission) -> None:
        """Count as one's own what another has done that is no more."""
        self.waited += other.waited
        self.left += other.left
        self.gate.activations += other.gate.activations

    def due(self, now: float) -> list[Ticket]:
        """Those that have been placed or refused by now, each with a lease or an error.

        To be called when a lease has ended while someone waits, and about once a second in any case.
        """
        if self.config.kv_gate:
            self._pass(self.gate.look(now), now)
        self._expire(now)
        self._place(now)
        self._watchful = self._caps or self.gate.active or bool(self._tickets)
        settled, self._settled = self._settled, []
        return settled

    # Waiting

    def _hold(self, request: Request, now: float, priority: Priority) -> Ticket:
        ticket = self._ticket(request, now, priority)
        gate, line, most = self.gate, self.gate.line, self.config.max_waiting
        if len(self._tickets) >= most or (ticket.session not in line and len(line) >= most):
            raise self._shed(ShedReason.ROOM_FULL, line.retry_after_s(ticket, now))
        held = line.keep(ticket, now)
        # Where there is room, the rate says how many came for it: with all of them refused nobody would.
        least_s = 0.0 if gate.fits(held.tokens) else line.least_wait_s(ticket, self.config.max_wait_s, now)
        if least_s > self.config.max_wait_s:
            raise self._shed(ShedReason.KV_FULL, line.retry_after_s(ticket, now))
        ticket.held = True
        held.tickets.append(ticket)
        return self._waits(ticket)

    def _wait(self, request: Request, now: float, priority: Priority) -> Ticket:
        ticket, room = self._ticket(request, now, priority), self._room
        if len(self._tickets) >= self.config.max_waiting:
            raise self._shed(ShedReason.ROOM_FULL, self._room_again_s(now))
        if room.least_wait_s(ticket, now) > self.config.max_wait_s:
            raise self._shed(ShedReason.WAIT_TOO_LONG, self._room_again_s(now))
        room.add(ticket, now)
        return self._waits(ticket)

    def _waits(self, ticket: Ticket) -> Ticket:
        last = next(reversed(self._tickets), ticket)
        self._tickets[ticket] = None
        if ticket.deadline < last.deadline:  # `max_wait_s` has become shorter while others waited
            self._tickets = dict.fromkeys(sorted(self._tickets, key=lambda each: each.deadline))
        return ticket

    def _ticket(self, request: Request, now: float, priority: Priority) -> Ticket:
        look_up(self._balancer.directory, request, now)
        held = max([resident.tokens for resident in request.residents], default=0)
        warm = 0 < request.prompt_tokens < 2 * held
        return Ticket(self, request, priority, warm, now, now + self.config.max_wait_s)

    def _shed(self, reason: ShedReason, retry_after_s: int) -> Shed:
        self.sheds[reason] += 1
        return Shed(reason, retry_after_s)

    def _room_again_s(self, now: float) -> int:
        return self._room.retry_after_s(now, self.config.max_wait_s)

    def _take_out(self, ticket: Ticket) -> None:
        """It waits no more, found no place, and keeps none."""
        del self._tickets[ticket]
        if ticket.held:
            self.gate.line.cancel(ticket)
        else:
            self._room.remove(ticket)

    def _pass(self, tickets: list[Ticket], now: float) -> None:
        """From the gate into the room."""
        for ticket in tickets:
            ticket.held = False
            self._room.add(ticket, now)

    def _expire(self, now: float) -> None:
        while self._tickets:
            ticket = next(iter(self._tickets))
            if ticket.deadline > now:
                return
            if ticket.held:
                ticket.error = self._shed(ShedReason.KV_FULL, self.gate.line.retry_after_s(ticket, now))
                self.gate.line.refuse(ticket, now)
                del self._tickets[ticket]
            else:
                ticket.error = self._shed(ShedReason.WAIT_TOO_LONG, self._room_again_s(now))
                self._take_out(ticket)
            self._settled.append(ticket)

    def _place(self, now: float) -> None:
        room = self._room
        while (ticket := room.next()) is not None:
            full = self._full(ticket.request, now)
            if full is None:
                return
            room.place(ticket, now)
            del self._tickets[ticket]
            try:
                ticket.lease = self._acquire(ticket.request, full, now)
                self.waited += 1
            except Exception as error:  # one that cannot be placed must not keep the others from it
                ticket.error = error
            self._settled.append(ticket)

    # Caps

    def _full(self, request: Request, now: float) -> tuple[Replica, ...] | None:
        """The replicas at a cap; None when the request must wait."""
        if not self._caps:
            return ()
        config, balancer = self.config, self._balancer
        in_flight = in_flight_tokens = 0
        if config.max_running or config.max_tokens:
            in_flight, in_flight_tokens = balancer.under_way(self.pool)
        if 0 < config.max_running <= in_flight:
            return None
        if config.max_tokens or config.max_tokens_per_replica:
            look_up(balancer.directory, request, now)  # it is placed with the prompt's size as the conversation has it
        tokens = max(0, request.prompt_tokens)
        if 0 < config.max_tokens < in_flight_tokens + tokens and in_flight:
            return None
        if not config.caps_replicas:
            return ()
        most, most_tokens = config.max_running_per_replica, config.max_tokens_per_replica
        full = tuple(
            replica
            for replica in balancer.within(self.pool)
            if (0 < most <= replica.in_flight)
            or (0 < most_tokens < replica.in_flight_tokens + tokens and replica.in_flight)
        )
        if not full or ((issuer := balancer.issuer(request, now)) is not None and issuer not in full):
            return full
        able = set(balancer.ready_in(self.pool))
        if (alone := self._alone(request, now)) is not None:
            able.add(alone)
        return None if able and able.issubset(full) else full

    def _alone(self, request: Request, now: float) -> Replica | None:
        """The one replica that may take it though it is not ready: it has its response, or finishes its session."""
        issuer = self._balancer.issuer(request, now)
        return self._balancer.stays(request, now) if issuer is None else issuer

    def _acquire(self, request: Request, full: tuple[Replica, ...], now: float) -> Lease:
        if not full:
            return self._balancer.acquire(request, now)
        if self._balancer.issuer(request, now) in full:
            # Others can take what comes, so that nobody waits for this one: it must neither hold them up nor go there.
            raise self._shed(ShedReason.WAIT_TOO_LONG, self._room_again_s(now))
        failed = request.failed
        request.failed = failed + full
        try:
            return self._balancer.acquire(request, now)
        finally:
            request.failed = failed
