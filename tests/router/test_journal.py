"""The decision journal: what a call is written as, and what becomes of it when the disk is slow, full or gone."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policies import registry
from policies.balancer import Balancer, NoReplica
from policies.types import OUTCOMES, Cause, Load, Phase, Replica, Request, State, Usage
from router.calls import Header, Join
from router.configuration import ConfigError
from router.journal import MAX_BATCHES, Journal
from router.journaled import JournaledBalancer
from router.settings import JournalSettings
from tests.fakes.journal import journaled
from tests.fakes.wire import eventually

DONE = OUTCOMES[Cause.DONE, Phase.BODY]
UNREACHED = OUTCOMES[Cause.UPSTREAM, Phase.CONNECT]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


# Calls


async def test_each_call_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with journaled(path, registry.make("least_loaded")) as (balancer, _):
        first, second = Replica("a"), Replica("b", weight=0.5, state=State.DRAINING)
        balancer.join(first, 1.0)
        balancer.join(second, 2.0)
        balancer.set_state(second, State.READY, 3.0)
        balancer.set_weight(second, 1.5, 3.5)
        balancer.report(first, Load(3.5, 1, 0, capacity_tokens=900), 4.0)
        request = Request(b"\x01" * 16, b"\x02" * 16, 0, 100)
        lease = balancer.acquire(request, 5.0)
        lease.first_token(6.0)
        lease.finish(DONE, Usage(200, None, 7), 7.0)  # twice what was estimated
        again = balancer.acquire(request, 8.0)
        again.timed = False
        again.finish(UNREACHED, None, 9.0)
        request.failed += (again.replica,)
        last = balancer.acquire(request, 9.0)
        balancer.explain(Request(turn=False), 9.5)
        balancer.switch(registry.make("random", {"seed": 2}), 10.0)
        balancer.cache_cleared(first, 11.0)
        balancer.leave("b", 12.0)
        balancer.join(Replica("a"), 13.0)
        balancer.set_state(balancer.replicas["a"], State.EJECTED, 14.0)
        with pytest.raises(NoReplica):
            balancer.acquire(Request(), 15.0)
        last.finish(DONE, None, 9_001.0)
    header, *found = lines(path)
    assert header["call"] == "journal"
    assert header["policy"]["name"] == "least_loaded"
    asked = {"key": "01" * 16, "parent": "02" * 16, "prompt_tokens": 100}
    chosen = [line["replica"] for line in found if line["call"] == "acquire" and "replica" in line]
    assert chosen[2] != chosen[1]
    assert found == [
        {"call": "join", "at": 1.0, "replica": 0, "id": "a", "weight": 1.0, "state": "ready"},
        {"call": "join", "at": 2.0, "replica": 1, "id": "b", "weight": 0.5, "state": "draining"},
        {"call": "set_state", "at": 3.0, "replica": 1, "state": "ready"},
        {"call": "set_weight", "at": 3.5, "replica": 1, "weight": 1.5},
        {"call": "report", "at": 4.0, "replica": 0, "load": {"at": 3.5, "running": 1, "waiting": 0,
                                                             "capacity_tokens": 900}},
        {"call": "acquire", "at": 5.0, **asked, "lease": 1, "replica": chosen[0], "reason": "least_loaded"},
        {"call": "first_token", "at": 6.0, "lease": 1},
        {"call": "finish", "at": 7.0, "lease": 1, "cause": "done", "phase": "body", "prompt_tokens": 200,
         "completion_tokens": 7},
        {"call": "acquire", "at": 8.0, **asked, "lease": 2, "replica": chosen[1], "reason": "least_loaded"},
        {"call": "finish", "at": 9.0, "lease": 2, "cause": "upstream", "phase": "connect", "timed": False},
        {"call": "acquire", "at": 9.0, **asked, "failed": [chosen[1]], "lease": 3, "replica": chosen[2],
         "reason": "least_loaded"},
        {"call": "explain", "at": 9.5, "turn": False},
        {"call": "switch", "at": 10.0, "policy": {"name": "random", "parameters": {"seed": 2}}},
        {"call": "cache_cleared", "at": 11.0, "replica": 0},
        {"call": "leave", "at": 12.0, "replica": 1},
        {"call": "leave", "at": 13.0, "replica": 0},
        {"call": "join", "at": 13.0, "replica": 2, "id": "a", "weight": 1.0, "state": "ready"},
        {"call": "set_state", "at": 14.0, "replica": 2, "state": "ejected"},
        {"call": "acquire", "at": 15.0, "refused": "all_ejected"},
        {"call": "finish", "at": 9001.0, "lease": 3, "cause": "done", "phase": "body"},
    ]  # fmt: skip


def test_no_call_is_forgotten() -> None:
    """Whoever gives the Balancer another method has to say whether a replay must make that call, too."""
    changes_no_choice = {"run_shadow", "unsure", "stays", "issuer"}
    tells = {"counts", "policy_in", "ready_in", "under_way", "within"}
    asks = {"explain", "propose"}  # by the same way, which is journaled
    public = {name for name, _ in inspect.getmembers(Balancer, inspect.isfunction) if not name.startswith("_")}
    journaled = set(vars(JournaledBalancer))
    assert public - changes_no_choice - tells - asks == public & journaled
    assert "_ask" in journaled


async def test_replicas_that_are_gone_are_let_go(tmp_path: Path) -> None:
    with journaled(tmp_path / "j", registry.make("round_robin")) as (balancer, _):
        for _ in range(50):
            replica = Replica("a")
            balancer.join(replica, 1.0)
            lease = balancer.acquire(Request(), 1.0)
            balancer.leave("a", 2.0)
            balancer.report(replica, Load(2.0), 2.0)
            lease.finish(DONE, None, 3.0)
            balancer.set_state(replica, State.EJECTED, 4.0)
        assert not balancer._numbers
        assert not balancer._leases


# Files


async def test_a_new_file_begins_with_the_fleet_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text("of an earlier router\n")
    with journaled(path, registry.make("random"), max_bytes=1000, files=3) as (balancer, journal):
        balancer.join(Replica("a", weight=2.0), 1.0)
        for at in range(100):
            balancer.acquire(Request(), at).finish(DONE, None, at)
            journal.flush()
    assert sorted(os.listdir(tmp_path)) == ["j", "j.1", "j.2"]
    assert path.stat().st_mode & 0o777 == 0o600
    parts = [lines(tmp_path / name)[0] for name in ("j.2", "j.1", "j")]
    assert [part["part"] for part in parts] == [parts[0]["part"] + more for more in range(3)]
    for part in parts:
        assert part["call"] == "journal"
        assert part["replicas"] == [
            {"call": "join", "at": 1.0, "replica": 0, "id": "a", "weight": 2.0, "state": "ready"}
        ]
    leases = [line["lease"] for name in ("j.2", "j.1", "j") for line in lines(tmp_path / name) if "lease" in line]
    assert leases == [number for lease in range(leases[0], 101) for number in (lease, lease)]


async def test_an_earlier_journal_is_kept_beside(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text("of an earlier router\n")
    with journaled(path, registry.make("random")):
        pass
    assert path.with_name("j.1").read_text() == "of an earlier router\n"
    assert [line["call"] for line in lines(path)] == ["journal"]


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "j"
    with pytest.raises(ConfigError, match=r"journal\.path: cannot write .*nowhere/j: No such file.*: name a file"):
        Journal(JournalSettings(path=str(path)))


# Disks


class Disk:
    """A pipe in place of a file: it is as slow as it is read, and gone when nobody reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._fd = -1
        self.data = b""
        self.open()

    def open(self) -> None:
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def close(self) -> None:
        os.close(self._fd)

    def read(self) -> list[dict[str, Any]]:
        """All lines so far."""
        try:
            while data := os.read(self._fd, 1 << 20):
                self.data += data
        except BlockingIOError:
            pass
        return [json.loads(line) for line in self.data.split(b"\n")[:-1] if line]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "j")
    yield disk
    disk.close()


