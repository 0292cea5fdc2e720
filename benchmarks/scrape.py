"""What a scrape of `/metrics` costs, and how long it holds up the event loop at a time.

A fleet of each size, where every replica was chosen for four reasons. Prints a JSON line for each: `samples` and
`bytes` of the page, `cpu_ms` of the whole of it, `longest_ms` and `p99_ms` of a slice between two turns of the loop, in
CPU time. The least of several scrapes: others may use the machine.

    python -m benchmarks.scrape
"""

from __future__ import annotations

import json
import time

from policies.balancer import Balancer
from policies.round_robin import RoundRobin
from policies.types import Choice, Load, Reason, Replica
from router.metrics import Metrics
from router.metrics.exposition import SLICE_S, Exposition

FLEETS = (16, 64, 1000)
SCRAPES = 7
REASONS = (Reason.HOME, Reason.NEW, Reason.MOVED, Reason.EVICTED)


def fleet(size: int) -> Metrics:
    """Counters of so many replicas."""
    balancer = Balancer(RoundRobin())
    metrics = Metrics(balancer)
    now = metrics.clock()
    for number in range(size):
        replica = Replica(f"http://10.0.{number // 256}.{number % 256}:30000")
        balancer.join(replica, now)
        balancer.report(replica, Load(now, running=3, waiting=1, capacity_tokens=700_000), now)
        for reason in REASONS:
            metrics.routed(Choice(replica, reason))
    for reason in Reason:
        metrics.first_byte(reason, 1.0)
    return metrics


def scrape(exposition: Exposition) -> tuple[int, list[float]]:
    """Size of the page, and CPU seconds of each stretch between two turns of the loop."""
    stretches: list[float] = []
    size = 0
    began = time.process_time()
    for part in exposition.slices():
        size += len(part)
        if time.process_time() - began > SLICE_S:
            stretches.append(time.process_time() - began)
            began = time.process_time()
    return size, [*stretches, time.process_time() - began]


def main() -> None:
    for size in FLEETS:
        exposition = Exposition(fleet(size))
        page = b"".join(exposition.slices())
        runs = [scrape(exposition) for _ in range(SCRAPES)]
        best = min(runs, key=lambda run: sum(run[1]))[1]
        figures = {
            "replicas": size,
            "samples": sum(not line.startswith(b"#") for line in page.splitlines()),
            "bytes": len(page),
            "cpu_ms": round(1e3 * sum(best), 1),
            "longest_ms": round(1e3 * min(max(run[1]) for run in runs), 1),
            "p99_ms": round(1e3 * sorted(best)[int(0.99 * (len(best) - 1))], 1),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
