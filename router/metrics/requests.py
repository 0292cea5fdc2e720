"""What became of requests. Rows of the table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from router.metrics import labels as of
from router.metrics.family import Family, Merge, counts, each_tally, one

if TYPE_CHECKING:
    from router.keys import Holder
    from router.metrics.metrics import Metrics


def _holders(metrics: Metrics) -> Iterable[Holder]:
    keys = None if metrics.proxy is None else metrics.proxy.keys
    return () if keys is None else keys.holders.values()


ROWS = (
    Family(
        "warmroute_requests_total",
        "counter",
        "requests",
        (of.CAUSE, of.PHASE),
        "Requests ended.",
        counts(
            lambda m: {(each.cause, each.phase): n for each, n in m.outcomes.items()},
            of.CAUSE.values or (),
            of.PHASE.values or (),
        ),
    ),
    Family(
        "warmroute_refusals_total",
        "counter",
        "requests",
        (of.REFUSAL,),
        "Requests the router answered itself.",
        counts(lambda m: {(reason,): n for reason, n in m.refusals.items()}, of.REFUSALS),
    ),
    Family(
        "warmroute_key_requests_total",
        "counter",
        "requests",
        (of.KEY,),
        "Requests that came with a key that is accepted.",
        lambda m, _: (((each.name,), each.requests) for each in _holders(m)),
    ),
    Family(
        "warmroute_key_in_flight_requests",
        "gauge",
        "requests",
        (of.KEY,),
        "Those of them that are received, waited for or answered now.",
        lambda m, _: (((each.name,), each.in_flight) for each in _holders(m)),
        Merge.SUM,
    ),
    Family(
        "warmroute_redispatches_total",
        "counter",
        "requests",
        (of.WHY,),
        "Requests sent to another replica after one failed them.",
        counts(lambda m: {(why,): n for why, n in m.redispatches.items()}, of.FAILURES),
    ),
    Family(
        "warmroute_wait_seconds",
        "histogram",
        "seconds",
        (),
        "From the whole request to its being placed on the replica that served it: time in the router's own queue, and "
        "for replicas that failed it before.",
        one(lambda m: m.waits),
    ),
    Family(
        "warmroute_first_byte_seconds",
        "histogram",
        "seconds",
        (of.REASON,),
        "From the whole request to the answer's first byte, by the reason of the choice.",
        lambda m, _: (((reason,), t.first_bytes) for reason, t in m.reasons.items() if any(t.first_bytes.counts)),
    ),
    Family(
        "warmroute_chunk_gap_seconds",
        "histogram",
        "seconds",
        (),
        "Mean time between two chunks of a streamed answer, one observation an answer; slow readers are left out.",
        one(lambda m: m.gaps),
    ),
    Family(
        "warmroute_request_seconds",
        "histogram",
        "seconds",
        (),
        "From a request's first byte to its end.",
        one(lambda m: m.durations),
    ),
    Family(
        "warmroute_prompt_tokens_total",
        "counter",
        "tokens",
        (of.REPLICA, of.REASON),
        "Prompt tokens that engines reported.",
        each_tally(lambda tally: tally.prompt_tokens),
    ),
    Family(
        "warmroute_cached_tokens_total",
        "counter",
        "tokens",
        (of.REPLICA, of.REASON),
        "Those of them that were cached; over prompt tokens it is the hit rate.",
        each_tally(lambda tally: tally.cached_tokens),
    ),
    Family(
        "warmroute_completion_tokens_total",
        "counter",
        "tokens",
        (of.REPLICA, of.REASON),
        "Tokens of answers that engines reported.",
        each_tally(lambda tally: tally.completion_tokens),
    ),
    Family(
        "warmroute_sent_bytes_total",
        "counter",
        "bytes",
        (),
        "Of answers sent to clients, heads included.",
        one(lambda m: m.sent_bytes),
    ),
    Family(
        "warmroute_received_bytes_total",
        "counter",
        "bytes",
        (),
        "Of request bodies.",
        one(lambda m: m.received_bytes),
    ),
)
