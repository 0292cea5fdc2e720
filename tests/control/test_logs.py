"""The access log: nobody who reads it slowly, or not at all, holds up serving."""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import os
import re
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from policies.balancer import Balancer
from policies.round_robin import RoundRobin
from policies.types import OUTCOMES, Cause, Outcome, Phase, Usage
from router import logs
from router.identity import DEFAULT_RULES, IdentityRules
from router.line import Line
from router.logs import AccessLog
from router.metrics import Metrics
from router.proxy.exchange import Exchange
from router.proxy.proxy import Proxy
from router.settings import Settings
from tests.fakes.proxied import RecordingHealth
from tests.fakes.wire import eventually

DONE = OUTCOMES[Cause.DONE, Phase.BODY]
PIPE_BYTES = 4096
"""The smallest pipe that Linux makes: a dozen lines fill it."""


@dataclass
class Logged:
    """An access log on a pipe whose other end is the test's, and exchanges of a real proxy to write into it."""

    log: AccessLog
    reader: int
    writer: int
    proxy: Proxy
    open: set[int] = field(default_factory=set)

    def write(
        self, count: int = 1, usage: Usage | None = None, *, outcome: Outcome = DONE, status: int = 0, why: str = ""
    ) -> None:
        """Log requests as the data plane does; they are numbered by their ids."""
        for _ in range(count):
            exchange = Exchange(self.proxy.protocol(server_state=SimpleNamespace(connections=set())))
            exchange.method, exchange.target, exchange.identifier = b"GET", b"/v1/models?key=s3cret", self.number()
            exchange.status, exchange.why = status, why
            self.log.write(exchange, outcome, usage, exchange.started_at + 1)

    def number(self) -> bytes:
        return self.proxy.new_identifier().rpartition(b"-")[2]

    def close(self, end: int) -> None:
        if end in self.open:
            self.open.discard(end)
            os.close(end)

    def read_all(self) -> list[str]:
        """What can be read until the writing end is closed."""
        data = b""
        while piece := os.read(self.reader, 65_536):
            data += piece
        return data.decode().splitlines()


@pytest.fixture
def logged() -> Iterator[Callable[..., Logged]]:
    """Makes a log; must be called in a running loop, which the proxy's calls are made on."""
    made: list[Logged] = []

    def make(form: str = "json", sample: float = 1.0) -> Logged:
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        log = AccessLog(form, writer, sample)  # type: ignore[arg-type]
        balancer = Balancer(RoundRobin())
        proxy = Proxy(
            balancer=balancer,
            identity=IdentityRules(DEFAULT_RULES, b""),
            settings=Settings(),
            metrics=Metrics(balancer),
            access_log=log,
            health=RecordingHealth(),
        )
        proxy.loop = asyncio.get_running_loop()
        made.append(Logged(log, reader, writer, proxy, {reader, writer}))
        return made[-1]

    yield make
    for each in made:
        each.close(each.reader)  # wakes a writer that waits
        each.log.close()
        each.close(each.writer)


def numbers(lines: list[str]) -> list[int]:
    return [int(json.loads(line)["request_id"], 16) for line in lines]


Make = Callable[..., Logged]


async def test_each_request_is_a_whole_line_in_order(logged: Make) -> None:
    log = logged()
    reading = asyncio.create_task(asyncio.to_thread(log.read_all))
    log.write(500)
    await asyncio.to_thread(log.log.close)
    log.close(log.writer)
    assert numbers(await reading) == list(range(1, 501))
    assert log.log.dropped == 0


async def test_of_what_went_well_a_share_is_logged_and_of_what_did_not_all(logged: Make) -> None:
    log = logged(sample=0.25)
    reading = asyncio.create_task(asyncio.to_thread(log.read_all))
    log.write(100)
    log.write(3, outcome=OUTCOMES[Cause.CLIENT, Phase.BODY])
    log.write(3, status=404)
    log.write(3, why="reset")
    await asyncio.to_thread(log.log.close)
    log.close(log.writer)
    seen = numbers(await reading)
    assert sum(number <= 100 for number in seen) == 25
    assert seen[25:] == list(range(101, 110))


async def test_lines_are_written_soon_without_being_asked_for(logged: Make) -> None:
    log = logged()
    log.write(3)
    line = await asyncio.to_thread(os.read, log.reader, 65_536)
    assert numbers(line.decode().splitlines()) == [1, 2, 3]


async def test_a_reader_that_stops_costs_lines_that_are_counted_and_no_waiting(logged: Make) -> None:
    """Everything here runs on the loop's own thread: a write that waited would hang the test."""
    log = logged()
    log.write(100)  # a batch larger than the pipe: the thread stands in it
    log.log.flush()
    await eventually(lambda: _pending(log.reader) > 0)
    batches = logs.MAX_BATCHES + 50
    for _ in range(batches):
        log.write()
        log.log.flush()
    assert (dropped := log.log.dropped) == 50, "all but those that the queue holds"
    reading = asyncio.create_task(asyncio.to_thread(log.read_all))
    await asyncio.to_thread(log.log.close)
    log.close(log.writer)
    written = numbers(await reading)
    assert len(written) == 100 + batches - dropped, "whatever was not counted as dropped was written"
    assert written == sorted(set(written)), "in order, none twice"


