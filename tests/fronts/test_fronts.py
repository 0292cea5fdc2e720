"""The proxies of deploy/fronts before real routers and emulated replicas, as docs/operations.md tells of them.

Three routers that share nothing; which of them a request went through is in the answer. One is killed, started again
and drained, while sessions go on asking.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from router.identity import DEFAULT_RULES, HeaderRule
from tests.fakes.client import RawClient, post
from tests.fakes.gated import Gated
from tests.fakes.process import Process
from tests.fakes.upstream import Peer, RawRequest, ScriptedUpstream, always, ok
from tests.fakes.waiting import until
from tests.fakes.wire import eventually
from tests.fronts.front import FILES, LIMIT_S, ROUTERS, Front, Ports, Router

pytestmark = pytest.mark.fronts

HEADERS = [rule.header for rule in DEFAULT_RULES if isinstance(rule, HeaderRule)]
SESSIONS = [f"session-{n}" for n in range(60)]
AT_ONCE = 8
"""Requests in flight at once."""
MOVED = {"haproxy": 0, "nginx": 0, "envoy": 2}
"""How many of the other routers' sessions may move when one leaves. A ring moves none; Maglev's table, as in Envoy,
may differ in a few more places than those of the router that is gone. Envoy's own ring moves about 4 of these."""