def started(disk: Disk) -> Journal:
    journal = Journal(JournalSettings(path=str(disk.path)))

    def header(part: int, lost: int) -> Header:
        return Header(0.0, 1, "0", 0.0, part, lost, {}, {}, [])

    journal.start(header)
    return journal


def line(number: int) -> Join:
    return Join(0.0, number, "a" * 5000, 1.0, State.READY)


async def test_a_disk_that_stalls_costs_lines_and_no_waiting(disk: Disk) -> None:
    journal = started(disk)
    count = 2 * MAX_BATCHES
    for number in range(count):  # more than the pipe and the queue hold
        journal.write(line(number))
        journal.flush()
    assert journal.dropped > 0
    last = count - 1

    def resumed() -> bool:
        nonlocal last
        journal.write(line(last := last + 1))
        journal.flush()
        return any(each.get("replica", 0) >= count for each in disk.read())

    await eventually(resumed, "lines again")
    lost = written = 0
    for each in disk.read():
        if each["call"] == "journal":
            lost = each["lost"]
        else:
            assert each["replica"] == lost + written, "no hole but those that a header tells of"
            written += 1
    assert lost > 0
    await asyncio.to_thread(journal.close)


async def test_a_disk_that_fails_leaves_a_gap_that_says_so(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    journal = started(disk)
    journal.write(line(0))
    journal.flush()
    await eventually(lambda: len(disk.read()) == 2, "the header and a line")
    disk.close()
    for number in (1, 2, 3):
        journal.write(line(number))
        journal.flush()
    await eventually(lambda: journal.dropped >= 3, "three lines that nobody took")
    disk.open()
    sent = 3

    def resumed() -> bool:
        """Lines come again, behind a header that knows of all that were lost."""
        nonlocal sent
        journal.write(line(sent := sent + 1))
        journal.flush()
        found = disk.read()
        (*_, known) = (each["lost"] for each in found if each["call"] == "journal")
        return known == journal.dropped and found[-1].get("replica", 0) > 3

    await eventually(resumed, "a line behind a header")

    def accounted() -> bool:
        return sum(each["call"] == "join" for each in disk.read()) + journal.dropped == sent + 1

    await eventually(accounted, "each line written or counted")
    assert journal.dropped >= 3
    assert sum("cannot write" in record.message for record in caplog.records) == 1, "said once"
    await asyncio.to_thread(journal.close)


async def test_a_full_disk_stops_nothing() -> None:
    journal = Journal(JournalSettings(path="/dev/full"))
    journal.start(lambda part, lost: Header(0.0, 1, "0", 0.0, part, lost, {}, {}, []))
    for number in range(5):
        journal.write(line(number))
        journal.flush()
    await eventually(lambda: journal.dropped == 5, "five lines that had no room")
    await asyncio.to_thread(journal.close)
