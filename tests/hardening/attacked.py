"""A router process under attack: its memory, its gauges, and an ordinary client that must notice nothing."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from tests.fakes.client import RawClient, get
from tests.fakes.exposed import total
from tests.fakes.process import Router
from tests.fakes.upstream import Peer, RawRequest, Script, ScriptedUpstream, ok
from tests.fakes.waiting import until
from tests.fakes.wire import eventually

CONTROL = "/control"
LIMIT_S = 60.0
MIB = 1 << 20

CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
"""A head whose body comes in chunks."""


class Attacked:
    """One router process and its replica. The ordinary client asks for `/control` all the time, on a kept connection
    and on new ones by turns."""

    def __init__(self, router: Router, upstream: ScriptedUpstream) -> None:
        self.router = router
        self.upstream = upstream
        self.answered = 0
        """Requests of the ordinary client that were answered as they should be."""
        self.newcomer = True
        """It comes on new connections, too, not on its kept one alone."""
        self._before = 0
        self._control: asyncio.Task[None]
        self._clients: list[RawClient] = []

    async def begin(self) -> None:
        for _ in range(20):  # what a router needs once, it has
            await self._ask_once()
        self._before = self.memory()
        self._control = asyncio.create_task(self._go_on())

    async def end(self) -> None:
        """The ordinary client was answered throughout, and goes on being so; nothing is left of anybody else."""
        try:
            await self.unharmed()
        finally:
            self._control.cancel()
            await asyncio.gather(self._control, return_exceptions=True)
            for client in self._clients:
                client.transport.abort()
            await eventually(lambda: all(client.ended for client in self._clients))
        await self.gauge("warmroute_connections", 0)
        await self.gauge("warmroute_body_bytes", 0)
        await self.gauge("warmroute_in_flight_requests", 0)
        errors = [line for line in self.router.log.read_text().splitlines() if "Traceback" in line]
        assert not errors, self.router.tail()

    async def client(self) -> RawClient:
        """A new connection of an attacker's."""
        client = await RawClient.connect(self.router.port)
        self._clients.append(client)
        return client

    async def clients(self, count: int) -> list[RawClient]:
        """Many connections, opened a hundred at a time."""
        found: list[RawClient] = []
        while len(found) < count:
            found += await asyncio.gather(*(self.client() for _ in range(min(100, count - len(found)))))
        return found

    async def unharmed(self, more: int = 3) -> None:
        """Wait until the ordinary client has been answered some times more."""
        await self._until_answered(self.answered + more)

    # Memory

    def memory(self) -> int:
        """Resident bytes of the router's process."""
        return int(_status(self.router.pid, "VmRSS"))

    @property
    def grown(self) -> int:
        """Resident bytes more than before the attack."""
        return self.memory() - self._before

    @property
    def peak(self) -> int:
        """The most that it ever grew, in resident bytes."""
        return _status(self.router.pid, "VmHWM") - self._before

    # Gauges

    async def metric(self, name: str) -> float:
        """The sum over all labels of a metric; 0 when there is none of it, NaN when the router cannot be asked."""
        try:
            async with httpx.AsyncClient(trust_env=False) as client:
                text = (await client.get(f"{self.router.admin_url}/metrics")).text
        except httpx.TransportError:  # it is out of descriptors
            return math.nan
        return total(text, name)

    async def gauge(self, name: str, value: float) -> None:
        """Wait until a metric has that value."""
        await until(lambda: self.metric(name), lambda seen: seen == value, LIMIT_S, f"{name} is {value}")

    async def reached(self, name: str, value: float) -> None:
        """Wait until a metric is at least that."""
        await until(lambda: self.metric(name), lambda seen: seen >= value, LIMIT_S, f"{name} reaches {value}")

    async def refused(self, reason: str, count: int) -> None:
        """Wait until so many requests have been refused for a reason."""
        await self.reached(f'warmroute_refusals_total{{reason="{reason}"}}', count)

    # The ordinary client

    async def _go_on(self) -> None:
        kept = await self.client()
        while True:
            await self._ask(kept)
            if self.newcomer:
                await self._ask_once()
            await asyncio.sleep(0.01)  # an ordinary client does not hammer

    async def _ask_once(self) -> None:
        fresh = await RawClient.connect(self.router.port)
        try:
            await self._ask(fresh)
        finally:
            fresh.transport.abort()
            await fresh.end()

    async def _ask(self, client: RawClient) -> None:
        answer = await client.ask(get(f"{CONTROL}?{self.answered}"))
        assert (answer.status, answer.body) == (200, b"/control?%d" % self.answered), answer
        self.answered += 1

    async def _until_answered(self, count: int) -> None:
        deadline = asyncio.get_running_loop().time() + LIMIT_S
        while self.answered < count:
            if self._control.done():
                await self._control
            assert asyncio.get_running_loop().time() < deadline, "the ordinary client is not answered any more"
            await asyncio.sleep(0.01)


def ordinary(request: RawRequest) -> bytes | None:
    """What a replica answers to probes and to the ordinary client; None: it is the attack's."""
    path = request.target.partition("?")[0]
    if path == CONTROL:
        return ok(request.target.encode())
    if path in ("/ready", "/health"):
        return ok()
    if path in ("/v1/loads", "/get_load", "/metrics", "/server_info", "/get_server_info", "/model_info"):
        return ok(status="404 Not Found")
    return None


def otherwise(say: Callable[[Peer, RawRequest], Awaitable[object]]) -> Script:
    """A script that is proper to probes and the ordinary client, and does to all other requests as `say` does."""

    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if (said := ordinary(request)) is not None:
                peer.send(said)
            else:
                await say(peer, request)

    return script


async def proper(peer: Peer) -> None:
    """A script that answers everything, saying how large the request's body was."""
    while True:
        request = await peer.request()
        peer.send(ordinary(request) or ok(b"%d" % len(request.body)))


silent = otherwise(lambda peer, _: peer.end())
"""A script that answers none of the attackers' requests."""


def _status(pid: int, field: str) -> int:
    line = re.search(rf"^{field}:\s+(\d+) kB$", (Path("/proc") / str(pid) / "status").read_text(), re.M)
    assert line is not None
    return int(line[1]) * 1024