@dataclass
class Behind:
    """A front, and the routers behind it in the order of their addresses."""

    front: Front
    routers: list[Router]
    client: httpx.AsyncClient

    async def ask(self, headers: dict[str, str], client: httpx.AsyncClient | None = None) -> str:
        """The router that a request came through; the status where it was not answered."""
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        answer = await (client or self.client).post(f"{self.front.url}/v1/chat/completions", json=body, headers=headers)
        if answer.status_code != 200:
            return str(answer.status_code)
        return answer.headers["x-warmroute-replica"].partition("-")[0]

    async def ask_all(self, asked: list[dict[str, str]]) -> list[str]:
        """The same of many, some at a time."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one(headers: dict[str, str]) -> str:
            async with places:
                return await self.ask(headers)

        return await asyncio.gather(*map(one, asked))

    async def owners(self) -> dict[str, str]:
        """A turn of each session: its router."""
        return dict(zip(SESSIONS, await self.ask_all([{"x-session-affinity": s} for s in SESSIONS]), strict=True))

    async def become(self, holds: Callable[[dict[str, str]], bool], what: str, turns: list[dict[str, str]]) -> None:
        """Let all sessions take turns until it holds. All turns taken are added to `turns`."""

        async def turn() -> dict[str, str]:
            turns.append(await self.owners())
            return turns[-1]

        await until(turn, holds, LIMIT_S, what)

    def router(self, name: str) -> Router:
        return next(router for router in self.routers if router.name == name)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ports, list[Router]]]:
    """Three routers over the same two emulated replicas."""
    folder, ports, routers = tmp_path_factory.mktemp("routers"), Ports(), []
    command = [sys.executable, "-m", "sim.emulator", "--port", "0", "--port", "0", "--time-scale", "0.001"]
    with Process(command, folder / "emulator.log") as emulator:
        emulator.wait_line(lambda _: len(emulator.lines) >= 2, LIMIT_S)
        urls = [f"http://127.0.0.1:{line.split()[1]}" for line in emulator.lines]
        try:
            routers = [Router(number + 1, ports, urls, folder) for number in range(ROUTERS)]
            for router in routers:
                router.wait_ready()
            yield ports, routers
        finally:
            for router in routers:
                router.kill()


@pytest.fixture(scope="module", params=FILES)
def front(
    request: pytest.FixtureRequest, places: tuple[Ports, list[Router]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    with Front(request.param, places[0], tmp_path_factory.mktemp(request.param)) as front:
        front.wait_serving()
        yield front


@pytest.fixture
async def behind(front: Front, places: tuple[Ports, list[Router]]) -> AsyncIterator[Behind]:
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
        behind = Behind(front, places[1], client)
        names = {router.name for router in behind.routers}
        await behind.become(lambda owners: set(owners.values()) == names, "all three routers serve", [])
        yield behind


async def test_every_turn_of_a_session_reaches_the_same_router_whatever_header_names_it(behind: Behind) -> None:
    asked = [{header: f"{header}-{n}"} for header in HEADERS for n in range(20)]
    first = await behind.ask_all(asked)
    assert await behind.ask_all(asked) == first
    for number, header in enumerate(HEADERS):
        routers = first[number * 20 : number * 20 + 20]
        assert len(set(routers)) == ROUTERS, f"sessions by {header} are spread: {routers}"


async def test_the_first_header_of_the_rules_decides(behind: Behind) -> None:
    for earlier, later in pairwise(HEADERS):
        if (earlier, later) == ("session-id", "session_id") and behind.front.name == "nginx":
            continue  # one and the same to nginx
        routers = await behind.ask_all([{later: f"other-{n}", earlier: "the session"} for n in range(20)])
        assert len(set(routers)) == 1, f"{earlier} goes before {later}: {routers}"


async def test_subagents_go_where_their_session_goes(behind: Behind) -> None:
    session = {"x-claude-code-session-id": "the session"}
    agents = [{**session, "x-claude-code-agent-id": f"agent-{n}"} for n in range(20)]
    assert len(set(await behind.ask_all([session, *agents]))) == 1


async def test_without_a_session_the_clients_address_decides(behind: Behind) -> None:
    found: list[str] = []
    for n in range(20):
        transport = httpx.AsyncHTTPTransport(local_address=f"127.0.1.{n + 1}")
        async with httpx.AsyncClient(transport=transport, timeout=LIMIT_S) as client:
            routers = {await behind.ask({"x-request-id": f"{n}-{turn}"}, client) for turn in range(3)}
        assert len(routers) == 1
        found += routers
    assert len(set(found)) == ROUTERS, "addresses are spread"


async def test_a_killed_router_costs_its_own_sessions_their_place_and_they_come_back(behind: Behind) -> None:
    before = await behind.owners()
    victim = behind.router(before[SESSIONS[0]])
    left = {router.name for router in behind.routers} - {victim.name}
    turns: list[dict[str, str]] = []
    under_way = asyncio.create_task(behind.become(lambda owners: set(owners.values()) == left, "all are served", turns))
    await eventually(lambda: turns, "a turn while all is well")
    await asyncio.to_thread(victim.kill)
    await under_way
    failed = [turn[s] for turn in turns for s in SESSIONS if not turn[s].startswith("router")]
    print(f"{behind.front.name}: of {len(turns) * len(SESSIONS)} requests failed: {failed}")
    assert set(failed) <= {"502", "503"}
    assert len(failed) <= 2 * AT_ONCE, "only what was under way when it was killed, or raced with its end"
    for _ in range(5):
        turns.append(await behind.owners())
        assert set(turns[-1].values()) == left, "nothing fails once it was noticed"
    for turn in turns:
        moved = [s for s in SESSIONS if before[s] != victim.name and turn[s] != before[s]]
        assert len(moved) <= MOVED[behind.front.name], f"of other routers: {moved}"

    victim.start()
    await asyncio.to_thread(victim.wait_ready)
    back: list[dict[str, str]] = []
    await behind.become(lambda owners: owners == before, "its sessions are back", back)
    assert all(router.startswith("router") for turn in back for router in turn.values()), "none of it costs a request"


async def test_a_router_that_is_gone_costs_no_request(behind: Behind) -> None:
    before = await behind.owners()
    victim = behind.router(before[SESSIONS[0]])
    await asyncio.to_thread(victim.kill)
    first = await behind.owners()  # before any probe can have found out
    assert all(router.startswith("router") for router in first.values()), first
    victim.start()
    await asyncio.to_thread(victim.wait_ready)
    await behind.become(lambda owners: owners == before, "its sessions are back", [])


async def test_a_router_taken_out_of_the_file_moves_its_own_sessions_only(behind: Behind, tmp_path: Path) -> None:
    before = await behind.owners()
    names = {router.name for router in behind.routers}
    with Front(behind.front.name, behind.front.ports, tmp_path, without=ROUTERS) as front:
        front.wait_serving()
        fewer = Behind(front, behind.routers, behind.client)
        gone = f"router{ROUTERS}"
        await fewer.become(lambda owners: set(owners.values()) == names - {gone}, "the others serve", [])
        after = await fewer.owners()
    moved = [session for session in SESSIONS if before[session] not in (gone, after[session])]
    assert len(moved) <= MOVED[front.name], moved


async def test_a_draining_router_is_left_before_it_closes(behind: Behind) -> None:
    if behind.front.name == "nginx":
        pytest.skip("nginx asks no health")
    before = await behind.owners()
    victim = behind.router(before[SESSIONS[0]])
    victim.drain()
    turns: list[dict[str, str]] = []
    await behind.become(lambda owners: victim.name not in owners.values(), "it is left", turns)
    assert all(router.startswith("router") for turn in turns for router in turn.values()), "no request fails"
    await asyncio.to_thread(victim.kill)
    victim.start()
    await asyncio.to_thread(victim.wait_ready)
    await behind.become(lambda owners: owners == before, "its sessions are back", [])


# Bytes: one router, the other two gone


@dataclass
class Relayed:
    """A replica under the test's control behind one router behind a front."""

    front: Front
    router: Router
    gated: Gated


