"""Replicas that break the rules of HTTP: the client learns of it, and nobody ever gets another's answer."""

from __future__ import annotations

import pytest

from tests.fakes.client import Ended, get, post
from tests.fakes.upstream import LAST_CHUNK, SSE_HEAD, Peer, always, chunk, chunked, chunked_head, ok, serving
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm

INVALID = {
    "both lengths": chunked_head("Content-Length: 5") + b"5\r\nhello\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "two equal lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "bad length": b"HTTP/1.1 200 OK\r\nContent-Length: 5x\r\n\r\nhello",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
    "coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding alone": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nhello",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello",
    "folded": b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "NUL": b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 0\r\n\r\n",
    "bare CR": b"HTTP/1.1 200 OK\r\nX: a\rSet-Cookie: b\r\nContent-Length: 0\r\n\r\n",
    "space before the colon": b"HTTP/1.1 200 OK\r\nContent-Length : 5\r\n\r\nhello",
    "status of letters": b"HTTP/1.1 abc OK\r\nContent-Length: 0\r\n\r\n",
    "no status": b"HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "other protocol": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "a request": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS alert": b"\x15\x03\x01\x00\x02\x02\x46",
    "zeros": b"\x00" * 100,
    "bad first chunk": chunked_head() + b"zz\r\nhello\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("size", [1 << 20, 1], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("name", INVALID)
async def test_nonsense_is_a_bad_gateway_or_a_broken_answer(warm: Warm, name: str, size: int) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.drip(INVALID[name], size)
        await peer.end()

    router = await warm(script)
    client = await router.client()
    client.send(post("/unknown"))
    if name == "bad first chunk" and size == 1:
        with pytest.raises(Ended):
            await client.answer()
        await router.ended("upstream/body")
    else:
        answer = await client.answer()
        assert (answer.status, answer.header("x-warmroute-reason")) == (502, "upstream_invalid")
        assert b"hello" not in answer.body
        await router.ended("upstream/headers")
    assert router.health.bad
    await (await router.upstreams[0].connection()).end()


async def test_a_head_without_end_is_cut_off(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nX: ")
        while True:
            peer.send(b"x" * 65536)
            await peer.drain()

    router = await warm(script)
    client = await router.client()
    answer = await client.ask(post("/unknown"))
    assert (answer.status, answer.header("x-warmroute-reason")) == (502, "upstream_invalid")
    peer = router.upstreams[0].connections[0]
    await peer.end()


async def test_headers_without_end_are_cut_off(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            peer.send(b"X-Header: value\r\n" * 4096)
            await peer.drain()

    router = await warm(script)
    client = await router.client()
    answer = await client.ask(post("/unknown"))
    assert (answer.status, answer.header("x-warmroute-reason")) == (502, "upstream_invalid")


OTHERS = ok(b"another's")

DESYNC = {
    "two answers at once": ok(b"right") + OTHERS,
    "two answers in chunks": chunked(b"right") + chunked(b"another's"),
    "more body than its length": ok(b"right") + b"another's",
    "an answer as excess": ok(b"right") + OTHERS * 3,
    "half an answer behind": ok(b"right") + OTHERS[:20],
    "garbage behind": ok(b"right") + b"\x00\xff",
    "an interim answer behind": ok(b"right") + b"HTTP/1.1 100 Continue\r\n\r\n",
    "excess after the last chunk": chunked(b"right") + b"5\r\nwrong\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", DESYNC)
async def test_excess_never_becomes_the_next_answer(warm: Warm, name: str) -> None:
    router = await warm(always(DESYNC[name]))
    for _ in range(3):
        client = await router.client()
        for _ in range(3):
            answer = await client.ask(post("/v1/chat/completions"))
            assert (answer.status, answer.body) == (200, b"right")
            assert not client.buffer, "nothing follows it"
    for peer in router.upstreams[0].connections:
        await peer.end()
    assert router.idle() == 0


@pytest.mark.parametrize("late", [OTHERS, b"HTTP/1.1 100 Continue\r\n\r\n", b"\x00", b"\r\n", OTHERS[:10]])
async def test_what_comes_on_an_idle_connection_ends_it(warm: Warm, late: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(ok(b"right"))
        if len(peer.upstream.connections) == 1:
            await eventually(lambda: router.idle() == 1)
            peer.send(late)
        await peer.end()

    router = await warm(script, pool={"idle_s": 60})
    client = await router.client()
    assert (await client.ask(post())).body == b"right"
    await router.upstreams[0].connections[0].end()
    assert (await client.ask(post())).body == b"right"
    assert len(router.upstreams[0].connections) == 2


BODY_OF_HEAD = {
    "length": ok(b"another's"),
    "chunked": chunked(b"another's"),
    "close to an answer": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + OTHERS,
}


@pytest.mark.parametrize("name", BODY_OF_HEAD)
async def test_a_body_sent_in_answer_to_head_is_nobodys(warm: Warm, name: str) -> None:
    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            peer.send(BODY_OF_HEAD[name] if request.method == "HEAD" else ok(b"right"))

    router = await warm(script)
    client = await router.client()
    for _ in range(3):
        assert (await client.ask(get(method="HEAD"))).status == 200
        assert (await client.ask(get())).body == b"right"
        assert not client.buffer


async def test_the_rest_of_a_body_sent_in_answer_to_head_is_nobodys(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        request = await peer.request()
        if request.method == "HEAD":
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx")
            await peer.request()
            peer.send(OTHERS)
        else:
            peer.send(ok(b"right"))
        await peer.end()

    router = await warm(script)
    client = await router.client()
    assert (await client.ask(get(method="HEAD"))).status == 200
    assert (await client.ask(get())).body == b"right"


async def test_a_replica_that_speaks_first_hangs_nobody(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        peer.send(OTHERS)
        await peer.request()

    router = await warm(script, always(ok(b"right")), retries={"budget_burst": 100})
    client = await router.client()
    for _ in range(20):
        assert (await client.ask(get())).status == 200


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_a_body_where_there_can_be_none_is_nobodys(warm: Warm, status: str) -> None:
    bare = f"HTTP/1.1 {status}\r\nContent-Length: 9\r\n\r\n".encode() + OTHERS
    router = await warm(serving(lambda request: bare if request.target == "/bare" else ok(b"right")))
    client = await router.client()
    for _ in range(3):
        assert (await client.ask(get("/bare"))).status == int(status[:3])
        assert (await client.ask(get("/right"))).body == b"right"
        assert not client.buffer


async def test_an_event_stream_that_lies_about_its_chunks_is_broken_for_one_client_only(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        request = await peer.request()
        if request.target == "/bad":
            await peer.drip(SSE_HEAD + chunk(b"data: 1\n\n") + b"9\r\ndata: 2\n\nX\r\n" + LAST_CHUNK, 120)
        else:
            peer.send(chunked(b"right"))
        await peer.end()

    router = await warm(script)
    bad, good = await router.client(), await router.client()
    bad.send(get("/bad"))
    with pytest.raises(Ended):
        await bad.answer()
    assert (await good.ask(get("/good"))).body == b"right"
