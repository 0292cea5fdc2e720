"""`make soak`: a router process before emulated replicas, for SOAK_S seconds (3600), and a verdict.

SOAK_SESSIONS (12) clients talk at once, SOAK_REPLICAS (4) answer, SOAK_SEED (1) draws what they do. Exit code 1 when
something leaked, broke without a fault that explains it, or was answered wrongly.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import uvloop

from tests.fakes import wire
from tests.fakes.process import start_router
from tests.soak.churn import Churn
from tests.soak.ledger import Ledger
from tests.soak.traffic import Session, faulty
from tests.soak.watch import Sample, Watch

WARM_SHARE = 0.2
"""Of the time, until which memory may grow for what is needed once."""
GROWTH_MIB = 24.0
"""Resident memory may be so much more at the end than after warming up, whatever the time: an allocator's waves."""
SLOPE_MIB_PER_H = 12.0
"""And may grow so fast, where the time is long enough (half an hour) to tell a slope from a wave."""
IDLE_S = 8.0
"""After the last request, for pools and gauges to empty: pool.idle_s and some sweeps."""


async def soak(seconds: float, sessions: int, replicas: int, seed: int, folder: Path) -> int:
    wire.LIMIT_S = 120.0  # how long a client waits for the next byte: replicas are stopped for seconds here
    ledger = Ledger()
    churn = await asyncio.to_thread(Churn, ledger, Random(f"{seed} churn"), replicas, folder)
    try:
        churn.write()
        flags = ("--config", str(churn.config))
        churn.router = router = await asyncio.to_thread(start_router, [], folder / "router.log", *flags)
        try:
            watch = Watch(ledger, router.pid, router.admin_url)
            first = await watch.sample()
            background = [asyncio.create_task(watch.run()), asyncio.create_task(churn.run())]
            clients = [asyncio.create_task(_talk(ledger, router.port, seed, n, seconds)) for n in range(sessions)]
            clients.append(asyncio.create_task(_err(ledger, router.port, seed, seconds)))
            ended, _ = await asyncio.wait([*clients, *background], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                if not task.cancelled() and task.exception() is not None:
                    raise task.exception() or AssertionError
            background[1].cancel()
            await asyncio.gather(*clients)
            await asyncio.sleep(IDLE_S)
            background[0].cancel()
            await asyncio.gather(*background, return_exceptions=True)
            last = await watch.sample()
            _judge(ledger, watch, first, last, seconds)
            log = router.log.read_text(errors="replace")
            if "Traceback" in log or "should not" in log:
                ledger.violate(f"the router's own log tells of a failure: {router.log}")
            print(watch.line(last))
        finally:
            await asyncio.to_thread(router.stop)
        code = await asyncio.to_thread(router.wait_end, 15)
        if code:
            ledger.violate(f"the router ended with {code}")
    finally:
        await asyncio.to_thread(churn.stop)
    print(" ".join(f"{count} {name}," for name, count in sorted(ledger.counts.items())))
    print(f"verdict: {'FAILED' if ledger.violations else 'passed'}")
    return 1 if ledger.violations else 0


async def _talk(ledger: Ledger, port: int, seed: int, number: int, seconds: float) -> None:
    """One client after another, each a session of its own."""
    rng = Random(f"{seed} client {number}")
    session = 0
    while ledger.now() < seconds:
        session += 1
        with suppress(ConnectionError):  # never refused here: the router lives through all of it
            await Session(ledger, port, rng, f"s{number}-{session}").run(rng.randint(1, 10))


async def _err(ledger: Ledger, port: int, seed: int, seconds: float) -> None:
    rng = Random(f"{seed} faulty")
    while ledger.now() < seconds:
        await asyncio.sleep(rng.uniform(0, 1))
        await faulty(ledger, port, rng)


def _judge(ledger: Ledger, watch: Watch, first: Sample, last: Sample, seconds: float) -> None:
    """What must be as it was before."""
    for name in ("in_flight", "connections", "body_bytes"):
        if getattr(last, name):
            ledger.violate(f"{name} is {getattr(last, name)} though nobody is there any more")
    if last.sockets > first.sockets + 8:  # probes' connections to each replica, and this very scrape's
        ledger.violate(f"{last.sockets} sockets are open, {first.sockets} were at the start")
    if last.files - last.sockets > first.files - first.sockets + 2:
        ledger.violate(f"{last.files - last.sockets} other files are open, {first.files - first.sockets} were")
    if last.threads > first.threads + 2:
        ledger.violate(f"{last.threads} threads run, {first.threads} did at the start")
    warm = seconds * WARM_SHARE
    early = [sample.rss_mib for sample in watch.samples if warm <= sample.at <= warm * 1.5]
    base = sum(early) / len(early) if early else first.rss_mib
    slope = watch.slope_mib_per_h(warm)
    print(f"memory: {first.rss_mib:.1f} MiB at first, {base:.1f} warm, {last.rss_mib:.1f} last, {slope:+.1f} MiB/h")
    if last.rss_mib > base + GROWTH_MIB:
        ledger.violate(f"memory has grown from {base:.1f} to {last.rss_mib:.1f} MiB")
    if seconds >= 1800 and slope > SLOPE_MIB_PER_H:
        ledger.violate(f"memory grows by {slope:.1f} MiB an hour")
    for name in ("streams", "answers", "left", "faulty"):
        if not ledger.counts[name]:
            ledger.violate(f"no {name}: this soak has shown nothing")


def main() -> int:
    numbers = {"SOAK_S": 3600, "SOAK_SESSIONS": 12, "SOAK_REPLICAS": 4, "SOAK_SEED": 1}
    given = {name: int(os.environ.get(name) or default) for name, default in numbers.items()}
    with TemporaryDirectory(prefix="soak-") as folder:
        return uvloop.run(soak(*given.values(), Path(os.environ.get("SOAK_LOGS") or folder)))


if __name__ == "__main__":
    sys.exit(main())
