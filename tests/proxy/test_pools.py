"""Pools in the data plane: a request never leaves its own, and without pools nobody looks for one."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from policies.admission.gate import STEPS
from policies.types import Replica
from router.identity import model
from router.pools import Pools
from router.proxy import exchange
from router.settings import ModelsSettings
from tests.fakes.client import get, post
from tests.fakes.proxied import Proxied
from tests.fakes.upstream import REFUSING, Peer, Script, always, ok
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm

POOLS = [{"name": "large", "models": ["glm*"]}, {"name": "small", "models": ["*haiku"]}]


async def pooled(warm: Warm, *scripts: Script, small: str) -> Proxied:
    """With the replicas of those names in the pool `small`."""
    router = await warm(*scripts, pools=POOLS)
    for name in small:
        old = router.balancer.leave(name, 0.0)
        router.balancer.join(Replica(name, pool="small", address=old.address), 0.0)
    return router


def asking(name: str, filler: str = "", *headers: str) -> bytes:
    body = {"messages": [{"role": "user", "content": filler}], "model": name}
    return post("/v1/chat/completions", json.dumps(body).encode(), *headers)


async def test_a_request_that_fails_goes_on_within_its_pool(warm: Warm) -> None:
    router = await pooled(warm, always(ok(b"a")), REFUSING, always(ok(b"c")), REFUSING, small="bc")
    client = await router.client()
    for _ in range(4):
        answer = await client.ask(asking("haiku"))
        assert (answer.status, answer.header("x-warmroute-replica")) == (200, "c")
    assert ("b", "connect") in router.health.bad


async def test_when_all_of_its_pool_fail_it_is_refused_though_others_are_well(warm: Warm) -> None:
    router = await pooled(warm, always(ok(b"a")), REFUSING, REFUSING, small="bc")
    client = await router.client()
    answer = await client.ask(asking("haiku"))
    assert (answer.status, answer.header("x-warmroute-reason")) == (503, "all_failed")
    assert router.upstreams[0].requests == []
    assert (await client.ask(asking("glm-5"))).body == b"a"


async def test_a_request_that_is_sent_again_goes_to_the_pool_that_is_its_own_by_then(warm: Warm) -> None:
    """Pools are renamed and change places while it is under way; that of its model is the first one now."""
    changed = asyncio.Event()

    async def dying(peer: Peer) -> None:
        await peer.request()
        await changed.wait()
        peer.transport.abort()

    router = await pooled(warm, always(ok(b"a")), dying, small="b")
    client = await router.client()
    client.send(asking("haiku"))
    await eventually(lambda: router.balancer.replicas["b"].in_flight == 1)
    a, b = (router.balancer.leave(name, 1.0) for name in "ab")
    router.balancer.join(Replica("b", address=a.address), 1.0)
    router.balancer.join(Replica("a", pool="large", address=b.address), 1.0)
    router.proxy.choose_pools(Pools([ModelsSettings.model_validate(each) for each in POOLS[::-1]]))
    changed.set()
    answer = await client.answer()
    assert (answer.body, answer.header("x-warmroute-replica")) == (b"a", "b")
    assert [(line["pool"], line["tries"]) for line in await router.lines()] == [("small", 2)]


async def test_a_gate_that_holds_back_one_model_does_not_hold_back_the_next_under_its_name(warm: Warm) -> None:
    router = await pooled(warm, always(ok(b"a")), always(ok(b"b")), small="b")
    other = await router.client()
    assert (await other.ask(asking("glm", "", "x-session-affinity: another"))).body == b"a"
    gate, now = router.proxy.room.admission.gate, router.proxy.clock()
    gate.active, gate._crowded_at = True, now
    gate.tenures.seek()
    assert not gate.tenures.find(STEPS, now)
    assert gate.admitted == 1
    await router.passed(0)  # a look at it
    held = await router.client()
    held.send(asking("glm", "", "x-session-affinity: s"))
    await eventually(lambda: gate.held == 1)
    a, b = (router.balancer.leave(name, now) for name in "ab")
    router.balancer.join(Replica("a", pool="large", address=a.address), now)
    router.balancer.join(Replica("b", address=b.address), now)
    router.proxy.choose_pools(Pools([ModelsSettings.model_validate(each) for each in POOLS[::-1]]))
    client = await router.client()
    assert (await client.ask(asking("haiku", "", "x-session-affinity: s"))).body == b"b"
    assert (await held.answer()).body == b"a"
    assert gate.held == 0


async def test_the_log_names_the_pool_that_a_stream_was_begun_in(warm: Warm) -> None:
    changed = asyncio.Event()

    async def slow(peer: Peer) -> None:
        await peer.request()
        await changed.wait()
        peer.send(ok(b"a"))

    router = await pooled(warm, slow, always(ok(b"b")), small="b")
    client = await router.client()
    client.send(asking("glm"))
    await eventually(lambda: router.replica("a").in_flight == 1)
    router.proxy.choose_pools(Pools([ModelsSettings.model_validate(each) for each in POOLS[::-1]]))
    changed.set()
    assert (await client.answer()).body == b"a"
    assert [line["pool"] for line in await router.lines()] == ["large"]


@pytest.mark.parametrize("filler", ["", "x" * 500_000], ids=["small", "large"])
async def test_a_body_in_many_pieces_is_read_whole(warm: Warm, filler: str) -> None:
    router = await pooled(warm, always(ok(b"a")), always(ok(b"b")), small="b")
    client = await router.client()
    body = json.dumps({"messages": [{"content": filler}], "model": "haiku", "tools": ["y" * 2000]}).encode()
    pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
    assert (await client.ask(post(chunks=pieces))).body == b"b"
    assert router.upstreams[1].requests[0].body == body


async def test_what_cannot_be_read_goes_to_the_first_pool(warm: Warm) -> None:
    router = await pooled(warm, always(ok(b"a")), always(ok(b"b")), small="b")
    client = await router.client()
    body = json.dumps({"model": "haiku"}).encode()
    packed = post("/v1/chat/completions", gzip.compress(body), "content-encoding: gzip")
    plain = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )
    for request in (get("/v1/models"), packed, plain, post(body=b"{"), post(body=b'{"model": 7}')):
        assert (await client.ask(request)).body == b"a"
    assert (await client.ask(post(body=body))).body == b"b"


async def test_each_line_of_the_log_names_the_pool(warm: Warm) -> None:
    router = await pooled(warm, always(ok(b"a")), always(ok(b"b")), small="b")
    client = await router.client()
    for name in ("haiku", "glm"):
        await client.ask(asking(name))
    await client.ask(asking("glm", "", "x-warmroute-pool: other"))
    assert [line.get("pool") for line in await router.lines(3)] == ["small", "large", None], "the last got into none"


async def test_without_pools_no_body_is_looked_at_for_one(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where there is one that has a name."""
    read: list[bytes] = []
    monkeypatch.setattr(exchange, "model_of", lambda body: read.append(body) or model.model_of(body))
    for pools in ([], POOLS[:1]):
        router = await warm(always(ok(b"a")), pools=pools)
        client = await router.client()
        assert (await client.ask(asking("haiku", "", "x-warmroute-pool: other"))).status == 200
        assert router.proxy.pools is None
    assert read == []
    router = await pooled(warm, always(ok(b"a")), always(ok(b"b")), small="b")
    client = await router.client()
    assert (await client.ask(asking("haiku"))).body == b"b"
    assert len(read) == 1, "it would be seen"
