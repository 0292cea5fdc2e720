"""Subprocesses: started, waited for, read line by line, and stopped; and the one way to start the router as one."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx

from tests.fakes.wire import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05
MAX_LINES = 100_000
TAIL_BYTES = 4_000
PORTS = range(20_000, 32_000)
"""Below those that systems hand out by themselves, Linux from 32768 and others from 49152: what is free here is not
taken by the next connection of anybody."""


def _own_ports() -> Iterator[int]:
    """Ports of this process of the run alone, again and again."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = PORTS[number::workers]
    first = random.randrange(len(own))  # another run may be under way
    return itertools.cycle((*own[first:], *own[:first]))


_ports = _own_ports()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on, nor will before the caller does: no other test gets it."""
    for _ in PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port := next(_ports)))
            return port
    raise AssertionError(f"no port of 127.0.0.1 from {PORTS[0]} to {PORTS[-1]} is free")


class Process:
    """A subprocess in a session of its own, its output kept in `log` and its standard output in `lines` too."""

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        self.log = log
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._changed = threading.Condition()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name=f"reads {log.name}", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def lines(self) -> list[str]:
        """Those of its standard output so far, in a list of its own: more may come at any moment."""
        with self._changed:
            return list(self._lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone, not to its children."""
        self._process.send_signal(number)

    def wait_ok(self, url: str, limit_s: float) -> None:
        """Wait until GET `url` answers 200. AssertionError, with the log's tail, when it does not in time or ends."""
        deadline = time.monotonic() + limit_s
        with httpx.Client(trust_env=False, timeout=3) as client:
            while time.monotonic() < deadline:
                if not self.alive:
                    raise AssertionError(f"{self.log.name} ended with {self._process.returncode}\n{self.tail()}")
                with suppress(httpx.TransportError):
                    if client.get(url).status_code == 200:
                        return
                time.sleep(POLL_S)
        raise AssertionError(f"no 200 from {url} within {limit_s} s\n{self.tail()}")

    def wait_line(self, match: Callable[[str], bool], limit_s: float) -> str:
        """Wait for a line on standard output, past ones included. AssertionError when the limit passes first."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            while True:
                for line in self._lines:
                    if match(line):
                        return line
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(f"no such line within {limit_s} s\n{self.tail()}")

    def wait_end(self, limit_s: float) -> int:
        """Wait until it has ended by itself, and return its exit code. AssertionError when it has not."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.log.name} has not ended within {limit_s} s\n{self.tail()}") from None

    def family(self) -> set[int]:
        """The processes it has started, and theirs, at the moment. Needs /proc."""
        return _children(self.pid)

    def stop(self, limit_s: float = 15) -> None:
        """SIGTERM to the process alone, then SIGKILL to what is left of its session. A second call does nothing."""
        if self.alive:
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def tail(self) -> str:
        """The end of what it wrote, for messages of failure."""
        return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output, self.log.open("ab", buffering=0) as sink:
            for raw in output:
                sink.write(raw)
                with self._changed:
                    self._lines.append(raw.decode(errors="replace").rstrip("\n"))
                    self._changed.notify_all()


def alive(pid: int) -> bool:
    """Whether a process still runs; one that only waits to be reaped does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _children(pid: int) -> set[int]:
    found = set()
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        for task in (Path("/proc") / str(pid) / "task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found |= {child} | _children(child)
    return found


class MakeRun(Process):
    """What `make run` starts, on free ports, before emulated replicas."""

    def __init__(self, log: Path) -> None:
        self.port, self.admin_port = free_port(), free_port()
        environment = [f"PORT={self.port}", f"ADMIN_PORT={self.admin_port}"]
        super().__init__(["env", "-u", "REPLICAS", *environment, sys.executable, ROOT / "scripts/run.py"], log)

    def wait_ready(self) -> None:
        """Wait until the router takes requests."""
        self.wait_ok(f"http://127.0.0.1:{self.admin_port}/readyz", LIMIT_S)


class Router(Process):
    """A running `warmroute serve`."""

    def __init__(self, replicas: Sequence[str], log: Path, *flags: str) -> None:
        port, admin_port = free_port(), free_port()
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        command: list[str | Path] = [ROOT / ".venv/bin/warmroute", "serve", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--admin-port", str(admin_port)]
        for replica in replicas:
            command += ["--replica", replica]
        super().__init__([*command, *flags], log)

    def entry(self, request_id: str, limit_s: float = LIMIT_S) -> dict[str, object]:
        """The access log's line of one request, which must have ended or be about to."""
        needle = json.dumps(request_id)
        return dict(json.loads(self.wait_line(lambda line: line.startswith("{") and needle in line, limit_s)))


def start_router(replicas: Sequence[str], log: Path, *flags: str) -> Router:
    """Start the router in front of `replicas` (URLs) and wait until it is ready. To be stopped by the caller."""
    router = Router(replicas, log, *flags)
    try:
        router.wait_ok(f"{router.admin_url}/readyz", LIMIT_S)
    except AssertionError:
        router.stop()
        raise
    return router
