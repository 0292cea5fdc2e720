"""A router process that finds its replicas by a Kubernetes API server: what sessions and requests see of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.discovery.cluster import Cluster
from tests.discovery.nameserver import Nameserver
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S, eventually
from tests.sharing.several import Load, Session, asked


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path) as cluster:
        yield cluster


async def test_pods_come_and_go_and_sessions_stay_while_they_can(cluster: Cluster) -> None:
    await cluster.run("a", "b")
    await cluster.serve(wait_for="/livez")
    async with httpx.AsyncClient(base_url=cluster.router.admin_url, trust_env=False, timeout=LIMIT_S) as admin:
        assert (await admin.get("/readyz")).status_code == 503, "it starts without any"
    cluster.tell("a")
    fleet = await cluster.states(a="ready")
    assert (fleet["a"]["source"], fleet["a"]["url"]) == (cluster.source, f"http://127.0.0.1:{cluster.ports['a']}")
    session, other = Session("one"), Session("other")
    await session.turn(cluster.router.port)
    cluster.tell("b")
    await cluster.states(a="ready", b="ready")
    cluster.tell("a", ready=False, serving=True, terminating=True)
    await cluster.states(a="finishing", b="ready")
    await session.turn(cluster.router.port)
    assert (session.home, session.warm()) == ("a", True), "it lives there"
    await other.turn(cluster.router.port)
    assert other.home == "b", "what is new does not go there"
    cluster.withdraw("a")
    await cluster.states(b="ready")
    await session.turn(cluster.router.port)
    assert session.home == "b"


async def test_another_pod_behind_the_same_address_is_another_replica(cluster: Cluster) -> None:
    """It has none of the sessions of the one before, nor its drains."""
    await cluster.run("a", "b")
    cluster.tell("a", uid="u1")
    await cluster.serve()
    session = Session("one")
    await session.turn(cluster.router.port)
    assert [home["tier"] for home in await _homes(cluster, "one")] == ["gpu"]
    cluster.tell("a", uid="u2")
    await until(cluster.fleet, lambda fleet: fleet["a"]["served"] == 0, LIMIT_S, "it is another one")
    assert [home["tier"] for home in await _homes(cluster, "one")] == [None], "nothing of it is there"
    cluster.api.put(*_moved(cluster, "b", at="a"))
    await cluster.states(b="ready")
    await session.turn(cluster.router.port)
    assert session.home == "b", "another name for the same address"


async def _homes(cluster: Cluster, session: str) -> list[dict[str, object]]:
    return list((await asked(cluster.router, "GET", f"/sessions/{session}"))["homes"])


def _moved(cluster: Cluster, name: str, *, at: str) -> list[dict[str, object]]:
    """One pod in the place of another, in the same slice and by one write."""
    cluster.tell(at)
    stored = cluster.api.stored(f"sglang-{at}")
    endpoint = stored["endpoints"][0] | {"targetRef": {"kind": "Pod", "name": name, "uid": f"uid-of-{name}"}}
    return [stored | {"endpoints": [endpoint]}]


async def test_without_an_api_server_the_fleet_stays_as_it_was(cluster: Cluster) -> None:
    await cluster.run("a", "b")
    cluster.tell("a")
    cluster.tell("b")
    await cluster.serve()
    sessions = [Session(f"s {number}") for number in range(4)]
    load = Load(sessions, lambda _: cluster.router.port)
    await load.turns(1)
    await cluster.api.stop()
    await until(cluster.seen, lambda seen: not seen["up"], LIMIT_S, "it is seen")
    await load.turns(2)
    async with httpx.AsyncClient(base_url=cluster.router.admin_url, trust_env=False, timeout=LIMIT_S) as admin:
        assert (await admin.get("/readyz")).status_code == 200
        metrics = (await admin.get("/metrics")).text
        assert f'warmroute_discovery_up{{source="{cluster.source}"}} 0.0' in metrics
        assert f'warmroute_discovery_replicas{{source="{cluster.source}"}} 2.0' in metrics
    assert set(await cluster.fleet()) == {"a", "b"}
    cluster.withdraw("b")
    await cluster.api.start()
    await cluster.states(a="ready")
    await load.turns(2)
    await load.end()
    assert not load.broken
    assert all(" b to " in f" {moved.split(': ')[1]}" for moved in load.moved), load.moved
    await until(cluster.seen, lambda seen: bool(seen["up"]), LIMIT_S, "a watch has held")
    log = cluster.router.log.read_text()
    assert "the 2 replicas that it told last stay" in log
    assert log.count("cannot be heard: All connection attempts failed") == 1, "once, however often it is asked"
    assert log.count("answers again") == 1


async def test_a_rollout_fails_no_request_and_moves_only_the_sessions_that_must(cluster: Cluster) -> None:
    """One pod after the other is replaced, as a Deployment does it, while all sessions talk."""
    old, new = ["p-0", "p-1", "p-2"], ["q-0", "q-1", "q-2"]
    await cluster.run(*old)
    for name in old:
        cluster.tell(name)
    await cluster.serve()
    await cluster.states(p_0="ready", p_1="ready", p_2="ready")
    sessions = [Session(f"session {number}") for number in range(6)]
    load = Load(sessions, lambda _: cluster.router.port)
    await load.turns(2)
    for goes, comes in zip(old, new, strict=True):
        await cluster.run(comes)
        cluster.tell(comes, ready=False)
        cluster.tell(comes)
        await until(cluster.fleet, lambda fleet, it=comes: it in fleet, LIMIT_S, f"{comes} has joined")
        cluster.tell(goes, ready=False, serving=True, terminating=True)
        await cluster.end(goes)
        cluster.withdraw(goes)
        await until(cluster.fleet, lambda fleet, it=goes: it not in fleet, LIMIT_S, f"{goes} has left")
        await load.turns(1)
    await load.end()
    assert not load.broken
    assert set(await cluster.fleet()) == set(new)
    came_from = {moved.split(": ")[1].split(" to ")[0] for moved in load.moved}
    assert came_from <= set(old), load.moved
    assert all(session.home in new for session in sessions)


async def test_replicas_by_dns_and_in_a_file(cluster: Cluster) -> None:
    await cluster.run("a", "b")
    server = Nameserver()
    await server.start()
    try:
        server.give("sglang.example", "A", "127.0.0.1")
        listed = cluster.write("replicas.yaml", [{"id": "b", "url": f"http://127.0.0.1:{cluster.ports['b']}"}])
        by_name = {"name": "sglang.example", "port": cluster.ports["a"], "server": server.address}
        await cluster.serve(discovery={"file": listed, "dns": [by_name]})
        names = {f"127.0.0.1:{cluster.ports['a']}", "b"}
        await until(cluster.fleet, lambda fleet: set(fleet) == names, LIMIT_S, f"{names}")
        cluster.write("replicas.yaml", [])
        await until(cluster.fleet, lambda fleet: len(fleet) == 1, LIMIT_S, "b has left")
        session = Session("one")
        await session.turn(cluster.router.port)
        assert session.home == f"127.0.0.1:{cluster.ports['a']}"
    finally:
        await server.stop()


async def test_every_worker_finds_them(cluster: Cluster) -> None:
    await cluster.run("a", "b")
    cluster.tell("a")
    await cluster.serve("--workers", "2")
    await eventually(lambda: len(cluster.api.watches) == 2, "both ask")
    cluster.tell("b")
    await cluster.states(a="ready", b="ready")
    cluster.withdraw("a")

    async def homes() -> set[str]:
        """Of sessions that begin now, by way of either worker."""
        sessions = [Session(f"{next(number)}") for _ in range(12)]
        await asyncio.gather(*(session.turn(cluster.router.port) for session in sessions))
        return {session.home for session in sessions}

    number = itertools.count()
    await until(homes, lambda seen: seen == {"b"}, LIMIT_S, "all go to b")
