"""The scripted replica and the raw client are themselves honest: bytes, pieces, endings and errors as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.fakes.client import Ended, RawClient, get, parse_head, post
from tests.fakes.upstream import Peer, Script, ScriptedUpstream, always, chunked, ok, serving, silent
from tests.fakes.wire import eventually

Start = Callable[[Script], Awaitable[ScriptedUpstream]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    started: list[ScriptedUpstream] = []

    async def begin(script: Script) -> ScriptedUpstream:
        started.append(await ScriptedUpstream(script).start())
        return started[-1]

    yield begin
    for upstream in started:
        await upstream.stop()


Connect = Callable[[ScriptedUpstream], Awaitable[RawClient]]


@pytest.fixture
async def connect(start: Start) -> AsyncIterator[Connect]:
    """Connects to a replica; asks for `start`, so that clients are gone before the replicas stop."""
    clients: list[RawClient] = []

    async def to(upstream: ScriptedUpstream) -> RawClient:
        clients.append(await RawClient.connect(upstream.port))
        return clients[-1]

    yield to
    for client in clients:
        client.transport.abort()
    await asyncio.sleep(0)


async def test_requests_are_recorded_as_they_came(start: Start, connect: Connect) -> None:
    upstream = await start(serving(lambda request: ok(request.body)))
    client = await connect(upstream)
    assert (await client.ask(post("/x?a=1", b"hello", "X-Twice: 1", "x-twice: 2"))).body == b"hello"
    (request,) = upstream.requests
    assert (request.method, request.target, request.version, request.body) == ("POST", "/x?a=1", "HTTP/1.1", b"hello")
    assert request.values("x-twice") == ["1", "2"]
    assert request.raw_head.startswith(b"POST /x?a=1 HTTP/1.1\r\nHost: ")
    with pytest.raises(AssertionError, match="came 2 times"):
        request.header("x-twice")


async def test_connections_and_their_ends_are_recorded(start: Start, connect: Connect) -> None:
    upstream = await start(silent)
    leaving = [(RawClient.close, "eof"), (RawClient.reset, "reset"), (RawClient.half_close, "eof")]
    for number, (leave, how) in enumerate(leaving):
        client = await connect(upstream)
        client.send(get())
        await upstream.request(number)
        leave(client)
        assert await upstream.connections[number].end() == how
    assert len(upstream.connections) == 3


@pytest.mark.parametrize(("leave", "how"), [(Peer.close, "eof"), (Peer.reset, "reset")])
async def test_a_client_tells_a_close_from_a_reset(
    start: Start, connect: Connect, leave: Callable[[Peer], None], how: str
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        await leaving.wait()
        leave(peer)

    leaving = asyncio.Event()
    upstream = await start(script)
    client = await connect(upstream)
    client.send(get())
    await client.up_to(b"half")
    leaving.set()
    assert await client.end() == how
    with pytest.raises(Ended):
        await client.exactly(1)


@pytest.mark.parametrize("cut", [-1, -2, -3, -5, 30])
async def test_an_incomplete_answer_is_not_taken_for_whole(start: Start, connect: Connect, cut: int) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(chunked(b"hello")[:cut])

    upstream = await start(script)
    client = await connect(upstream)
    with pytest.raises(Ended):
        await client.ask(get())


async def test_chunks_and_trailers_are_kept_apart(start: Start, connect: Connect) -> None:
    upstream = await start(always(chunked(b"a", b"bc")[:-2] + b"X: y\r\n\r\n"))
    client = await connect(upstream)
    answer = await client.ask(get())
    assert (answer.chunks, answer.body, answer.trailers) == ([b"a", b"bc"], b"abc", b"X: y\r\n")


async def test_what_drips_is_read_in_pieces(start: Start, connect: Connect) -> None:
    """The tests of cut bytes rest on this: the other end, in the same loop, has read each piece by itself."""
    upstream = await start(silent)
    client = await connect(upstream)
    peer = await upstream.connection()
    await client.drip(post(body=b"hello"))
    await upstream.request()
    assert peer.reads == peer.received == len(post(body=b"hello"))


async def test_a_writer_is_held_back_by_a_reader_that_stops(start: Start, connect: Connect) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        for _ in range(1000):
            peer.send(b"x" * 65536)
            await peer.drain()

    upstream = await start(script)
    client = await connect(upstream)
    client.stop_reading()
    client.send(get())
    peer = await upstream.connection()
    await eventually(lambda: peer.full)
    client.read_on()
    assert len(await client.rest()) == 65_536_000


async def test_an_error_in_a_script_is_raised_in_the_end(connect: Connect) -> None:
    async def script(peer: Peer) -> None:
        raise ValueError("wrong script")

    upstream = await ScriptedUpstream(script).start()
    client = await connect(upstream)
    await client.end()
    with pytest.raises(ValueError, match="wrong script"):
        await upstream.stop()


def test_heads_are_read_strictly() -> None:
    answer = parse_head(b"HTTP/1.1 404 Not Found\r\nA: 1\r\na: 2\r\nB:\r\n\r\n")
    assert (answer.version, answer.status, answer.phrase) == ("HTTP/1.1", 404, "Not Found")
    assert (answer.values("a"), answer.header("b"), answer.header("c")) == (["1", "2"], "", None)
    with pytest.raises(AssertionError):
        parse_head(b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n")
    with pytest.raises(AssertionError):
        parse_head(b"HTTP/1.1 200 OK\r\nA : 1\r\n\r\n")
