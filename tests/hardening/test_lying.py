"""Replicas that say what is not so: their client learns of it, memory stays flat, and nobody else notices."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from urllib.parse import quote, unquote

import pytest

from tests.fakes.client import Answer, RawClient, get, post
from tests.fakes.upstream import LAST_CHUNK, SSE_HEAD, Peer, RawRequest, Script, chunk, chunked_head, ok
from tests.fakes.wire import Ended
from tests.hardening.attacked import MIB, Attacked, ordinary, otherwise
from tests.hardening.conftest import Attack

Say = Callable[[Peer, str], Awaitable[None]]
BLOCK = b"x" * 65_536


def lying(say: Say) -> Script:
    """A script that is proper to probes and the ordinary client, and else lies as `say` does, by the target's name."""
    return otherwise(lambda peer, request: say(peer, unquote(request.target.removeprefix("/lie/"))))


def lie(name: str) -> bytes:
    """A request that is answered with the lie of that name, and must not be run twice."""
    return post(f"/lie/{quote(name)}")


async def pour(peer: Peer, start: bytes, block: bytes) -> None:
    """`block` after `start`, without end."""
    peer.send(start)
    while True:
        peer.send(block)
        await asyncio.sleep(0)  # the router is another process: it may read faster than is written here
        await peer.drain()


async def together(router: Attacked, request: bytes, count: int = 5) -> list[Answer | Ended]:
    """What so many clients at once are answered, or how their answers break off."""

    async def one() -> Answer | Ended:
        client = await router.client()
        try:
            return await client.ask(request)
        except Ended as ended:
            return ended

    return list(await asyncio.gather(*(one() for _ in range(count))))


ENDLESS = {
    "a header line": (b"HTTP/1.1 200 OK\r\nX: ", BLOCK),
    "a header's name": (b"HTTP/1.1 200 OK\r\n", BLOCK),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 10_000),
    "a phrase": (b"HTTP/1.1 200 ", BLOCK),
    "a version": (b"HTTP/1.1", b"1" * 65_536),
    "empty lines": (b"", b"\r\n" * 30_000),
    "1xx answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "headers of a 1xx": (b"HTTP/1.1 103 Early Hints\r\n", b"Link: </a>\r\n" * 1_000),
}


async def test_heads_without_end_are_a_bad_gateway(attacked: Attack) -> None:
    router = await attacked(lying(lambda peer, name: pour(peer, *ENDLESS[name])))
    for name in ENDLESS:
        for answer in await together(router, lie(name)):
            assert isinstance(answer, Answer), (name, answer)
            assert (answer.status, answer.header("x-warmroute-reason")) == (502, "upstream_invalid"), name
    assert router.peak < 64 * MIB


AFTER_THE_HEAD = {
    "trailers": (chunked_head() + chunk(b"some") + b"0\r\n", b"X: y\r\n" * 10_000),
    "a trailer": (chunked_head() + chunk(b"some") + b"0\r\nX: ", BLOCK),
    "a chunk's extension": (chunked_head() + chunk(b"some") + b"5;", BLOCK),
    "a chunk's size": (chunked_head() + chunk(b"some"), b"0" * 65_536),
}


async def test_what_is_endless_behind_a_head_breaks_the_answer_off(attacked: Attack) -> None:
    router = await attacked(lying(lambda peer, name: pour(peer, *AFTER_THE_HEAD[name])))
    for name in AFTER_THE_HEAD:
        for answer in await together(router, lie(name)):
            assert isinstance(answer, Ended), f"{name}: no end mark, so that nobody takes it for whole"
    assert router.peak < 64 * MIB


BOMBS = {
    "a chunk of 4 GB": chunked_head() + b"ffffffff\r\nsome",
    "a chunk of 16 EB": chunked_head() + b"ffffffffffffffff\r\nsome",
    "a chunk past all numbers": chunked_head() + b"fffffffffffffffff\r\nsome",
    "a length of 16 EB": b"HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\nsome",
    "a length past all numbers": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nsome",
    "a length too long by one": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nsome",
}


@pytest.mark.parametrize("close", [True, False], ids=["closed", "left open"])
async def test_less_than_was_announced_is_never_a_whole_answer(attacked: Attack, close: bool) -> None:
    async def say(peer: Peer, name: str) -> None:
        peer.send(BOMBS[name])
        if close:
            peer.close()
        await peer.end()

    router = await attacked(lying(say), timeouts={"idle_s": 1})
    found = await asyncio.gather(*(together(router, lie(name)) for name in BOMBS))
    for name, answers in zip(BOMBS, found, strict=True):
        for answer in answers:
            assert isinstance(answer, Ended) or answer.status == 502, name
    assert router.peak < 20 * MIB


