"""What one placement costs: `Balancer.acquire` and the lease's finish, with a fleet and many sessions known.

Each policy places requests on REPLICAS replicas that have all reported a load, after SESSIONS sessions were placed
and finished. Three kinds of request:

    idle    a session never seen before, while every replica is idle: all are alike, the dearest tie to break
    known   the next turn of a known session, drawn at random, with OPEN_LEASES requests in flight
    new     a session never seen before, likewise; the directory is full, so that each also evicts one

Prints a JSON line for each policy and kind. Times are microseconds of wall time, garbage collection included: run it
on an idle machine.

    python -m benchmarks.placement
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from policies.balancer import Balancer
from policies.directory import Directory
from policies.registry import POLICIES, make
from policies.types import Cause, Load, Outcome, Phase, Replica, Request, Usage

REPLICAS = 64
SESSIONS = 100_000
MEASURED = 20_000
"""Placements measured of each kind."""
OPEN_LEASES = 8 * REPLICAS
"""Requests in flight all the while."""
STEP_S = 1e-4
"""Time between two requests, as the Balancer is told: a report stays fresh over a whole kind."""
DONE = Outcome(Cause.DONE, Phase.BODY)
USAGE = Usage(prompt_tokens=60_000, cached_tokens=58_000, completion_tokens=500)


def turn(session: int) -> Request:
    """A request of the session of this number."""
    key = xxhash.xxh3_128_digest(b"session %d" % session)
    return Request(key=key, fingerprint=session + 1, prompt_tokens=60_000)


def clock() -> Iterator[float]:
    """Seconds, STEP_S apart."""
    ticks = 0
    while True:
        ticks += 1
        yield ticks * STEP_S


def report_idle(balancer: Balancer, now: float) -> None:
    for replica in balancer.replicas.values():
        balancer.report(replica, Load(now, running=0, waiting=0, waiting_tokens=0), now)


def report_busy(balancer: Balancer, now: float) -> None:
    """A load of its own on each replica, from other routers too."""
    for number, replica in enumerate(balancer.replicas.values()):
        balancer.report(replica, Load(now, running=8 + number % 5, waiting=number % 3, waiting_tokens=1000), now)


def place(balancer: Balancer, ticks: Iterator[float], sessions: Iterable[int]) -> list[int]:
    """Nanoseconds that each session's placement and finish took, in ascending order."""
    taken_ns = []
    for session in sessions:
        request, opened, ended = turn(session), next(ticks), next(ticks)
        started = time.perf_counter_ns()
        balancer.acquire(request, opened).finish(DONE, USAGE, ended)
        taken_ns.append(time.perf_counter_ns() - started)
    return sorted(taken_ns)


def measure(policy: str) -> Iterator[dict[str, object]]:
    """One row for each kind of request."""
    balancer, ticks, drawn = Balancer(make(policy), Directory(SESSIONS)), clock(), random.Random(1)
    for number in range(REPLICAS):
        balancer.join(Replica(f"http://10.0.0.{number}:30000"), next(ticks))
    report_idle(balancer, next(ticks))
    place(balancer, ticks, range(SESSIONS))

    def row(request: str, sessions: Iterable[int]) -> dict[str, object]:
        taken_ns = place(balancer, ticks, sessions)
        return {
            "policy": policy,
            "request": request,
            "replicas": REPLICAS,
            "sessions": len(balancer.directory),
            "p50_us": round(taken_ns[len(taken_ns) // 2] / 1e3, 2),
            "p99_us": round(taken_ns[len(taken_ns) * 99 // 100] / 1e3, 2),
            "max_us": round(taken_ns[-1] / 1e3, 2),
        }

    report_idle(balancer, next(ticks))
    yield row("idle", range(SESSIONS, SESSIONS + MEASURED))
    known = range(MEASURED, SESSIONS)  # the oldest were evicted for those of `idle`
    for session in known[:OPEN_LEASES]:
        balancer.acquire(turn(session), next(ticks))
    report_busy(balancer, next(ticks))
    yield row("known", [drawn.choice(known) for _ in range(MEASURED)])
    yield row("new", range(SESSIONS + MEASURED, SESSIONS + 2 * MEASURED))


def main() -> None:
    cli = argparse.ArgumentParser(description="What one placement costs.")
    cli.add_argument("policies", nargs="*", help="all unless given")
    cli.add_argument("--output", type=Path, help="file that gets the results as JSON lines")
    args = cli.parse_args()
    unknown = [name for name in args.policies if name not in POLICIES]
    if unknown:
        cli.error(f"unknown policy {', '.join(unknown)}; known: {', '.join(POLICIES)}")
    for policy in args.policies or POLICIES:
        for row in measure(policy):
            line = json.dumps(row)
            print(line, flush=True)
            if args.output:
                with args.output.open("a") as output:
                    output.write(line + "\n")


if __name__ == "__main__":
    main()
