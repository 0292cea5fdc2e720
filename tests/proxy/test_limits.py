"""Limits on size, time and number, each refused with an error that names it."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from tests.fakes.client import Answer, Ended, RawClient, get, post
from tests.fakes.upstream import LAST_CHUNK, SSE_HEAD, Peer, always, chunk, ok, silent
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm


async def refusal(client: RawClient, status: int, reason: str) -> Answer:
    """The client is refused so, and its connection ended."""
    answer, rest = await client.refused()
    assert (answer.status, answer.header("x-warmroute-reason")) == (status, reason)
    assert rest == b""
    error = json.loads(answer.body)
    assert error["error"]["code"] == reason
    assert error["error"]["message"]
    assert answer.header("connection") == "close"
    assert answer.header("x-request-id")
    return answer


class TestHeaders:
    LIMITS = {"header_bytes": 2000}

    @pytest.mark.parametrize(
        "request_",
        [
            get("/", "X-Big: " + "x" * 2000),
            get("/", *(f"X-{n}: {n}" for n in range(300))),
            get("/" + "x" * 2000),
            get("/", "X-Huge: " + "x" * 5_000_000),
            b"GET / HTTP/1.1\r\nX-Endless: " + b"x" * 5_000_000,
            b"GET /" + b"x" * 5_000_000,
            b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000,
        ],
        ids=["one", "many", "target", "huge", "endless", "endless target", "endlessly many"],
    )
    async def test_too_many_bytes(self, warm: Warm, request_: bytes) -> None:
        router = await warm(always(ok()), limits=self.LIMITS)
        client = await router.client()
        client.send(request_)
        await refusal(client, 431, "headers_too_large")
        assert not router.upstreams[0].connections

    @pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nX"])
    async def test_byte_by_byte_without_end(self, warm: Warm, start: bytes) -> None:
        router = await warm(always(ok()), limits={"header_bytes": 500})
        client = await router.client()
        await client.drip(start + b"x" * 520)
        await refusal(client, 431, "headers_too_large")

    async def test_trailers_without_end(self, warm: Warm) -> None:
        router = await warm(always(ok()), limits=self.LIMITS)
        client = await router.client()
        client.send(post(chunks=[b"hello"])[:-2])
        with suppress(Ended):
            for _ in range(5000):
                client.send(b"X-Trailer: " + b"x" * 10_000)
                await asyncio.sleep(0)
                if client.ended:
                    break
        assert b"headers_too_large" in client.buffer
        assert not router.upstreams[0].connections

    async def test_chunks_of_one_byte_are_no_trailers(self, warm: Warm) -> None:
        router = await warm(always(ok()), limits={"header_bytes": 300})
        client = await router.client()
        await client.drip(post(chunks=[b"x"] * 300))
        assert (await client.answer()).status == 200
        assert (await router.upstreams[0].request()).body == b"x" * 300

    async def test_as_many_as_allowed(self, warm: Warm) -> None:
        router = await warm(always(ok()), limits=self.LIMITS)
        client = await router.client()
        for size in (1000, 1800):
            assert (await client.ask(get("/", "X-Big: " + "x" * size))).status == 200


class TestBody:
    LIMITS = {"body_bytes": 1000}

    async def test_a_length_too_large_is_refused_before_the_body(self, warm: Warm) -> None:
        router = await warm(always(ok()), limits=self.LIMITS)
        client = await router.client()
        client.send(post(body=b"x" * 1001)[:-1001])
        await refusal(client, 413, "body_too_large")
        assert router.proxy.body_bytes == 0

    @pytest.mark.parametrize("chunks", [[b"x" * 1001], [b"x" * 100] * 11, [b"x" * 1_000_000] * 10])
    async def test_chunks_too_large_together(self, warm: Warm, chunks: list[bytes]) -> None:
        router = await warm(always(ok()), limits=self.LIMITS)
        client = await router.client()
        client.send(post(chunks=chunks))
        await refusal(client, 413, "body_too_large")
        assert not router.upstreams[0].connections

    async def test_the_refusal_reaches_a_client_that_is_still_sending(self, warm: Warm) -> None:
        """It must not be lost to the reset that unread bytes would cause."""
        router = await warm(always(ok()), limits=self.LIMITS)
        client = await router.client()
        client.send(post(body=b"x" * 20_000_000))
        await refusal(client, 413, "body_too_large")
        assert client.ended == "eof"

    @pytest.mark.parametrize("chunks", [None, [b"x" * 100] * 10])
    async def test_as_large_as_allowed(self, warm: Warm, chunks: list[bytes] | None) -> None:
        router = await warm(always(ok()), limits=self.LIMITS)
        client = await router.client()
        assert (await client.ask(post(body=b"x" * 1000, chunks=chunks))).status == 200

    async def test_a_length_beyond_all_measure(self, warm: Warm) -> None:
        router = await warm(always(ok()))
        client = await router.client()
        client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999999999999\r\n\r\n")
        await refusal(client, 413, "body_too_large")

    async def test_the_default_is_64_mib(self, warm: Warm) -> None:
        router = await warm(always(ok()))
        client = await router.client()
        client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % ((64 << 20) + 1))
        await refusal(client, 413, "body_too_large")

    async def test_all_bodies_together(self, warm: Warm) -> None:
        router = await warm(silent, limits={"body_bytes": 10_000, "body_memory_bytes": 10_000})
        first = await router.client()
        first.send(post(body=b"x" * 9_000))
        await router.upstreams[0].request()
        second = await router.client()
        second.send(post(body=b"x" * 2_000))
        answer = await refusal(second, 503, "body_memory")
        assert answer.header("retry-after")
        first.close()
        await router.ended("client/headers")
        third = await router.client()
        third.send(post(body=b"x" * 9_000))
        await router.upstreams[0].request(1)


class TestTime:
    """The sweeper looks each 50 ms in these tests, each second in production."""

    @pytest.mark.parametrize("start", [b"G", b"GET / HTTP/1.1\r\nHost: a\r\n"])
    async def test_a_head_that_does_not_come(self, warm: Warm, start: bytes) -> None:
        router = await warm(always(ok()), timeouts={"header_s": 0.2})
        client = await router.client()
        client.send(start)
        await refusal(client, 408, "header_timeout")
        await router.ended("timeout/request")

    async def test_a_head_that_drips(self, warm: Warm) -> None:
        """The limit is on the whole head: a byte now and then does not lengthen it."""
        router = await warm(always(ok()), timeouts={"header_s": 0.2})
        client = await router.client()
        client.send(b"GET /")
        while not client.ended:
            client.send(b"x")
            await asyncio.sleep(0.01)
        await refusal(client, 408, "header_timeout")

    async def test_a_body_that_does_not_come(self, warm: Warm) -> None:
        router = await warm(always(ok()), timeouts={"body_s": 0.2})
        client = await router.client()
        client.send(post(body=b"hello")[:-1])
        await refusal(client, 408, "body_timeout")
        assert router.proxy.body_bytes == 0
        assert not router.upstreams[0].connections

    async def test_a_request_at_all(self, warm: Warm) -> None:
        router = await warm(always(ok()), timeouts={"keep_alive_s": 0.5})
        fresh = await router.client()
        used = await router.client()
        await used.ask(get())
        assert await fresh.rest() == b"", "nobody asked, nobody is answered"
        assert await used.rest() == b""
        assert router.outcomes() == {"done/body": 1}

    async def test_the_first_byte(self, warm: Warm) -> None:
        router = await warm(silent, always(ok()), timeouts={"first_byte_s": 0.5})
        client = await router.client()
        answer = await client.ask(post())
        assert (answer.status, answer.header("x-warmroute-reason")) == (504, "first_byte_timeout")
        await router.ended("timeout/headers")
        await (await router.upstreams[0].connection()).end()
        assert not router.upstreams[1].connections, "it may be running still: not sent again"
        assert router.health.bad == [("a", "first_byte_timeout")]
        assert (await client.ask(post())).status == 200, "the client's connection serves on"

    async def test_the_first_event_of_a_held_stream(self, warm: Warm) -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            peer.send(SSE_HEAD)
            await peer.end()

        router = await warm(script, timeouts={"first_byte_s": 0.2})
        client = await router.client()
        assert (await client.ask(post())).status == 504

    async def test_silence_in_the_middle(self, warm: Warm) -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            peer.send(SSE_HEAD + chunk(b"data: 1\n\n"))
            await peer.end()

        router = await warm(script, timeouts={"idle_s": 0.2})
        client = await router.client()
        client.send(post())
        with pytest.raises(Ended):
            await client.answer()
        await router.ended("timeout/body")
        await (await router.upstreams[0].connection()).end()

    @pytest.mark.parametrize("whole", [True, False], ids=["whole chunks", "pieces"])
    async def test_a_slow_stream_is_not_silent(self, warm: Warm, whole: bool) -> None:
        count = 12 if whole else 6

        async def script(peer: Peer) -> None:
            await peer.request()
            peer.send(SSE_HEAD)
            for _ in range(count):
                piece = chunk(b"data: 1\n\n")
                for part in [piece] if whole else [piece[:5], piece[5:]]:
                    peer.send(part)
                    await router.passed(0.1)
            peer.send(LAST_CHUNK)
            await peer.end()

        router = await warm(script, timeouts={"idle_s": 1})
        client = await router.client()
        assert len((await client.ask(post())).body) == count * len(b"data: 1\n\n")

    async def test_a_client_that_never_reads_again(self, warm: Warm) -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            peer.send(SSE_HEAD)
            while True:
                peer.send(chunk(b"x" * 65536))
                await peer.drain()

        router = await warm(script, timeouts={"stalled_client_s": 0.3})
        client = await router.client()
        client.send(post())
        await client.head()
        client.stop_reading()
        await (await router.upstreams[0].connection()).end()
        await router.ended("client/body")

    async def test_a_refused_client_that_does_not_close(self, warm: Warm) -> None:
        """It is read from for a little while, then cut off."""
        router = await warm(always(ok()), limits={"body_bytes": 10})
        client = await router.client()
        client.send(post(body=b"x" * 11))
        assert (await client.answer()).status == 413
        assert await client.rest() == b""
        await eventually(lambda: not router.proxy.downstreams)


class TestConnections:
    async def test_too_many(self, warm: Warm) -> None:
        router = await warm(always(ok()), limits={"connections": 2})
        kept = [await router.client() for _ in range(2)]
        for client in kept:
            await client.ask(get())
        more = await router.client()
        answer, rest = await more.refused()
        assert (answer.status, answer.header("x-warmroute-reason"), rest) == (503, "connections", b"")
        assert answer.header("retry-after")
        more.close()
        kept[0].close()
        await eventually(lambda: len(router.proxy.downstreams) == 1)
        assert (await (await router.client()).ask(get())).status == 200
        assert (await kept[1].ask(get())).status == 200
        assert router.metrics.refusals == {"connections": 1}
