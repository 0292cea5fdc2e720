"""Two workers behind one port, seen from outside: as one router."""

from __future__ import annotations

import json
import signal
from typing import Any

from tests.control.test_metrics import total
from tests.fakes.waiting import until
from tests.workers.manned import Manned, worker_of

TURNS = 24
"""All fit the cache of one replica, which says that each has 40,000 tokens."""


async def test_both_serve_and_are_told_of_as_one(manned: Manned) -> None:
    await manned.start()
    answers = await manned.turns(TURNS)
    assert {answer.status_code for answer in answers} == {200}
    assert len({worker_of(answer.headers["x-request-id"]) for answer in answers}) == 2, "both get connections"

    # Each session stays, whichever worker its next turn comes to.
    homes = [answer.headers["x-warmroute-replica"] for answer in answers]
    again = await manned.turns(TURNS)
    assert [answer.headers["x-warmroute-replica"] for answer in again] == homes
    workers = [[worker_of(answer.headers["x-request-id"]) for answer in each] for each in (answers, again)]
    assert any(first != second for first, second in zip(*workers, strict=True))

    seen = await manned.until(
        manned.samples, lambda seen: total(seen, "warmroute_requests_total") == 2 * TURNS, "all are counted"
    )
    assert total(seen, "warmroute_request_seconds_count") == total(seen, "warmroute_choices_total") == 2 * TURNS
    assert (
        total(seen, "warmroute_turns_total", turn="new") == total(seen, "warmroute_turns_total", turn="stayed") == TURNS
    )
    assert total(seen, "warmroute_sessions") == TURNS, "as many as each knows"
    assert total(seen, "warmroute_replica_state", state="ready") == 2
    assert total(seen, "process_max_fds") > 0

    # The log: a whole line for each request.
    await until(_ids(manned), lambda ids: len(ids) == 2 * TURNS, 60, "every request has its line")


def _ids(manned: Manned) -> Any:
    async def ids() -> set[str]:
        lines = [json.loads(line) for line in manned.router.lines]
        return {line["request_id"] for line in lines}

    return ids


async def test_what_is_under_way_is_told_of_all(manned: Manned) -> None:
    await manned.start()
    manned.hold()
    streams = await manned.open_on_both(6)
    fleet = await manned.fleet()
    for name in "ab":
        assert fleet[name]["in_flight"] == sum(stream.replica == name for stream in streams)
        assert fleet[name]["others_in_flight"] == 0

    async def told() -> dict[str, Any]:
        return dict((await manned.admin.get("/overview", params={"decisions": 3})).json())

    fine = "All 2 replicas are ready"
    overview = await manned.until(told, lambda told: told["verdict"]["text"] == fine, "both workers have probed them")
    assert overview["fleet"]["in_flight"] == len(streams)
    assert sum(each["in_flight"] for each in overview["replicas"]) == len(streams)
    assert overview["fleet"]["connections"] == len(streams)
    seen = await manned.samples()
    assert total(seen, "warmroute_in_flight_requests") == len(streams)
    listed = await manned.run("replicas", "--json")
    assert sum(each["in_flight"] for each in json.loads(listed.stdout)) == len(streams)
    assert (await manned.run("top", "--once")).returncode == 0
    manned.let_go()
    assert all([await manned.ends_whole(stream.client) for stream in streams])
    after = await manned.until(
        lambda: manned.admin.get("/overview"), lambda told: told.json()["fleet"]["in_flight"] == 0, "all have ended"
    )
    assert len(after.json()["decisions"]) == len(streams)
    assert len({each["number"] for each in after.json()["decisions"]}) == len(streams)


async def test_the_admin_port_is_guarded_and_passes_on(manned: Manned) -> None:
    token = "0123456789abcdef0123456789abcdef"
    await manned.start("a", admin={"token": token, "open_metrics": True})
    assert (await manned.admin.get("/replicas")).status_code == 401
    assert (await manned.admin.put("/policy", json={"name": "random"})).status_code == 401
    assert (await manned.admin.get("/metrics")).status_code == 200
    manned.admin.headers["authorization"] = f"Bearer {token}"
    assert [each["id"] for each in (await manned.admin.get("/replicas")).json()["replicas"]] == ["a"]
    assert (await manned.admin.get("/ui")).headers["content-security-policy"]
    assert (await manned.admin.get("/nosuch")).status_code == 404
    assert (await manned.admin.delete("/policy")).status_code == 405
    explained = await manned.admin.post("/explain", json={"messages": [{"role": "user", "content": "hi"}]})
    assert explained.json()["policy"] == "session_affinity"
    assert (await manned.admin.get("/sessions/%2Fnosuch%2F")).json()["error"]["code"] == "unknown_session"


async def test_the_log_tells_of_workers_and_of_no_store_that_nobody_configured(manned: Manned) -> None:
    await manned.start()
    log = await manned.logged("warmroute listens on")
    said = ["2 workers start", "sessions are shared with the other workers", "2 workers serve", "warmroute listens on"]
    places = [log.find(text) for text in said]
    assert -1 not in places, log
    assert places == sorted(places), "that it listens is said when they serve"
    assert "the store is there" not in log


async def test_the_log_says_what_is_waited_for_at_the_end(manned: Manned) -> None:
    await manned.start()
    manned.hold()
    await manned.open("s")
    manned.router.signal(signal.SIGTERM)
    await manned.logged("under way: 1 request, with up to")
    manned.let_go()
