"""What of a message's head is passed on, dropped and added."""

from __future__ import annotations

import re

import pytest

from tests.fakes.client import get, post
from tests.fakes.upstream import ScriptedUpstream, always, ok
from tests.proxy.conftest import Warm

HOP_BY_HOP = {
    "Keep-Alive": "timeout=5",
    "Proxy-Authenticate": "Basic",
    "Proxy-Authorization": "Basic eA==",
    "Proxy-Connection": "keep-alive",
    "TE": "trailers",
    "Trailer": "X-Sum",
    "Upgrade": "h2c",
}


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP))
async def test_headers_of_one_hop_stay_on_it(warm: Warm, name: str) -> None:
    line = f"{name}: {HOP_BY_HOP[name]}"
    router = await warm(always(ok(b"body", line, "X-Other: 1")))
    client = await router.client()
    answer = await client.ask(get("/x", line, "X-Other: 1"))
    request = await router.upstreams[0].request()
    assert request.header(name.lower()) is None
    assert answer.header(name.lower()) is None
    assert request.header("x-other") == answer.header("x-other") == "1"


async def test_headers_named_in_connection_stay_on_their_hop(warm: Warm) -> None:
    lines = (
        "Connection: keep-alive, X-Own , x-more",
        "connection:X-Third",
        "X-Own: 1",
        "X-More: 2",
        "X-Third: 3",
        "X-On: 4",
    )
    router = await warm(always(ok(b"body", *lines)))
    client = await router.client()
    answer = await client.ask(get("/x", *lines))
    request = await router.upstreams[0].request()
    for message in (request, answer):
        assert [message.header(name) for name in ("x-own", "x-more", "x-third", "x-on")] == [None, None, None, "4"]
    assert request.header("connection") is None


async def test_what_the_message_means_cannot_be_named_away(warm: Warm) -> None:
    connection = "Connection: host, content-length, transfer-encoding, content-type, authorization, content-encoding"
    router = await warm(always(ok(b"body", connection, "Content-Type: text/plain", "Content-Encoding: x")))
    client = await router.client()
    answer = await client.ask(post("/x", b"hello", connection, "Authorization: Bearer k", "Content-Encoding: x"))
    request = await router.upstreams[0].request()
    assert request.body == b"hello"
    assert request.header("host") == router.upstreams[0].url.removeprefix("http://")
    assert request.header("content-type") == "application/json"
    assert request.header("authorization") == "Bearer k"
    assert request.header("content-encoding") == "x"
    assert (answer.body, answer.header("content-type"), answer.header("content-encoding")) == (
        b"body",
        "text/plain",
        "x",
    )


