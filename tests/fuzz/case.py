"""One case: clients, replicas, a network that cuts and delays, and time, all drawn from one `Random`."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from random import Random

import h11

from policies.admission import AdmissionConfig
from policies.balancer import Balancer
from policies.registry import make
from policies.types import Replica, State
from router.identity import DEFAULT_RULES, IdentityRules
from router.logs import AccessLog
from router.metrics import Metrics
from router.proxy.downstream import Downstream
from router.proxy.proxy import Proxy
from router.proxy.upstream import Upstream
from router.settings import PolicySettings, Settings
from tests.fakes.proxied import RecordingHealth
from tests.fuzz import grammar, oracle
from tests.fuzz.loop import FuzzLoop
from tests.fuzz.oracle import Asked, Finding, Relay
from tests.fuzz.transport import FuzzTransport

TIMEOUTS = {"header_s": 5, "body_s": 5, "keep_alive_s": 8, "first_byte_s": 5, "idle_s": 5, "stalled_client_s": 5}
LIMITS = {"header_bytes": 4_000, "body_bytes": 20_000, "body_memory_bytes": 40_000, "connections": 100}
SETTINGS = [
    Settings(
        response_headers=True,
        policy=PolicySettings(name=name),
        timeouts=TIMEOUTS,  # type: ignore[arg-type]
        limits=LIMITS,  # type: ignore[arg-type]
        retries={"budget_burst": burst},  # type: ignore[arg-type]
        admission={"max_running": running, "max_wait_s": 5},  # type: ignore[arg-type]
    )
    for name in ("round_robin", "session_affinity")
    for burst in (0, 20)
    for running in (0, 1)
]
ADMISSIONS = [
    AdmissionConfig(max_running=running, max_running_per_replica=each, max_waiting=waiting, max_wait_s=2.0)
    for running in (0, 1, 2)
    for each in (0, 1)
    for waiting in (0, 1, 1000)
]
"""What a reload may bring."""
IDENTITY = IdentityRules(DEFAULT_RULES, b"")
NOISE = [b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n<excess>", b"\r\n", b"HTTP/1.1 408 Timeout\r\n\r\n", b"\x00"]
MAX_STEPS = 20_000
LAST_S = 60.0
"""By then every timeout has struck, whatever happened before."""

_access_log: AccessLog | None = None


def access_log() -> AccessLog:
    """One for all cases: it has a thread."""
    global _access_log
    if _access_log is None:
        _access_log = AccessLog("json", os.open(os.devnull, os.O_WRONLY))
    return _access_log


class Server:
    """Uvicorn's part of a connection."""

    def __init__(self) -> None:
        self.connections: set[object] = set()


class Client:
    """A client's end: what it will send, and what it was written."""

    def __init__(self, rng: Random, number: int, liar: float) -> None:
        self.address = f"192.0.2.{number}"
        count = rng.choice((1, 1, 2, 3, 4, 20))
        parts = [grammar.request(rng, f"c{number}r{n}") for n in range(count)]
        if rng.random() < liar:
            which = rng.randrange(count)
            parts[which] = grammar.mutated(rng, parts[which])
        self.pieces = deque(grammar.cut(rng, b"".join(parts)))
        self.sent = bytearray()
        self.left = False
        self.transport: FuzzTransport


