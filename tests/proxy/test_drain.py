"""Shutting down: what is under way ends well, what is idle ends at once."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.client import get, post
from tests.fakes.upstream import LAST_CHUNK, SSE_HEAD, Peer, Script, always, chunk, ok
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm


async def test_idle_connections_are_closed(warm: Warm) -> None:
    router = await warm(always(ok()))
    fresh, used = await router.client(), await router.client()
    await used.ask(get())
    await eventually(lambda: len(router.proxy.downstreams) == 2)
    router.proxy.begin_drain()
    assert await fresh.rest() == b""
    assert await used.rest() == b""


async def test_a_request_that_was_on_its_way_is_answered(warm: Warm) -> None:
    """Sent before the client could know: HTTP's own race, of which a kept connection is closed a while later."""
    router = await warm(always(ok(b"whole")))
    fresh, used = await router.client(), await router.client()
    await used.ask(get())
    await eventually(lambda: len(router.proxy.downstreams) == 2)
    router.proxy.begin_drain()
    for client in (fresh, used):
        answer = await client.ask(get())
        assert (answer.body, answer.header("connection")) == (b"whole", "close")
        assert await client.rest() == b""


async def test_a_stream_runs_to_its_end_and_then_its_connection_closes(warm: Warm) -> None:
    drained = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        await drained.wait()
        for _ in range(10):
            peer.send(chunk(b"data: 2\n\n"))
            await asyncio.sleep(0)
        peer.send(LAST_CHUNK)
        await peer.end()

    router = await warm(script)
    client = await router.client()
    client.send(post())
    assert (await client.head()).header("connection") is None
    assert await client.chunk() == b"data: 1\n\n"
    router.proxy.begin_drain()
    drained.set()
    for _ in range(10):
        assert await client.chunk() == b"data: 2\n\n"
    assert await client.chunk() == b""
    assert await client.rest() == b"\r\n"
    assert router.outcomes() == {"done/body": 1}


async def test_an_answer_not_begun_says_that_it_is_the_last(warm: Warm) -> None:
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await release.wait()
        peer.send(ok(b"whole"))
        await peer.end()

    router = await warm(script)
    client = await router.client()
    client.send(post())
    await router.upstreams[0].request()
    router.proxy.begin_drain()
    release.set()
    answer = await client.answer()
    assert (answer.body, answer.header("connection")) == (b"whole", "close")
    assert await client.rest() == b""


async def test_a_request_half_received_is_served(warm: Warm) -> None:
    router = await warm(always(ok(b"whole")))
    client = await router.client()
    request = post(body=b"hello")
    client.send(request[:-3])
    await eventually(lambda: router.proxy.body_bytes)
    router.proxy.begin_drain()
    client.send(request[-3:])
    answer = await client.answer()
    assert (answer.body, answer.header("connection")) == (b"whole", "close")
    assert await client.rest() == b""


async def test_new_connections_are_answered_once(warm: Warm) -> None:
    """Until the listener closes they may come: better served than reset."""
    router = await warm(always(ok(b"whole")))
    router.proxy.begin_drain()
    client = await router.client()
    for request in (post(), post("/flush_cache")):
        client = await router.client()
        answer = await client.ask(request)
        assert answer.header("connection") == "close"
        assert await client.rest() == b""


async def silent(peer: Peer) -> None:
    await peer.request()
    await peer.end()


async def streaming(peer: Peer) -> None:
    await peer.request()
    peer.send(SSE_HEAD + chunk(b"data: 1\n\n"))
    await peer.end()


@pytest.mark.parametrize(
    ("script", "sent", "phase"),
    [(streaming, post(), "body"), (silent, post(), "headers"), (silent, post(body=b"hello")[:-3], "request")],
    ids=["in the answer", "before the answer", "in the request"],
)
async def test_what_the_router_cuts_off_is_not_put_down_to_the_client(
    warm: Warm, script: Script, sent: bytes, phase: str
) -> None:
    router = await warm(script)
    client = await router.client()
    client.send(sent)
    if phase == "body":
        await client.head()
        await client.chunk()
    elif phase == "headers":
        await router.upstreams[0].request()
    else:
        await eventually(lambda: router.proxy.body_bytes)
    router.proxy.begin_drain()
    assert router.proxy.cut() == 1
    await router.ended(f"router/{phase}")
    assert router.outcomes() == {f"router/{phase}": 1}
    (line,) = await router.lines()
    assert (line["cause"], line["phase"]) == ("router", phase)
    assert await client.end() in ("eof", "reset")


async def test_a_client_that_leaves_before_that_has_left_by_itself(warm: Warm) -> None:
    router = await warm(streaming)
    client = await router.client()
    client.send(post())
    await client.head()
    router.proxy.begin_drain()
    client.transport.abort()
    await router.ended("client/body")
    assert router.proxy.cut() == 0
    assert router.outcomes() == {"client/body": 1}
