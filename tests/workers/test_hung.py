"""One of two workers stands still: what the admin port tells, what becomes of orders, and how all end."""

from __future__ import annotations

import os
import signal

from tests.control.test_metrics import total
from tests.router.test_cli import ended
from tests.workers.manned import Manned
from tests.workers.test_orders import told

PATIENCE_S = 20.0
"""Of who asks: shorter than the half minute after which a worker that stands still is killed."""


async def still(manned: Manned, number: int) -> int:
    """Have this worker stand still. Returns its process."""
    pid = manned.pids()[number]
    os.kill(pid, signal.SIGSTOP)
    manned.admin.timeout = PATIENCE_S
    return pid


async def test_the_others_are_told_of_without_it_and_it_is_replaced(manned: Manned) -> None:
    await manned.start()
    await manned.turns(20)
    await manned.until(manned.samples, lambda seen: total(seen, "warmroute_requests_total") == 20, "all are counted")
    pid = await still(manned, 1)
    await manned.ready()
    for path in ("/livez", "/replicas", "/overview", "/metrics", "/policy"):
        assert (await manned.admin.get(path)).status_code == 200, path
    seen = await manned.samples()
    assert total(seen, "warmroute_requests_total") == 20, "no counter falls"
    assert total(seen, "warmroute_workers") == 1
    verdict = (await manned.admin.get("/overview")).json()["verdict"]
    assert verdict["text"].startswith("1 of 2 workers does not answer. ")
    log = await manned.logged("worker 1 was ended by signal 9: started again")
    assert log.count("worker 1 does not answer: ") == 1
    assert "worker 1 has not answered for 30 s: killed" in log
    seen = await manned.until(manned.samples, lambda seen: total(seen, "warmroute_workers") == 2, "another serves")
    assert total(seen, "warmroute_requests_total") == 20
    assert manned.pids()[1] != pid


async def test_orders_reach_it_as_soon_as_it_goes_on(manned: Manned) -> None:
    await manned.start("abc")
    pid = await still(manned, 2)
    await manned.logged("worker 2 does not answer")
    drained = await manned.admin.post("/replicas/a/drain")
    assert drained.status_code == 200
    drain = (await manned.fleet())["a"]["drain"]
    assert (drain["in_flight"], drain["done"]) == (0, False), "it may have requests there"
    manned.write(ids="ab")
    assert (await manned.reload()).status_code == 200
    os.kill(pid, signal.SIGCONT)
    await manned.logged("worker 2 answers again")
    await manned.until(manned.fleet, lambda fleet: fleet["a"]["drain"]["done"], "all say so")
    await manned.until(lambda: told(manned), lambda seen: seen == {"b"}, "both have heard of both")


async def test_a_signal_ends_all_when_those_that_answer_have_ended(manned: Manned) -> None:
    await manned.start(drain={"grace_s": 1})
    await still(manned, 2)
    await manned.logged("worker 2 does not answer")
    manned.router.signal(signal.SIGTERM)
    assert await ended(manned.router) == 1, "what it had was cut off"
    assert "worker 2 does not answer: killed" in manned.router.log.read_text()
