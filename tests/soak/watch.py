"""The router's process from outside: memory, sockets, threads, and its own gauges, once a second."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.fakes.exposed import total
from tests.soak.ledger import Ledger

SAMPLE_S = 1.0
REPORT_S = 10.0
SLACK = 3
"""Requests by which the router's count may be ahead of the clients': those that left are seen a moment later."""
PATIENCE = 5
"""Samples in a row that are too many before it is a leak."""


@dataclass(slots=True)
class Sample:
    """The router at one moment."""

    at: float
    rss_mib: float
    sockets: int
    files: int
    threads: int
    in_flight: float
    connections: float
    body_bytes: float


class Watch:
    """Takes samples, prints a line now and then, and says what is left in the end."""

    def __init__(self, ledger: Ledger, pid: int, admin_url: str) -> None:
        self._ledger = ledger
        self._proc = Path("/proc") / str(pid)
        self._url = f"{admin_url}/metrics"
        self.samples: list[Sample] = []

    async def run(self) -> None:
        """Without end."""
        reported, ahead = 0.0, 0
        while True:
            before = self._ledger.outstanding
            sample = await self.sample()
            ahead = ahead + 1 if sample.in_flight > max(before, self._ledger.outstanding) + SLACK else 0
            if ahead == PATIENCE:
                self._ledger.violate(f"{sample.in_flight:.0f} in flight, clients wait for {self._ledger.outstanding}")
            if sample.at - reported >= REPORT_S:
                reported = sample.at
                print(self.line(sample), flush=True)
            await asyncio.sleep(SAMPLE_S)

    async def sample(self) -> Sample:
        """The router as it is now."""
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            text = (await client.get(self._url)).text
        status = (self._proc / "status").read_text()
        found = []
        for name in (self._proc / "fd").iterdir():
            try:
                found.append(os.readlink(name))
            except FileNotFoundError:  # closed meanwhile
                continue
        sample = Sample(
            at=self._ledger.now(),
            rss_mib=_number(r"^VmRSS:\s+(\d+)", status) / 1024,
            sockets=sum(link.startswith("socket:") for link in found),
            files=len(found),
            threads=int(_number(r"^Threads:\s+(\d+)", status)),
            in_flight=total(text, "warmroute_in_flight_requests"),
            connections=total(text, "warmroute_connections"),
            body_bytes=total(text, "warmroute_body_bytes"),
        )
        self.samples.append(sample)
        return sample

    def line(self, sample: Sample) -> str:
        """One line of figures."""
        counts = self._ledger.counts
        kinds = " ".join(f"{counts[name]} {name}" for name in ("requests", "streams", "answers", "left", "faulty"))
        ends = " ".join(f"{counts[name]} {name}" for name in ("broken", "failed", "refused", "churn", "violations"))
        return (
            f"{sample.at:6.0f} s | {kinds} | {ends} | {sample.in_flight:.0f} in flight, "
            f"{sample.connections:.0f} clients, {sample.sockets} sockets, {sample.threads} threads, "
            f"{sample.rss_mib:.1f} MiB"
        )

    def slope_mib_per_h(self, since: float) -> float:
        """How resident memory grows after `since` seconds: the least squares line through the samples."""
        points = [(sample.at / 3600, sample.rss_mib) for sample in self.samples if sample.at >= since]
        if len(points) < 2:
            return 0.0
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text, re.M)
    assert found is not None
    return float(found[1])
