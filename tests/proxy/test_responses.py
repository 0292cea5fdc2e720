"""Requests that name a response of `/v1/responses` go to the replica that issued it: no other has it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from policies.responses import Responses
from policies.types import State
from router.metrics.exposition import Exposition
from router.sharing import Sharing
from router.store import MemoryStore
from sim.emulator import Emulator, EmulatorConfig
from tests.fakes.client import Answer, get, post
from tests.fakes.proxied import Proxied
from tests.fakes.upstream import Peer, ScriptedUpstream, always, ok
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm

RESPONSES = "/v1/responses"
CONFIG = EmulatorConfig(time_scale=0.0001, response_store=True, output_tokens=4)


@dataclass(slots=True)
class Said:
    """An answer, and who gave it."""

    status: int
    replica: str | None
    reason: str | None
    id: str


@pytest.fixture
async def engines() -> AsyncIterator[list[Emulator]]:
    """Four replicas that keep responses."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Emulator(CONFIG)) for _ in range(4)]


def urls(engines: list[Emulator]) -> list[str]:
    return [engine.url for engine in engines]


@asynccontextmanager
async def shared(store: MemoryStore, *routers: Proxied) -> AsyncIterator[list[Sharing]]:
    """The routers share this store meanwhile."""
    sharings = []
    for number, router in enumerate(routers):
        made = Sharing(store, router.balancer, name=str(number), wait_s=30, timeout_s=1, clock=time.monotonic)
        await made.start()
        router.proxy.sharing = made
        sharings.append(made)
    try:
        yield sharings
    finally:
        for router, sharing in zip(routers, sharings, strict=True):
            await sharing.stop()
            router.proxy.sharing = None


async def ask(router: Proxied, request: bytes) -> Answer:
    client = await router.client()
    client.send(request)
    return await client.answer()


def read(answer: Answer) -> Said:
    body = answer.body
    if answer.header("content-type") == "text/event-stream; charset=utf-8":
        body = body.split(b"\n\n")[0].split(b"data: ")[1]
    said = json.loads(body)
    response = said.get("response", said)
    replica, reason = answer.header("x-warmroute-replica"), answer.header("x-warmroute-reason")
    return Said(answer.status, replica, reason, response.get("id", ""))


async def respond(router: Proxied, *headers: str, previous: str = "", **fields: Any) -> Said:
    body = {"model": "emulated", "input": "hello"} | ({"previous_response_id": previous} if previous else {}) | fields
    return read(await ask(router, post(RESPONSES, json.dumps(body).encode(), *headers)))


async def by_id(router: Proxied, response_id: str) -> Said:
    return read(await ask(router, get(f"{RESPONSES}/{response_id}")))


async def cancel(router: Proxied, response_id: str) -> Said:
    return read(await ask(router, post(f"{RESPONSES}/{response_id}/cancel", b"")))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", ["round_robin", "random", "session_affinity", "rendezvous"])
async def test_a_follow_up_goes_to_the_issuer(warm: Warm, engines: list[Emulator], policy: str, stream: bool) -> None:
    """Whatever the policy, and although every turn says to be of another session."""
    router = await warm(*urls(engines), policy=policy)
    first = [await respond(router, f"x-session-id: {number}", stream=stream) for number in range(6)]
    assert len({said.replica for said in first}) > 1
    for turn in range(3):
        for number, said in enumerate(first):
            header = f"x-session-id: other {turn} {number}"
            following = await respond(router, header, previous=said.id, stream=stream)
            assert (following.status, following.replica, following.reason) == (200, said.replica, "home")
            first[number] = following


async def test_asking_for_it_and_cancelling_it_go_there(warm: Warm, engines: list[Emulator]) -> None:
    router = await warm(*urls(engines))
    for _ in range(6):
        said = await respond(router, background=True)
        for asked in (await by_id(router, said.id), await cancel(router, said.id)):
            assert asked == Said(200, said.replica, "home", said.id)


async def test_an_unknown_id_goes_the_ordinary_way(warm: Warm, engines: list[Emulator]) -> None:
    router = await warm(*urls(engines))
    said = [await respond(router, previous="resp_unknown") for _ in range(4)]
    said += [await by_id(router, "resp_unknown") for _ in range(4)]
    assert [(each.status, each.reason) for each in said] == [(404, "rotation")] * 8
    assert len({each.replica for each in said}) == 4


