"""A client that leaves: the replica is freed at once, whatever was going on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.fakes.client import RawClient, get, post
from tests.fakes.upstream import LAST_CHUNK, SSE_HEAD, Peer, always, chunk, ok, silent
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm

Leave = Callable[[RawClient], None]

LEAVING = [
    pytest.param(RawClient.close, id="close"),
    pytest.param(RawClient.reset, id="reset"),
    pytest.param(RawClient.half_close, id="half close"),
]
"""A client that shuts down only its sending side cannot be told from one that is gone, and agents do not do it."""


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("request_", [get(), post(), post(body=b"x" * 1_000_000)], ids=["get", "post", "large"])
async def test_while_waiting_for_the_first_byte(warm: Warm, leave: Leave, request_: bytes) -> None:
    router = await warm(silent)
    client = await router.client()
    client.send(request_)
    await router.upstreams[0].request()
    assert router.replica("a").in_flight == 1
    leave(client)
    peer = router.upstreams[0].connections[0]
    await peer.end()
    await router.ended("client/headers")
    assert router.replica("a").in_flight == 0
    (line,) = await router.lines()
    assert (line["cause"], line["phase"], line.get("status")) == ("client", "headers", None)


@pytest.mark.parametrize("leave", LEAVING)
async def test_mid_stream(warm: Warm, leave: Leave) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        await peer.end()

    router = await warm(script)
    client = await router.client()
    client.send(post())
    await client.head()
    assert await client.chunk() == b"data: 1\n\n"
    leave(client)
    await (await router.upstreams[0].connection()).end()
    await router.ended("client/body")
    (line,) = await router.lines()
    assert (line["cause"], line["phase"], line["status"]) == ("client", "body", 200)


@pytest.mark.parametrize("leave", LEAVING)
async def test_during_an_answer_that_is_no_stream(warm: Warm, leave: Leave) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")
        await peer.end()

    router = await warm(script)
    client = await router.client()
    client.send(post())
    await client.head()
    await client.exactly(4)
    leave(client)
    await (await router.upstreams[0].connection()).end()
    await router.ended("client/body")


async def test_while_its_stream_is_held_for_the_first_event(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(SSE_HEAD)
        await peer.end()

    router = await warm(script)
    client = await router.client()
    client.send(post())
    await router.upstreams[0].request()
    client.close()
    await router.upstreams[0].connections[0].end()
    await router.ended("client/headers")


async def test_while_it_does_not_read(warm: Warm) -> None:
    """The replica's stream is paused then; its connection must end all the same."""

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(SSE_HEAD)
        while True:
            peer.send(chunk(b"x" * 65536))
            await peer.drain()

    router = await warm(script)
    client = await router.client()
    client.send(post())
    await client.head()
    client.stop_reading()
    peer = await router.upstreams[0].connection()
    await eventually(lambda: peer.full)
    client.reset()
    await peer.end()
    await router.ended("client/body")


@pytest.mark.parametrize("leave", LEAVING)
async def test_while_the_replica_does_not_accept(warm: Warm, unaccepting: str, leave: Leave) -> None:
    router = await warm(unaccepting, timeouts={"connect_s": 60.0})
    client = await router.client()
    client.send(post())
    await eventually(lambda: router.replica("a").in_flight == 1)
    leave(client)
    await router.ended("client/connect")
    assert router.replica("a").in_flight == 0


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("sent", [1, 30, -1])
async def test_during_its_own_upload(warm: Warm, leave: Leave, sent: int) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    client.send(post(body=b"x" * 500)[:sent])
    await eventually(lambda: any(d._receiving is not None for d in router.proxy.downstreams))
    leave(client)
    await router.ended("client/request")
    assert not router.upstreams[0].connections


async def test_with_more_requests_behind(warm: Warm) -> None:
    router = await warm(silent)
    client = await router.client()
    client.send(post(body=b"first") + post(body=b"second") + get() + post(body=b"upload")[:-2])
    await router.upstreams[0].request()
    await eventually(lambda: router.proxy.body_bytes == len("firstsecondupload") - 2)
    client.close()
    await router.upstreams[0].connections[0].end()
    await router.ended("client/headers")
    await router.ended("client/request", 3)
    assert router.proxy.body_bytes == 0
    assert [request.body for request in router.upstreams[0].requests] == [b"first"]
    assert len(await router.lines(4)) == 4


async def test_after_the_last_event_is_no_failure(warm: Warm) -> None:
    """Agents often close at `[DONE]` without waiting for the last chunk."""

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(SSE_HEAD + chunk(b"data: 1\n\n"))
        peer.send(chunk(b"data: [DONE]\n\n"))
        await peer.end()

    router = await warm(script)
    client = await router.client()
    client.send(post())
    await client.up_to(b"[DONE]")
    client.close()
    await router.ended("done/body")


async def test_between_requests_disturbs_nothing(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    await client.ask(get())
    client.close()
    await eventually(lambda: not router.proxy.downstreams)
    assert router.idle() == 1
    assert router.outcomes() == {"done/body": 1}


async def test_a_gone_clients_connection_to_the_replica_is_not_given_to_another(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        request = await peer.request()
        if request.target == "/slow":
            await release.wait()
        peer.send(SSE_HEAD + chunk(request.target.encode()) + LAST_CHUNK)
        await peer.end()

    release = asyncio.Event()
    router = await warm(script)
    client = await router.client()
    client.send(get("/slow"))
    await router.upstreams[0].request()
    client.close()
    await router.ended("client/headers")
    release.set()
    other = await router.client()
    assert (await other.ask(get("/mine"))).body == b"/mine"


async def test_a_hundred_that_leave_at_once_leave_nothing_behind(warm: Warm) -> None:
    router = await warm(silent, silent)
    clients = [await router.client() for _ in range(100)]
    for client in clients:
        client.send(post())
    await eventually(lambda: sum(len(upstream.requests) for upstream in router.upstreams) == 100)
    assert router.replica("a").in_flight == router.replica("b").in_flight == 50
    for client in clients:
        client.reset()
    await router.ended("client/headers", 100)
    for upstream in router.upstreams:
        for peer in upstream.connections:
            await peer.end()
