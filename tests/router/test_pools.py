"""Pools of a running router: which requests go to which replicas, whatever happens to either."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sim.replay import replay
from tests.control.test_metrics import parse, total
from tests.fakes.client import Answer, RawClient, get, post
from tests.fakes.operated import LIMIT_S, Operated
from tests.fakes.waiting import until

POOLS = [{"name": "large", "models": ["claude-opus-*", "glm"]}, {"name": "small", "models": ["*haiku*"]}]


def members(operated: Operated, **pools: str) -> dict[str, Any]:
    """The configuration's list of replicas: those named by letters in each pool."""
    listed = [
        {"id": name, "url": operated.replicas[name].upstream.url, "pool": pool}
        for pool, names in pools.items()
        for name in names
    ]
    return {"pools": POOLS, "replicas": listed}


async def start(operated: Operated, large: str = "ab", small: str = "yz", *flags: str, **settings: Any) -> None:
    for name in large + small:
        await operated.add(name)
    operated.write(**members(operated, large=large, small=small), **settings)
    await operated.serve(*flags)


async def ask(operated: Operated, model: str, session: str = "", *headers: str) -> Answer:
    """One turn, whole."""
    said = [{"role": "user", "content": 'of the "model": "claude-haiku" say ' + "word " * 500}]
    body = json.dumps({"messages": said, "model": model, "stream": True}).encode()
    client = await RawClient.connect(operated.router.port)
    operated.clients.append(client)
    return await client.ask(post("/v1/chat/completions", body, f"x-session-affinity: {session}", *headers))


async def where(operated: Operated, model: str, session: str = "", *headers: str) -> str:
    answer = await ask(operated, model, session, *headers)
    assert answer.status == 200, answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")
    return answer.header("x-warmroute-replica") or ""


async def test_the_model_decides_and_the_header_before_it(operated: Operated) -> None:
    await start(operated)
    for n in range(4):
        assert await where(operated, "claude-opus-4-5", f"s{n}") in "ab"
        assert await where(operated, "claude-3-5-Haiku-latest", f"s{n}") in "yz"
    assert await where(operated, "unknown") in "ab", "the first pool takes what is no other's"
    assert await where(operated, "glm", "", "x-warmroute-pool: small") in "yz"
    assert await where(operated, "haiku", "", "X-Warmroute-Pool: large") in "ab"
    client = await RawClient.connect(operated.router.port)
    operated.clients.append(client)
    assert (await client.ask(get("/v1/models"))).header("x-warmroute-replica") in ("a", "b")
    assert (await client.ask(get("/v1/models", "x-warmroute-pool: small"))).header("x-warmroute-replica") in ("y", "z")
    passed = operated.replicas["y"].upstream.requests + operated.replicas["z"].upstream.requests
    assert "small" in {request.header("x-warmroute-pool") for request in passed}, "it goes on to the replica"
    twice = [("x-warmroute-pool", "large"), ("x-warmroute-pool", "small")]  # as when a gateway adds its own at the end
    assert await where(operated, "glm", "", *(f"{name}: {value}" for name, value in twice)) in "yz"
    assert (await operated.admin.get("/explain", headers=twice)).json()["pool"] == "small"
    refused = await ask(operated, "glm", "", "x-warmroute-pool: smal")
    assert (refused.status, refused.header("x-warmroute-reason")) == (400, "unknown_pool")
    assert "large, small" in json.loads(refused.body)["error"]["message"]


