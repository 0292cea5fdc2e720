"""`python -m sim.emulator` as a process: its command line, its output and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulator.asks import CHAT, HELLO, raw
from tests.fakes.client import RawClient, get
from tests.fakes.process import ROOT, Process
from tests.fakes.waiting import until

_LIMIT_S = 60


def start(log: Path, *flags: str) -> Process:
    return Process([sys.executable, "-m", "sim.emulator", *flags], log)


def ports(process: Process, count: int) -> list[int]:
    """The ports of its `ready` lines."""
    process.wait_line(lambda _: len(process.lines) >= count, _LIMIT_S)
    assert [line.split()[0] for line in process.lines] == ["ready"] * count
    return [int(line.split()[1]) for line in process.lines]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Process]:
    """Two replicas in one process, five times as fast as the real thing."""
    with start(tmp_path / "log", "--port", "0", "--port", "0", "--time-scale", "0.2", "--model", "m") as process:
        yield process


async def test_sigterm_serves_until_idle_and_exits_with_0(two: Process) -> None:
    """As recorded: not ready at once, running streams end well, new requests are served, then it goes."""
    first, second = ports(two, 2)
    streaming = await RawClient.connect(first)
    kept = await RawClient.connect(first)
    other = await RawClient.connect(second)
    endless = {"messages": HELLO, "stream": True, "max_tokens": 1500, "ignore_eos": True}
    streaming.send(raw(CHAT, endless))
    assert (await streaming.head()).status == 200
    assert (await kept.ask(get("/ready"))).status == 200
    two.signal(signal.SIGTERM)
    await until(lambda: kept.ask(get("/ready")), lambda answer: answer.status == 503, _LIMIT_S, "/ready is 503")
    assert (await kept.ask(get("/health"))).status == 503
    assert (await kept.ask(get("/v1/loads"))).status == 200
    assert (await other.ask(get("/ready"))).status == 503
    fresh = await RawClient.connect(first)
    served = await fresh.ask(raw(CHAT, {"messages": HELLO, "max_tokens": 3}))
    assert json.loads(served.body)["choices"][0]["finish_reason"] == "length"
    chunks = []
    while chunk := await streaming.chunk():
        chunks.append(chunk)
    assert chunks[-1] == b"data: [DONE]\n\n"
    for client in (streaming, kept, other, fresh):
        client.close()
    assert two.wait_end(_LIMIT_S) == 0


async def test_sigint_ends_at_once(two: Process) -> None:
    first, _ = ports(two, 2)
    client = await RawClient.connect(first)
    client.send(raw(CHAT, {"messages": HELLO, "stream": True, "max_tokens": 100_000, "ignore_eos": True}))
    await client.head()
    two.signal(signal.SIGINT)
    assert two.wait_end(_LIMIT_S) == 0
    client.close()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "port must be between 0 and 65535, not 70000"),
        (["--time-scale", "0"], "time_scale must be above 0, not 0.0"),
        (["--kv-tokens", "many"], "argument --kv-tokens: invalid int value: 'many'"),
        (["--hardware", "abacus"], "argument --hardware: invalid choice: 'abacus'"),
        (["--speed", "1"], "unrecognized arguments: --speed 1"),
    ],
)
def test_bad_flags(flags: list[str], message: str) -> None:
    command = [sys.executable, "-m", "sim.emulator", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S)
    assert ended.returncode == 2
    assert message in ended.stderr


def test_a_port_that_is_taken(two: Process) -> None:
    taken = ports(two, 2)[0]
    command = [sys.executable, "-m", "sim.emulator", "--port", "0", "--port", str(taken)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S)
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{taken}" in ended.stderr
