"""What is not proxied: upgrades, tunnels, foreign hosts, engine administration."""

from __future__ import annotations

import json

import pytest

from router.proxy.guard import ADMIN_PATHS
from tests.fakes.client import RawClient, get, post
from tests.fakes.upstream import always, ok
from tests.proxy.conftest import Warm


async def test_websockets_are_refused_clearly(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    client.send(
        get("/v1/realtime", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13") + b"\x81\x05"
    )
    answer, rest = await client.refused()
    assert (answer.status, answer.header("x-warmroute-reason"), rest) == (501, "upgrade", b"")
    assert "WebSocket" in json.loads(answer.body)["error"]["message"]
    assert not router.upstreams[0].connections


async def test_an_upgrade_with_a_body_is_refused(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    client.send(post("/x", b"hello", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"))
    answer, rest = await client.refused()
    assert (answer.status, answer.header("x-warmroute-reason"), rest) == (501, "upgrade", b"")


@pytest.mark.parametrize("size", [1, 1000])
async def test_the_http2_preface_is_refused_clearly(warm: Warm, size: int) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    await client.drip(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", size)
    answer, rest = await client.refused()
    assert (answer.status, answer.header("x-warmroute-reason"), rest) == (501, "upgrade", b"")


async def test_connect_is_refused(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    client.send(b"CONNECT elsewhere.test:443 HTTP/1.1\r\nHost: elsewhere.test\r\n\r\n" + get("/flush_cache"))
    answer, rest = await client.refused()
    assert (answer.status, answer.header("x-warmroute-reason"), rest) == (405, "connect", b"")
    assert "GET" in (answer.header("allow") or "")
    assert not router.upstreams[0].connections


@pytest.mark.parametrize(
    "target",
    ["http://elsewhere.test/v1", "https://elsewhere.test", "http://u@127.0.0.1:{port}/", "http://127.0.0.1:1/"],
)
async def test_absolute_targets_elsewhere_are_misdirected(warm: Warm, target: str) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    client.send(get(target.format(port=router.port)))
    answer, _ = await client.refused()
    assert (answer.status, answer.header("x-warmroute-reason")) == (421, "foreign_host")
    assert not router.upstreams[0].connections


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://127.0.0.1:{port}/v1/models?a=1", "/v1/models?a=1"),
        ("HTTP://localhost:{port}", "/"),
        ("http://LOCALHOST:{port}//x", "//x"),
    ],
)
async def test_absolute_targets_here_are_served(warm: Warm, target: str, path: str) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    assert (await client.ask(get(target.format(port=router.port)))).status == 200
    assert (await router.upstreams[0].request()).target == path


@pytest.mark.parametrize("target", ["v1/models", "*", "ftp://127.0.0.1/", "file:///etc/passwd"])
async def test_other_targets_are_refused(warm: Warm, target: str) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    client.send(get(target))
    answer, _ = await client.refused()
    assert answer.status == 400
    assert not router.upstreams[0].connections


ADMIN_FORMS = [
    "/flush_cache",
    "/flush_cache/",
    "/flush_cache?timeout=5",
    "/flush_cache#x",
    "/flush_cache%0a",
    "/flush_cache%20",
    "/flush_cache;x=1",
    "//flush_cache",
    "/./flush_cache",
    "/v1/../flush_cache",
    "/x/y/../../flush_cache",
    "/%66lush_cache",
    "/%66%6c%75%73%68%5f%63%61%63%68%65",
    "/%2fflush_cache",
    "/%2e/flush_cache",
    "/x/%2e%2e/flush_cache",
    "/x%2f..%2fflush_cache",
    "/\\flush_cache",
    "/%5cflush_cache",
    "/../../flush_cache",
    "http://127.0.0.1:{port}/flush_cache",
    "http://127.0.0.1:{port}//flush%5Fcache",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/hicache/storage-backend",
    "/hicache/storage-backend/clear",
    "/pd_role_switch",
    "/set_internal_state",
    "/open_session",
    "/v1/load_lora_adapter",
]


@pytest.mark.parametrize("target", ADMIN_FORMS)
async def test_administration_is_forbidden_however_it_is_written(warm: Warm, target: str) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    for request in (get(target.format(port=router.port)), post(target.format(port=router.port))):
        answer = await client.ask(request)
        assert (answer.status, answer.header("x-warmroute-reason")) == (403, "admin_path")
    assert not router.upstreams[0].connections
    assert (await client.ask(get())).status == 200, "the connection serves on"


@pytest.mark.parametrize("target", ["/../other", "/..%2fother", "/a/../../other", "/%2e%2e/other", "/..\\other"])
async def test_no_path_climbs_out_of_a_replicas_base_path(warm: Warm, target: str) -> None:
    router = await warm(always(ok()))
    answer = await (await router.client()).ask(get(target))
    assert (answer.status, answer.header("x-warmroute-reason")) == (400, "target")
    assert not router.upstreams[0].connections


async def test_a_request_that_has_been_here_before_is_refused(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    assert (await client.ask(get("/v1/models", "Via: 1.1 another"))).status == 200
    theirs, ours = (await router.upstreams[0].request()).values("via")
    assert theirs == "1.1 another"
    answer, _ = await _refused(client, get("/v1/models", f"Via: {ours}"))
    assert answer == (508, "loop")


async def _refused(client: RawClient, request: bytes) -> tuple[tuple[int, str | None], bytes]:
    client.send(request)
    answer, rest = await client.refused()
    return (answer.status, answer.header("x-warmroute-reason")), rest


async def test_every_administrative_path_known_is_forbidden(warm: Warm) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    for path in sorted(ADMIN_PATHS):
        for prefix in ("", "v1/"):
            assert (await client.ask(post(f"/{prefix}{path}"))).status == 403
    assert not router.upstreams[0].connections


@pytest.mark.parametrize(
    "target", ["/flush_cache_", "/x/flush_cache", "/get_model_info", "/v1/responses/flush_cache/cancel"]
)
async def test_what_only_looks_like_it_is_served(warm: Warm, target: str) -> None:
    router = await warm(always(ok()))
    client = await router.client()
    assert (await client.ask(get(target))).status == 200


async def test_allowed_paths_go_through_and_others_stay_forbidden(warm: Warm) -> None:
    router = await warm(always(ok()), admin_paths={"allow": ["/flush_cache", "/hicache/storage-backend"]})
    client = await router.client()
    assert (await client.ask(post("/flush_cache?timeout=1"))).status == 200
    assert (await client.ask(get("/hicache/storage-backend"))).status == 200
    assert (await client.ask(post("/hicache/storage-backend/clear"))).status == 403
    assert (await client.ask(post("/abort_request"))).status == 403


async def test_all_administration_can_be_allowed(warm: Warm) -> None:
    router = await warm(always(ok()), admin_paths={"allow": ["*"]})
    client = await router.client()
    assert (await client.ask(post("/abort_request"))).status == 200


@pytest.mark.parametrize(
    "aside",
    [
        get("/v1/models", "x-session-affinity: s"),
        post("/v1/messages/count_tokens", b'{"messages": []}' * 100, "x-session-affinity: s"),
        post("/v1/embeddings", b'{"input": "x"}', "x-session-affinity: s"),
        post("/v1/embeddings", b'{"input": "x"}' * 9_000, "x-session-affinity: s"),
    ],
    ids=["list", "count", "embedding", "large embedding"],
)
async def test_what_is_no_turn_goes_home_and_leaves_no_mark_there(warm: Warm, aside: bytes) -> None:
    replicas = [always(ok(b'{"usage": {"prompt_tokens": 90000, "completion_tokens": 10}}')) for _ in range(3)]
    router = await warm(*replicas, policy="session_affinity")
    client = await router.client()
    turn = post("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}]}', "x-session-affinity: s")
    home = (await client.ask(turn)).header("x-warmroute-replica")
    (replica,) = [replica for replica in router.balancer.ready if replica.id == home]
    before = (len(replica.cache), replica.cache.held_tokens)
    assert before == (1, 90_010)
    assert (await client.ask(aside)).header("x-warmroute-replica") == home
    assert (len(replica.cache), replica.cache.held_tokens) == before
    assert [len(other.cache) for other in router.balancer.ready if other is not replica] == [0, 0]
