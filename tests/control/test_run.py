"""`make run`: it says what is wrong before it starts anything, and however it ends, nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.fakes.process import ROOT, MakeRun, Process, alive, free_port
from tests.fakes.waiting import until

LIMIT_S = 60
REMEDY = "Try PORT=8090 ADMIN_PORT=8091 make run"
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

each_signal = pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[MakeRun]:
    """`scripts/run.py` just started, the leader of a group as `make run` is in a terminal."""
    with MakeRun(tmp_path / "log") as runner:
        yield runner


async def all_gone(family: set[int]) -> None:
    async def left() -> list[int]:
        return [pid for pid in family if alive(pid)]

    try:
        await until(left, lambda pids: not pids, LIMIT_S, "none of its processes is left")
    finally:
        for pid in await left():
            os.kill(pid, signal.SIGKILL)


def started_with(variable: str) -> set[int]:
    """The processes that have it in their environment, as NAME=value."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # ended meanwhile, or somebody else's
            if variable.encode() in file.read_bytes().split(b"\0"):
                found.add(int(file.parent.name))
    return found


async def grown(runner: MakeRun, count: int) -> set[int]:
    """Its processes, once they are so many."""

    async def family() -> set[int]:
        assert runner.alive, runner.tail()
        return runner.family()

    return await until(family, lambda pids: len(pids) >= count, LIMIT_S, f"{count} processes started")


@each_signal
async def test_a_signal_to_the_group_stops_all_once_and_streams_end_whole(
    runner: MakeRun, number: signal.Signals
) -> None:
    """As a terminal's Ctrl-C does: the stream under way needs the router and its replica to its last byte."""
    await asyncio.to_thread(runner.wait_ready)
    family = runner.family()
    assert len(family) == 2, "the router and the emulator"
    chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 200, "ignore_eos": True}
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{runner.port}", trust_env=False, timeout=LIMIT_S) as client,
        client.stream("POST", "/v1/chat/completions", json={"model": "emulated", **chat}) as answer,
    ):
        pieces = answer.aiter_text()
        received = await anext(pieces)
        os.killpg(runner.pid, number)
        async for piece in pieces:
            received += piece
    assert received.rstrip().endswith("data: [DONE]")
    assert await asyncio.to_thread(runner.wait_end, LIMIT_S) == 0, runner.tail()
    await all_gone(family)
    log = runner.log.read_text()
    assert log.count("stopping: ") == 1, "the router was told once"
    assert "Traceback" not in log
    assert "KeyboardInterrupt" not in log


async def test_a_signal_while_the_replicas_start(runner: MakeRun) -> None:
    family = await grown(runner, 1)
    os.killpg(runner.pid, signal.SIGINT)
    assert await asyncio.to_thread(runner.wait_end, LIMIT_S) == 130, runner.tail()
    await all_gone(family)
    assert "Traceback" not in runner.log.read_text()


async def test_a_signal_while_the_router_starts(runner: MakeRun) -> None:
    """It has no handlers yet: ended by SIGTERM, or told of it, or not even started."""
    family = await grown(runner, 2)
    os.killpg(runner.pid, signal.SIGINT)
    assert await asyncio.to_thread(runner.wait_end, LIMIT_S) in (0, 130, 128 + signal.SIGTERM), runner.tail()
    await all_gone(family)
    assert "Traceback" not in runner.log.read_text()


SIGNALLED = """
import os, runpy, signal, sys
forks = []
os.register_at_fork(
    before=lambda: forks.append(1),
    after_in_child=lambda: len(forks) == int(sys.argv[2]) and os.kill(0, signal.SIGINT),
)
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""Runs a script; SIGINT comes to its group when it has forked so often, before the child is another program."""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell another process's environment")
@pytest.mark.parametrize("fork", [1, 2, 3], ids=["of the replicas", "of the check", "of the router"])
async def test_a_signal_in_the_moment_of_a_fork(tmp_path: Path, fork: int) -> None:
    ports = [f"PORT={free_port()}", f"ADMIN_PORT={free_port()}"]
    command = [sys.executable, "-c", SIGNALLED, ROOT / "scripts/run.py", str(fork)]
    with Process(["env", "-u", "REPLICAS", *ports, *command], tmp_path / "log") as process:
        try:
            code = await asyncio.to_thread(process.wait_end, LIMIT_S)
        finally:
            await all_gone(started_with(ports[0]))
        assert code == 130, process.tail()
        assert "Traceback" not in process.log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no signal for a parent's death")
@pytest.mark.parametrize("count", [1, 2], ids=["as the replicas start", "serving"])
async def test_killed_it_takes_its_children_along(runner: MakeRun, count: int) -> None:
    family = await grown(runner, count)
    if count == 2:
        await asyncio.to_thread(runner.wait_ready)
    runner.signal(signal.SIGKILL)
    assert await asyncio.to_thread(runner.wait_end, LIMIT_S) == -signal.SIGKILL
    await all_gone(family)


# Ports


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    """`scripts/run.py` to its end."""
    clean = {name: value for name, value in os.environ.items() if name != "REPLICAS"}
    command = [sys.executable, str(ROOT / "scripts/run.py")]
    return subprocess.run(
        command, env=clean | environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.parametrize("name", ["PORT", "ADMIN_PORT"])
def test_a_busy_port_is_told_before_anything_starts(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run(**{"PORT": str(free_port()), "ADMIN_PORT": str(free_port()), name: str(port)})
    assert (done.returncode, done.stdout) == (1, ""), "no replica, no welcome"
    told = f"warmroute: cannot listen on 127.0.0.1:{port} ({name}): Address already in use. {REMEDY}\n"
    assert done.stderr == told


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"POLICY": "sticki"}, "warmroute: policy: unknown policy 'sticki'"),
        ({"REPLICAS": "a:30000"}, "warmroute: replicas.0: 'a:30000' is not a replica's URL"),
    ],
)
def test_a_configuration_that_cannot_be_is_told_before_any_welcome(environment: dict[str, str], told: str) -> None:
    done = run(PORT=str(free_port()), ADMIN_PORT=str(free_port()), **environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(told)


@pytest.mark.parametrize("value", ["eighty", "70000", "-1", ""])
def test_what_is_no_port_is_told_likewise(value: str) -> None:
    done = run(PORT=value, ADMIN_PORT=str(free_port()))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"warmroute: cannot listen on 127.0.0.1:{value} (PORT): not a port. {REMEDY}\n"
