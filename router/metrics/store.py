"""What is shared with other routers. Rows of the table; there is nothing to tell where no store is configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from router.metrics import labels as of
from router.metrics.family import Family, Merge, Sample, one
from router.metrics.histogram import Histogram

if TYPE_CHECKING:
    from router.metrics.metrics import Metrics
    from router.sharing import Sharing


def _sharing(metrics: Metrics) -> Sharing | None:
    return None if metrics.proxy is None else metrics.proxy.sharing


def _one(value: Callable[[Sharing], float | Histogram]) -> Callable[[Metrics, float], Iterator[Sample]]:
    def found(metrics: Metrics) -> float | Histogram | None:
        sharing = _sharing(metrics)
        return None if sharing is None else value(sharing)

    return one(found)


def _counts(found: Callable[[Sharing], Mapping[str, int]]) -> Callable[[Metrics, float], Iterator[Sample]]:
    def read(metrics: Metrics, _: float) -> Iterator[Sample]:
        sharing = _sharing(metrics)
        if sharing is not None:
            yield from (((name,), count) for name, count in found(sharing).items())

    return read


ROWS = (
    Family(
        "warmroute_store_up",
        "gauge",
        "1",
        (),
        "1 while [the store](#several-routers) does what it is asked for; without one there is none of this.",
        _one(lambda sharing: float(sharing.up)),
        Merge.MIN,
    ),
    Family(
        "warmroute_store_routers",
        "gauge",
        "routers",
        (),
        "Other routers that were heard in the last 3 s, workers among them.",
        _one(lambda sharing: len(sharing.others)),
        Merge.MIN,
    ),
    Family(
        "warmroute_store_claims_total",
        "counter",
        "requests",
        (of.OUTCOME,),
        "First requests of sessions that this router did not know, by what the store said.",
        _counts(lambda sharing: sharing.claims),
    ),
    Family(
        "warmroute_store_claim_seconds",
        "histogram",
        "seconds",
        (),
        "How long such a request waited for it.",
        _one(lambda sharing: sharing.waits),
    ),
    Family(
        "warmroute_store_notes_total",
        "counter",
        "notes",
        (of.DIRECTION,),
        "Notes of homes: what a turn that was placed, or has ended, left where.",
        _counts(lambda sharing: sharing.notes),
    ),
    Family(
        "warmroute_store_untold",
        "gauge",
        "homes",
        (),
        "Homes that wait to be told to the others.",
        _one(lambda sharing: sharing.untold),
        Merge.SUM,
    ),
    Family(
        "warmroute_store_faults_total",
        "counter",
        "faults",
        (of.OP,),
        "Times that the store did not do it, by what it was asked for; late claims are not among them.",
        _counts(lambda sharing: sharing.faults),
    ),
)
