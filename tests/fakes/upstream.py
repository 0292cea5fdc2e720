"""A replica whose behaviour, byte by byte, is a script of the test's."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.fakes.process import free_port
from tests.fakes.wire import Ended, Wire, eventually


@dataclass(slots=True)
class RawRequest:
    """A request as it arrived."""

    method: str
    target: str
    version: str
    headers: list[tuple[str, str]]
    """Names in lower case, in order."""
    body: bytes
    raw_head: bytes

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def header(self, name: str) -> str | None:
        """The only value of a header; AssertionError when it is there twice."""
        values = self.values(name)
        assert len(values) < 2, f"{name} came {len(values)} times: {values}"
        return values[0] if values else None


class Peer(Wire):
    """One connection that a replica accepted."""

    def __init__(self, upstream: ScriptedUpstream) -> None:
        super().__init__()
        self.upstream = upstream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.upstream.accepted(self)

    async def head(self) -> RawRequest:
        """The next request's head, its body left unread. Raises Ended."""
        raw = await self.up_to(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        method, target, version = first.split(" ")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        request = RawRequest(method, target, version, headers, b"", raw)
        assert request.header("transfer-encoding") is None, "the router sends lengths"
        return request

    async def request(self) -> RawRequest:
        """The next whole request. Raises Ended when the router closes first."""
        request = await self.head()
        request.body = await self.exactly(int(request.header("content-length") or 0))
        self.upstream.requests.append(request)
        return request


Script = Callable[[Peer], Awaitable[None]]


class ScriptedUpstream:
    """A server that runs `script` for each connection and closes it when the script returns.

    A script that the connection's end interrupts (Ended) is over; any other error is raised by `stop`.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        """May be changed at any time; holds for connections accepted from then on."""
        self.connections: list[Peer] = []
        self.requests: list[RawRequest] = []
        """Read whole, in order, over all connections."""
        self.port = free_port()
        """Its own even while it does not listen."""
        self._scheme = "http"
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    async def start(self, *, tls: ssl.SSLContext | None = None) -> ScriptedUpstream:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Peer(self), "127.0.0.1", self.port, ssl=tls)
        self._scheme = "https" if tls is not None else "http"
        return self

    async def stop(self) -> None:
        """Stop listening and break off every connection. Raises what went wrong in a script."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self.connections:
            peer.transport.abort()
        await eventually(lambda: all(peer.transport.is_closing() for peer in self.connections))
        if self._errors:
            raise self._errors[0]

    def stop_listening(self) -> None:
        """Refuse new connections; those there are stay."""
        self._server.close()

    async def connection(self, number: int = 0) -> Peer:
        """The connection accepted as the `number`th, waiting for it."""
        await eventually(lambda: len(self.connections) > number, f"connection {number} of {self.url}")
        return self.connections[number]

    async def request(self, number: int = 0) -> RawRequest:
        """The request read whole as the `number`th, waiting for it."""
        await eventually(lambda: len(self.requests) > number, f"request {number} at {self.url}")
        return self.requests[number]

    def accepted(self, peer: Peer) -> None:
        """A connection came."""
        self.connections.append(peer)
        task = asyncio.get_running_loop().create_task(self._run(peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, peer: Peer) -> None:
        try:
            await self.script(peer)
        except Ended:
            pass
        except (Exception, AssertionError) as error:
            self._errors.append(error)
        peer.transport.close()


def ok(body: bytes = b"ok", *headers: str, status: str = "200 OK") -> bytes:
    """A whole answer of known length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chunked_head(*headers: str, status: str = "200 OK") -> bytes:
    """The head of an answer in chunks."""
    return "\r\n".join([f"HTTP/1.1 {status}", "Transfer-Encoding: chunked", *headers]).encode("latin-1") + b"\r\n\r\n"


SSE_HEAD = chunked_head("Content-Type: text/event-stream; charset=utf-8")
"""As SGLang begins a stream."""
LAST_CHUNK = b"0\r\n\r\n"

REFUSING = "http://127.0.0.1:9"
"""Nothing listens on the discard port."""


def chunk(data: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(*chunks: bytes, head: bytes = b"") -> bytes:
    """A whole answer in chunks."""
    return (head or chunked_head()) + b"".join(map(chunk, chunks)) + LAST_CHUNK


def serving(make: Callable[[RawRequest], bytes]) -> Script:
    """A script that answers every request with what `make` says, keeping the connection."""

    async def script(peer: Peer) -> None:
        while True:
            peer.send(make(await peer.request()))

    return script


def always(answer: bytes) -> Script:
    """A script that answers every request with the same bytes."""
    return serving(lambda _: answer)


async def silent(peer: Peer) -> None:
    """A script that reads a request and never answers; over when the router closes."""
    await peer.request()
    await peer.end()