@pytest.mark.parametrize("head", [SSE_HEAD, b"HTTP/1.1 200 OK\r\n\r\n"], ids=["chunks", "until it closes"])
async def test_a_stream_without_end_costs_nothing_but_its_bytes(attacked: Attack, head: bytes) -> None:
    """100 MB through the router, and it holds none of it."""
    first = b"data: 1\n\n"
    before, piece = (chunk(first), chunk(BLOCK)) if head is SSE_HEAD else (first, BLOCK)
    begun = asyncio.Event()

    async def say(peer: Peer, _: str) -> None:
        peer.send(head + before)
        await begun.wait()  # what comes in one piece with a head may be cut where the network cut it
        await pour(peer, b"", piece)

    router = await attacked(lying(say))
    clients = [await router.client() for _ in range(4)]
    for client in clients:
        client.send(post())
        await client.head()
        assert await client.chunk() == first
    begun.set()
    for client in clients:
        piece = await client.chunk()  # one as large may come in several reads, and goes on in as many
        assert piece
        assert not piece.strip(b"x")
    while min(client.received for client in clients) < 25 * MIB:
        for client in clients:
            await client.some()
    assert router.peak < 20 * MIB
    for client in clients:
        client.reset()
    await router.gauge("warmroute_in_flight_requests", 0)


async def test_a_stream_of_single_bytes_is_passed_on_whole(attacked: Attack) -> None:
    """30,000 chunks of one byte in a few reads: as slow as a parser can be made to be."""
    count = 30_000

    async def say(peer: Peer, _: str) -> None:
        peer.send(SSE_HEAD + b"1\r\nx\r\n" * count + LAST_CHUNK)
        await peer.drain()

    router = await attacked(lying(say))
    for answer in await together(router, post(), 2):
        assert isinstance(answer, Answer)
        assert len(answer.body) == count
    assert router.peak < 60 * MIB


async def test_a_compressed_bomb_is_not_opened(attacked: Attack) -> None:
    bomb = gzip.compress(bytes(200 * MIB), 9)

    async def say(peer: Peer, target: str) -> None:
        peer.send(ok(bomb, "Content-Encoding: gzip", "Content-Type: text/event-stream"))

    router = await attacked(lying(say))
    for request in (get(), post("/v1/chat/completions", bomb, "Content-Encoding: gzip")):
        for answer in await together(router, request):
            assert isinstance(answer, Answer)
            assert answer.body == bomb
            assert answer.header("content-encoding") == "gzip"
    assert router.upstream.requests[-1].body in (bomb, b"")
    assert router.peak < 64 * MIB


UNCLEAR = {
    **{
        f"{control:#x} in the phrase": b"200 O%cK\r\nContent-Length: 4\r\n" % control for control in (0, 1, 11, 27, 127)
    },
    "a coding said twice": b"200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    "a coding with a tab behind it": b"200 OK\r\nTransfer-Encoding: chunked\t\r\n",
    "a coding twice in one": b"200 OK\r\nTransfer-Encoding: chunked, chunked\r\n",
    "NUL in an interim's phrase": b"100 Con\x00tinue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 4\r\n",
}


async def test_what_parsers_might_read_otherwise_is_not_passed_on(attacked: Attack) -> None:
    """Most of these were found by `make fuzz`."""

    async def say(peer: Peer, name: str) -> None:
        peer.send(b"HTTP/1.1 " + UNCLEAR[name] + b"\r\n4\r\nsome\r\n0\r\n\r\n")
        await peer.end()

    router = await attacked(lying(say))
    for name in UNCLEAR:
        (answer,) = await together(router, lie(name), 1)
        assert isinstance(answer, Answer), (name, answer)
        assert (answer.status, answer.header("x-warmroute-reason")) == (502, "upstream_invalid"), name


async def test_answers_nobody_asked_for_are_nobodys(attacked: Attack) -> None:
    """Two answers to one request would be the next client's: a kept connection never carries one over."""
    other = ok(b"another's")

    async def split(peer: Peer, request: RawRequest) -> None:
        peer.send(ok(b"right") + (b"" if request.target == "/kept" else other * 2))

    router = await attacked(otherwise(split), retries={"budget_burst": 10_000})

    async def one(client: RawClient, number: int) -> None:
        for n in range(30):
            answer = await client.ask(get("/kept" if (n + number) % 3 else "/split"))
            assert answer.body == b"right" or answer.header("x-warmroute-reason") in ("all_failed", "tries_exhausted")
            assert not client.buffer

    await asyncio.gather(*(one(client, number) for number, client in enumerate(await router.clients(10))))


async def test_probes_and_reports_without_end_are_given_up(attacked: Attack) -> None:
    """The control plane asks the same replica: endless, huge and nonsensical answers cost it nothing either."""
    paths = {
        "/v1/loads": b"[" * MIB,
        "/get_load": b'{"a":' * 100_000,
        "/metrics": b"sglang:num_running_reqs 1e999\n" * 30_000,
        "/server_info": BLOCK,
        "/get_server_info": b"\xff" * MIB,
    }

    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if (block := paths.get(request.target.partition("?")[0])) is not None:
                if len(peer.upstream.requests) % 2:
                    await pour(peer, b"HTTP/1.1 200 OK\r\n\r\n", block)
                peer.send(ok(block[: 2 * MIB // 3]))
            else:
                peer.send(ordinary(request) or ok())

    router = await attacked(script, health={"interval_s": 0.1}, reports={"interval_s": 0.1, "timeout_s": 0.5})
    asked = len(router.upstream.requests)
    while len(router.upstream.requests) < asked + 300:
        await router.unharmed(5)
    assert router.peak < 20 * MIB
