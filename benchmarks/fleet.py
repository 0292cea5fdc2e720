"""Emulated replicas, each a process, and the routers in front of them, others."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import processes

HOST = "127.0.0.1"
POLL_S = 0.1


def names(replicas: int) -> list[str]:
    """As the simulator names them: policies that hash must not see others."""
    return [f"r{number:03}" for number in range(replicas)]


def configuration(urls: Sequence[str], policy: str, path: Path) -> str:
    """Of a router that keeps a journal there, as JSON, which is YAML too."""
    replicas = [{"id": name, "url": url} for name, url in zip(names(len(urls)), urls, strict=True)]
    return json.dumps(
        {"replicas": replicas, "policy": policy, "response_headers": True, "journal": {"path": str(path)}}
    )


@contextmanager
def emulators(count: int, *options: str) -> Iterator[list[str]]:
    """Replicas with these options of `python -m sim.emulator`: their URLs, while they run."""
    command = [sys.executable, "-m", "sim.emulator", *options]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            running.append(processes.start(command, output=subprocess.PIPE, errors=None))
        urls = []
        for emulator in running:
            assert emulator.stdout is not None
            word, _, port = emulator.stdout.readline().decode().partition(" ")
            if word != "ready":
                raise SystemExit("an emulated replica did not start; its message is above")
            urls.append(f"http://{HOST}:{port.strip()}")
        yield urls
    finally:
        for emulator in running:
            emulator.kill()  # SIGTERM would make it drain as engines do
            processes.stop(emulator)


@dataclass(frozen=True, slots=True)
class Router:
    """A router's process."""

    url: str
    admin_url: str
    pid: int
    log: Path


@contextmanager
def serving(config: Path, log: Path) -> Iterator[Router]:
    """A router with this configuration, while it runs. It may not be ready yet."""
    port, admin_port = _free_ports()
    command = [sys.executable, "-m", "router.cli", "serve", "--config", str(config), "--host", HOST]
    command += ["--port", str(port), "--admin-port", str(admin_port)]
    with log.open("wb") as output:
        process = processes.start(command, output=output, errors=output)
    try:
        yield Router(f"http://{HOST}:{port}", f"http://{HOST}:{admin_port}", process.pid, log)
    finally:
        processes.stop(process)


@contextmanager
def router(urls: Sequence[str], policy: str, folder: Path) -> Iterator[str]:
    """Its URL, while it runs; a journal is in the folder when it has ended."""
    config = folder / "config.json"
    config.write_text(configuration(urls, policy, folder / "journal.jsonl"))
    with serving(config, folder / "router.log") as started:
        _wait(started, "/replicas", lambda told: all(replica["load"] is not None for replica in told["replicas"]))
        yield started.url


@contextmanager
def routers(number: int, urls: Sequence[str], store: str, folder: Path) -> Iterator[list[Router]]:
    """So many, ready, while they run. They share through that store, or nothing when it is empty."""
    config = folder / "config.json"
    replicas = [{"id": f"r{n}", "url": url} for n, url in enumerate(urls)]
    shared = {"identity": {"secret": "of the benchmark"}, "store": {"url": store}} if store else {}
    config.write_text(json.dumps({"replicas": replicas, "response_headers": True, **shared}))
    with ExitStack() as stack:
        started = [stack.enter_context(serving(config, folder / f"router-{n}.log")) for n in range(number)]
        for each in started:
            _wait(each, "/readyz", lambda _: True)
        yield started


def _free_ports() -> tuple[int, int]:
    with socket.create_server((HOST, 0)) as one, socket.create_server((HOST, 0)) as other:
        return int(one.getsockname()[1]), int(other.getsockname()[1])


def _wait(started: Router, path: str, enough: Callable[[Any], bool]) -> None:
    """Until its admin port answers there with 200, and what it says is enough."""
    deadline = time.monotonic() + processes.START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(started.admin_url + path, timeout=5) as answer:
                if enough(json.load(answer)):
                    return
        except OSError:
            pass
        time.sleep(POLL_S)
    said = started.log.read_text()[-2000:]
    raise SystemExit(f"the router was not ready within {processes.START_S:.0f} s:\n{said}")
