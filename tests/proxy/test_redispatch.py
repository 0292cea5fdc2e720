"""A replica that does not take a request: another one gets it, unless a byte was passed on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from policies.round_robin import RoundRobin
from policies.types import Choice, Replica, Request, State
from tests.fakes.client import Answer, get, post
from tests.fakes.proxied import Proxied
from tests.fakes.upstream import (
    LAST_CHUNK,
    REFUSING,
    SSE_HEAD,
    Peer,
    Script,
    always,
    chunk,
    chunked_head,
    ok,
    serving,
    silent,
)
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm

BUSY = always(
    ok(b'{"object":"error","message":"The request queue is full.","code":503}', status="503 Service Unavailable")
)


def reason(answer: Answer) -> tuple[int, str | None]:
    return answer.status, answer.header("x-warmroute-reason")


def served(router: Proxied) -> str:
    """Which replicas got a lease, and how often."""
    return " ".join(f"{name}{router.replica(name).served}" for name in sorted(router.balancer.replicas))


async def reset_on_accept(peer: Peer) -> None:
    peer.reset()


async def close_on_accept(peer: Peer) -> None:
    peer.close()


async def reset_unanswered(peer: Peer) -> None:
    await peer.request()
    peer.reset()


async def close_unanswered(peer: Peer) -> None:
    await peer.request()


async def reset_in_head(peer: Peer) -> None:
    await peer.request()
    await peer.drip(b"HTTP/1.1 200 OK\r\nContent-Le", 100)
    peer.reset()


async def nonsense(peer: Peer) -> None:
    await peer.request()
    peer.send(b"SSH-2.0-OpenSSH_9.2\r\n")
    await peer.end()


class TestConnecting:
    async def test_refused(self, warm: Warm) -> None:
        router = await warm(REFUSING, always(ok(b"b")))
        client = await router.client()
        answer = await client.ask(post("/unknown", b"body"))
        assert (answer.status, answer.body, answer.header("x-warmroute-replica")) == (200, b"b", "b")
        assert (await router.upstreams[0].request()).body == b"body"
        assert router.health.bad == [("a", "connect")]
        assert router.metrics.redispatches == {"connect": 1}
        (line,) = await router.lines()
        assert (line["tries"], line["failed"], line["replica"], line["cause"]) == (2, "connect", "b", "done")

    async def test_timeout(self, warm: Warm, unaccepting: str) -> None:
        router = await warm(unaccepting, always(ok(b"b")), timeouts={"connect_s": 0.3})
        client = await router.client()
        assert (await client.ask(post("/unknown"))).body == b"b"
        assert router.health.bad == [("a", "connect_timeout")]

    async def test_no_such_host(self, warm: Warm) -> None:
        router = await warm("http://no-such-host.invalid:1", always(ok(b"b")))
        client = await router.client()
        assert (await client.ask(post("/unknown"))).body == b"b"

    @pytest.mark.parametrize("script", [reset_on_accept, close_on_accept])
    async def test_a_replica_that_accepts_and_breaks_off_never_hangs_a_request(
        self, warm: Warm, script: Script
    ) -> None:
        router = await warm(script, always(ok(b"b")), retries={"budget_burst": 100})
        client = await router.client()
        for _ in range(30):
            assert (await client.ask(post())).body == b"b"
        assert router.upstreams[0].connections


class TestLosingTheConnection:
    @pytest.mark.parametrize("script", [reset_unanswered, close_unanswered, reset_in_head])
    async def test_inference_is_run_again_elsewhere(self, warm: Warm, script: Script) -> None:
        router = await warm(script, always(ok(b"b")))
        client = await router.client()
        answer = await client.ask(post("/v1/chat/completions", b"prompt"))
        assert answer.body == b"b"
        assert (await router.upstreams[1].request()).body == b"prompt"
        assert router.health.bad == [("a", "reset")]

    @pytest.mark.parametrize("script", [reset_unanswered, close_unanswered, reset_in_head])
    async def test_a_post_that_may_have_had_an_effect_is_not(self, warm: Warm, script: Script) -> None:
        router = await warm(script, always(ok(b"b")))
        client = await router.client()
        assert reason(await client.ask(post("/unknown"))) == (502, "upstream_closed")
        assert len(router.upstreams[0].connections) == 1
        assert not router.upstreams[1].requests
        await router.ended("upstream/headers")
        assert (await client.ask(get())).body == b"b", "the client's connection serves on"

    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS"])
    async def test_idempotent_methods_are_run_again(self, warm: Warm, method: str) -> None:
        router = await warm(reset_unanswered, always(ok(b"b")))
        client = await router.client()
        assert (await client.ask(get("/unknown", method=method))).body == b"b"

    async def test_nonsense_counts_as_no_answer(self, warm: Warm) -> None:
        router = await warm(nonsense, always(ok(b"b")))
        client = await router.client()
        assert (await client.ask(post())).body == b"b"
        assert reason(await client.ask(post("/unknown"))) == (502, "upstream_invalid")
        assert router.health.bad == [("a", "invalid")] * 2

    @pytest.mark.parametrize("reset", [True, False])
    async def test_a_kept_connection_found_closed_is_replaced_and_the_request_sent_once_more(
        self, warm: Warm, reset: bool
    ) -> None:
        """The engine's keep-alive ended just as the request was on its way."""

        async def script(peer: Peer) -> None:
            await peer.request()
            peer.send(ok(b"from %d" % len(peer.upstream.connections)))
            await peer.head()
            if reset:
                peer.reset()

        router = await warm(script, always(ok(b"never")), policy="least_loaded")
        router.balancer.leave("b", 0)
        client = await router.client()
        assert (await client.ask(post("/unknown"))).body == b"from 1"
        assert (await client.ask(post("/unknown", b"x" * 10))).body == b"from 2"
        assert (await client.ask(post("/unknown"))).body == b"from 3"
        assert router.health.bad == []
        assert router.metrics.redispatches == {}
        assert served(router) == "a3"

    async def test_it_is_sent_once_more_only_once(self, warm: Warm) -> None:
        async def script(peer: Peer) -> None:
            if len(peer.upstream.connections) == 1:
                await peer.request()
                peer.send(ok())
            await peer.request()

        router = await warm(script)
        client = await router.client()
        assert (await client.ask(post("/unknown"))).status == 200
        assert reason(await client.ask(post("/unknown"))) == (502, "upstream_closed")
        assert len(router.upstreams[0].connections) == 2

    async def test_nothing_is_sent_once_more_after_part_of_an_answer(self, warm: Warm) -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            peer.send(ok())
            await peer.request()
            await peer.drip(b"HTTP/1.1 20", 100)

        router = await warm(script)
        client = await router.client()
        assert (await client.ask(post())).status == 200
        assert reason(await client.ask(post())) == (503, "all_failed")
        assert len(router.upstreams[0].connections) == 1

    async def test_what_must_not_run_twice_gets_a_connection_of_its_own(self, warm: Warm) -> None:
        """On a kept one, its being closed could not be told from the replica's death while the request ran."""
        router = await warm(always(ok()))
        client = await router.client()
        for _ in range(2):
            assert (await client.ask(post("/unknown"))).status == 200
        assert len(router.upstreams[0].connections) == 2


