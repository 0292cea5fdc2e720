"""What operators order reaches every worker, and those that come later."""

from __future__ import annotations

import json
import os
import signal

from tests.workers.manned import Manned
from tests.workers.test_ending import replaced

TURNS = 40


async def told(manned: Manned) -> set[str | None]:
    """The replicas that new sessions were told to be on, over all workers."""
    answers = await manned.turns(TURNS)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["x-request-id"].partition("-")[0] for answer in answers}) == 2, "both workers"
    return {answer.headers.get("x-warmroute-replica") for answer in answers}


async def test_drains_and_policies_hold_for_all_and_for_those_that_come_later(manned: Manned) -> None:
    await manned.start()
    drained = await manned.run("drain", "a", "--wait", "--json")
    assert drained.returncode == 0, drained.stderr
    assert json.loads(drained.stdout.splitlines()[-1])["drain"]["done"]
    assert await told(manned) == {"b"}
    unknown = await manned.admin.post("/replicas/c/drain")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_replica")
    answer = await manned.admin.put("/policy", json={"name": "random", "parameters": {"seed": 3}})
    assert answer.json()["new"] == {"name": "random", "parameters": {"seed": 3}}
    assert await _switched(manned) == {"w1", "w2"}
    refused = await manned.admin.put("/policy", json={"name": "nosuch"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_policy")

    pids = manned.pids()
    os.kill(pids[1], signal.SIGKILL)
    await replaced(manned, pids)
    await manned.becomes("a", "draining")
    assert (await manned.admin.get("/policy")).json()["policy"] == "random"
    assert await told(manned) == {"b"}
    assert (await manned.run("undrain", "a")).returncode == 0
    assert await told(manned) == {"a", "b"}


async def _switched(manned: Manned) -> set[str]:
    """Workers whose log says that they have another policy."""

    async def who() -> set[str]:
        lines = [json.loads(line) for line in manned.router.log.read_text().splitlines()]
        return {line["worker"] for line in lines if line.get("message", "").startswith("policy switched")}

    return set(await manned.until(who, lambda found: len(found) == 2, "both have switched"))


async def test_a_reload_reaches_all_and_those_that_come_later(manned: Manned) -> None:
    await manned.start("a", admission={"max_running": 10})
    await manned.add("b")
    manned.write(ids="b", admission={"max_running": 20}, workers=4)
    answer = (await manned.reload()).json()
    assert {"key": "admission.max_running", "old": 10, "new": 20} in answer["changed"], "told as it is written"
    assert [change["key"] for change in answer["takes_restart"]] == ["workers"]
    assert await told(manned) == {"b"}

    manned.config.write_text("admission: {max_running: no}")
    refused = await manned.reload()
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_config")
    pids = manned.pids()
    os.kill(pids[1], signal.SIGKILL)  # the one that comes has what is in force, not what was refused
    await replaced(manned, pids)
    assert await told(manned) == {"b"}

    await manned.add("c")
    manned.write(ids="c")
    manned.router.signal(signal.SIGHUP)
    await manned.logged("asked by SIGHUP")
    await manned.until(lambda: told(manned), lambda seen: seen == {"c"}, "both have read it")


async def test_a_reload_reaches_a_worker_that_is_just_starting(manned: Manned) -> None:
    """It was given what was in force as it began."""
    await manned.start("a")
    await manned.add("b")
    manned.write(ids="b")
    pids = manned.pids()
    os.kill(pids[2], signal.SIGKILL)
    await manned.logged("worker 2 was ended by signal 9: started again")
    assert (await manned.reload()).status_code == 200
    await replaced(manned, pids)
    await manned.until(lambda: told(manned), lambda seen: seen == {"b"}, "both have read it")