class Peer:
    """A replica's end of one connection."""

    def __init__(self, case: Case) -> None:
        self.transport = FuzzTransport(case.loop, "192.0.2.99", self.received)
        self.outgoing: deque[bytes | None] = deque()
        """What it will send; None closes."""
        self.relay: Relay | None = None
        self.gone = False
        self._case = case
        self._reader = h11.Connection(h11.SERVER, max_incomplete_event_size=oracle.LIMIT_BYTES)
        self._head: h11.Request | None = None
        self._body = b""

    def received(self, data: bytes) -> None:
        reader = self._reader
        try:
            reader.receive_data(data)
            while (event := reader.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Request):
                    self._head, self._body = event, b""
                elif isinstance(event, h11.Data):
                    self._body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    assert self._head is not None
                    self._asked(oracle.asked(self._head, self._body))
                    reader.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                    reader.send(h11.EndOfMessage())
                    reader.start_next_cycle()
        except (h11.RemoteProtocolError, h11.LocalProtocolError) as error:
            self._case.findings.append(f"a replica cannot read what was relayed: {error}: {data!r}")

    def _asked(self, asked: Asked) -> None:
        case = self._case
        rng = case.rng
        reply = grammar.answer(rng, asked.method.decode(), b"<%d>" % len(case.relays), case.liar)
        self.relay = Relay(asked, excess_forbidden=not reply.ends)
        case.relays.append(self.relay)
        # What it had not sent yet of an answer that is over, it sends no more.
        self.outgoing = deque(grammar.cut(rng, reply.raw))
        if reply.ends:
            self.outgoing.append(None)

    def step(self) -> None:
        """Send the next piece."""
        piece = self.outgoing.popleft()
        if piece is None:
            self.outgoing.clear()
            self.gone = True
            if self.relay is not None:
                self.relay.ended = True
            self.transport.end()
            return
        if self.relay is not None and not self.transport.is_closing():
            self.relay.raw += piece
        self.transport.feed(piece)


