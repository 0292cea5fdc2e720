"""Workers' processes without what asks them: pauses between starts, and what stands still."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.settings import Settings
from router.workers import crew as crew_module
from router.workers import member as member_module
from router.workers.assignment import Assignment
from router.workers.crew import Crew
from router.workers.member import Member
from router.workers.supervisor import shared_sockets
from tests.fakes.wire import LIMIT_S, eventually

NOWHERE = "192.0.2.1"
"""Of no machine."""


class Crewed:
    """One worker or more of a crew, none of which reaches a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.crew: Crew

    async def start(self, count: int, host: str = "127.0.0.1") -> None:
        """`host` is where sockets are made anew."""
        settings = Settings(port=0, workers=count, replicas=["http://127.0.0.1:9"])  # type: ignore[list-item]

        def assignment(member: Member, admin: str) -> Assignment:
            listeners = [sock.fileno() for sock in member.sockets]
            return Assignment(member.number, count, settings, "s", admin, str(self.folder / "store"), listeners)

        self.crew = Crew(host, shared_sockets(settings), self.folder, assignment)
        await self.crew.start()

    def signal(self, member: Member, number: signal.Signals) -> None:
        assert member.process is not None
        os.kill(member.process.pid, number)

    async def ends(self) -> None:
        await asyncio.wait_for(self.crew.all_ended(), LIMIT_S)

    async def stop(self) -> None:
        if hasattr(self, "crew"):
            self.crew.stop(at_once=True)
            self.crew.kill()
            await self.ends()


@pytest.fixture
async def crewed(tmp_path: Path) -> AsyncIterator[Crewed]:
    """Not started yet; what it started is ended after the test."""
    crewed = Crewed(tmp_path)
    yield crewed
    await crewed.stop()


async def test_who_is_to_stop_does_not_wait_until_a_worker_may_be_started_again(
    crewed: Crewed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(crew_module, "FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(crew_module, "LONGEST_PAUSE_S", 3600.0)
    await crewed.start(2)
    member = crewed.crew.members[1]
    crewed.signal(member, signal.SIGKILL)
    await eventually(lambda: "signal 9: started again" in caplog.text and member.up)
    crewed.signal(member, signal.SIGKILL)
    await eventually(lambda: "started again in 3600 s" in caplog.text)
    crewed.crew.stop()
    await crewed.ends()
    assert not crewed.crew.failed


async def test_nor_until_there_are_sockets_for_it(
    crewed: Crewed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(crew_module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(crew_module, "LONGEST_PAUSE_S", 3600.0)
    await crewed.start(1, NOWHERE)
    [member] = crewed.crew.members
    for when in ("", " in 0.001 s", " in 0.002 s"):
        await eventually(lambda: member.up)
        crewed.signal(member, signal.SIGKILL)
        await eventually(lambda when=when: f"signal 9: started again{when}\n" in caplog.text)  # type: ignore[misc]
    await eventually(lambda: f"worker 1 is not started yet: cannot listen on {NOWHERE}" in caplog.text)
    crewed.crew.stop()
    await crewed.ends()


async def test_a_worker_that_stands_still_for_long_is_killed_and_started_again(
    crewed: Crewed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(member_module, "HUNG_LOOKS", 2)
    await crewed.start(2)
    still, other = crewed.crew.members
    name, pid = still.name, other.process and other.process.pid
    crewed.signal(still, signal.SIGSTOP)
    await eventually(lambda: "worker 1 has not answered for 4 s: killed" in caplog.text)
    await eventually(lambda: still.up and still.name != name)
    assert "worker 1 was ended by signal 9: started again" in caplog.text
    assert (other.process and other.process.pid) == pid
    assert [member.silent for member in crewed.crew.members] == [False, False]


async def test_a_worker_that_answers_again_is_let_live(crewed: Crewed, caplog: pytest.LogCaptureFixture) -> None:
    await crewed.start(1)
    [member] = crewed.crew.members
    name = member.name
    crewed.signal(member, signal.SIGSTOP)
    await eventually(lambda: member.silent)
    crewed.signal(member, signal.SIGCONT)
    await eventually(lambda: not member.silent)
    assert (member.up, member.name) == (True, name)
    assert caplog.text.count("worker 1 does not answer: ") == 1
    assert "worker 1 answers again" in caplog.text
