"""Where replicas are found. Rows of the table; there is nothing to tell where no source is configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from router.metrics import labels as of
from router.metrics.family import Family, Merge, Sample

if TYPE_CHECKING:
    from router.discovery.feed import Feed
    from router.metrics.metrics import Metrics


def _each(value: Callable[[Feed], float | None]) -> Callable[[Metrics, float], Iterator[Sample]]:
    def read(metrics: Metrics, _: float) -> Iterator[Sample]:
        for feed in metrics.discovery.feeds if metrics.discovery is not None else ():
            found = value(feed)
            if found is not None:
                yield (feed.name,), found

    return read


ROWS = (
    Family(
        "warmroute_discovery_up",
        "gauge",
        "1",
        (of.SOURCE,),
        "1 while [a source of replicas](#discovery) does what it is asked for; else what it told last stays in force.",
        _each(lambda feed: float(feed.up)),
        Merge.MIN,
    ),
    Family(
        "warmroute_discovery_replicas",
        "gauge",
        "replicas",
        (of.SOURCE,),
        "Replicas that it told last, those that are to be emptied or not ready yet among them.",
        _each(lambda feed: len(feed.targets)),
        Merge.MAX,
    ),
    Family(
        "warmroute_discovery_heard_timestamp_seconds",
        "gauge",
        "seconds",
        (of.SOURCE,),
        "When it was heard last, since the epoch, with or without news.",
        _each(lambda feed: feed.heard_at),
        Merge.MIN,
    ),
    Family(
        "warmroute_discovery_faults_total",
        "counter",
        "faults",
        (of.SOURCE,),
        "Times that it did not answer, or told what cannot be believed.",
        _each(lambda feed: feed.faults),
    ),
)