async def test_one_batch_is_bounded(logged: Make) -> None:
    log = logged()
    log.write(logs.MAX_LINES + 7)
    assert log.log.dropped == 7


async def test_closing_with_a_reader_that_stands_still_ends(logged: Make) -> None:
    log = logged()
    log.write(200)
    closing = threading.Thread(target=log.log.close, daemon=True)
    closing.start()
    await eventually(lambda: not closing.is_alive(), "it has given up waiting for the reader")


async def test_a_reader_that_has_gone_costs_lines_and_nothing_else(logged: Make) -> None:
    log = logged()
    log.close(log.reader)
    log.write(20)
    log.log.flush()
    await eventually(lambda: log.log.dropped == 20)
    log.write(5)
    log.log.flush()
    await eventually(lambda: log.log.dropped == 25)


async def test_a_pipe_made_non_blocking_by_its_other_owner(logged: Make) -> None:
    log = logged()
    os.set_blocking(log.writer, False)
    log.write(100)
    log.log.flush()
    await eventually(lambda: _pending(log.reader) > 0)
    reading = asyncio.create_task(asyncio.to_thread(log.read_all))
    await asyncio.to_thread(log.log.close)
    log.close(log.writer)
    assert numbers(await reading) == list(range(1, 101))


async def test_a_line_cut_off_does_not_swallow_the_next(logged: Make, tmp_path: Path) -> None:
    """A reader that goes in the middle of a batch, as a log shipper that is restarted: what comes after is whole."""
    log = logged()
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    first = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(fifo, os.O_WRONLY)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    shipped = AccessLog("json", writer)
    log.log, plain = shipped, log.log
    log.write(100)
    shipped.flush()
    await eventually(lambda: _pending(first) > 0)
    os.close(first)
    await eventually(lambda: shipped.dropped > 0)
    second = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(second, True)
    log.write(2)
    await asyncio.to_thread(shipped.close)
    os.close(writer)
    log.log = plain
    with os.fdopen(second, encoding="utf-8") as rest:
        lines = rest.read().splitlines()
    assert numbers(lines[-2:]) == [101, 102]


def _pending(descriptor: int) -> int:
    """Bytes in a pipe that nobody has read."""
    count = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


# What a line says


def test_its_fields_are_those_documented() -> None:
    text = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    table = text.partition("## The log")[2].partition("## Traces")[0]
    documented = [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(documented) == sorted(one.name for one in msgspec.structs.fields(Line))


async def test_what_does_not_apply_is_left_out_and_the_query_is_never_told(logged: Make) -> None:
    log = logged()
    log.write()
    log.write(usage=Usage(100, 64, 7))
    raw = await asyncio.to_thread(os.read, log.reader, 65_536)
    bare, full = (json.loads(line) for line in raw.splitlines())
    assert bare.keys() == {
        *("time", "request_id", "method", "path", "cause", "phase", "tries", "duration_s", "bytes_in", "bytes_out")
    }
    assert (bare["path"], bare["cause"], bare["phase"], bare["duration_s"]) == ("/v1/models", "done", "body", 1.0)
    assert (full["prompt_tokens"], full["cached_tokens"], full["completion_tokens"]) == (100, 64, 7)
    assert b"s3cret" not in raw


async def test_the_form_for_people(logged: Make) -> None:
    log = logged("text")
    log.write(usage=Usage(100, 64, 7))
    line = (await asyncio.to_thread(os.read, log.reader, 65_536)).decode()
    assert re.fullmatch(r"\d\d:\d\d:\d\d - GET /v1/models -> - 1\.000s 64/100 tokens cached\n", line)


@pytest.mark.parametrize(
    ("tries", "failed", "told"),
    [
        (1, None, "-> b (home_lost) 0.250s\n"),
        (2, "reset", "-> b (home_lost), 2 tried, failed: reset 0.250s\n"),
    ],
)
def test_the_form_for_people_tells_of_other_tries(tries: int, failed: str | None, told: str) -> None:
    line = Line(0, "", "POST", "/v1/models", "done", "body", tries, 0.25, 0, 0, replica="b", reason="home_lost")
    line.failed = failed
    assert logs.text(line).decode().endswith(told)


def test_the_form_for_people_tells_why_nobody_served_it() -> None:
    line = Line(0, "", "POST", "/", "upstream", "queue", 2, 0.25, 0, 0, status=503, refusal="all_failed")
    line.failed = "connect"
    told = "503 POST / -> -, 2 tried, failed: connect 0.250s refused: all_failed ended by upstream in queue\n"
    assert logs.text(line).decode().endswith(told)
