"""What one placement costs: `Balancer.acquire`, with a fleet and many sessions known; and giving the place back.

Each policy places requests on fleets of 16, 64 and 1,000 replicas, after SESSIONS sessions were placed and finished.
Three kinds of request:

    known   the next turn of a known session, drawn at random, whose KV is resident
    new     a session never seen before; the directory is full, so that each also evicts one
    idle    as new, while every replica is idle and only the sessions of this kind are known

With `known` and `new`, each replica has OPEN requests in flight, and others of other routers. Prompts are of 60,000
tokens, with the hashes of their blocks. Prints a JSON line for each: `p50_us`, `p99_us` and `max_us` are of the choice,
which a request waits for; `end_p50_us` is of its first token and end, told after its bytes have gone. Times are of wall
time, with the collector of garbage as the router runs it: run it on an idle machine. `max_cpu_us` is the most of this
thread's own time that a choice took: what is far above it in `max_us` was another process's turn.

    python -m benchmarks.placement [POLICY ...]
"""

from __future__ import annotations

import argparse
import gc
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

FLEETS = (16, 64, 1000)
SESSIONS = 100_000
MEASURED = 10_000
"""Placements measured of each kind."""
OPEN = 5
"""Requests in flight on each replica."""
STEP_S = 1e-3
"""Time between two requests, as the Balancer is told."""
BLOCKS = 60
DONE = Outcome(Cause.DONE, Phase.BODY)
USAGE = Usage(prompt_tokens=60_000, cached_tokens=58_000, completion_tokens=500)


def turn(session: int) -> Request:
    """A request of the session of this number."""
    key = xxhash.xxh3_128_digest(b"session %d" % session)
    first = session << 8
    return Request(key, fingerprint=session + 1, prompt_tokens=60_000, blocks=tuple(range(first, first + BLOCKS)))


class Measured:
    """A fleet under one policy."""

    def __init__(self, policy: str, replicas: int, shadow: str | None) -> None:
        self.balancer = Balancer(make(policy), Directory(SESSIONS))
        self.now = 0.0
        if shadow is not None:
            self.balancer.run_shadow(make(shadow), self.now)
        room = 2 * SESSIONS * 60_500 // replicas
        for number in range(replicas):
            replica = Replica(f"http://10.0.{number >> 8}.{number & 255}:30000")
            self.balancer.join(replica, self.now)
            self.balancer.report(replica, Load(self.now, 0, 0, 0, capacity_tokens=room), self.now)

    def place(self, sessions: Iterable[int]) -> tuple[list[int], list[int], int]:
        """Nanoseconds that each placement took, and its end, in ascending order; and the most CPU of a placement."""
        taken_ns, ended_ns, most_cpu_ns = [], [], 0
        balancer = self.balancer
        gc.collect()
        gc.freeze()
        gc.disable()
        for count, session in enumerate(sessions):
            request = turn(session)
            self.now += STEP_S
            cpu = time.thread_time_ns()
            started = time.perf_counter_ns()
            lease = balancer.acquire(request, self.now)
            placed = time.perf_counter_ns()
            most_cpu_ns = max(most_cpu_ns, time.thread_time_ns() - cpu)
            lease.first_token(self.now)
            lease.finish(DONE, USAGE, self.now)
            ended_ns.append(time.perf_counter_ns() - placed)
            taken_ns.append(placed - started)
            if count % 1000 == 0:
                gc.collect(0)
        gc.unfreeze()
        gc.enable()
        return sorted(taken_ns), sorted(ended_ns), most_cpu_ns

    def make_busy(self, sessions: Iterable[int]) -> None:
        """Leave requests in flight, and loads of others, of its own on each replica."""
        for session in sessions:
            self.now += STEP_S
            self.balancer.acquire(turn(session), self.now).first_token(self.now)
        for number, replica in enumerate(self.balancer.replicas.values()):
            running = replica.in_flight + 3 + number % 5
            for _ in range(2):  # what one report sees alone is not believed
                load = Load(self.now, running=running, waiting=number % 3, waiting_tokens=1000 + number)
                self.balancer.report(replica, load, self.now)


def measure(policy: str, replicas: int, shadow: str | None) -> Iterator[dict[str, object]]:
    """One row for each kind of request."""

    def row(kind: str, sessions: Iterable[int]) -> dict[str, object]:
        taken_ns, ended_ns, most_cpu_ns = fleet.place(sessions)
        return {
            "policy": policy,
            "request": kind,
            **({"shadow": shadow} if shadow else {}),
            "replicas": replicas,
            "sessions": len(fleet.balancer.directory),
            "p50_us": round(taken_ns[len(taken_ns) // 2] / 1e3, 2),
            "p99_us": round(taken_ns[len(taken_ns) * 99 // 100] / 1e3, 2),
            "max_us": round(taken_ns[-1] / 1e3, 2),
            "max_cpu_us": round(most_cpu_ns / 1e3, 2),
            "end_p50_us": round(ended_ns[len(ended_ns) // 2] / 1e3, 2),
        }

    fleet = Measured(policy, replicas, shadow)
    yield row("idle", range(MEASURED))
    drawn = random.Random(1)
    fleet = Measured(policy, replicas, shadow)
    fleet.place(range(SESSIONS))
    fleet.make_busy(drawn.sample(range(SESSIONS), OPEN * replicas))
    yield row("known", (drawn.randrange(SESSIONS) for _ in range(MEASURED)))
    yield row("new", range(SESSIONS, SESSIONS + MEASURED))


def main() -> None:
    cli = argparse.ArgumentParser(description="What one placement costs.")
    cli.add_argument("policies", nargs="*", help="all unless given")
    cli.add_argument(
        "--replicas", type=int, nargs="*", default=FLEETS, help="sizes of the fleet (default: %(default)s)"
    )
    cli.add_argument("--shadow", choices=list(POLICIES), help="another policy, asked beside each")
    cli.add_argument("--output", type=Path, help="file that gets the results as JSON lines")
    args = cli.parse_args()
    unknown = [name for name in args.policies if name not in POLICIES]
    if unknown:
        cli.error(f"unknown policy {', '.join(unknown)}; known: {', '.join(POLICIES)}")
    for policy in args.policies or POLICIES:
        for replicas in args.replicas:
            for row in measure(policy, replicas, args.shadow):
                line = json.dumps(row)
                print(line, flush=True)
                if args.output:
                    with args.output.open("a") as output:
                        output.write(line + "\n")


if __name__ == "__main__":
    main()