async def test_what_is_not_kept_is_not_remembered(warm: Warm, engines: list[Emulator]) -> None:
    router = await warm(*urls(engines))
    await respond(router, store=False)
    await respond(router, store=False, stream=True)
    await ask(router, post("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}]}'))
    assert len(router.balancer.responses) == 0
    for replica in router.balancer.replicas.values():
        replica.keeps_responses = False
    await respond(router)
    assert len(router.balancer.responses) == 0
    assert (await respond(router, previous="resp_1", store=False)).status == 404


async def test_an_issuer_that_left_is_not_missed(warm: Warm, engines: list[Emulator]) -> None:
    router = await warm(*urls(engines))
    said = await respond(router)
    router.balancer.leave(str(said.replica), router.proxy.clock())
    assert [(await respond(router, previous=said.id)).status, (await by_id(router, said.id)).status] == [404, 404]


@pytest.mark.parametrize("state", list(State))
async def test_by_the_state_of_the_issuer(warm: Warm, engines: list[Emulator], state: State) -> None:
    """One that drains is asked for what it has, and gets no turn; one that is out gets nothing."""
    router = await warm(*urls(engines))
    said = await respond(router)
    router.balancer.set_state(router.replica(str(said.replica)), state, router.proxy.clock())
    gets_turns = state in (State.READY, State.FINISHING, State.HALF_OPEN)
    following = await respond(router, previous=said.id)
    assert (following.replica == said.replica, following.status) == (gets_turns, 200 if gets_turns else 404)
    asked = await by_id(router, said.id)
    assert asked.status == (404 if state is State.EJECTED else 200)


RESPONSE = json.dumps({"id": "resp_1", "object": "response", "store": True}).encode()


@pytest.mark.parametrize("status", [503, 0])
async def test_a_failure_of_the_issuer_is_told_and_not_covered_by_anothers_404(warm: Warm, status: int) -> None:
    """Another replica would say that there is no such response, which is not so."""
    issuer = ScriptedUpstream(always(ok(RESPONSE, "Content-Type: application/json")))
    await issuer.start()
    router = await warm(issuer, always(ok(b"{}", status="404 Not Found")))
    assert (await respond(router)).replica == "a"
    busy = always(ok(b"{}", status="503 Service Unavailable"))
    issuer.script = busy if status else dying_at_once
    for peer in issuer.connections:
        peer.transport.abort()
    for request in (post(RESPONSES, b'{"input": "x", "previous_response_id": "resp_1"}'), get(f"{RESPONSES}/resp_1")):
        answer = await ask(router, request)
        assert answer.status == 503
        assert answer.header("x-warmroute-reason") == ("queue_full" if status else "tries_exhausted")
        assert answer.header("retry-after")
    assert not router.upstreams[1].requests


async def dying_at_once(peer: Peer) -> None:
    await peer.request()


async def test_a_full_issuer_is_neither_passed_by_nor_overrun(warm: Warm) -> None:
    """Others have room: nobody waits for it, so that it must not wait either, lest it hold up those behind it."""

    async def holding(peer: Peer) -> None:
        await peer.request()
        peer.send(ok(RESPONSE, "Content-Type: application/json"))
        await peer.request()
        await peer.end()

    router = await warm(holding, always(ok(b"{}")), admission={"max_running_per_replica": 1})
    assert (await respond(router)).replica == "a"
    router.balancer.set_state(router.replica("b"), State.EJECTED, router.proxy.clock())
    busy = await router.client()
    busy.send(post(RESPONSES, b'{"input": "x"}'))
    await eventually(lambda: router.replica("a").in_flight == 1)
    router.balancer.set_state(router.replica("b"), State.READY, router.proxy.clock())
    refused = await ask(router, post(RESPONSES, b'{"input": "x", "previous_response_id": "resp_1"}'))
    assert (refused.status, refused.header("x-warmroute-reason")) == (503, "wait_too_long")
    assert (await ask(router, post(RESPONSES, b'{"input": "x"}'))).header("x-warmroute-replica") == "b"
    cancelled = await ask(router, post(f"{RESPONSES}/resp_1/cancel", b"{}"))  # is no work, though it has a body
    assert (cancelled.status, cancelled.header("x-warmroute-replica")) == (200, "a")


async def test_they_are_bounded_and_the_one_used_last_stays(warm: Warm, engines: list[Emulator]) -> None:
    router = await warm(*urls(engines))
    router.balancer.responses.max_responses = 3
    kept = await respond(router)
    for _ in range(10):
        await respond(router)
        assert (await by_id(router, kept.id)).replica == kept.replica
    assert len(router.balancer.responses) == 3
    assert b"\nwarmroute_responses 3.0\n" in await Exposition(router.proxy.metrics).text()


async def test_no_id_is_written_anywhere(warm: Warm, engines: list[Emulator]) -> None:
    """Who has the id of a response can read it."""
    router = await warm(*urls(engines))
    store = MemoryStore(time.monotonic)
    async with shared(store, router):
        said = await respond(router)
        await respond(router, previous=said.id)
        await by_id(router, said.id)
        await cancel(router, said.id)
        await by_id(router, "resp_unknown")
        heard = await store.hear("0", 30)
        await eventually(lambda: len(store._sessions) >= 2)
    lines = await router.lines(5)
    assert [line["path"] for line in lines[2:4]] == [f"{RESPONSES}/{{id}}", f"{RESPONSES}/{{id}}/cancel"]
    written = repr((lines, heard, store._sessions, list(router.balancer.responses.lately(0))))
    assert "response:" in written
    assert "resp_" not in written


@pytest.mark.parametrize(
    "path",
    [
        f"{RESPONSES}/ID",
        f"{RESPONSES}/ID/cancel",
        f"{RESPONSES}/ID/x/ID",
        "/v1/%72esponses/ID",
        "/v1/responses%2FID",
        "/v1//responses//ID",
        "/v1/responses/./ID",
        "/responses/x/v1/responses/ID",
        "/v1/x/../responses/ID",
    ],
)
async def test_however_its_path_is_written_no_id_is_logged(warm: Warm, path: str) -> None:
    """A server before the engine may fold slashes, and any takes escapes for what they stand for."""
    router = await warm(always(ok(b"{}")))
    name = "resp_0123456789abcdef"
    await ask(router, get(path.replace("ID", name)))
    (line,) = await router.lines()
    assert name not in repr(line)
    assert "{id}" in line["path"]


@pytest.mark.parametrize("path", [RESPONSES, f"{RESPONSES}/", "/v1/models", "/v1/%72esponses", "/x%2Fy"])
async def test_a_path_without_an_id_is_logged_as_it_is(warm: Warm, path: str) -> None:
    router = await warm(always(ok(b"{}")))
    await ask(router, get(path))
    assert [line["path"] for line in await router.lines()] == [path]


async def test_several_routers_know_each_others(warm: Warm, engines: list[Emulator]) -> None:
    one, other = [await warm(*urls(engines)) for _ in range(2)]
    async with shared(MemoryStore(time.monotonic), one, other) as sharings:
        said = [await respond(one) for _ in range(4)]
        await eventually(lambda: len(other.balancer.responses) == 4, "the other has heard of all")
        for each in said:
            assert (await respond(other, previous=each.id)).replica == each.replica
        # Who has not heard asks the store.
        other.balancer.responses = Responses(100, 3600)
        for each in said:
            assert (await by_id(other, each.id)).replica == each.replica
        assert sharings[1].claims["adopted"] == 4
        await eventually(lambda: len(one.balancer.responses) == 8, "four more, which the other was given")
        assert [(await by_id(router, "resp_unknown")).status for router in (other, one)] == [404, 404]
        assert len(one.balancer.responses) == 8, "an id that nobody knows teaches nothing"


async def test_a_store_that_forgot_is_told_again(warm: Warm, engines: list[Emulator]) -> None:
    router = await warm(*urls(engines))
    store = MemoryStore(time.monotonic)
    async with shared(store, router):
        await respond(router)
        (key,) = (key for key, _ in router.balancer.responses.lately(0))
        await eventually(lambda: key in store._sessions)
        store._sessions.clear()
        store._used.clear()
        store._epoch = "another"
        await eventually(lambda: key in store._sessions, "it is stored again")
