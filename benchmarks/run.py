"""Measure one router on the three shapes of work that matter.

    small    1 KB JSON requests and answers, back to back
    stream   4 KB requests, streams of 100 chunks 20 ms apart, 128 at once
    agent    400 KB requests (about 100k tokens), streams of 100 chunks 10 ms apart, 24 at once

For each, one JSON line: what the router itself used (CPU microseconds per request and per chunk, resident memory;
all its processes together, from /proc) and what a client saw. The router must forward to 127.0.0.1:9001-9004.

    python -m benchmarks.run --name direct --url http://127.0.0.1:9001
    python -m benchmarks.run --name mine --url http://127.0.0.1:8000 --start 'my-router --flags'
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import processes

PORTS = (9001, 9002, 9003, 9004)
"""Where the stand-in replicas listen."""
LOGS = Path(tempfile.gettempdir()) / "warmroute-bench"
"""Where routers' output goes, a file each, unless another folder is given; each start overwrites its own."""
LOAD_EXTRA_S = 120.0
"""What the load may take beyond its seconds: ramp, last turns, and its own grace."""

Row = dict[str, Any]
"""One line of results, as JSON has it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of work: how the stand-ins answer and what the load sends."""

    backend: tuple[str, ...]
    load: tuple[str, ...]
    seconds: float


SHAPES = {
    "small": Shape(("--chunks", "1"), ("--concurrency", "32", "--body-kb", "1"), 8.0),
    "stream": Shape(
        ("--chunks", "100", "--gap-ms", "20", "--ttft-ms", "5"),
        ("--stream", "--concurrency", "128", "--body-kb", "4"),
        10.0,
    ),
    "agent": Shape(
        ("--chunks", "100", "--gap-ms", "10", "--ttft-ms", "5"),
        ("--stream", "--concurrency", "24", "--body-kb", "400"),
        10.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Router:
    """What is measured."""

    name: str
    url: str
    command: tuple[str, ...] = ()
    """Starts it; empty when it runs already, or for the stand-ins themselves."""
    session_header: str = "modal-session-id"
    """The header by which it tells sessions apart."""


def start_backend(options: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Start the stand-in replicas and return once they listen."""
    command = [sys.executable, "-m", "benchmarks.backend", "--ports", ",".join(map(str, PORTS)), *options]
    backend = processes.start(command, output=subprocess.PIPE, errors=None)
    assert backend.stdout is not None
    if backend.stdout.readline() != b"ready\n":
        processes.stop(backend)
        raise SystemExit("the stand-in replicas did not start; their message is above")
    return backend


def start_router(router: Router, logs: Path) -> subprocess.Popen[bytes]:
    """Start a router whose output goes to a file. Raises RouterFailed when its port is taken."""
    processes.require_free(router.url)
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{router.name}.log").open("wb") as log:
        return processes.start(router.command, output=log, errors=log)


def load_command(router: Router, options: tuple[str, ...], seconds: float) -> list[str]:
    url = router.url + "/v1/chat/completions"
    command = [sys.executable, "-m", "benchmarks.load", "--url", url, "--session-header", router.session_header]
    return [*command, "--seconds", str(seconds), *options]


def measure(router: Router, shape: str, *, seconds: float | None, logs: Path) -> Row:
    """One row: the router, fresh, on one shape. `seconds` replaces the shape's own time.

    A router that does not come up, or dies, gives a row with `error`.
    """
    spec = SHAPES[shape]
    head: Row = {"name": router.name, "shape": shape}
    backend = start_backend(spec.backend)
    process = None
    try:
        if router.command:
            process = start_router(router, logs)
        processes.wait_until_answering(router.url, router.session_header, process)
        before = processes.cost(process.pid) if process else processes.Cost(0.0, 0.0)
        seen = run_load(load_command(router, spec.load, seconds or spec.seconds), seconds or spec.seconds)
        if process is not None and process.poll() is not None:
            raise processes.RouterFailed(f"its process ended under load with code {process.returncode}")
        after = processes.cost(process.pid) if process else before
    except processes.RouterFailed as error:
        return {**head, "error": f"{error}; what it printed: {logs / router.name}.log"}
    finally:
        if process is not None:
            processes.stop(process)
        processes.stop(backend)
    used_us = (after.cpu_s - before.cpu_s) * 1e6
    row: Row = {**head, "cpu_us_per_request": round(used_us / max(1, seen["requests"]), 1)}
    if seen["chunks"]:
        row["cpu_us_per_chunk"] = round(used_us / seen["chunks"], 2)
    return {**row, "rss_mib": round(after.rss_mib, 1), **seen}


def run_load(command: list[str], seconds: float) -> Row:
    """Play the load to its end and return its report."""
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=seconds + LOAD_EXTRA_S)
    seen: Row = json.loads(done.stdout)
    return seen


def add_options(cli: argparse.ArgumentParser) -> None:
    """The options that run.py and peers.py share."""
    cli.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES), help="comma-separated")
    cli.add_argument("--seconds", type=float, help="instead of each shape's own time; for trying things out")
    cli.add_argument("--logs", type=Path, default=LOGS, help="folder for what routers print (default: %(default)s)")


def check_options(cli: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    unknown = [shape for shape in args.shapes if shape not in SHAPES]
    if unknown:
        cli.error(f"--shapes: unknown {', '.join(unknown)}; known: {', '.join(SHAPES)}")
    processes.raise_file_limit()


def main() -> int:
    cli = argparse.ArgumentParser(description="Measure one router.")
    cli.add_argument("--name", required=True)
    cli.add_argument("--url", required=True)
    cli.add_argument("--start", default="", help="command that starts the router; without it, it must run already")
    cli.add_argument("--session-header", default="modal-session-id")
    add_options(cli)
    args = cli.parse_args()
    check_options(cli, args)
    router = Router(args.name, args.url, tuple(shlex.split(args.start)), args.session_header)
    failed = False
    for shape in args.shapes:
        row = measure(router, shape, seconds=args.seconds, logs=args.logs)
        failed |= "error" in row
        print(json.dumps(row), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