async def test_one_session_id_is_a_session_in_each_pool(operated: Operated) -> None:
    """As Claude Code's, whose small model is asked under the id of the large one's session."""
    await start(operated)
    large, small = await where(operated, "glm", "s"), await where(operated, "haiku", "s")
    for _ in range(3):
        assert await where(operated, "haiku", "s") == small
        assert await where(operated, "glm", "s") == large
    told = {}
    for pool in ("large", "small"):
        answer = (await operated.admin.get("/sessions/s", params={"pool": pool})).raise_for_status().json()
        told[answer["pool"]] = {home["replica"] for home in answer["homes"]}
        explained = (await operated.admin.get("/explain", params={"session": "s", "pool": pool})).json()
        assert (explained["pool"], explained["reason"]) == (pool, "home")
        by_digest = (await operated.admin.get(f"/sessions/{answer['session']}")).json()
        assert (by_digest["session"], by_digest["pool"]) == (answer["session"], pool)
        assert (await operated.admin.get("/explain", params={"session": answer["session"]})).json()["pool"] == pool
        assert (await operated.admin.get(f"/ui/sessions/{answer['session']}")).status_code == 200
    assert told == {"large": {large}, "small": {small}}
    assert (await operated.admin.get("/sessions/s")).json()["pool"] == "large"
    unknown = await operated.admin.get("/sessions/s", params={"pool": "x"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "invalid_query")
    explained = await operated.run("explain", "--session", "s", "--pool", "small")
    assert f"* {small}" in " ".join(explained.stdout.split()), explained


async def test_a_pool_without_replicas_is_no_matter_to_the_other(operated: Operated) -> None:
    await start(operated, small="z")
    (await operated.admin.post("/replicas/z/drain")).raise_for_status()
    await operated.becomes("z", "draining")
    refused = await ask(operated, "haiku")
    assert (refused.status, refused.header("x-warmroute-reason")) == (503, "all_draining")
    assert await where(operated, "glm") in "ab"
    assert (await operated.admin.get("/readyz")).status_code == 200, "any pool that serves is worth traffic"
    overview = (await operated.admin.get("/overview")).json()
    assert overview["verdict"] == {
        "level": "bad",
        "text": "no replica of pool small is ready; 1 draining of 3 replicas",
    }
    assert overview["pools"] == [
        {"pool": "large", "replicas": 2, "ready": 2},
        {"pool": "small", "replicas": 1, "ready": 0},
    ]
    families = parse((await operated.admin.get("/metrics")).text)
    assert total(families, "warmroute_pool_ready_replicas", pool="small") == 0
    assert total(families, "warmroute_pool_ready_replicas", pool="large") == 2
    assert total(families, "warmroute_replica_pool", replica="z", pool="small") == 1
    (await operated.admin.delete("/replicas/z/drain")).raise_for_status()
    await operated.becomes("z", "ready")
    assert await where(operated, "haiku") == "z"
    (await operated.admin.post("/replicas/a/drain")).raise_for_status()
    (await operated.admin.post("/replicas/b/drain")).raise_for_status()
    await operated.becomes("b", "draining")
    assert (await operated.admin.get("/readyz")).status_code == 200


async def test_who_watches_sees_the_pools(operated: Operated) -> None:
    await start(operated, large="a", small="z")
    await where(operated, "haiku", "s")
    fleet = await operated.fleet()
    assert {name: each["pool"] for name, each in fleet.items()} == {"a": "large", "z": "small"}
    shown = (await operated.run("replicas")).stdout
    assert [line.split()[:2] for line in shown.splitlines()] == [["REPLICA", "POOL"], ["a", "large"], ["z", "small"]]
    top = (await operated.run("top", "--once")).stdout
    assert "POOL" in top
    assert "Pool small" in (await operated.admin.get("/ui")).text
    assert "Pool small" in (await operated.admin.get("/ui/replicas/z")).text
    line = await operated.logged('"pool":"small"')
    assert '"replica":"z"' in line


async def test_several_workers_have_the_same_pools_and_homes(operated: Operated) -> None:
    await start(operated, "ab", "yz", "--workers", "2", store={"wait_s": 1.0})  # however busy the machine is
    large, small = await where(operated, "glm", "s"), await where(operated, "haiku", "s")
    assert large in "ab"
    assert small in "yz"
    for _ in range(4):  # each over a connection of its own, which either worker may get
        assert await where(operated, "glm", "s") == large
        assert await where(operated, "haiku", "s") == small
    assert {each["pool"] for each in (await operated.fleet()).values()} == {"large", "small"}
    assert len((await operated.admin.get("/overview")).json()["pools"]) == 2


async def test_without_pools_nobody_is_told_of_any(operated: Operated) -> None:
    await operated.start("a")
    assert await where(operated, "haiku", "s", "x-warmroute-pool: anything") == "a"
    assert (await operated.fleet())["a"]["pool"] is None
    assert "POOL" not in (await operated.run("replicas")).stdout
    assert "warmroute_replica_pool{" not in (await operated.admin.get("/metrics")).text
    assert '"pool"' not in await operated.logged('"replica":"a"')


async def test_a_reload_brings_pools_and_no_session_loses_its_home(operated: Operated) -> None:
    await operated.start("ab")
    homes = {f"s{n}": await where(operated, "glm", f"s{n}") for n in range(6)}
    before = await operated.fleet()
    await operated.add("z")
    operated.write(**members(operated, large="ab", small="z"))
    (await operated.reload()).raise_for_status()
    await operated.becomes("z", "ready")
    assert {s: await where(operated, "glm", s) for s in homes} == homes
    assert await where(operated, "haiku", "s1") == "z"
    fleet = await operated.fleet()
    assert [fleet[name]["served"] > before[name]["served"] for name in "ab"] == [True, True], "they are the same ones"


async def test_a_reload_moves_a_replica_between_pools(operated: Operated) -> None:
    await start(operated, large="ab", small="z")
    operated.hold()
    client, replica = await operated.stream("s")
    assert replica in "ab"
    operated.write(**members(operated, large="ab".replace(replica, ""), small="z" + replica))
    (await operated.reload()).raise_for_status()
    await operated.becomes(replica, "ready")
    assert (await operated.fleet())[replica]["pool"] == "small"
    operated.let_go()
    assert await operated.ends_whole(client), "what ran there ends in its own time"
    assert await where(operated, "unknown", "s") not in (replica, "z")
    assert {await where(operated, "haiku", f"s{n}") for n in range(8)} == {replica, "z"}


RENAMED = [{"name": "tiny", "models": ["*haiku*"]}, {"name": "big", "models": ["glm"]}]
"""And in another order: the first pool is another model's."""


@pytest.mark.parametrize("pools", [POOLS[::-1], RENAMED], ids=["reordered", "renamed"])
async def test_who_waits_while_pools_change_is_served_by_its_own(operated: Operated, pools: list[Any]) -> None:
    await start(operated, "a", "z", admission={"max_running_per_replica": 1, "max_wait_s": LIMIT_S})
    operated.hold()
    busy = [asyncio.create_task(ask(operated, model)) for model in ("glm", "haiku")]

    async def waiting() -> list[int]:
        fleet = (await operated.admin.get("/overview")).json()["fleet"]
        return [fleet["in_flight"], fleet["waiting"]]

    await until(waiting, lambda found: found == [2, 0], LIMIT_S, "both replicas are at their cap")
    models = ("glm", "haiku") * 3
    waits = [asyncio.create_task(ask(operated, model)) for model in models]
    await until(waiting, lambda found: found == [2, 6], LIMIT_S, "all others wait")
    first, second = (pool["name"] for pool in pools)
    operated.write(**members(operated, **{second: "a", first: "z"}) | {"pools": pools})
    (await operated.reload()).raise_for_status()
    operated.let_go()
    answers = [await each for each in (*busy, *waits)]
    assert [answer.status for answer in answers] == [200] * 8
    assert [answer.header("x-warmroute-replica") for answer in answers] == ["a", "z"] * 4
    waited = total(parse((await operated.admin.get("/metrics")).text), "warmroute_left_requests_total")
    assert waited == 0, "no client has left"


async def test_what_was_counted_of_a_pool_that_is_removed_stays_counted(operated: Operated) -> None:
    """Else it would look to Prometheus as if the router had been started anew."""
    await start(operated, "a", "z", admission={"max_running_per_replica": 1, "max_wait_s": LIMIT_S})
    operated.hold()
    asked = [asyncio.create_task(ask(operated, "haiku")) for _ in range(3)]

    async def figure(name: str) -> float:
        return total(parse((await operated.admin.get("/metrics")).text), name)

    await until(lambda: figure("warmroute_waiting_requests"), lambda count: count == 2, LIMIT_S, "two wait")
    operated.let_go()
    assert [(await each).status for each in asked] == [200] * 3
    assert await figure("warmroute_waited_requests_total") == 2
    operated.write(pools=[], replicas=[{"id": "a", "url": operated.replicas["a"].upstream.url}])
    (await operated.reload()).raise_for_status()
    assert await figure("warmroute_waited_requests_total") == 2


async def test_a_reload_with_a_pool_that_is_none_changes_nothing(operated: Operated) -> None:
    await start(operated, large="a", small="z")
    operated.write(**members(operated, large="a", smal="z"))
    answer = await operated.reload()
    assert answer.status_code == 422
    assert "replicas.1.pool: 'smal' is no pool: did you mean 'small'?" in answer.json()["error"]["message"]
    assert await where(operated, "haiku") == "z"


async def test_a_policy_is_switched_and_shadowed_in_every_pool(operated: Operated) -> None:
    await start(operated)
    (await operated.admin.put("/policy", json={"name": "round_robin"})).raise_for_status()
    (await operated.admin.put("/policy/shadow", json={"name": "session_affinity"})).raise_for_status()
    assert {await where(operated, "haiku", "s") for _ in range(2)} == {"y", "z"}
    assert {await where(operated, "glm", "s") for _ in range(2)} == {"a", "b"}
    policy = (await operated.admin.get("/policy")).json()
    assert policy["shadow"]["choices"] == 4
    assert list(policy["pools"]) == ["small"]


async def test_a_journal_of_pools_gives_the_same_choices_again(operated: Operated, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    await start(operated, journal={"path": str(path)})
    for n in range(12):
        await where(operated, ("glm", "haiku", "unknown")[n % 3], f"s{n % 4}")
    operated.router.stop()
    found = replay(path)
    assert (found.choices, found.different, found.whole) == (12, 0, True), found.differences
