"""Prometheus' text format, made in slices.

A fleet of a thousand replicas has tens of thousands of samples, and each takes prometheus-client some microseconds.
Made at once they would hold up every stream for as long; so the loop gets its turn between slices. The samples of one
scrape are therefore not of one instant, as those of several processes never are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from router.metrics.family import Family, Sample
from router.metrics.table import FAMILIES

if TYPE_CHECKING:
    from router.metrics.metrics import Metrics

SLICE_SAMPLES = 500
"""Rendered before the clock is looked at: 2 ms. A histogram counts as one, and is never cut."""
SLICE_S = 0.002
"""Past this the loop gets its turn."""


class _One:
    """A registry of one family."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


class Exposition:
    """Everything of one process."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._process = process_registry()

    async def text(self) -> bytes:
        """The whole page."""
        return await page(self.slices())

    def slices(self) -> Iterator[bytes]:
        """The page in pieces, each of what is then."""
        metrics = self._metrics
        yield generate_latest(self._process)
        now = metrics.clock()
        yield from slices((family, family.read(metrics, now)) for family in FAMILIES)


def process_registry() -> CollectorRegistry:
    """What prometheus-client tells of this process and its Python."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


async def page(parts: Iterable[bytes]) -> bytes:
    """Them all, made one by one, with the loop's turn now and then."""
    made: list[bytes] = []
    began = perf_counter()
    for part in parts:
        made.append(part)
        if perf_counter() - began > SLICE_S:
            await asyncio.sleep(0)
            began = perf_counter()
    return b"".join(made)


def slices(told: Iterable[tuple[Family, Iterable[Sample]]]) -> Iterator[bytes]:
    """Families with their samples as text, in pieces."""
    for family, found in told:
        samples = iter(found)
        part = generate_latest(_One(family.made_of(islice(samples, SLICE_SAMPLES))))
        head = b"%b\n%b\n" % tuple(part.split(b"\n", 2)[:2])
        yield part
        while some := list(islice(samples, SLICE_SAMPLES)):
            yield generate_latest(_One(family.made_of(some))).removeprefix(head)
