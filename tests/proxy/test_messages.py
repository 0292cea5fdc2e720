"""Requests and answers of every shape, one after another on kept connections."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from tests.fakes.client import get, post
from tests.fakes.upstream import (
    LAST_CHUNK,
    Peer,
    always,
    chunk,
    chunked,
    chunked_head,
    ok,
    serving,
)
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm


async def test_connections_are_kept_on_both_sides(warm: Warm) -> None:
    router = await warm(serving(lambda request: ok(request.body)))
    client = await router.client()
    for number in range(5):
        answer = await client.ask(post(body=b"turn %d" % number))
        assert (answer.status, answer.body) == (200, b"turn %d" % number)
        assert answer.header("connection") is None
    assert len(router.upstreams[0].connections) == 1
    assert router.outcomes() == {"done/body": 5}


async def test_one_clients_connection_serves_the_next_client(warm: Warm) -> None:
    router = await warm(always(ok()))
    for _ in range(3):
        client = await router.client()
        await client.ask(get())
        client.close()
    assert len(router.upstreams[0].connections) == 1


async def test_a_client_that_asks_for_close_gets_it_and_the_replicas_connection_stays(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    answer = await client.ask(get("/x", "Connection: close"))
    assert answer.header("connection") == "close"
    assert await client.rest() == b""
    again = await router.client()
    assert (await again.ask(get())).body == b"ok"
    assert len(router.upstreams[0].connections) == 1


async def test_a_replica_that_says_close_is_not_asked_again_on_that_connection(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(ok(b"first", "Connection: close"))
        await peer.end()

    router = await warm(script)
    client = await router.client()
    for _ in range(3):
        answer = await client.ask(get())
        assert answer.body == b"first"
        assert answer.header("connection") is None, "the client's connection is another matter"
    assert len(router.upstreams[0].connections) == 3


@pytest.mark.parametrize(
    "chunks",
    [[b"a"], [b"hello ", b"world"], [b"x" * 100_000, b"y", b"z" * 5000], []],
    ids=["one", "two", "large", "none"],
)
async def test_a_chunked_request_arrives_whole_with_its_length(warm: Warm, chunks: list[bytes]) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    await client.ask(post(chunks=chunks))
    request = await router.upstreams[0].request()
    assert request.body == b"".join(chunks)
    assert request.header("content-length") == str(len(request.body))


async def test_extensions_and_trailers_of_a_chunked_request_are_dropped(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n"
    answer = await client.ask(head + b'3;name="v"\r\nabc\r\n2\r\nde\r\n0\r\nX-Sum: 5\r\nHost: evil\r\n\r\n')
    assert answer.status == 200
    request = await router.upstreams[0].request()
    assert request.body == b"abcde"
    assert request.header("x-sum") is None
    assert request.header("trailer") is None
    assert "evil" not in request.raw_head.decode()


@pytest.mark.parametrize("body", [b"", b"{}", b"\x00\xff\r\n\r\n" * 1000, b"k" * 3_000_000])
async def test_bodies_are_equal_at_both_ends(warm: Warm, body: bytes) -> None:
    router = await warm(serving(lambda request: ok(request.body)))
    client = await router.client()
    answer = await client.ask(post(body=body))
    assert (await router.upstreams[0].request()).body == body
    assert answer.body == body


@pytest.mark.parametrize("chunks", [None, [b"hello ", b"", b"world"][::2]], ids=["length", "chunked"])
async def test_a_request_that_comes_byte_by_byte(warm: Warm, chunks: list[bytes] | None) -> None:
    router = await warm(serving(lambda request: ok(request.body)))
    client = await router.client()
    await client.drip(post("/v1/messages", b"hello world", "X-Empty:", "X-Long: " + "v" * 40, chunks=chunks))
    answer = await client.answer()
    assert answer.body == b"hello world"
    request = await router.upstreams[0].request()
    assert request.target == "/v1/messages"
    assert request.header("x-empty") == ""
    assert request.header("x-long") == "v" * 40


@pytest.mark.parametrize(
    "answer",
    [
        ok(b"hello world", "X-Empty:", "X-Long: " + "v" * 40),
        chunked(b"hello ", b"world", head=chunked_head("X-Empty:", "X-Long: " + "v" * 40)),
        chunked_head("X-Empty:", "X-Long: " + "v" * 40)
        + b'6;ext="1"\r\nhello \r\n05\r\nworld\r\n0\r\nX-Trailer: t\r\nX-Request-Id: 3\r\n\r\n',
    ],
    ids=["length", "chunked", "trailers"],
)
@pytest.mark.parametrize("size", [1, 1 << 20], ids=["byte by byte", "at once"])
async def test_an_answer_however_it_comes(warm: Warm, answer: bytes, size: int) -> None:
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.drip(answer, size)

    router = await warm(script)
    client = await router.client()
    for _ in range(2):
        got = await client.ask(post())
        assert got.values("x-trailer") == []
        assert (got.status, got.phrase, got.body) == (200, "OK", b"hello world")
        assert got.header("x-empty") == ""
        assert got.header("x-long") == "v" * 40
        assert got.trailers == b""
    assert len(router.upstreams[0].connections) == 1


async def test_a_body_compressed_by_the_client_arrives_compressed(warm: Warm) -> None:
    router = await warm(always(ok()))
    body = gzip.compress(b"{}" * 1000)
    client = await router.client()
    await client.ask(post("/v1/chat/completions", body, "Content-Encoding: gzip"))
    request = await router.upstreams[0].request()
    assert request.body == body
    assert request.header("content-encoding") == "gzip"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_body_compressed_by_the_replica_arrives_compressed(warm: Warm, stream: bool) -> None:
    body = gzip.compress(b'data: {"error": {"code": 503}}\n\n' * 100)
    headers = ("Content-Encoding: gzip", "Content-Type: text/event-stream")
    answer = chunked(body[:50], body[50:], head=chunked_head(*headers)) if stream else ok(body, *headers)
    router = await warm(always(answer))
    client = await router.client()
    got = await client.ask(post("/generate", b"{}", "Accept-Encoding: gzip"))
    assert got.body == body
    assert got.header("content-encoding") == "gzip"
    assert (await router.upstreams[0].request()).header("accept-encoding") == "gzip"


async def test_head_with_a_length(warm: Warm) -> None:
    router = await warm(always(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"))
    client = await router.client()
    for _ in range(2):
        answer = await client.ask(get(method="HEAD"))
        assert answer.header("content-length") == "1000"
    assert len(router.upstreams[0].connections) == 1


async def test_head_answered_as_chunked_keeps_both_connections(warm: Warm) -> None:
    router = await warm(serving(lambda request: chunked_head() if request.method == "HEAD" else ok(b"body")))
    client = await router.client()
    for _ in range(2):
        answer = await client.ask(get(method="HEAD"))
        assert answer.header("transfer-encoding") == "chunked"
        assert (await client.ask(get())).body == b"body"
    assert len(router.upstreams[0].connections) == 1


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_an_answer_without_a_body_keeps_both_connections(warm: Warm, status: str) -> None:
    bare = f"HTTP/1.1 {status}\r\nETag: x\r\n\r\n".encode()
    router = await warm(serving(lambda request: bare if request.target == "/bare" else ok(b"body")))
    client = await router.client()
    for _ in range(2):
        answer = await client.ask(get("/bare"))
        assert answer.status == int(status[:3])
        assert answer.header("etag") == "x"
        assert answer.header("transfer-encoding") is None
        assert (await client.ask(get())).body == b"body"
    assert len(router.upstreams[0].connections) == 1


async def test_304_may_tell_the_length_it_does_not_send(warm: Warm) -> None:
    bare = b"HTTP/1.1 304 Not Modified\r\nContent-Length: 77\r\n\r\n"
    router = await warm(serving(lambda request: bare if request.target == "/bare" else ok(b"body")))
    client = await router.client()
    assert (await client.ask(get("/bare"))).header("content-length") == "77"
    assert (await client.ask(get())).body == b"body"


async def test_early_hints_are_passed_on_and_100_is_not(warm: Warm) -> None:
    interims = (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nConnection: X-Hop\r\nX-Hop: 1\r\n\r\n"
        b"HTTP/1.1 102 Processing\r\n\r\n"
    )
    router = await warm(always(interims + ok(b"body")))
    client = await router.client()
    for _ in range(2):
        answer = await client.ask(post())
        assert [(each.status, each.header("link")) for each in answer.interims] == [(103, "</a>"), (102, None)]
        assert answer.interims[0].header("x-hop") is None
        assert (answer.status, answer.phrase, answer.body) == (200, "OK", b"body")
    assert len(router.upstreams[0].connections) == 1


async def test_an_early_hint_arrives_before_the_answer_exists(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
        await eventually(lambda: seen)
        peer.send(ok(b"body"))
        await peer.end()

    seen: list[int] = []
    router = await warm(script)
    client = await router.client()
    client.send(get())
    seen.append((await client.head()).status)
    assert seen == [103]
    assert (await client.answer()).body == b"body"


async def test_what_an_interim_answer_says_of_framing_means_nothing_for_the_final_one(warm: Warm) -> None:
    for lie in (b"Transfer-Encoding: chunked", b"Content-Length: 5"):
        router = await warm(always(b"HTTP/1.1 103 Early Hints\r\n" + lie + b"\r\n\r\n" + ok(b"body")))
        client = await router.client()
        answer = await client.ask(get())
        assert (answer.status, answer.body, answer.header("transfer-encoding")) == (200, b"body", None)
        assert answer.interims[0].header("content-length") is None


async def test_http10_clients_get_no_interim_answers(warm: Warm) -> None:
    router = await warm(always(b"HTTP/1.1 103 Early Hints\r\n\r\n" + ok(b"body")))
    client = await router.client()
    answer = await client.ask(get(version="1.0"))
    assert (answer.interims, answer.body) == ([], b"body")


async def test_switching_protocols_is_refused(warm: Warm) -> None:
    router = await warm(always(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nbytes"))
    client = await router.client()
    answer = await client.ask(post("/unknown"))
    assert (answer.status, answer.header("x-warmroute-reason")) == (502, "upstream_invalid")


async def test_a_flood_of_interim_answers_is_ended(warm: Warm) -> None:
    router = await warm(always(b"HTTP/1.1 102 Processing\r\n\r\n" * 1000))
    client = await router.client()
    answer = await client.ask(post("/unknown"))
    assert (answer.status, answer.header("x-warmroute-reason")) == (502, "upstream_invalid")
    assert len(answer.interims) <= 32
    assert await router.upstreams[0].connections[0].end()


class TestExpect:
    REQUEST = post("/generate", b"0123456789", "Expect: 100-continue")
    HEAD, BODY = REQUEST[:-10], REQUEST[-10:]

    async def test_is_granted_before_the_body_is_sent(self, warm: Warm) -> None:
        router = await warm(serving(lambda request: ok(request.body)))
        client = await router.client()
        client.send(self.HEAD)
        assert (await client.head()).status == 100
        client.send(self.BODY)
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, self.BODY)
        assert (await router.upstreams[0].request()).header("expect") is None

    async def test_in_its_turn_when_pipelined(self, warm: Warm) -> None:
        router = await warm(serving(lambda request: ok(request.target.encode())))
        client = await router.client()
        client.send(get("/first") + self.HEAD)
        first = await client.answer()
        assert (first.body, first.interims) == (b"/first", [])
        assert (await client.head()).status == 100
        client.send(self.BODY)
        assert (await client.answer()).body == b"/generate"

    async def test_a_client_that_does_not_wait_is_served_too(self, warm: Warm) -> None:
        router = await warm(serving(lambda request: ok(request.body)))
        client = await router.client()
        client.send(get("/first") + self.REQUEST)
        await client.answer()
        assert (await client.answer()).body == self.BODY

    async def test_other_expectations_are_417(self, warm: Warm) -> None:
        router = await warm(always(ok()))
        client = await router.client()
        client.send(post("/generate", b"x", "Expect: tea"))
        answer, rest = await client.refused()
        assert (answer.status, answer.header("x-warmroute-reason"), rest) == (417, "expectation", b"")
        assert not router.upstreams[0].connections

    async def test_is_refused_at_once_when_the_body_will_be_too_large(self, warm: Warm) -> None:
        router = await warm(always(ok()), limits={"body_bytes": 9})
        client = await router.client()
        client.send(self.HEAD)
        answer, _ = await client.refused()
        assert (answer.status, answer.interims) == (413, [])

    async def test_http10_has_none(self, warm: Warm) -> None:
        router = await warm(always(ok()))
        client = await router.client()
        answer = await client.ask(post("/generate", b"x", "Expect: 100-continue", version="1.0"))
        assert (answer.status, answer.interims) == (200, [])


class TestHttp10:
    async def test_is_closed_after_the_answer(self, warm: Warm) -> None:
        router = await warm(always(ok(b"body")))
        client = await router.client()
        answer = await client.ask(get(version="1.0"))
        assert (answer.body, answer.header("connection")) == (b"body", "close")
        assert await client.rest() == b""

    async def test_is_kept_when_it_asks(self, warm: Warm) -> None:
        router = await warm(always(ok(b"body")))
        client = await router.client()
        for _ in range(2):
            answer = await client.ask(get("/x", "Connection: keep-alive", version="1.0"))
            assert (answer.body, answer.header("connection")) == (b"body", "keep-alive")

    async def test_needs_no_host(self, warm: Warm) -> None:
        router = await warm(always(ok(b"body")))
        client = await router.client()
        answer = await client.ask(b"GET / HTTP/1.0\r\n\r\n")
        assert answer.status == 200

    async def test_gets_chunks_undone_and_the_end_by_close(self, warm: Warm) -> None:
        router = await warm(always(chunked(b"hello ", b"world")))
        client = await router.client()
        answer = await client.ask(get("/x", "Connection: keep-alive", version="1.0"))
        assert (answer.body, answer.header("connection")) == (b"hello world", "close")
        assert answer.header("transfer-encoding") is None

    async def test_each_chunk_undone_when_it_comes(self, warm: Warm) -> None:
        got: list[bytes] = []
        acknowledged = asyncio.Semaphore(0)

        async def script(peer: Peer) -> None:
            await peer.request()
            peer.send(chunked_head())
            for number in range(5):
                peer.send(chunk(b"chunk %d" % number))
                await acknowledged.acquire()
            peer.send(LAST_CHUNK)
            await peer.end()

        router = await warm(script)
        client = await router.client()
        client.send(get(version="1.0"))
        await client.head()
        for _ in range(5):
            got.append(await client.exactly(7))
            acknowledged.release()
        assert await client.rest() == b""
        assert got[4] == b"chunk 4"


async def test_an_answer_ended_by_close_is_chunked_for_the_client(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.drip(b"HTTP/1.1 200 OK\r\n\r\nhello world", 20)

    router = await warm(script)
    client = await router.client()
    for _ in range(2):
        answer = await client.ask(get())
        assert answer.header("transfer-encoding") == "chunked"
        assert answer.body == b"hello world"
    assert router.outcomes() == {"done/body": 2}


async def test_an_http10_replica_is_understood(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nold")

    router = await warm(script)
    client = await router.client()
    for _ in range(2):
        answer = await client.ask(get())
        assert (answer.version, answer.body) == ("HTTP/1.1", b"old")
    assert len(router.upstreams[0].connections) == 2


async def test_an_early_answer_is_passed_on_while_the_body_is_still_being_sent(warm: Warm) -> None:
    body = b"x" * 30_000_000

    async def script(peer: Peer) -> None:
        peer.stop_reading()
        peer.send(ok(b"no thanks", status="400 Bad Request"))
        await eventually(lambda: router.outcomes())
        peer.read_on()
        await peer.end()

    router = await warm(script)
    client = await router.client()
    answer = await client.ask(post("/v1/chat/completions", body))
    assert (answer.status, answer.body) == (400, b"no thanks")
    assert (await client.ask(post("/v1/chat/completions", body))).status == 400
    peer = router.upstreams[0].connections[0]
    await peer.end()
    assert peer.received < len(body), "the rest of the body is not sent to a replica that has answered"


async def test_an_early_answer_frees_what_a_replica_does_not_read(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        peer.stop_reading()
        peer.send(ok(b"no thanks", status="400 Bad Request"))
        await peer.end()

    router = await warm(script)
    client = await router.client()
    assert (await client.ask(post(body=b"x" * 30_000_000))).status == 400
    peer = await router.upstreams[0].connection()
    peer.read_on()
    await peer.end()
    assert peer.received < 30_000_000


async def test_a_request_without_a_body_says_nothing_of_a_length(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    await client.ask(get())
    await client.ask(post(body=b""))
    assert (await router.upstreams[0].request(0)).header("content-length") is None
    assert (await router.upstreams[0].request(1)).header("content-length") == "0"


async def test_empty_lines_between_requests_are_skipped(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    for _ in range(2):
        assert (await client.ask(b"\r\n\r\n" + get())).status == 200


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY"])
async def test_any_method_and_path_goes_through(warm: Warm, method: str) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    target = "/v1/any%20thing/at;all?q=a%2Fb&c=%00#f"
    answer = await client.ask(get(target, method=method))
    assert answer.status == 200
    request = await router.upstreams[0].request()
    assert (request.method, request.target) == (method, target)