async def test_who_asked_and_how_is_told(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    await client.ask(get())
    request = await router.upstreams[0].request()
    assert request.header("x-forwarded-for") == "127.0.0.1"
    assert request.header("x-forwarded-proto") == "http"
    assert request.header("x-forwarded-host") == "warmroute.test"


async def test_what_earlier_proxies_told_is_kept(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    told = ("X-Forwarded-For: 10.0.0.1, 10.0.0.2", "X-Forwarded-For: 10.0.0.3")
    await client.ask(get("/x", *told, "X-Forwarded-Proto: https", "X-Forwarded-Host: public.test"))
    request = await router.upstreams[0].request()
    assert request.header("x-forwarded-for") == "10.0.0.1, 10.0.0.2, 10.0.0.3, 127.0.0.1"
    assert request.header("x-forwarded-proto") == "https"
    assert request.header("x-forwarded-host") == "public.test"


async def test_a_request_id_is_kept_on_both_ways_and_logged(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    answer = await client.ask(get("/x", "X-Request-Id: mine-1"))
    assert (await router.upstreams[0].request()).header("x-request-id") == "mine-1"
    assert answer.header("x-request-id") == "mine-1"
    (line,) = await router.lines()
    assert line["request_id"] == "mine-1"


@pytest.mark.parametrize("bad", ["", "two words", "x" * 129, "caf\xe9"])
async def test_a_request_id_is_made_when_none_fit_is_given(warm: Warm, bad: str) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    answers = [await client.ask(get("/x", f"X-Request-Id: {bad}")) for _ in range(2)]
    made = [answer.header("x-request-id") for answer in answers]
    assert made == [request.header("x-request-id") for request in router.upstreams[0].requests]
    assert made[0] != made[1]
    assert all(re.fullmatch(r"[!-~]{1,128}", each or "") for each in made)


async def test_the_replicas_own_request_id_reaches_the_client(warm: Warm) -> None:
    router = await warm(always(ok(b"", "X-Request-Id: engine-7")))
    client = await router.client()
    assert (await client.ask(get("/x", "X-Request-Id: mine"))).values("x-request-id") == ["engine-7"]


async def test_tracing_and_unknown_headers_are_passed_on_as_they_are(warm: Warm) -> None:
    lines = [
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate: a=1,b=2",
        "Authorization: Bearer sk-1",
        "X-MiXed-CaSe: Va;lue",
        "Accept: a",
        "Accept: b",
        "X-Latin: caf\xe9",
        "X-Empty:",
    ]
    router = await warm(always(ok(b"", *lines, "Set-Cookie: a=1", "Set-Cookie: b=2")))
    client = await router.client()
    answer = await client.ask(get("/x", *lines))
    request = await router.upstreams[0].request()
    for message in (request, answer):
        assert message.header("traceparent") == "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        assert message.header("tracestate") == "a=1,b=2"
        assert message.header("authorization") == "Bearer sk-1"
        assert message.values("accept") == ["a", "b"]
        assert message.header("x-latin") == "caf\xe9"
        assert message.header("x-empty") == ""
    assert answer.values("set-cookie") == ["a=1", "b=2"]
    assert b"X-MiXed-CaSe: Va;lue\r\n" in request.raw_head


async def test_names_and_values_do_not_run_into_each_other(warm: Warm) -> None:
    """Empty values used to glue the next name on in careless uses of the parser."""
    router = await warm(always(ok()))
    client = await router.client()
    await client.ask(get("/x", "A:", "B: ", "C: c", "D:\t", "E: e e\t "))
    request = await router.upstreams[0].request()
    assert [request.header(name) for name in "abcde"] == ["", "", "c", "", "e e"]


async def test_the_host_is_the_replicas_with_its_port(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    await client.ask(get())
    assert (await router.upstreams[0].request()).header("host") == f"127.0.0.1:{router.upstreams[0].port}"


async def test_a_base_path_is_put_before_the_target(warm: Warm) -> None:
    upstream = await ScriptedUpstream(always(ok())).start()
    try:
        router = await warm(f"{upstream.url}/models/a/")
        client = await router.client()
        await client.ask(get("/v1/models?x=1"))
        await client.ask(get("*", method="OPTIONS"))
        assert [request.target for request in upstream.requests] == ["/models/a/v1/models?x=1", "*"]
    finally:
        await upstream.stop()


async def test_the_choice_is_told_in_the_answer(warm: Warm) -> None:
    router = await warm(always(ok()), always(ok()))
    client = await router.client()
    answers = [await client.ask(get()) for _ in range(2)]
    assert [answer.header("x-warmroute-replica") for answer in answers] == ["a", "b"]
    assert answers[0].header("x-warmroute-reason") == "rotation"


async def test_a_phrase_of_any_sort_is_passed_on(warm: Warm) -> None:
    router = await warm(always(ok(status="418 I'm a (small) teapot")), always(ok(status="200 ")))
    client = await router.client()
    assert (await client.ask(get())).phrase == "I'm a (small) teapot"
    assert (await client.ask(get())).phrase == ""


async def test_204_with_a_length_is_sent_without_it(warm: Warm) -> None:
    """RFC 9110, section 8.6: a client that believed the length would wait for bytes that never come."""
    router = await warm(always(b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n"))
    client = await router.client()
    for _ in range(2):
        assert (await client.ask(get())).header("content-length") is None
