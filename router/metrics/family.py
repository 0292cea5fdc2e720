"""One family of metrics: what it is called and means, and where its values are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from policies.types import Replica
from router.metrics.histogram import Histogram
from router.metrics.tally import Tally

if TYPE_CHECKING:
    from router.metrics.metrics import Metrics

Sample = tuple[tuple[str, ...], "float | Histogram"]
"""Values of the labels, in the family's order, and what is told under them."""


class Merge(StrEnum):
    """How the values of several workers of one supervisor become one."""

    SUM = "sum"
    MAX = "max"
    """What is the same in all, or seen by each alike; of 0 and 1: whether it is so in any."""
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Label:
    """One dimension. Its values are a closed set, or bounded by the fleet."""

    name: str
    meaning: str
    values: tuple[str, ...] | None = None
    """None: not known beforehand, and bounded as `meaning` says."""


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table. `read` yields what there is at the moment; it must not mind that time passes meanwhile."""

    name: str
    """As it is exposed, counters with `_total`."""
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[Label, ...]
    meaning: str
    read: Callable[[Metrics, float], Iterable[Sample]]
    merge: Merge = Merge.SUM
    """Every gauge says it; counters and histograms are added up."""

    @property
    def help(self) -> str:
        """The meaning as it is exposed: without the links of the operations page."""
        return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", self.meaning)

    def made_of(self, samples: Iterable[Sample]) -> Metric:
        """prometheus-client's form of it, with these samples."""
        names = [label.name for label in self.labels]
        if self.kind == "histogram":
            histogram = HistogramMetricFamily(self.name, self.help, labels=names)
            for values, value in samples:
                assert isinstance(value, Histogram)
                histogram.add_metric(values, value.buckets(), value.total)
            return histogram
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(self.name, self.help, labels=names)
        for values, value in samples:
            assert not isinstance(value, Histogram)
            family.add_metric(values, value)
        return family


# Ways to read


def one(value: Callable[[Metrics], float | Histogram | None]) -> Callable[[Metrics, float], Iterator[Sample]]:
    """A single value without labels; None: there is none yet."""

    def read(metrics: Metrics, _: float) -> Iterator[Sample]:
        found = value(metrics)
        if found is not None:
            yield (), found

    return read


def each_replica(value: Callable[[Replica, float], float | None]) -> Callable[[Metrics, float], Iterator[Sample]]:
    """One value for each replica of the fleet; None: nothing is known of that one."""

    def read(metrics: Metrics, now: float) -> Iterator[Sample]:
        for replica in list(metrics.balancer.replicas.values()):
            found = value(replica, now)
            if found is not None:
                yield (replica.id,), found

    return read


def each_tally(value: Callable[[Tally], int]) -> Callable[[Metrics, float], Iterator[Sample]]:
    """One count by replica, of those in the fleet, and reason."""

    def read(metrics: Metrics, _: float) -> Iterator[Sample]:
        for replica_id, tally in list(metrics.replicas.items()):
            if replica_id in metrics.balancer.replicas:
                for reason, each in list(tally.reasons.items()):
                    yield (replica_id, reason), value(each)

    return read


def counts(
    found: Callable[[Metrics], Mapping[Any, float]], *every: Iterable[str]
) -> Callable[[Metrics, float], Iterator[Sample]]:
    """Counts by the values of the labels, each a tuple of text.

    `every`: sets of which all combinations are told from the start, as 0, so that a first occurrence is an increase.
    """
    zeros = dict.fromkeys(product(*every), 0.0) if every else {}

    def read(metrics: Metrics, _: float) -> Iterator[Sample]:
        yield from {**zeros, **found(metrics)}.items()

    return read
