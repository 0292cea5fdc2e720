"""What waits, and what is held back. Rows of the table. What is refused is told by `warmroute_refusals_total`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from policies.admission import Admission
from router.metrics.family import Family, Merge, one
from router.metrics.metrics import Metrics


def _of(
    value: Callable[[Admission], float], over: Callable[[Iterable[float]], float] = sum
) -> Callable[[Metrics], float | None]:
    """Over all pools."""
    return lambda metrics: None if metrics.proxy is None else over([value(each) for each in metrics.proxy.room.all])


ROWS = (
    Family(
        "warmroute_waiting_requests",
        "gauge",
        "requests",
        (),
        "Requests in the [wait room](#under-overload), for a cap or at the KV gate.",
        one(_of(lambda admission: admission.waiting)),
        Merge.SUM,
    ),
    Family(
        "warmroute_waited_requests_total",
        "counter",
        "requests",
        (),
        "Requests that were placed after waiting there.",
        one(_of(lambda admission: admission.waited)),
    ),
    Family(
        "warmroute_left_requests_total",
        "counter",
        "requests",
        (),
        "Requests whose client left while they waited there.",
        one(_of(lambda admission: admission.left)),
    ),
    Family(
        "warmroute_kv_gate_active",
        "gauge",
        "1",
        (),
        "1 while sessions are held back because the live ones do not fit the KV caches.",
        one(_of(lambda admission: float(admission.gate.active), max)),
        Merge.MAX,
    ),
    Family(
        "warmroute_kv_gate_activations_total",
        "counter",
        "times",
        (),
        "Times that this began.",
        one(_of(lambda admission: admission.gate.activations)),
    ),
    Family(
        "warmroute_held_sessions",
        "gauge",
        "sessions",
        (),
        "Sessions that are held back.",
        one(_of(lambda admission: admission.gate.held)),
        Merge.SUM,
    ),
    Family(
        "warmroute_admitted_sessions",
        "gauge",
        "sessions",
        (),
        "Sessions that have been let in; 0 while none are held back.",
        one(_of(lambda admission: admission.gate.admitted)),
        Merge.SUM,
    ),
)
