"""Replicas that are emptied: by an operator, or by their own word."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

from tests.fakes.operated import LIMIT_S, Operated
from tests.fakes.process import ROOT
from tests.fakes.waiting import until


async def drain(operated: Operated, name: str, homes: str) -> dict[str, Any]:
    answer = await operated.admin.post(f"/replicas/{name}/drain", json={"homes": homes})
    return dict(answer.raise_for_status().json())


async def progress(operated: Operated, name: str) -> dict[str, Any]:
    return dict((await operated.fleet())[name]["drain"])


async def test_with_homes_that_move_nothing_comes_and_streams_end_naturally(operated: Operated) -> None:
    await operated.start()
    home = await operated.where("s")
    (other,) = {"a", "b"} - {home}
    operated.hold()
    streaming, at = await operated.stream("s")
    assert at == home
    told = await drain(operated, home, "move")
    assert (told["state"], told["drain"]["in_flight"], told["drain"]["done"]) == ("draining", 1, False)
    assert told["drain"]["by"].startswith("127.0.0.1:")
    operated.replicas[other].finish.set()
    assert {await operated.where(session) for session in ("s", "t", "u", "v")} == {other}
    assert (await progress(operated, home))["in_flight"] == 1
    operated.let_go()
    assert await operated.ends_whole(streaming)
    await until(lambda: progress(operated, home), lambda seen: seen["done"], LIMIT_S, "it is empty")
    back = (await operated.admin.delete(f"/replicas/{home}/drain")).json()
    assert (back["state"], back["drain"]) == ("ready", None)


async def test_homes_that_finish_stay_until_they_are_idle(operated: Operated) -> None:
    """How long that takes is a setting."""
    await operated.start()
    homes = {session: await operated.where(session) for session in "stuvwxyz"}
    assert set(homes.values()) == {"a", "b"}
    living = [session for session, home in homes.items() if home == "a"]
    told = await drain(operated, "a", "finish")
    assert (told["state"], told["drain"]["conversations"], told["drain"]["done"]) == ("finishing", len(living), False)
    for session in living:
        headers = await operated.chat(session)
        assert (headers["x-warmroute-replica"], headers["x-warmroute-reason"]) == ("a", "home")
    assert {await operated.where(f"new {number}") for number in range(6)} == {"b"}
    assert (await operated.admin.get("/explain?session=never-seen")).json()["replica"] == "b"
    assert (await operated.admin.get(f"/explain?session={living[0]}")).json()["replica"] == "a"
    assert not (await progress(operated, "a"))["done"]
    operated.write(drain={"session_idle_s": 0.01})
    assert (await operated.reload()).status_code == 200
    await until(lambda: progress(operated, "a"), lambda seen: seen["done"], LIMIT_S, "its sessions are idle")


async def test_a_drain_outlives_good_probes_and_reloads(operated: Operated) -> None:
    await operated.start()
    since = (await drain(operated, "a", "move"))["drain"]["since"]
    probed = len(operated.replicas["a"].upstream.requests)

    async def probes() -> int:
        return sum(request.target == "/ready" for request in operated.replicas["a"].upstream.requests[probed:])

    await until(probes, lambda count: count >= 2, LIMIT_S, "probed again, twice")
    await operated.add("c")
    operated.write(policy="round_robin")
    assert (await operated.reload()).status_code == 200
    await operated.becomes("c", "ready")
    assert {await operated.where(f"s{number}") for number in range(6)} == {"b", "c"}
    again = await drain(operated, "a", "finish")
    assert (again["state"], again["drain"]["since"]) == ("finishing", since), "the same drain, in another way"
    text = await operated.logged("replica a drains, its sessions finish: asked by 127.0.0.1:")
    assert "replica a drains, its sessions move: asked by 127.0.0.1:" in text


async def test_an_operators_drain_yields_to_what_is_worse(operated: Operated) -> None:
    """A replica that says itself that it wants nothing new gets nothing, whatever an operator said of its sessions."""
    await operated.start()
    operated.replicas["a"].ready = "503 Service Unavailable"
    own = await operated.becomes("a", "draining")
    assert (own["drain"]["by"], own["drain"]["homes"]) == ("the replica", "move")
    assert (await drain(operated, "a", "finish"))["state"] == "draining"
    operated.replicas["a"].ready = "200 OK"
    await operated.becomes("a", "finishing")
    await operated.replicas["a"].upstream.stop()
    await operated.becomes("a", "ejected")


async def test_what_cannot_be_drained_changes_nothing(operated: Operated) -> None:
    await operated.start()
    for path, body, status, told in (
        ("/replicas/nosuch/drain", "", 404, "There is no replica 'nosuch'; known are: a, b."),
        ("/replicas/a/drain", "move", 400, "The body is not JSON"),
        ("/replicas/a/drain", "[]", 422, 'write it as in {"homes": "finish"}'),
        ("/replicas/a/drain", '{"homes": "stay"}', 422, "homes must be one of move, finish, got 'stay'"),
        ("/replicas/a/drain", '{"homes": ["move"]}', 422, "homes must be one of move, finish, got ['move']"),
        ("/replicas/a/drain", '{"home": "move"}', 422, "unknown key 'home'; known keys: homes"),
    ):
        answer = await operated.admin.post(path, content=body)
        assert (answer.status_code, told in answer.json()["error"]["message"]) == (status, True), answer.text
    assert (await operated.admin.delete("/replicas/nosuch/drain")).status_code == 404
    assert (await operated.admin.delete("/replicas/a/drain")).status_code == 200, "without a drain there is none to end"
    assert {each["state"] for each in (await operated.fleet()).values()} == {"ready"}


async def test_ids_that_are_urls_are_taken_as_they_are_and_encoded(operated: Operated) -> None:
    await operated.start()
    urls = [replica.upstream.url for replica in operated.replicas.values()]
    operated.write(replicas=urls)
    assert (await operated.reload()).status_code == 200
    assert (await operated.admin.post(f"/replicas/{urls[0]}/drain")).json()["state"] == "draining", "moves by default"
    done = await operated.run("drain", urls[1], "--homes", "finish", "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (0, "finishing"), done.stderr
    assert (await operated.run("undrain", urls[1])).stdout == f"{urls[1]} is ready: ready\n"


# The command


async def test_the_command_waits_until_the_replica_is_empty(operated: Operated) -> None:
    await operated.start()
    operated.hold()
    streaming, at = await operated.stream("s")
    command = [sys.executable, "-m", "router.cli", "drain", at, "--wait", "--admin", operated.router.admin_url]
    waiting = await asyncio.to_thread(subprocess.Popen, command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with waiting:
        assert waiting.stdout is not None
        assert await asyncio.to_thread(waiting.stdout.readline) == f"{at} drains: 1 request in flight\n"
        assert waiting.poll() is None
        operated.let_go()
        assert await operated.ends_whole(streaming)
        assert await asyncio.to_thread(waiting.stdout.readline) == f"{at} is empty: 0 requests in flight\n"
        assert await asyncio.to_thread(waiting.wait, LIMIT_S) == 0


async def test_the_command_gives_up_in_time_and_says_so(operated: Operated) -> None:
    await operated.start()
    operated.hold()
    _, at = await operated.stream("s")
    done = await operated.run("drain", at, "--wait", "--timeout", "0.2")
    assert done.returncode == 1
    assert done.stderr == f"warmroute: {at} is not empty after 0.2 s; it goes on draining\n"
    assert (await operated.fleet())[at]["state"] == "draining"
    for arguments, told in (
        (["drain", "nosuch"], "There is no replica 'nosuch'; known are: a, b."),
        (["undrain", "nosuch"], "There is no replica 'nosuch'"),
        (["drain", at, "--timeout", "3"], "--timeout is of no use without --wait"),
        (["drain", at, "--homes", "stay"], "invalid choice: 'stay'"),
    ):
        wrong = await operated.run(*arguments)
        assert (wrong.returncode, told in wrong.stderr) == (2, True), wrong.stderr
