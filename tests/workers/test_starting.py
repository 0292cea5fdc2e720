"""What keeps workers from starting is said once, with the exit code that one router has for it."""

from __future__ import annotations

import functools
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from router.settings import Settings
from router.workers.supervisor import shared_sockets
from tests.fakes.wire import LIMIT_S
from tests.router.test_cli import warmroute


def test_a_bad_configuration_is_told_once() -> None:
    done = warmroute("serve", "--workers", "2", "--policy", "nosuch")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("warmroute: policy: unknown policy 'nosuch'")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("workers", ["0", "-1", "257", "x"])
def test_a_number_of_workers_that_cannot_be_is_refused(workers: str) -> None:
    done = warmroute("check-config", WARMROUTE_WORKERS=workers)
    assert done.returncode == 2
    assert done.stderr.startswith("warmroute: workers: ")


@pytest.mark.parametrize(("taken", "shares"), [("--port", True), ("--admin-port", False)])
def test_a_port_in_use_is_told_in_a_line(taken: str, shares: bool) -> None:
    """Also when who has it would share it: clients would be answered now by one, now by the other."""
    with socket.socket() as other:
        if shares:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        flags = {"--port": "0", "--admin-port": "0"} | {taken: str(port)}
        words = [word for flag in flags.items() for word in flag]
        done = warmroute("serve", "--workers", "2", *words, WARMROUTE_LOG__LEVEL="error")
    assert done.returncode == 1
    assert done.stderr == (
        f"warmroute: cannot listen on 127.0.0.1:{port}: Address already in use: choose another host or port\n"
    )


def test_that_there_is_nowhere_to_make_sockets_is_told_in_a_line() -> None:
    """As in a container of which nothing can be written."""
    command = [sys.executable, "-m", "router.cli", "serve", "--workers", "2", "--port", "0", "--admin-port", "0"]
    nothing_written = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, 0))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, preexec_fn=nothing_written, check=False
    )
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert told.startswith("warmroute: no folder for the workers' sockets can be made: ")
    assert told.endswith(": set TMPDIR to one that can be written")
    assert "Traceback" not in done.stderr


def test_what_only_a_worker_finds_out_ends_all_with_its_code(tmp_path: Path) -> None:
    journal = str(tmp_path / "nosuch" / "journal")
    ports = ("--port", "0", "--admin-port", "0")
    done = warmroute("serve", "--workers", "2", *ports, WARMROUTE_JOURNAL__PATH=journal, WARMROUTE_LOG__LEVEL="error")
    assert done.returncode == 2
    assert done.stderr.count("journal.path: cannot write") == 1, "the first worker alone says it"
    assert "Traceback" not in done.stderr


def test_any_free_port_is_the_same_for_all_workers() -> None:
    groups = shared_sockets(Settings(host="localhost", port=0, workers=3))
    try:
        assert len(groups) == 3
        assert len({sock.getsockname()[1] for group in groups for sock in group}) == 1
        assert len({len(group) for group in groups}) == 1, "every address of the host"
    finally:
        for sock in (sock for group in groups for sock in group):
            sock.close()
