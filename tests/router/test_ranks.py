"""Data-parallel ranks of an engine as replicas: a router process before engines that have several behind one URL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from sim.emulator import Emulator, EmulatorConfig
from tests.fakes.client import RawClient, post
from tests.fakes.operated import LIMIT_S, Operated
from tests.fakes.process import free_port
from tests.fakes.waiting import until
from tests.fakes.wire import eventually

RANK = "x-data-parallel-rank"
OVERRIDE = "x-override-routed-dp-rank"
CHAT = "/v1/chat/completions"


def ranks(operated: Operated, **counts: int) -> dict[str, Any]:
    """Settings by which the replicas of these names have so many ranks."""
    given = [{"id": name, "url": operated.replicas[name].upstream.url, "ranks": n} for name, n in counts.items()]
    return {"replicas": given}


async def sent(operated: Operated, session: str, *headers: str, name: str = "a") -> list[tuple[str, str]]:
    """The headers with which a turn of a session, sent with these, arrives."""
    requests = operated.replicas[name].upstream.requests
    client = await RawClient.connect(operated.router.port)
    operated.clients.append(client)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": session}]}).encode()
    client.send(post(CHAT, body, f"x-session-affinity: {session}", "x-request-id: mine", *headers))
    await client.answer()
    (request,) = (each for each in requests if each.header("x-request-id") == "mine" and each.target == CHAT)
    requests.remove(request)
    return request.headers


def named(headers: list[tuple[str, str]], *names: str) -> list[tuple[str, str]]:
    return sorted((name, value) for name, value in headers if name in names)


async def test_a_rank_is_named_to_the_engine_and_a_clients_own_word_dropped(operated: Operated) -> None:
    await operated.add("a")
    operated.write(**ranks(operated, a=2), response_headers=True)
    await operated.serve()
    home = await operated.where("s")
    assert home in ("a@0", "a@1")
    rank = home[-1]
    lies = ("X-Data-Parallel-Rank: 7", "x-data-parallel-RANK: 8", "X-Override-Routed-DP-Rank: 9", "x-other: kept")
    for own in ((), lies):
        headers = await sent(operated, "s", *own)
        assert named(headers, RANK, OVERRIDE) == [(RANK, rank), (OVERRIDE, rank)]
        assert named(headers, "x-other") == ([("x-other", "kept")] if own else [])


async def test_before_a_whole_engine_the_clients_word_goes_on(operated: Operated) -> None:
    await operated.start("a")
    assert named(await sent(operated, "s"), RANK, OVERRIDE) == []
    headers = await sent(operated, "s", "X-Data-Parallel-Rank: 7", "x-override-routed-dp-rank: 8")
    assert named(headers, RANK, OVERRIDE) == [(RANK, "7"), (OVERRIDE, "8")]


async def test_a_credential_goes_beside_the_rank_also_after_a_reload(operated: Operated) -> None:
    await operated.add("a")
    keys = {"keys": {"credential": "replace", "replica_key": "k1"}}
    operated.write(**ranks(operated, a=2), **keys, response_headers=True)
    await operated.serve()
    for key in ("k1", "k2"):
        keys["keys"]["replica_key"] = key
        operated.write(**ranks(operated, a=2), **keys, response_headers=True)
        assert (await operated.reload()).status_code == 200
        headers = await sent(operated, "s")
        assert named(headers, "authorization") == [("authorization", f"Bearer {key}")]
        assert len(named(headers, RANK)) == 1


async def test_ranks_come_and_go_under_a_running_stream(operated: Operated) -> None:
    await operated.start("a")
    operated.hold()
    whole, at = await operated.stream("before")
    assert at == "a"
    operated.write(**ranks(operated, a=2), response_headers=True)
    told = (await operated.reload()).raise_for_status().json()
    url = operated.replicas["a"].upstream.url
    assert told["changed"] == [
        {"key": "replicas.a", "old": {"url": url, "weight": 1.0}, "new": {"url": url, "weight": 1.0, "ranks": 2}}
    ]
    fleet = await operated.fleet()
    assert {name: (each["url"], each["rank"]) for name, each in fleet.items()} == {"a@0": (url, 0), "a@1": (url, 1)}
    leaving = (await operated.admin.get("/replicas")).json()["leaving"]
    assert [(each["id"], each["in_flight"]) for each in leaving] == [("a", 1)]
    on_rank, at = await operated.stream("between")
    assert at in fleet
    operated.write()
    assert (await operated.reload()).status_code == 200
    assert {name: each["rank"] for name, each in (await operated.fleet()).items()} == {"a": None}
    operated.let_go()
    assert await operated.ends_whole(whole)
    assert await operated.ends_whole(on_rank)
    assert await operated.where("after") == "a"


async def test_more_ranks_leave_those_that_were_there_as_they_are(operated: Operated) -> None:
    await operated.add("a")
    operated.write(**ranks(operated, a=2), response_headers=True)
    await operated.serve()
    homes = {session: await operated.where(session) for session in "stuv"}
    operated.write(**ranks(operated, a=4), response_headers=True)
    assert (await operated.reload()).status_code == 200
    assert set(await operated.fleet()) == {"a@0", "a@1", "a@2", "a@3"}
    assert {session: await operated.where(session) for session in "stuv"} == homes


async def test_a_rank_is_drained_by_its_id(operated: Operated) -> None:
    await operated.add("a")
    operated.write(**ranks(operated, a=2), response_headers=True)
    await operated.serve()
    done = await operated.run("drain", "a@1", "--wait", "--timeout", str(LIMIT_S))
    assert (done.returncode, done.stdout) == (0, "a@1 is empty: 0 requests in flight\n"), done.stderr
    assert {await operated.where(session) for session in "stuvw"} == {"a@0"}
    metrics = (await operated.admin.get("/metrics")).text
    assert 'replica="a@1"' in metrics
    shown = (await operated.run("replicas")).stdout
    assert [line.split()[:2] for line in shown.splitlines()[1:]] == [["a@0", "ready"], ["a@1", "draining"]]
    assert (await operated.run("undrain", "a@1")).stdout.startswith("a@1 is ready")


async def test_what_cannot_be_is_told_and_nothing_changed(operated: Operated) -> None:
    await operated.start("a")
    for count in (0, 65, "two"):
        operated.write(replicas=[{"id": "a", "url": "http://127.0.0.1:9", "ranks": count}])
        answer = await operated.reload()
        assert answer.status_code == 422
        assert "replicas.0.ranks" in answer.text
    operated.write(replicas=[{"id": "a", "url": "http://127.0.0.1:9", "ranks": 2}, {"id": "a@1", "url": "http://b:1"}])
    assert "the id 'a@1' is given twice" in (await operated.reload()).text
    assert set(await operated.fleet()) == {"a"}


async def test_when_an_engine_fails_none_of_its_ranks_is_tried_again(operated: Operated) -> None:
    """They are one server: two tries must be enough, with eight dead ranks beside one replica that lives."""
    await operated.add("a")
    dead = {"id": "d", "url": f"http://127.0.0.1:{free_port()}", "ranks": 8}
    operated.write(
        replicas=[{"id": "a", "url": operated.replicas["a"].upstream.url}, dead],
        health={"fail_after": 100_000, "passive_fail_after": 100_000, "failure_window": 1000},
        retries={"tries": 2, "budget_burst": 1000},
        response_headers=True,
    )
    await operated.serve()
    assert {await operated.where(f"s{number}") for number in range(20)} == {"a"}


# With engines that have ranks


@pytest.fixture
async def engine() -> AsyncIterator[Emulator]:
    """Of two ranks, with a queue and a cache each."""
    config = EmulatorConfig(dp_size=2, kv_tokens=200_000, page_size=16, time_scale=0.01, keep_alive_seconds=60)
    async with Emulator(config) as emulator:
        yield emulator


async def turn(operated: Operated, session: str, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """Replica, prompt tokens, and those of them that were cached."""
    body = {"model": "emulated", "messages": messages, "max_tokens": 8, "ignore_eos": True}
    client = await RawClient.connect(operated.router.port)
    operated.clients.append(client)
    client.send(post(CHAT, json.dumps(body).encode(), f"x-session-affinity: {session}"))
    answer = await client.answer()
    assert answer.status == 200, answer.body
    told = json.loads(answer.body)
    messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})
    usage = told["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer.header("x-warmroute-replica") or "", usage["prompt_tokens"], cached


async def converse(operated: Operated, session: str, turns: int) -> list[tuple[str, int, int]]:
    messages: list[dict[str, str]] = []
    seen = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"{session}, turn {number}: " + "word " * 400})
        seen.append(await turn(operated, session, messages))
    return seen


def write(operated: Operated, engine: Emulator, count: int, **more: Any) -> None:
    # What is known decides here: how long others wait there, on a machine busy with other things, does not.
    policy = {"name": "session_affinity", "parameters": {"hysteresis_s": 600}}
    operated.write(replicas=[{"id": "e", "url": engine.url, "ranks": count}], policy=policy, **more)


async def test_sessions_of_one_engine_spread_over_its_ranks_and_each_finds_its_cache(
    operated: Operated, engine: Emulator
) -> None:
    write(operated, engine, 2)
    await operated.serve()
    sessions = [f"s{number}" for number in range(8)]
    seen = await asyncio.gather(*(converse(operated, session, 4) for session in sessions))
    for turns in seen:
        assert len({replica for replica, _, _ in turns}) == 1, turns
        assert turns[0][2] < 16 * 8, "nothing of its own yet"
        for (_, prompt, _), (_, _, cached) in pairwise(turns):
            assert cached > prompt - 16, turns
    assert {turns[0][0] for turns in seen} == {"e@0", "e@1"}
    homes: dict[str, set[str]] = {}
    for record in engine.log:
        homes.setdefault(record.headers["x-session-affinity"], set()).add(record.headers[RANK])
    assert {session: {turns[0][0][-1]} for session, turns in zip(sessions, seen, strict=True)} == homes


async def test_each_rank_tells_its_own_load_and_capacity(operated: Operated, engine: Emulator) -> None:
    write(operated, engine, 2)
    await operated.serve()
    client = await RawClient.connect(engine.port)
    operated.clients.append(client)
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100_000, "ignore_eos": True}
    client.send(post(CHAT, json.dumps(body | {"stream": True}).encode(), f"{RANK}: 1"))
    await eventually(lambda: engine.running == 1)

    async def told() -> dict[str, tuple[int | None, int | None]]:
        fleet = await operated.fleet()
        loads = {name: each["load"] or {} for name, each in fleet.items()}
        return {name: (load.get("running"), load.get("capacity_tokens")) for name, load in loads.items()}

    wanted = {"e@0": (0, 200_000), "e@1": (1, 200_000)}
    await until(told, lambda seen: seen == wanted, LIMIT_S, f"{wanted}")


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, "replica e: its engine has 2 data-parallel ranks (--dp-size), and `ranks` says 1: the engine spreads"),
        (3, "replica e@0: its engine has 2 data-parallel ranks (--dp-size), and `ranks` says 3: what is sent to"),
    ],
)
async def test_a_size_other_than_the_engines_is_told_for_all_its_ranks_together(
    operated: Operated, engine: Emulator, count: int, words: str
) -> None:
    write(operated, engine, count)
    await operated.serve()
    await operated.logged(words)
    if count > 2:
        await operated.logged("replica e@2 tells no load: /v1/loads: the engine tells of no data-parallel rank 2")
    log = operated.router.log.read_text()
    assert log.count("data-parallel ranks (--dp-size)") == 1
    assert "set ranks: 2" in log
