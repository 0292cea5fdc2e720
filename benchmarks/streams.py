"""Thousands of streams at once through one router process.

The streams open one after another over RAMP_S seconds and each lasts longer than that, so that in the end all are
open together. Load and stand-ins run in processes of their own. Prints one JSON line: whole and broken streams, how
many were open at once, the router's largest resident memory, its CPU per chunk, and how long chunks were on their way.
Ends with status 1 when a stream broke or not all were open at once.

    python -m benchmarks.streams
    python -m benchmarks.streams haproxy --streams 1000
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import processes
from benchmarks.peers import routers
from benchmarks.run import LOAD_EXTRA_S, LOGS, Router, Row, load_command, start_backend, start_router

RAMP_S = 20.0
LOAD_S = RAMP_S + 10.0
"""Until then sessions may begin a stream. Less than a stream lasts: each session gets one."""
CHUNKS, GAP_MS = 40, 1000
"""A stream lasts 40 s; 5,000 of them carry 5,000 chunks a second."""
SAMPLE_S = 0.5
"""Between two looks at the router's memory."""
SPARE_FILES = 200
"""Files a router needs beyond its two sockets a stream."""


def measure(router: Router, streams: int, logs: Path) -> Row:
    """One row. Raises RouterFailed when the router does not come up or does not stay."""
    pace = ("--chunks", str(CHUNKS), "--gap-ms", str(GAP_MS))
    backend = start_backend(pace)
    process = load = None
    try:
        process = start_router(router, logs)
        processes.wait_until_answering(router.url, router.session_header, process)
        before = processes.cost(process.pid)
        options = ("--stream", "--chunks", str(CHUNKS), "--concurrency", str(streams), "--body-kb", "4")
        ramp = ("--ramp-ms", str(RAMP_S * 1e3 / streams))
        load = processes.start(load_command(router, options + ramp, LOAD_S), output=subprocess.PIPE, errors=None)
        peak_rss_mib = _watch(process, load)
        after = processes.cost(process.pid)
        assert load.stdout is not None
        seen: Row = json.loads(load.stdout.read())
    finally:
        for each in (load, process, backend):
            if each is not None:
                processes.stop(each)
    return {
        "name": router.name,
        "shape": "streams",
        "streams": streams,
        "idle_rss_mib": round(before.rss_mib, 1),
        "peak_rss_mib": round(peak_rss_mib, 1),
        "cpu_us_per_chunk": round((after.cpu_s - before.cpu_s) / max(1, seen["chunks"]) * 1e6, 2),
        **seen,
    }


def _watch(router: subprocess.Popen[bytes], load: subprocess.Popen[bytes]) -> float:
    """Wait for the load's end. Returns the router's largest resident memory, MiB."""
    peak = 0.0
    for _ in range(int((LOAD_S + LOAD_EXTRA_S) / SAMPLE_S)):
        if router.poll() is not None:
            raise processes.RouterFailed(f"its process ended under load with code {router.returncode}")
        peak = max(peak, processes.cost(router.pid).rss_mib)
        try:
            load.wait(SAMPLE_S)
        except subprocess.TimeoutExpired:
            continue
        return peak
    raise processes.RouterFailed("the load did not end in time")


def main() -> int:
    cli = argparse.ArgumentParser(description="Thousands of streams at once through one router process.")
    cli.add_argument("name", nargs="?", default="warmroute", help="router, as in benchmarks.peers")
    cli.add_argument("--streams", type=int, default=5000)
    cli.add_argument("--output", type=Path, help="file that gets the result as a JSON line")
    cli.add_argument("--logs", type=Path, default=LOGS, help="folder for what routers print (default: %(default)s)")
    args = cli.parse_args()
    files = processes.raise_file_limit()
    if files < 2 * args.streams + SPARE_FILES:
        cli.error(
            f"{args.streams} streams need {2 * args.streams + SPARE_FILES} open files, the limit is {files}: ulimit -n"
        )
    with tempfile.TemporaryDirectory(prefix="warmroute-bench-") as folder:
        known = routers(Path(folder))
        if args.name not in known or not known[args.name].command:
            cli.error(f"unknown router {args.name}; known: {', '.join(r.name for r in known.values() if r.command)}")
        try:
            row = measure(known[args.name], args.streams, args.logs)
        except processes.RouterFailed as error:
            print(f"{args.name}: {error}; what it printed: {args.logs / args.name}.log", file=sys.stderr)
            return 1
    line = json.dumps(row)
    print(line)
    if args.output:
        with args.output.open("a") as output:
            output.write(line + "\n")
    whole = row["requests"] == args.streams == row["peak_open"] and not row["broken_streams"] and not row["failed"]
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
