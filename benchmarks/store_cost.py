"""What sharing through a store costs a router: CPU of its process before the stand-ins of `benchmarks.run`, beside
one that shares nothing. Both serve the same load at the same time, so that whatever the machine does, it does to both.

Prints a JSON line for each row, medians, and the ratios of all repeats. `known`: each client keeps its session; `new`:
every request is of a session of its own; `stream`: for each chunk. `store_ops_per_request` and
`store_bytes_per_request` are what the store was asked for, and the memory that it took, by its own INFO.

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
from contextlib import ExitStack, contextmanager
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


class Cost(NamedTuple):
    """Of a fresh router's process."""

    us: float
    """CPU for each request, or chunk under `stream`, microseconds."""
    requests: int


def pair(row: str, store: str, folder: Path) -> tuple[Cost, Cost]:
    """One that shares nothing, and one that shares through this store."""
    shape = run.SHAPES[SHAPES[row]]
    concurrency = int(shape.load[shape.load.index("--concurrency") + 1])
    size = int(shape.load[shape.load.index("--body-kb") + 1]) * 1024
    chunks = int(shape.backend[shape.backend.index("--chunks") + 1])
    backend = run.start_backend(shape.backend)
    try:
        with ExitStack() as stack:
            routers = []
            for name, url in ("alone", ""), ("shared", store):
                (folder / name).mkdir(exist_ok=True)
                routers += stack.enter_context(fleet.routers(1, URLS, url, folder / name))
            plans = [
                load.Plan(
                    host=fleet.HOST,
                    port=int(router.url.rpartition(":")[2]),
                    path="/v1/chat/completions",
                    stream=row == "stream",
                    chunks=chunks,
                    concurrency=concurrency,
                    seconds=COST_S,
                    body_bytes=size,
                    ramp_s=0.0,
                    session_header="x-session-affinity",
                )
                for router in routers
            ]
            before = [processes.cost(router.pid).cpu_s for router in routers]
            tallies = uvloop.run(_push_all(plans, row == "new"))
            used_s = [processes.cost(router.pid).cpu_s - was for router, was in zip(routers, before, strict=True)]
    finally:
        processes.stop(backend)
    for tally in tallies:
        if tally.failed or tally.broken_streams:
            raise SystemExit(f"{row}: {tally.failed} failed, {tally.broken_streams} broken")
    alone, shared = (
        Cost(1e6 * cpu_s / (len(tally.transit_ns) if row == "stream" else tally.done), tally.done)
        for cpu_s, tally in zip(used_s, tallies, strict=True)
    )
    return alone, shared


async def _push_all(plans: Sequence[load.Plan], new: bool) -> list[load.Tally]:
    return await asyncio.gather(*(_push(plan, new) for plan in plans))


def costs(server: Server, folder: Path, rows: Sequence[str], repeats: int) -> None:
    for row in rows:
        pairs = []
        commands = held = 0
        for _ in range(repeats):
            server.ask("FLUSHALL")
            before = info(server)
            pairs.append(pair(row, server.url, folder))
            after = info(server)
            commands += after.commands - before.commands
            held += after.bytes - before.bytes
        requests = sum(shared.requests for _, shared in pairs)
        ratios = [shared.us / alone.us for alone, shared in pairs]
        unit = "chunk" if row == "stream" else "request"
        line = {
            "cost": row,
            f"us_per_{unit}": round(statistics.median(alone.us for alone, _ in pairs), 1),
            f"us_per_{unit}_shared": round(statistics.median(shared.us for _, shared in pairs), 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "store_ops_per_request": round(commands / requests, 2),
            "store_bytes_per_request": round(held / requests),
            "requests_per_s": round(requests / repeats / COST_S),
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    cli = argparse.ArgumentParser(description="What sharing costs a router.")
    cli.add_argument("rows", nargs="*", help=f"of {', '.join(SHAPES)} (default: all)")
    cli.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    args = cli.parse_args()
    if unknown := [row for row in args.rows if row not in SHAPES]:
        cli.error(f"unknown row {unknown[0]!r}: one of {', '.join(SHAPES)}")
    with started() as server, tempfile.TemporaryDirectory(prefix="warmroute-cost-") as folder:
        costs(server, Path(folder), args.rows or list(SHAPES), args.repeats)


if __name__ == "__main__":
    main()