class TestBusy:
    @pytest.mark.parametrize("request_", [post(), post("/unknown"), get(), get(method="HEAD")])
    async def test_503_goes_elsewhere(self, warm: Warm, request_: bytes) -> None:
        router = await warm(BUSY, always(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"))
        client = await router.client()
        answer = await client.ask(request_)
        assert (answer.status, answer.header("x-warmroute-replica")) == (200, "b")
        assert router.health.bad == [], "a full queue is no sickness"
        assert router.metrics.redispatches == {"busy": 1}

    async def test_all_full(self, warm: Warm) -> None:
        router = await warm(BUSY, BUSY)
        client = await router.client()
        answer = await client.ask(post())
        assert reason(answer) == (503, "queue_full")
        assert int(answer.header("retry-after") or 0) >= 1
        assert answer.header("content-type") == "application/json"
        error = json.loads(answer.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["code"], error["type"]) == ("queue_full", "overloaded_error")
        assert served(router) == "a1 b1"
        await router.ended("upstream/headers")
        assert reason(await client.ask(post())) == (503, "queue_full"), "the client's connection serves on"

    @pytest.mark.parametrize("status", [400, 401, 404, 408, 409, 413, 422, 429, 499, 500, 501, 502, 504])
    async def test_other_statuses_pass_unchanged(self, warm: Warm, status: int) -> None:
        body = b'{"object":"error","message":"context too long"}'
        router = await warm(always(ok(body, "Retry-After: 7", status=f"{status} Whatever")), always(ok()))
        client = await router.client()
        answer = await client.ask(post())
        assert (answer.status, answer.phrase, answer.body) == (status, "Whatever", body)
        assert answer.header("retry-after") == "7"
        assert not router.upstreams[1].connections


CHAT_FULL = (
    b'data: {"error": {"object": "error", "message": "The request queue is full.", '
    b'"type": "SERVICE_UNAVAILABLE", "param": null, "code": 503}}\n\n'
)
CHAT_USAGE = (
    b'data: {"id":"x","object":"chat.completion.chunk","choices":[],'
    b'"usage":{"prompt_tokens":0,"total_tokens":0,"completion_tokens":0}}\n\n'
)
DONE = b"data: [DONE]\n\n"
GENERATE_FULL = (
    b'data: {"error": {"message": "The request queue is full.", '
    b'"type": "SERVICE_UNAVAILABLE", "code": 503, "retryable": false}}\n\n'
)
MESSAGES_FULL = (
    b'event: error\ndata: {"type": "error", '
    b'"error": {"type": "overloaded_error", "message": "The request queue is full."}}\n\n'
)
MESSAGE_START = b'event: message_start\ndata: {"type": "message_start", "message": {"id": "m", "usage": {}}}\n\n'
RESPONSE_CREATED = b'event: response.created\ndata: {"type": "response.created", "response": {"id": "r"}}\n\n'
RESPONSE_FULL = (
    b'event: response.failed\ndata: {"type": "response.failed", "response": {"id": "r", '
    b'"error": {"code": "server_error", "message": "The request queue is full."}}}\n\n'
)

FULL = {
    "chat": [CHAT_FULL, DONE],
    "chat with usage": [CHAT_FULL, CHAT_USAGE, DONE],
    "chat, one chunk": [CHAT_FULL + CHAT_USAGE + DONE],
    "generate": [GENERATE_FULL, DONE],
    "messages": [MESSAGES_FULL],
    "messages, crlf": [MESSAGES_FULL.replace(b"\n", b"\r\n")],
    "messages, begun": [MESSAGE_START, MESSAGES_FULL],
    "responses": [RESPONSE_CREATED, RESPONSE_CREATED.replace(b"created", b"in_progress"), RESPONSE_FULL],
    "compact": [CHAT_FULL.replace(b": ", b":"), DONE],
    "code as text": [CHAT_FULL.replace(b"503", b'"503"'), DONE],
}

BAD = {
    "context too long": [
        b'data: {"error": {"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}}\n\n',
        DONE,
    ],
    "rate limit": [
        b'event: error\ndata: {"type": "error", "error": {"type": "rate_limit_error", "message": "503"}}\n\n'
    ],
    "internal": [b'data: {"error": {"message": "CUDA error 503", "code": 500}}\n\n', DONE],
    "error is a text": [b'data: {"error": "503"}\n\n', DONE],
    "not json": [b'data: {"error": {code: 503}}\n\n', DONE],
    "event without data": [b"event: error\n\n", DONE],
    "answer that speaks of it": [
        b'data: {"choices":[{"delta":{"content":"{\\"error\\": {\\"code\\": 503}}"}}]}\n\n',
        DONE,
    ],
    "second event": [b'data: {"choices":[]}\n\n', CHAT_FULL, DONE],
    "message begun": [
        MESSAGE_START,
        b'event: content_block_start\ndata: {"type": "content_block_start"}\n\n',
        MESSAGES_FULL,
    ],
    "message begun, then over": [MESSAGE_START],
    "response": [RESPONSE_CREATED, b'event: response.output_text.delta\ndata: {"delta": "x"}\n\n', RESPONSE_FULL],
    "nothing at all": [],
    "cut off by its end": [CHAT_FULL[:60]],
}


def sse(events: list[bytes]) -> bytes:
    return SSE_HEAD + b"".join(map(chunk, events)) + LAST_CHUNK


class TestQueueFullInsideTheStream:
    @pytest.mark.parametrize("name", FULL)
    async def test_goes_elsewhere(self, warm: Warm, name: str) -> None:
        router = await warm(always(sse(FULL[name])), always(sse([b"data: {}\n\n", DONE])))
        client = await router.client()
        answer = await client.ask(post())
        assert (answer.status, answer.chunks) == (200, [b"data: {}\n\n", DONE])
        assert answer.header("x-warmroute-replica") == "b"
        assert router.metrics.redispatches == {"queue_full": 1}
        await (await router.upstreams[0].connection()).end()

    @pytest.mark.parametrize("name", FULL)
    async def test_goes_elsewhere_however_it_is_cut(self, warm: Warm, name: str) -> None:
        """The first connection cuts its answer after one byte, the next after two, and so on."""
        answer = sse(FULL[name])

        async def script(peer: Peer) -> None:
            await peer.request()
            cut = peer.upstream.connections.index(peer) + 1
            peer.send(answer[:cut])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            peer.send(answer[cut:])
            await peer.end()

        router = await warm(script, always(sse([DONE])), retries={"budget_burst": 10_000})
        client = await router.client()
        for _ in range(len(answer)):
            got = await client.ask(post())
            assert got.chunks == [DONE]
        assert len(router.upstreams[0].connections) == len(answer)

    @pytest.mark.parametrize("name", FULL)
    async def test_goes_elsewhere_when_it_drips(self, warm: Warm, name: str) -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            await peer.drip(sse(FULL[name]))
            await peer.end()

        router = await warm(script, always(sse([DONE])))
        client = await router.client()
        assert (await client.ask(post())).chunks == [DONE]

    @pytest.mark.parametrize("name", BAD)
    async def test_anything_else_passes_unchanged(self, warm: Warm, name: str) -> None:
        router = await warm(always(sse(BAD[name])), always(ok(b"other")))
        client = await router.client()
        answer = await client.ask(post())
        assert (answer.status, answer.chunks) == (200, BAD[name])
        assert not router.upstreams[1].connections

    @pytest.mark.parametrize("name", BAD)
    async def test_anything_else_passes_unchanged_when_it_drips(self, warm: Warm, name: str) -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            await peer.drip(sse(BAD[name]))
            await peer.end()

        router = await warm(script, always(ok(b"other")))
        client = await router.client()
        assert (await client.ask(post())).body == b"".join(BAD[name])
        assert not router.upstreams[1].connections

    async def test_an_error_event_without_end_is_not_held_without_end(self, warm: Warm) -> None:
        start = b'data: {"error": {"message": "'

        async def script(peer: Peer) -> None:
            await peer.request()
            peer.send(SSE_HEAD + chunk(start))
            for _ in range(20):
                peer.send(chunk(b"x" * 65536))
                await peer.drain()
            await release.wait()
            peer.send(LAST_CHUNK)
            await peer.end()

        release = asyncio.Event()
        router = await warm(script)
        client = await router.client()
        client.send(post())
        assert (await client.head()).status == 200
        release.set()
        got = b""
        while data := await client.chunk():
            got += data
        assert got == start + b"x" * 65536 * 20

    async def test_a_json_body_that_looks_like_it_passes(self, warm: Warm) -> None:
        router = await warm(always(ok(CHAT_FULL, "Content-Type: text/plain")), always(ok(b"other")))
        client = await router.client()
        assert (await client.ask(post())).body == CHAT_FULL

    async def test_all_full(self, warm: Warm) -> None:
        router = await warm(always(sse(FULL["chat"])), always(sse(FULL["messages"])))
        client = await router.client()
        answer = await client.ask(post())
        assert reason(answer) == (503, "queue_full")
        assert answer.header("retry-after")

    async def test_one_that_dies_while_the_event_is_held_is_replaced(self, warm: Warm) -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            await peer.drip(SSE_HEAD + chunk(CHAT_FULL[:30]), 1000)

        router = await warm(script, always(sse([DONE])))
        client = await router.client()
        answer = await client.ask(post())
        assert (answer.chunks, answer.header("x-warmroute-replica")) == ([DONE], "b")


class TestBounds:
    async def test_tries(self, warm: Warm) -> None:
        router = await warm(*[REFUSING] * 5, retries={"tries": 3})
        client = await router.client()
        answer = await client.ask(post())
        assert reason(answer) == (503, "tries_exhausted")
        assert answer.header("retry-after")
        assert len(router.health.bad) == 3

    async def test_every_replica_is_tried_only_once(self, warm: Warm) -> None:
        router = await warm(REFUSING, REFUSING, retries={"tries": 10})
        client = await router.client()
        assert reason(await client.ask(post())) == (503, "all_failed")
        assert sorted(router.health.bad) == [("a", "connect"), ("b", "connect")]

    async def test_budget(self, warm: Warm) -> None:
        """An outage is not multiplied: one request in five may be sent again, after a burst of two."""
        router = await warm(*[REFUSING] * 4, retries={"tries": 2, "budget_share": 0.2, "budget_burst": 2})
        client = await router.client()
        reasons = [reason(await client.ask(post()))[1] for _ in range(40)]
        assert reasons[:2] == ["tries_exhausted", "tries_exhausted"]
        assert reasons.count("tries_exhausted") == 2 + 40 * 0.2 - 1
        assert set(reasons) == {"tries_exhausted", "retry_budget"}
        assert router.metrics.redispatches["connect"] == reasons.count("tries_exhausted")

    async def test_no_budget(self, warm: Warm) -> None:
        router = await warm(REFUSING, always(ok()), retries={"budget_share": 0.0, "budget_burst": 0})
        client = await router.client()
        answer = await client.ask(post())
        assert reason(answer) == (503, "retry_budget")
        assert answer.header("retry-after")

    async def test_what_waited_on_a_replica_that_is_out_costs_no_budget(self, warm: Warm) -> None:
        """It is as many as were there: losing one replica must not lose them."""
        router = await warm(silent, always(ok()), retries={"budget_share": 0.0, "budget_burst": 0})
        client = await router.client()
        client.send(post())
        peer = await router.upstreams[0].connection()
        await router.upstreams[0].request()
        router.balancer.set_state(router.balancer.replicas["a"], State.EJECTED, 0.0)
        peer.reset()
        assert (await client.answer()).header("x-warmroute-replica") == "b"

    async def test_no_replica(self, warm: Warm) -> None:
        router = await warm()
        client = await router.client()
        answer = await client.ask(post())
        assert reason(answer) == (503, "no_replicas")
        assert answer.header("retry-after")
        assert json.loads(answer.body)["error"]["code"] == "no_replicas"
        await router.ended("router/queue")
        (line,) = await router.lines()
        assert (line["status"], line["refusal"], line["tries"]) == (503, "no_replicas", 0)

    async def test_never_after_a_byte_was_passed_on(self, warm: Warm) -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            await peer.drip(chunked_head() + chunk(b"first"), 1000)

        router = await warm(script, always(ok(b"other")))
        client = await router.client()
        client.send(post())
        await client.up_to(b"first\r\n")
        assert await client.rest() == b""
        assert not router.upstreams[1].connections


async def test_a_replica_that_answers_not_even_its_probes_is_given_up(warm: Warm) -> None:
    """A hung host keeps its connections open: without this its requests would wait for the first-byte timeout."""
    router = await warm(silent, always(ok()))
    client = await router.client()
    client.send(post())
    await router.upstreams[0].request()
    router.health.silent.add("a")
    assert (await client.answer()).header("x-warmroute-replica") == "b"
    assert router.metrics.redispatches == {"silent": 1}


@pytest.mark.parametrize("full", [BUSY, always(sse(FULL["chat"]))], ids=["503", "in the stream"])
async def test_the_whole_body_is_sent_again(warm: Warm, full: Script) -> None:
    body = b"0123456789" * 300_000
    router = await warm(full, serving(lambda request: ok(request.body)))
    client = await router.client()
    assert (await client.ask(post(body=body))).body == body
    assert router.upstreams[0].requests[0].body == body


async def test_a_client_that_leaves_between_two_tries(warm: Warm) -> None:
    router = await warm(BUSY, silent)
    client = await router.client()
    client.send(post())
    await router.upstreams[1].request()
    client.close()
    await router.upstreams[1].connections[0].end()
    await router.ended("client/headers")
    assert served(router) == "a1 b1"


async def test_what_the_first_replica_said_is_forgotten(warm: Warm) -> None:
    """Neither its headers nor its way of framing colours the answer of the second."""
    router = await warm(always(sse(FULL["chat"])), always(ok(CHAT_FULL, "Content-Type: application/json")))
    client = await router.client()
    answer = await client.ask(post())
    assert (answer.body, answer.values("content-type")) == (CHAT_FULL, ["application/json"])
    assert answer.header("transfer-encoding") is None


async def test_a_replica_that_is_gone_for_good_does_not_stop_the_service(warm: Warm) -> None:
    router = await warm(always(ok(b"a")), always(ok(b"b")))
    client = await router.client()
    for _ in range(4):
        await client.ask(post())
    await router.upstreams[0].stop()
    await eventually(lambda: not router.living())
    for _ in range(6):
        assert (await client.ask(post())).body == b"b"


class _Broken(RoundRobin):
    """A policy with a fault."""

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        raise ZeroDivisionError("of the test's own")


async def test_a_fault_in_placing_is_answered_not_waited_for(warm: Warm) -> None:
    router = await warm(always(ok(b"a")))
    router.balancer.switch(_Broken(), 0.0)
    client = await router.client()
    answer = await client.ask(post())
    assert (answer.status, answer.header("x-warmroute-reason")) == (500, "internal")
    (line,) = await router.lines()
    assert (line["status"], line["refusal"]) == (500, "internal")
