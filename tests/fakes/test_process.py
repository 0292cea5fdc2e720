"""The helpers that hold other tests' subprocesses."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.fakes.process import Process, alive, free_port
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S

SERVE = "import http.server, sys; http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), {handler}).serve_forever()"
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


def test_output_is_kept_in_order_and_in_the_log(tmp_path: Path) -> None:
    script = "import sys; print('one'); sys.stdout.flush(); print('two', file=sys.stderr); print('three')"
    with Process([sys.executable, "-c", script], tmp_path / "log") as process:
        assert process.wait_line(lambda line: line.startswith("th"), LIMIT_S) == "three"
        assert process.wait_end(LIMIT_S) == 0
    assert list(process.lines) == ["one", "three"]
    text = (tmp_path / "log").read_text()
    assert all(word in text for word in ("one", "two", "three")), "both streams, though a line may fall into another"


def test_waiting_for_a_url(tmp_path: Path) -> None:
    port = free_port()
    script = SERVE.format(handler="http.server.SimpleHTTPRequestHandler")
    with Process([sys.executable, "-c", script, str(port)], tmp_path / "log") as process:
        process.wait_ok(f"http://127.0.0.1:{port}/", LIMIT_S)
        with pytest.raises(AssertionError, match="no 200 from"):
            process.wait_ok(f"http://127.0.0.1:{port}/nothing-is-here", 0.2)
    assert not process.alive


def test_a_process_that_ends_instead_of_answering_shows_its_log(tmp_path: Path) -> None:
    script = "import sys; sys.exit('no such model')"
    with (
        Process([sys.executable, "-c", script], tmp_path / "log") as process,
        pytest.raises(AssertionError, match=r"ended with 1\n.*no such model"),
    ):
        process.wait_ok(f"http://127.0.0.1:{free_port()}/", LIMIT_S)


def test_a_line_that_never_comes(tmp_path: Path) -> None:
    with (
        Process([sys.executable, "-c", "print('other')"], tmp_path / "log") as process,
        pytest.raises(AssertionError, match="no such line"),
    ):
        process.wait_line(lambda line: line == "this", 0.2)


async def test_stopping_ends_what_ignores_sigterm_and_its_children(tmp_path: Path) -> None:
    process = Process([sys.executable, "-c", STUBBORN], tmp_path / "log")
    child = int(process.wait_line(str.isdigit, LIMIT_S))
    process.stop(limit_s=0.2)
    process.stop()
    assert process.wait_end(0) == -signal.SIGKILL

    async def lives() -> bool:
        return alive(child)

    await until(lives, lambda still: not still, LIMIT_S, "the child has gone")


async def test_until_returns_what_holds_and_names_what_does_not() -> None:
    numbers = iter(range(100))

    async def ask() -> int:
        return next(numbers)

    assert await until(ask, lambda n: n == 3, LIMIT_S, "three") == 3
    with pytest.raises(AssertionError, match="not within 0 s: a hundred; last seen: 4"):
        await until(ask, lambda n: n == 100, 0, "a hundred")
