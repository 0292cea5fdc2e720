"""What sharing through a store costs a router: CPU of its process before the stand-ins of `benchmarks.run`, with a
store and without, in turn.

Prints a JSON line for each row, medians. `known`: each client keeps its session; `new`: every request is of a session
of its own; `stream`: for each chunk. `store_ops_per_request` and `store_bytes_per_request` are what the store was asked
for, and the memory that it took, by its own INFO.

    python -m benchmarks.store_cost
    python -m benchmarks.store_cost new --repeats 7

It needs a Redis or Valkey as the tests do (`tests.store.servers`), and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import uvloop

from benchmarks import fleet, load, processes, run
from benchmarks.peers import URLS
from tests.store.servers import NEEDED, Server, binaries

COST_S = 6.0
SHAPES = {"known": "small", "new": "small", "stream": "stream"}


class Info(NamedTuple):
    """What a store has counted since it started, and holds now."""

    commands: int
    bytes: int


@contextmanager
def started() -> Iterator[Server]:
    """The first server that is here, while it runs."""
    found = binaries()
    if not found:
        raise SystemExit(NEEDED)
    server = Server(next(iter(found.values())))
    server.start()
    try:
        yield server
    finally:
        server.remove()


def info(server: Server) -> Info:
    told = server.ask("INFO")
    return Info(int(told["total_commands_processed"]), int(told["used_memory"]))


class _New(load.Session):
    """Every turn is of a session that nobody has seen."""

    _numbers = count()

    def _next_turn(self) -> None:
        self._request = self._plan.request(f"new-{next(self._numbers)}")
        super()._next_turn()


async def _push(plan: load.Plan, new: bool) -> load.Tally:
    """Closed-loop load, as `benchmarks.load` makes it."""
    tally = load.Tally()
    end_ns = time.monotonic_ns() + int(plan.seconds * 1e9)
    loop = asyncio.get_running_loop()
    session = _New if new else load.Session

    async def client(number: int) -> None:
        request = plan.request(f"known-{number}")
        while time.monotonic_ns() < end_ns:
            _, protocol = await loop.create_connection(
                lambda: session(plan, request, tally, end_ns), plan.host, plan.port
            )
            await protocol.closed

    await asyncio.gather(*(client(number) for number in range(plan.concurrency)))
    return tally


def cost_us(row: str, store: str, folder: Path) -> tuple[float, int]:
    """CPU of a fresh router's process: microseconds for each request, or chunk under `stream`; how many requests."""
    shape = run.SHAPES[SHAPES[row]]
    stream = row == "stream"
    concurrency = int(shape.load[shape.load.index("--concurrency") + 1])
    size = int(shape.load[shape.load.index("--body-kb") + 1]) * 1024
    chunks = int(shape.backend[shape.backend.index("--chunks") + 1])
    backend = run.start_backend(shape.backend)
    try:
        with fleet.routers(1, URLS, store, folder) as [router]:
            port = int(router.url.rpartition(":")[2])
            plan = load.Plan(
                host="127.0.0.1",
                port=port,
                path="/v1/chat/completions",
                stream=stream,
                chunks=chunks,
                concurrency=concurrency,
                seconds=COST_S,
                body_bytes=size,
                ramp_s=0.0,
                session_header="x-session-affinity",
            )
            before = processes.cost(router.pid)
            tally = uvloop.run(_push(plan, row == "new"))
            after = processes.cost(router.pid)
    finally:
        processes.stop(backend)
    if tally.failed or tally.broken_streams:
        raise SystemExit(f"{row}: {tally.failed} failed, {tally.broken_streams} broken")
    return 1e6 * (after.cpu_s - before.cpu_s) / (len(tally.transit_ns) if stream else tally.done), tally.done


def costs(server: Server, folder: Path, rows: Sequence[str], repeats: int) -> None:
    for row in rows:
        found: dict[str, list[float]] = {"": [], server.url: []}
        commands = held = requests = 0
        for _ in range(repeats):
            for store, values in found.items():
                server.ask("FLUSHALL")
                before = info(server)
                cost, done = cost_us(row, store, folder)
                values.append(cost)
                if store:
                    requests += done
                    after = info(server)
                    commands += after.commands - before.commands
                    held += after.bytes - before.bytes
        own, shared = (statistics.median(values) for values in found.values())
        unit = "chunk" if row == "stream" else "request"
        line = {
            "cost": row,
            f"us_per_{unit}": round(own, 1),
            f"us_per_{unit}_shared": round(shared, 1),
            "ratio": round(shared / own, 2),
            "store_ops_per_request": round(commands / requests, 2),
            "store_bytes_per_request": round(held / requests),
            "requests_per_s": round(requests / repeats / COST_S),
            "repeats": repeats,
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    cli = argparse.ArgumentParser(description="What sharing costs a router.")
    cli.add_argument("rows", nargs="*", help=f"of {', '.join(SHAPES)} (default: all)")
    cli.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    args = cli.parse_args()
    if unknown := [row for row in args.rows if row not in SHAPES]:
        cli.error(f"unknown row {unknown[0]!r}: one of {', '.join(SHAPES)}")
    with started() as server, tempfile.TemporaryDirectory(prefix="warmroute-cost-") as folder:
        costs(server, Path(folder), args.rows or list(SHAPES), args.repeats)


if __name__ == "__main__":
    main()
