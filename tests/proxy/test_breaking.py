"""A replica that dies in the middle of its answer: the client can tell that the answer is not whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.fakes.client import Ended, get, post
from tests.fakes.upstream import SSE_HEAD, Peer, always, chunk, chunked_head, ok
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm

Die = Callable[[Peer], None]

DEATHS = [pytest.param(Peer.close, id="close"), pytest.param(Peer.reset, id="reset")]

PARTIAL = {
    "chunks": chunked_head() + chunk(b"half"),
    "inside a chunk": chunked_head() + b"8\r\nhalf",
    "before the last chunk's end": chunked_head() + chunk(b"half") + b"0\r\n",
    "event stream": SSE_HEAD + chunk(b"data: half\n\n"),
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf",
}


@pytest.mark.parametrize("die", DEATHS)
@pytest.mark.parametrize("name", PARTIAL)
async def test_an_http11_client_sees_that_the_answer_is_incomplete(warm: Warm, name: str, die: Die) -> None:
    reached = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(PARTIAL[name])
        await reached.wait()
        die(peer)

    router = await warm(script, always(ok(b"other")))
    client = await router.client()
    client.send(post())
    await client.up_to(b"half")
    reached.set()
    await client.end()
    rest = bytes(client.buffer)
    assert b"0\r\n\r\n" not in rest
    if name == "length":
        assert rest == b""
    await router.ended("upstream/body")
    (line,) = await router.lines()
    assert (line["cause"], line["phase"], line["status"]) == ("upstream", "body", 200)
    assert not router.upstreams[1].requests, "nothing is sent again once a byte was passed on"
    assert router.health.bad == [("a", "broken")]


@pytest.mark.parametrize("die", DEATHS)
@pytest.mark.parametrize("name", PARTIAL)
async def test_an_http10_client_sees_a_reset(warm: Warm, name: str, die: Die) -> None:
    """It has no other way to tell: a plain close would be the end of its body."""
    reached = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(PARTIAL[name])
        await reached.wait()
        die(peer)

    router = await warm(script)
    client = await router.client()
    client.send(post(version="1.0"))
    await client.up_to(b"half")
    reached.set()
    assert await client.end() == "reset"
    await router.ended("upstream/body")


async def test_a_reset_of_an_answer_ended_by_close_is_not_its_end(warm: Warm) -> None:
    reached = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await reached.wait()
        peer.reset()

    router = await warm(script)
    for version in ("1.1", "1.0"):
        reached.clear()
        client = await router.client()
        client.send(get(version=version))
        await client.up_to(b"half")
        reached.set()
        how = await client.end()
        assert b"0\r\n\r\n" not in client.buffer
        assert how == ("reset" if version == "1.0" else "eof")
    await router.ended("upstream/body", 2)


@pytest.mark.parametrize(
    "garbage", [b"zz\r\nhello\r\n", b"5\r\nhello!!", b"5\nhello\n", b"-1\r\n\r\n", b"fffffffffffffffff\r\n"]
)
async def test_chunks_that_make_no_sense_end_the_answer_visibly(warm: Warm, garbage: bytes) -> None:
    reached = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(SSE_HEAD + chunk(b"data: half\n\n"))
        await reached.wait()
        peer.send(garbage + chunk(b"data: more\n\n") + b"0\r\n\r\n")
        await peer.end()

    router = await warm(script)
    client = await router.client()
    client.send(post())
    await eventually(lambda: b"half\n\n" in client.buffer)
    reached.set()
    with pytest.raises(Ended):
        await client.answer()
    await router.ended("upstream/body")
    await (await router.upstreams[0].connection()).end()


async def test_a_forbidden_trailer_ends_the_answer_visibly(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.drip(chunked_head() + chunk(b"half") + b"0\r\nContent-Length: 5\r\n\r\n")
        await peer.end()

    router = await warm(script)
    client = await router.client()
    client.send(post())
    with pytest.raises(Ended):
        await client.answer()


async def test_pipelined_requests_behind_are_not_answered(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.drip(chunked_head() + chunk(b"half"), 40)

    router = await warm(script)
    client = await router.client()
    client.send(post() + post() + post())
    with pytest.raises(Ended):
        await client.answer()
    await router.ended("client/request", 2)
    assert len(router.upstreams[0].requests) == 1