@pytest.fixture(params=FILES)
async def relayed(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Relayed]:
    gated, ports = Gated(), Ports()
    await gated.upstream.start()
    router = Router(1, ports, [gated.upstream.url], tmp_path)
    try:
        await asyncio.to_thread(router.wait_ready)
        with Front(request.param, ports, tmp_path) as front:
            await _found(front)
            yield Relayed(front, router, gated)
    finally:
        gated.finish.set()
        await asyncio.to_thread(router.kill)
        await gated.upstream.stop()


def _posts(gated: Gated) -> list[RawRequest]:
    """What clients sent, without the router's own questions."""
    return [request for request in gated.upstream.requests if request.method == "POST"]


async def _found(front: Front) -> None:
    """Wait until the front sends all to the one place that answers, and has given the two others up."""
    async with httpx.AsyncClient(trust_env=False) as client:

        async def statuses() -> set[int]:
            with suppress(httpx.TransportError):
                return {(await client.get(front.url, headers={"session-id": s})).status_code for s in SESSIONS[:20]}
            return set()

        await until(statuses, lambda found: len(found) == 1 and found < {200, 404}, LIMIT_S, f"{front.name} serves")


@asynccontextmanager
async def connected(front: Front) -> AsyncIterator[RawClient]:
    """A client's connection to the front."""
    client = await RawClient.connect(front.port)
    try:
        yield client
    finally:
        client.transport.abort()
        await client.end()


async def test_a_stream_passes_as_it_comes(relayed: Relayed) -> None:
    relayed.gated.finish.clear()
    async with connected(relayed.front) as client:
        client.send(post())
        answer = await client.head()
        assert (answer.status, answer.header("content-type")) == (200, "text/event-stream; charset=utf-8")
        await client.up_to(b'data: {"id":"1"}\n\n')  # while the replica waits
        relayed.gated.finish.set()
        assert b'"usage"' in await client.up_to(b"data: [DONE]\n\n")
        await client.up_to(b"0\r\n\r\n")


async def test_a_stream_of_a_killed_router_does_not_end_as_if_whole(relayed: Relayed) -> None:
    relayed.gated.finish.clear()
    async with connected(relayed.front) as client:
        client.send(post())
        await client.up_to(b'data: {"id":"1"}\n\n')
        await asyncio.to_thread(relayed.router.kill)
        await client.end()
        assert b"0\r\n\r\n" not in bytes(client.buffer)


@pytest.mark.parametrize("size", [5_000_000, 64 * 2**20])
async def test_a_large_body_passes(size: int, relayed: Relayed) -> None:
    body = b'{"messages": [{"role": "user", "content": "%b"}]}'
    body %= b"x" * (size - len(body) + 2)
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
        answer = await client.post(f"{relayed.front.url}/v1/chat/completions", content=body)
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    (request,) = _posts(relayed.gated)
    assert len(body) == size
    assert request.body == body


async def test_the_replica_is_told_who_asked(relayed: Relayed) -> None:
    sent = {"x-forwarded-for": "203.0.113.9", "x-request-id": "mine", "host": "api.example", "session_id": "s"}
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
        url = f"{relayed.front.url}/v1/chat/completions"
        for headers in ({}, sent):
            assert (await client.post(url, json={}, headers=headers)).status_code == 200
    bare, full = _posts(relayed.gated)
    # The client, the front; for a client on its own machine Envoy says the machine's address instead.
    hops = r"[\d.]+, 127\.0\.0\.1" if relayed.front.name == "envoy" else r"127\.0\.0\.1, 127\.0\.0\.1"
    assert re.fullmatch(hops, bare.header("x-forwarded-for") or "")
    assert re.fullmatch(rf"203\.0\.113\.9, ?{hops}", full.header("x-forwarded-for") or "")
    assert full.header("x-forwarded-proto") == "http"
    assert full.header("x-forwarded-host") == "api.example"
    assert full.header("x-request-id") == "mine"
    assert full.header("session_id") == "s", "underscores pass"


@pytest.mark.parametrize("name", FILES)
async def test_a_request_passes_as_it_comes(name: str, tmp_path: Path) -> None:
    """Before a stand-in, as a router takes a request whole before it goes on."""
    begun = asyncio.Event()

    async def script(peer: Peer) -> None:
        request = await peer.head()
        if request.method == "POST":
            await peer.exactly(100_000)
            begun.set()
            await peer.exactly(int(request.header("content-length") or 0) - 100_000)
        peer.send(ok())

    ports = Ports()
    stand_in, admin = ScriptedUpstream(script), ScriptedUpstream(always(ok()))
    stand_in.port, admin.port = ports.data, ports.admin
    await stand_in.start()
    await admin.start()
    with Front(name, ports, tmp_path) as front:
        await _found(front)
        async with connected(front) as client:
            request = post("/v1/chat/completions", b"x" * 5_000_000)
            client.send(request[:200_000])
            async with asyncio.timeout(LIMIT_S):
                await begun.wait()
            client.send(request[200_000:])
            assert (await client.answer()).status == 200
    await stand_in.stop()
    await admin.stop()
