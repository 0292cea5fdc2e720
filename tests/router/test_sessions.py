"""The list of sessions: who is in it, in which order, and that a long one holds nothing up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from policies.types import Replica, Request
from router.admin import Admin
from router.admin.sessions import SLICE
from router.app import Router
from router.settings import Settings
from tests.fakes.fleet import DONE, turn
from tests.fakes.gated import PROMPT_TOKENS
from tests.fakes.operated import Operated


async def test_live_sessions_are_listed_the_latest_first(operated: Operated) -> None:
    await operated.start()
    homes = [await operated.where(f"session {number}") for number in range(5)]
    operated.hold()
    await operated.stream("session 1")
    told = (await operated.admin.get("/sessions")).json()
    assert (told["known"], len(told["sessions"])) == (5, 5)
    digests = [(await operated.admin.get(f"/sessions/session {number}")).json()["session"] for number in range(5)]
    assert [session["session"] for session in told["sessions"]] == [digests[number] for number in (1, 4, 3, 2, 0)]
    first = told["sessions"][0]
    assert (first["in_flight"], [home["replica"] for home in first["homes"]]) == (1, [homes[1]])
    assert told["sessions"][1]["tokens"] == told["sessions"][1]["homes"][0]["tokens"] == PROMPT_TOKENS + 20
    assert [s["session"] for s in (await operated.admin.get("/sessions?limit=2")).json()["sessions"]] == [
        digests[1],
        digests[4],
    ]
    for name in ("a", "b"):
        living = [digests[number] for number in (1, 4, 3, 2, 0) if homes[number] == name]
        listed = (await operated.admin.get(f"/sessions?replica={name}")).json()["sessions"]
        assert [session["session"] for session in listed] == living
    table = await operated.run("sessions", "--limit", "2")
    assert (table.returncode, table.stderr) == (0, "")
    head, *rows = table.stdout.splitlines()
    assert head.split() == ["SESSION", "IDLE", "IN", "FLIGHT", "CONVERSATIONS", "TOKENS", "HOMES"]
    assert [row.split()[0] for row in rows] == [digests[1], digests[4]]
    as_json = await operated.run("sessions", "--replica", homes[0], "--sort", "tokens", "--json")
    assert digests[0] in {session["session"] for session in json.loads(as_json.stdout)}


async def test_what_cannot_be_listed_is_told(operated: Operated) -> None:
    await operated.start("a")
    for query, status, told in (
        ("limit=0", 400, "limit must be a number from 1 to 1000, got '0'"),
        ("limit=1001", 400, "limit must be"),
        ("limit=many", 400, "limit must be"),
        ("sort=size", 400, "sort must be one of recent, tokens, got 'size'"),
        ("replica=nosuch", 404, "There is no replica 'nosuch'; known are: a."),
    ):
        answer = await operated.admin.get(f"/sessions?{query}")
        assert (answer.status_code, told in answer.json()["error"]["message"]) == (status, True), answer.text
    done = await operated.run("sessions", "--limit", "0")
    assert (done.returncode, done.stdout) == (2, "")


async def test_a_long_list_is_made_in_slices() -> None:
    """The loop goes on with other work meanwhile, which may change the directory."""
    router = Router(Settings(policy={"name": "round_robin"}))  # type: ignore[arg-type]
    balancer, now = router.balancer, router.clock()
    for name in ("a", "b"):
        balancer.join(Replica(name), now)
    count = 6 * SLICE
    for number in range(count):
        turn(balancer, Request(b"%016d" % number, prompt_tokens=10), now, prompt=1000 + number)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            balancer.acquire(Request(b"other %d" % turns, prompt_tokens=10), router.clock()).finish(DONE, None, now)
            await asyncio.sleep(0)

    async def listed(query: str) -> list[dict[str, Any]]:
        transport = httpx.ASGITransport(Admin(router).app())  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            return list((await client.get(f"/sessions?{query}")).raise_for_status().json()["sessions"])

    other = asyncio.create_task(others())
    try:
        largest = await listed("sort=tokens&limit=3&replica=b")
        assert turns >= 6
    finally:
        other.cancel()
        router.access_log.close()
    assert [session["session"] for session in largest] == [(b"%016d" % (count - n)).hex() for n in (1, 3, 5)]
