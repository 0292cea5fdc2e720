"""Several requests sent before the first is answered."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.client import get, post
from tests.fakes.upstream import LAST_CHUNK, Peer, always, chunk, chunked_head, ok, serving
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm


async def test_answers_come_in_the_order_of_requests(warm: Warm) -> None:
    router = await warm(serving(lambda request: ok(request.target.encode() + request.body)))
    client = await router.client()
    client.send(b"".join(get(f"/{n}") + post(f"/{n}/", b"body %d" % n) for n in range(40)))
    for n in range(40):
        assert (await client.answer()).body == b"/%d" % n
        assert (await client.answer()).body == b"/%d/body %d" % (n, n)
    assert router.outcomes() == {"done/body": 80}


async def test_a_quick_answer_waits_for_a_slow_one(warm: Warm) -> None:
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if request.target == "/slow":
                await release.wait()
            peer.send(ok(request.target.encode()))

    router = await warm(script)
    client = await router.client()
    client.send(get("/slow") + get("/quick"))
    other = await router.client()
    assert (await other.ask(get("/other"))).body == b"/other", "only this client waits"
    assert client.received == 0
    release.set()
    assert (await client.answer()).body == b"/slow"
    assert (await client.answer()).body == b"/quick"


async def test_a_refused_request_is_answered_in_its_turn(warm: Warm) -> None:
    router = await warm(serving(lambda request: ok(request.target.encode())))
    client = await router.client()
    client.send(get("/a") + get("/flush_cache") + get("/b") + get("/flush_cache"))
    assert (await client.answer()).body == b"/a"
    assert (await client.answer()).status == 403
    assert (await client.answer()).body == b"/b"
    assert (await client.answer()).status == 403
    assert router.outcomes() == {"done/body": 2, "client/queue": 2}


async def test_nothing_is_taken_after_a_request_that_ends_the_connection(warm: Warm) -> None:
    router = await warm(serving(lambda request: ok(request.target.encode())))
    client = await router.client()
    client.send(get("/a") + get("/b", "Connection: close") + get("/c"))
    assert (await client.answer()).body == b"/a"
    assert (await client.answer()).body == b"/b"
    assert await client.rest() == b""
    assert [request.target for request in router.upstreams[0].requests] == ["/a", "/b"]


@pytest.mark.parametrize(
    "refused",
    [
        b"GET /x HTTP/1.1\r\n\r\n",
        get("http://elsewhere.test/x"),
        get("/x", "Upgrade: websocket", "Connection: upgrade"),
        b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        post("/x", b"x", "Expect: tea"),
        post("/x", b"x" * 200),
    ],
    ids=["no host", "foreign", "upgrade", "coding", "expect", "too large"],
)
@pytest.mark.parametrize("behind", [True, False], ids=["behind another", "first"])
async def test_nothing_is_taken_after_a_request_that_is_refused_with_its_connection(
    warm: Warm, refused: bytes, behind: bool
) -> None:
    """What follows such a request may be anything: a smuggled request must not be taken for the client's."""
    router = await warm(serving(lambda request: ok(request.target.encode())), limits={"body_bytes": 100})
    client = await router.client()
    before = get("/before") if behind else b""
    client.send(before + refused + post("/after", b"hello"))
    if behind:
        assert (await client.answer()).body == b"/before"
    answer, rest = await client.refused()
    assert answer.status >= 400
    assert answer.header("connection") == "close"
    assert rest == b""
    client.close()
    await eventually(lambda: not router.proxy.downstreams)
    assert [request.target for request in router.upstreams[0].requests] == ["/before"] * behind


async def test_behind_a_huge_stream(warm: Warm) -> None:
    block = b"x" * 65536

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(chunked_head())
        for _ in range(500):
            peer.send(chunk(block))
            await peer.drain()
        peer.send(LAST_CHUNK)
        while True:
            peer.send(ok((await peer.request()).target.encode()))

    router = await warm(script)
    client = await router.client()
    client.send(get("/huge") + get("/next") + get("/flush_cache") + get("/last"))
    answer = await client.answer()
    assert len(answer.body) == 500 * len(block)
    assert (await client.answer()).body == b"/next"
    assert (await client.answer()).status == 403
    assert (await client.answer()).body == b"/last"


async def test_many_requests_are_not_all_read_ahead(warm: Warm) -> None:
    """One answer outstanding, 100 MB of requests behind it: the router stops reading."""
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            await release.wait()
            peer.send(ok(b"%d" % len(request.body)))

    router = await warm(script)
    client = await router.client()
    request = post(body=b"x" * 1_000_000)
    sent = 0
    while not client.full and sent < 100:
        client.send(request)
        sent += 1
        await asyncio.sleep(0)
    assert sent < 100
    await eventually(lambda: client.full)
    assert router.proxy.body_bytes < 32_000_000
    release.set()
    for _ in range(sent):
        assert (await client.answer()).body == b"1000000"


async def test_a_client_that_asks_on_without_reading_does_not_pile_up_answers(warm: Warm) -> None:
    router = await warm(always(ok(b"x" * 10_000)))
    client = await router.client()
    client.stop_reading()
    pad = "X-Pad: " + "x" * 2000
    requests = get("/v1/models", pad) + get("/flush_cache", pad)
    sent = 0
    while not client.full:
        client.send(requests)
        sent += 1
        await asyncio.sleep(0)
    (downstream,) = router.proxy.downstreams
    assert downstream.transport.get_write_buffer_size() < 500_000
    client.read_on()
    for _ in range(sent):
        assert (await client.answer()).body == b"x" * 10_000
        assert (await client.answer()).status == 403


async def test_a_head_may_begin_in_the_read_in_which_a_large_body_ends(warm: Warm) -> None:
    """The bytes of one request do not count against the header limit of the next."""
    router = await warm(serving(lambda request: ok(b"%d" % len(request.body))), limits={"header_bytes": 1000})
    client = await router.client()
    second = get("/second")
    client.send(post(body=b"x" * 50_000) + second[:30])
    assert (await client.answer()).body == b"50000"
    client.send(second[30:])
    assert (await client.answer()).body == b"0"


async def test_a_pipelined_body_has_its_full_time_from_when_it_is_its_turn(warm: Warm) -> None:
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if request.target == "/slow":
                await release.wait()
            peer.send(ok(request.body))

    router = await warm(script, timeouts={"body_s": 1})
    client = await router.client()
    upload = post("/upload", b"hello", "Expect: 100-continue")
    client.send(get("/slow") + upload[:-5])
    await router.upstreams[0].request()
    (downstream,) = router.proxy.downstreams
    await router.passed(1.1)
    release.set()
    await client.answer()
    assert (await client.head()).status == 100
    await router.passed(0)
    client.send(upload[-5:])
    assert (await client.answer()).body == b"hello"
    assert downstream in router.proxy.downstreams
