"""Processes under measurement: start, wait for an answer, count CPU and memory, end."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

TICK_HZ = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
START_S = 60.0
"""How long a router may take to answer its first request."""
STOP_S = 10.0
"""How long a process may take to end after SIGTERM, before SIGKILL."""
WARM_REQUESTS = 16
"""Requests that must be answered in a row before measuring: a router may answer before it knows all its replicas."""


class RouterFailed(Exception):
    """A router that did not come up, or did not stay, with the reason."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a tree of processes has used so far."""

    cpu_s: float
    """User and system time of all its processes, seconds."""
    rss_mib: float
    """Resident memory, summed over its processes: pages shared between them count once for each."""


def raise_file_limit() -> int:
    """Let this process, and those it starts, open as many files as the system allows. Returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def start(
    command: Sequence[str], *, output: int | IO[bytes], errors: int | IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """Start a command as the leader of a session of its own, so that its whole tree can be found and ended.

    Raises SystemExit when the program does not exist.
    """
    try:
        return subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} is not installed; make bench-peers installs the peers") from None


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def tree(leader: int) -> list[int]:
    """Process ids of the leader's session and of all descendants, itself included."""
    parents: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields:
                parents[int(entry.name)] = int(fields[1]), int(fields[3])
    found = {pid for pid, (_, session) in parents.items() if session == leader or pid == leader}
    while more := {pid for pid, (parent, _) in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def cost(leader: int) -> Cost:
    """CPU and memory of a process and of all it started, from /proc/PID/stat (proc_pid_stat(5))."""
    cpu_s = rss_mib = 0.0
    for pid in tree(leader):
        fields = _stat(pid)
        if fields:
            cpu_s += (int(fields[11]) + int(fields[12])) / TICK_HZ
            rss_mib += int(fields[21]) * PAGE_BYTES / 2**20
    return Cost(cpu_s, rss_mib)


def _stat(pid: int) -> list[str]:
    """The fields after the command's name (the third, state, comes first); empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def require_free(url: str) -> None:
    """Raise RouterFailed when something listens there already: it would be measured in the router's place."""
    parts = urlsplit(url)
    with socket.socket() as probe:
        if probe.connect_ex((parts.hostname or "127.0.0.1", parts.port or 80)) == 0:
            raise RouterFailed(f"{url} is taken by another process; end it first")


def wait_until_answering(url: str, session_header: str, process: subprocess.Popen[bytes] | None) -> None:
    """Return once WARM_REQUESTS requests in a row were answered with 200.

    Raises RouterFailed when that takes longer than START_S seconds or the router's process ends.
    """
    deadline = time.monotonic() + START_S
    body = b'{"model":"bench","stream":false,"messages":[{"role":"user","content":"hello"}]}'
    answered, last = 0, "nothing tried"
    while answered < WARM_REQUESTS:
        if process is not None and process.poll() is not None:
            raise RouterFailed(f"its process ended with code {process.returncode}")
        if time.monotonic() > deadline:
            raise RouterFailed(f"no answer within {START_S:.0f} s; last: {last}")
        headers = {"content-type": "application/json", session_header: f"warm-{answered}"}
        request = urllib.request.Request(url + "/v1/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                answer.read()
            answered += 1
        except OSError as error:
            answered, last = 0, str(error)
            time.sleep(0.1)