class Case:
    """Draws everything from `rng`; `run` raises Finding when something happened that must not."""

    peer = Peer

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.loop = FuzzLoop()
        self.strict = rng.random() < 0.35
        self.liar = 0.0 if self.strict else rng.choice((0.0, 0.3, 0.8))
        self.relays: list[Relay] = []
        self.peers: list[Peer] = []
        self.findings: list[str] = []
        settings = rng.choice(SETTINGS)
        crowd = (2, 3, 4) if settings.admission.max_running else (1, 1, 1, 2)
        self.clients = [Client(rng, n, 0.0 if self.strict else 0.6) for n in range(rng.choice(crowd))]
        self.balancer = Balancer(make(settings.policy.name, settings.policy.parameters))
        metrics = Metrics(self.balancer, self.loop.time)
        self.proxy = Proxy(
            balancer=self.balancer,
            identity=IDENTITY,
            settings=settings,
            metrics=metrics,
            access_log=access_log(),
            health=RecordingHealth(),
        )
        self.proxy.clock = self.loop.time
        self.metrics = metrics
        metrics.proxy = self.proxy
        self.replicas = [
            Replica(name, address=Upstream(f"http://{name}", connect_s=3.0, idle_s=3.0))
            for name in "abc"[: rng.choice((1, 2, 3))]
        ]

    def run(self) -> int:
        """Returns how many answers clients got."""
        asyncio._set_running_loop(self.loop)
        try:
            self._begin()
            self._traffic()
            if self.strict:
                self._check_answers()
            self._end()
            self._check_left_over()
            return self._check_answers()
        finally:
            asyncio._set_running_loop(None)
            access_log().flush()

    def _begin(self) -> None:
        for replica in self.replicas:
            self.balancer.join(replica, 0.0)
        self.proxy.start()
        server = Server()
        for client in self.clients:
            client.transport = FuzzTransport(self.loop, client.address)
            client.transport.attach(Downstream(self.proxy, server))

    def _traffic(self) -> None:
        rng = self.rng
        for _ in range(MAX_STEPS):
            self.loop.settle()
            if not self._step():
                return
            if rng.random() < 0.05:
                self._disturb()
        raise Finding(f"still busy after {MAX_STEPS} steps")

    def _step(self) -> bool:
        """One end does the next thing. False when nobody has anything to do."""
        clients = [client for client in self.clients if client.pieces and not client.left]
        peers = [peer for peer in self.peers if peer.outgoing and not peer.gone]
        choices = len(clients) + len(peers) + len(self.loop.connecting)
        if not choices:
            return False
        which = self.rng.randrange(choices)
        if which < len(clients):
            client = clients[which]
            piece = client.pieces.popleft()
            client.sent += piece
            client.transport.feed(piece)
        elif which < len(clients) + len(peers):
            peers[which - len(clients)].step()
        else:
            self._connect()
        return True

    def _connect(self) -> None:
        waiter, factory, _ = self.loop.connecting.popleft()
        if waiter.done():
            return
        if not self.strict and self.rng.random() < 0.1:
            waiter.set_exception(ConnectionRefusedError(111, "refused"))
            return
        peer = self.peer(self)
        self.peers.append(peer)
        protocol = factory()
        peer.transport.attach(protocol)
        if self.rng.random() < 0.05 * self.liar:
            peer.transport.feed(self.rng.choice(NOISE))
        waiter.set_result((peer.transport, protocol))

    def _disturb(self) -> None:
        """What happens now and then: a reader stops or reads on, time passes, somebody goes."""
        rng = self.rng
        client = rng.choice(self.clients)
        how = rng.random()
        if how < 0.3:
            client.transport.reads_nothing = True
        elif how < 0.5:
            client.transport.read_on()
        elif self.strict:
            self.loop.pass_time(0.01)
        elif how < 0.55:
            self._operate()
        elif how < 0.7:
            self.loop.pass_time(rng.choice((0.5, 1.5, 4.0)))
        elif how < 0.85:
            client.left = True
            rng.choice((client.transport.end, client.transport.reset))()
        elif self.peers:
            peer = rng.choice(self.peers)
            if rng.random() < 0.4:
                if peer.relay is not None and not peer.transport.is_closing():
                    peer.relay.raw += b"<noise>"
                    peer.relay.excess_forbidden = False
                peer.transport.feed(b"<noise>")
                return
            peer.gone = True
            if rng.random() < 0.5:
                if peer.relay is not None and not peer.transport.is_closing():
                    peer.relay.ended = True
                peer.transport.end()
            else:
                peer.transport.reset()

    def _operate(self) -> None:
        """Caps change while requests wait, or a replica drains, is out, comes back."""
        rng, now = self.rng, self.loop.now
        if rng.random() < 0.5:
            room = self.proxy.room
            room.admission.configure(rng.choice(ADMISSIONS), now)
            room.freed()
        else:
            self.balancer.set_state(rng.choice(self.replicas), rng.choice([*State, State.READY]), now)

    def _end(self) -> None:
        """Let everything come to its end: readers read on, what was to be sent is, then timeouts strike."""
        for client in self.clients:
            client.transport.read_on()
        started = self.loop.now
        while self.proxy.downstreams or any(not peer.transport.is_closing() for peer in self.peers):
            if self.loop.now - started > LAST_S:
                raise Finding(f"connections that nothing ends: {self.proxy.downstreams}, {len(self.peers)} peers")
            self._traffic()
            for client in self.clients:
                client.transport.read_on()
            self.loop.settle()
            self.loop.pass_time(1.0)

    def _check_left_over(self) -> None:
        if self.loop.errors:
            raise Finding(f"reached the loop's exception handler: {self.loop.errors}") from (
                self.loop.errors[0] if isinstance(self.loop.errors[0], BaseException) else None
            )
        for replica in self.replicas:
            if replica.in_flight or replica.prefill_tokens or replica.pending:
                raise Finding(f"{replica.id} has {replica.in_flight} open leases, {replica.prefill_tokens} tokens")
        balancer, admission = self.balancer, self.proxy.room.admission
        if balancer.in_flight or balancer.in_flight_tokens or balancer.pending or admission.waiting:
            raise Finding(f"{balancer.in_flight} leases are open, {admission.waiting} requests wait")
        if self.proxy.body_bytes:
            raise Finding(f"{self.proxy.body_bytes} bytes of bodies are still held")
        if any(not waiter.done() for waiter, _, _ in self.loop.connecting):
            raise Finding("somebody still waits for a connection")
        if self.findings:
            raise Finding(self.findings[0])

    def _check_answers(self) -> int:
        count = 0
        for client in self.clients:
            sender = client.address.encode()
            transport = client.transport
            count += oracle.check(
                bytes(client.sent),
                [relay for relay in self.relays if relay.asked.sender == sender],
                bytes(transport.out),
                closed=transport.is_closing(),
                aborted=transport.aborted,
                strict=self.strict and not transport.reads_nothing,
            )
        return count


def run(seed: int) -> int:
    """Run the case of this number. Returns how many answers clients got; raises Finding."""
    return Case(Random(seed)).run()
