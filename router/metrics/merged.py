"""The counts of several workers as one: each tells its own as samples, and their supervisor makes one page of them.

What a worker had counted when it ended, or ceased to answer, is kept, as it told it last: a sum must not fall because
one of those summed is another process now, or says nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from router.metrics.exposition import SLICE_S, page, process_registry, slices
from router.metrics.family import Family, Merge, Sample
from router.metrics.histogram import Histogram
from router.metrics.table import FAMILIES

if TYPE_CHECKING:
    from router.metrics.metrics import Metrics

_Labels = tuple[str, ...]
_Value = float | tuple[list[float], list[int], float]
"""A number; or of a histogram its bounds, its counts and its sum."""


class _Process(msgspec.Struct, array_like=True):
    """A family of prometheus-client's own."""

    name: str
    help: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class Told(msgspec.Struct, array_like=True):
    """All that one process has to tell."""

    process: list[_Process]
    families: list[list[tuple[_Labels, _Value]]]
    """In the order of the table."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Told).decode

PROCESS_RULES = {"process_start_time_seconds": Merge.MIN, "python_info": Merge.MAX}
"""How prometheus-client's own become one; the others are added up."""


class Samples:
    """What a worker tells, encoded."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._process = process_registry()

    async def told(self) -> bytes:
        """A `Told`, made with the loop's turn now and then."""
        metrics, now = self._metrics, self._metrics.clock()
        families: list[msgspec.Raw] = []
        began = perf_counter()
        for family in FAMILIES:
            families.append(
                msgspec.Raw(_encode([(labels, _plain(value)) for labels, value in family.read(metrics, now)]))
            )
            if perf_counter() - began > SLICE_S:
                await asyncio.sleep(0)
                began = perf_counter()
        return _encode((_of_process(self._process), families))


def _plain(value: float | Histogram) -> _Value:
    return (list(value.bounds), value.counts, value.total) if isinstance(value, Histogram) else value


def _of_process(registry: CollectorRegistry) -> list[_Process]:
    return [
        _Process(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, sample.labels, sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


class Merged:
    """One page of what all workers tell, and those before them told."""

    def __init__(self) -> None:
        self._own = process_registry()
        self._last: dict[str, Told] = {}
        self._ended: list[Told] = []
        """One, once any has ended: the sum of what is added up."""

    def take(self, worker: str, told: bytes) -> None:
        """What a worker tells now. Raises ValueError when it makes no sense."""
        try:
            self._last[worker] = _decode(told)
        except msgspec.MsgspecError as error:
            raise ValueError(f"the counts of {worker} cannot be read: {error}") from None

    def end(self, worker: str) -> None:
        """It runs no more: what it counted stays."""
        told = self._last.pop(worker, None)
        if told is None:
            return
        before = [*self._ended, _counted(told)]
        families = [
            [(labels, _plain(value)) for labels, value in _merged(family, [each.families[number] for each in before])]
            for number, family in enumerate(FAMILIES)
        ]
        self._ended = [Told(_processes([each.process for each in before]), families)]

    async def text(self, telling: Container[str | None]) -> bytes:
        """The page. Of workers that are not `telling` now it has what they had counted, and no gauges."""
        living = [told for worker, told in self._last.items() if worker in telling]
        silent = [_counted(told) for worker, told in self._last.items() if worker not in telling]
        past = [*silent, *self._ended]
        processes = [_of_process(self._own), *(each.process for each in [*living, *past])]
        families = self._families(living, past)
        return await page(part for parts in (_lines(_processes(processes)), slices(families)) for part in parts)

    def _families(self, living: list[Told], past: list[Told]) -> Iterator[tuple[Family, Iterable[Sample]]]:
        open_labels = _open_labels(living)
        for number, family in enumerate(FAMILIES):
            ended = [
                [sample for sample in each.families[number] if _current(family, sample[0], open_labels)]
                for each in past
            ]
            yield family, _merged(family, [*(each.families[number] for each in living), *ended])


def _counted(told: Told) -> Told:
    """What of it only ever grows."""
    families = [[] if family.kind == "gauge" else told.families[number] for number, family in enumerate(FAMILIES)]
    return Told([family for family in told.process if family.kind == "counter"], families)


def _merged(family: Family, told: Iterable[list[tuple[_Labels, _Value]]]) -> list[Sample]:
    """The samples of one family, of several workers, by labels."""
    found: dict[_Labels, float | Histogram] = {}
    for samples in told:
        for labels, value in samples:
            if isinstance(value, tuple):
                histogram = found.get(labels)
                if histogram is None:
                    histogram = found[labels] = Histogram(tuple(value[0]))
                assert isinstance(histogram, Histogram)
                histogram.add(value[1], value[2])
            else:
                before = found.get(labels)
                assert not isinstance(before, Histogram)
                found[labels] = value if before is None else _joined(family.merge, before, value)
    return list(found.items())


def _joined(rule: Merge, one: float, other: float) -> float:
    if rule is Merge.SUM:
        return one + other
    return max(one, other) if rule is Merge.MAX else min(one, other)


def _open_labels(living: list[Told]) -> dict[str, set[str]]:
    """Values of labels that are not a closed set, such as replicas, which those who live tell of."""
    found: dict[str, set[str]] = {}
    for number, family in enumerate(FAMILIES):
        for at, label in enumerate(family.labels):
            if label.values is None:
                values = found.setdefault(label.name, set())
                values.update(labels[at] for each in living for labels, _ in each.families[number])
    return found


def _current(family: Family, labels: _Labels, known: dict[str, set[str]]) -> bool:
    """Whether what was counted before is still told: not of a replica that has left the fleet."""
    return all(
        label.values is not None or value in known[label.name]
        for label, value in zip(family.labels, labels, strict=True)
    )


def _processes(told: Iterable[list[_Process]]) -> list[_Process]:
    found: dict[str, _Process] = {}
    for families in told:
        for family in families:
            known = found.get(family.name)
            found[family.name] = family if known is None else _both(known, family)
    return list(found.values())


def _both(one: _Process, other: _Process) -> _Process:
    rule = PROCESS_RULES.get(one.name, Merge.SUM)
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for name, labels, value in [*one.samples, *other.samples]:
        at = name, tuple(labels.items())
        values[at] = _joined(rule, values[at], value) if at in values else value
    samples = [(name, dict(labels), value) for (name, labels), value in values.items()]
    return _Process(one.name, one.help, one.kind, samples)


class _Read:
    """prometheus-client's form of what is not of this process."""

    def __init__(self, families: list[_Process]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for each in self._families:
            metric = Metric(each.name, each.help, each.kind)
            for name, labels, value in each.samples:
                metric.add_sample(name, labels, value)
            yield metric


def _lines(families: list[_Process]) -> Iterator[bytes]:
    yield generate_latest(_Read(families))
