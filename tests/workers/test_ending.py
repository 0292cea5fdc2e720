"""How workers and their supervisor end, and what becomes of streams."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.control.test_metrics import total
from tests.fakes.process import alive
from tests.fakes.waiting import until
from tests.fakes.wire import Ended
from tests.router.test_cli import END_S, ended, refuses
from tests.workers.manned import Manned


async def all_gone(pids: dict[int, int]) -> None:
    async def left() -> list[int]:
        return [pid for pid in pids.values() if alive(pid)]

    await until(left, lambda found: not found, END_S, "no worker is left")


async def replaced(manned: Manned, before: dict[int, int]) -> dict[int, int]:
    """The workers once every one is up again, and not all are the same."""

    async def up() -> bool:
        verdict = (await manned.admin.get("/overview")).json()["verdict"]["text"]
        return "not answer" not in verdict and manned.pids().keys() == before.keys() and manned.pids() != before

    await until(up, bool, END_S, "the worker is replaced")
    return manned.pids()


async def test_a_worker_that_is_killed_takes_its_own_streams_along_and_nothing_else(manned: Manned) -> None:
    await manned.start()
    await manned.turns(20)
    await manned.until(manned.samples, lambda seen: total(seen, "warmroute_requests_total") == 20, "all are counted")
    manned.hold()
    streams = await manned.open_on_both(6)
    pids = manned.pids()
    os.kill(pids[1], signal.SIGKILL)

    async def broken(index: int) -> bool:
        try:
            await streams[index].client.chunk()
        except Ended:
            return True
        return False

    waiting = [asyncio.create_task(broken(index)) for index in range(len(streams))]
    await asyncio.wait(waiting, timeout=END_S, return_when=asyncio.FIRST_COMPLETED)
    new = await replaced(manned, pids)
    assert new[2] == pids[2]
    manned.let_go()
    lost = [stream.worker for stream, task in zip(streams, waiting, strict=True) if await task]
    assert len(set(lost)) == 1, "of one worker"
    assert len(lost) == sum(stream.worker == lost[0] for stream in streams), "all of that"
    for stream in streams:
        if stream.worker != lost[0]:
            while await stream.client.chunk():
                pass
    assert {answer.status_code for answer in await manned.turns(20)} == {200}
    left = len(streams) - len(lost)
    seen = await manned.until(
        manned.samples,
        lambda seen: total(seen, "warmroute_requests_total") == 40 + left,
        "what the dead one had counted is still there",
    )
    assert total(seen, "warmroute_in_flight_requests") == 0
    assert [error["message"] for error in manned.errors()] == ["worker 1 was ended by signal 9: started again"]

    os.kill(new[1], signal.SIGKILL)  # soon again
    assert {answer.status_code for answer in await manned.turns(10)} == {200}, "some wait for it"
    last = await replaced(manned, new)
    assert manned.errors()[-1]["message"] == "worker 1 was ended by signal 9: started again in 0.5 s"

    os.kill(last[1], signal.SIGKILL)
    await manned.logged("started again in 1 s")
    assert {answer.status_code for answer in await manned.turns(20)} == {200}, "the other one has its connections"
    told = (await manned.admin.get("/overview")).json()["verdict"]
    assert (told["level"], told["text"].startswith("1 of 2 workers does not answer. ")) == ("warn", True)
    await manned.ready()
    await replaced(manned, last)


async def test_one_worker_can_be_made_anew_without_a_loss(manned: Manned) -> None:
    await manned.start()
    manned.hold()
    streams = await manned.open_on_both(4)
    pids = manned.pids()
    os.kill(pids[2], signal.SIGTERM)
    os.kill(pids[2], signal.SIGTERM)
    manned.let_go()
    assert all([await manned.ends_whole(stream.client) for stream in streams])
    assert {answer.status_code for answer in await manned.turns(20)} == {200}, "they wait for it if need be"
    assert (await replaced(manned, pids))[1] == pids[1]


async def test_a_signal_lets_the_streams_of_all_end(manned: Manned) -> None:
    await manned.start()
    manned.hold()
    streams = await manned.open_on_both(4)
    pids = manned.pids()
    # As systemd does it: to all processes at once.
    for pid in (manned.router.pid, *pids.values()):
        os.kill(pid, signal.SIGTERM)
    await refuses(manned.router)
    answer = await manned.admin.get("/readyz")
    assert (answer.status_code, answer.json()["reason"]) == (503, "draining")
    manned.let_go()
    assert all([await manned.ends_whole(stream.client) for stream in streams])
    assert await ended(manned.router) == 0
    await all_gone(pids)
    log = manned.router.log.read_text()
    assert log.count("stopping: ") == 1
    assert "Traceback" not in log
    assert manned.errors() == []


async def test_a_second_signal_ends_all_at_once_and_the_code_says_so(manned: Manned) -> None:
    await manned.start()
    manned.hold()
    streams = await manned.open_on_both(4)
    pids = manned.pids()
    manned.router.signal(signal.SIGTERM)
    await refuses(manned.router)
    manned.router.signal(signal.SIGINT)
    for stream in streams:
        with pytest.raises(Ended):
            await stream.client.chunk()
    assert await ended(manned.router) == 1
    await all_gone(pids)


async def test_a_supervisor_that_is_killed_takes_all_along(manned: Manned) -> None:
    await manned.start()
    pids = manned.pids()
    assert len(pids) == 2
    os.kill(pids[2], signal.SIGSTOP)  # as stuck as can be
    manned.router.signal(signal.SIGKILL)
    await all_gone(pids)
