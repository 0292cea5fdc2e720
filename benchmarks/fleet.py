"""Emulated replicas, each a process, and the router in front of them, another."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def router(urls: Sequence[str], policy: str, folder: Path) -> Iterator[str]:
    """Its URL, while it runs; a journal is in the folder when it has ended."""
    port, admin_port = _free_ports()
    config, log = folder / "config.json", folder / "router.log"
    config.write_text(configuration(urls, policy, folder / "journal.jsonl"))
    command = [sys.executable, "-m", "router.cli", "serve", "--config", str(config), "--host", HOST]
    command += ["--port", str(port), "--admin-port", str(admin_port)]
    with log.open("wb") as output:
        process = processes.start(command, output=output, errors=output)
    try:
        _wait_until_watched(f"http://{HOST}:{admin_port}/replicas", log)
        yield f"http://{HOST}:{port}"
    finally:
        processes.stop(process)


def _free_ports() -> tuple[int, int]:
    with socket.create_server((HOST, 0)) as one, socket.create_server((HOST, 0)) as other:
        return int(one.getsockname()[1]), int(other.getsockname()[1])


def _wait_until_watched(url: str, log: Path) -> None:
    """Until the router has a load report of every replica: then all are known to live."""
    deadline = time.monotonic() + processes.START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if all(replica["load"] is not None for replica in json.load(answer)["replicas"]):
                    return
        except OSError:
            pass
        time.sleep(POLL_S)
    raise SystemExit(f"the router was not ready within {processes.START_S:.0f} s:\n{log.read_text()[-2000:]}")
