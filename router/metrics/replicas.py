"""What is known and believed of each replica; much of it goes into the cost of sending a request there. Rows of the
table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from policies import cost
from policies.types import Replica, State
from router.breaker import Circuit
from router.metrics import labels as of
from router.metrics.family import Family, Merge, Sample, each_replica, one
from router.proxy.upstream import Upstream

if TYPE_CHECKING:
    from router.metrics.metrics import Metrics


def _states(metrics: Metrics, _: float) -> Iterator[Sample]:
    for replica in list(metrics.balancer.replicas.values()):
        for state in State:
            yield (replica.id, state), float(replica.state is state)


def _breakers(metrics: Metrics, _: float) -> Iterator[Sample]:
    proxy = metrics.proxy
    if proxy is None:
        return
    for replica in list(metrics.balancer.replicas.values()):
        breaker = proxy.health.breaker(replica)
        if breaker is not None:
            for circuit in Circuit:
                yield (replica.id, circuit), float(breaker.state is circuit)


def _panic(metrics: Metrics) -> float:
    return float(metrics.proxy is not None and metrics.proxy.health.panic)


def _members(metrics: Metrics, _: float) -> Iterator[Sample]:
    pools = None if metrics.proxy is None else metrics.proxy.pools
    if pools is not None:
        for replica in list(metrics.balancer.replicas.values()):
            yield (replica.id, pools.shown(replica.pool)), 1.0


def _ready(metrics: Metrics, _: float) -> Iterator[Sample]:
    pools = None if metrics.proxy is None else metrics.proxy.pools
    if pools is not None:
        for pool in pools.all:
            yield (pools.shown(pool),), float(len(metrics.balancer.ready_in(pool)))


def _connections(replica: Replica, _: float) -> float | None:
    return replica.address.open if isinstance(replica.address, Upstream) else None


ROWS = (
    Family(
        "warmroute_replica_regretted_prefill_tokens_total",
        "counter",
        "tokens",
        (of.REPLICA,),
        "Of the tokens prefilled anew though they had been computed, those that it prefilled.",
        each_replica(lambda replica, _: replica.regretted_tokens),
    ),
    Family(
        "warmroute_replica_state",
        "gauge",
        "1",
        (of.REPLICA, of.STATE),
        "1 for the state it is in, 0 for the others.",
        _states,
        Merge.MAX,
    ),
    Family(
        "warmroute_replica_pool",
        "gauge",
        "1",
        (of.REPLICA, of.POOL),
        "1 for the [pool](#pools) that it is in, to join others with; none where there is only one.",
        _members,
        Merge.MAX,
    ),
    Family(
        "warmroute_pool_ready_replicas",
        "gauge",
        "replicas",
        (of.POOL,),
        "Replicas of the pool that may be sent requests; none where there is only one pool.",
        _ready,
        Merge.MAX,
    ),
    Family(
        "warmroute_breaker_state",
        "gauge",
        "1",
        (of.REPLICA, of.CIRCUIT),
        "1 for the state of its [circuit breaker](#circuit-breaker), 0 for the others.",
        _breakers,
        Merge.MAX,
    ),
    Family(
        "warmroute_panic",
        "gauge",
        "1",
        (),
        "1 while so few replicas are well that [others are used, too](#panic).",
        one(_panic),
        Merge.MAX,
    ),
    Family(
        "warmroute_slowness_ratio",
        "gauge",
        "ratio",
        (of.REPLICA,),
        "By how much it [lags](#slow-replicas) behind what is expected and behind its fleet; 1 unless it is slow.",
        each_replica(lambda replica, _: replica.speed.slowness),
        Merge.MAX,
    ),
    Family(
        "warmroute_in_flight_requests",
        "gauge",
        "requests",
        (of.REPLICA,),
        "Our requests there.",
        each_replica(lambda replica, _: replica.in_flight),
        Merge.SUM,
    ),
    Family(
        "warmroute_pending_requests",
        "gauge",
        "requests",
        (of.REPLICA,),
        "Those of them that await their first token: queued in the engine, or being prefilled.",
        each_replica(lambda replica, _: replica.pending),
        Merge.SUM,
    ),
    Family(
        "warmroute_pending_prefill_tokens",
        "gauge",
        "tokens",
        (of.REPLICA,),
        "Their tokens, estimated, that await prefill.",
        each_replica(lambda replica, _: replica.prefill_tokens),
        Merge.SUM,
    ),
    Family(
        "warmroute_others_in_flight_requests",
        "gauge",
        "requests",
        (of.REPLICA,),
        "Requests that are of no warmroute, as the engine reports them.",
        each_replica(lambda replica, now: replica.foreign[0] if cost.told(replica, now) else 0),
        Merge.MAX,
    ),
    Family(
        "warmroute_expected_wait_seconds",
        "gauge",
        "seconds",
        (of.REPLICA,),
        "Until a prefill sent now would begin.",
        each_replica(cost.expected_wait),
        Merge.MAX,
    ),
    Family(
        "warmroute_report_age_seconds",
        "gauge",
        "seconds",
        (of.REPLICA,),
        "Age of its last load report by its own clock; none while it has sent none.",
        each_replica(lambda replica, now: None if replica.load is None else max(0.0, now - replica.load.at)),
        Merge.MAX,
    ),
    Family(
        "warmroute_resident_tokens",
        "gauge",
        "tokens",
        (of.REPLICA,),
        "Believed to be in its KV cache, in GPU memory or the host tier.",
        each_replica(lambda replica, _: replica.cache.held_tokens),
        Merge.MAX,
    ),
    Family(
        "warmroute_resident_conversations",
        "gauge",
        "conversations",
        (of.REPLICA,),
        "Conversations whose KV is believed to be there: homes.",
        each_replica(lambda replica, _: len(replica.cache)),
        Merge.MAX,
    ),
    Family(
        "warmroute_capacity_tokens",
        "gauge",
        "tokens",
        (of.REPLICA,),
        "Believed to fit there: a quarter more than the engine says, corrected by what it reports as cached.",
        each_replica(lambda replica, _: replica.cache.capacity),
        Merge.MAX,
    ),
    Family(
        "warmroute_live_tokens",
        "gauge",
        "tokens",
        (of.REPLICA,),
        "Resident tokens, those of a session idle for 10 minutes counting a third.",
        each_replica(lambda replica, now: replica.cache.live(now)),
        Merge.MAX,
    ),
    Family(
        "warmroute_prefill_factor",
        "gauge",
        "ratio",
        (of.REPLICA,),
        "Learned seconds of prefill over those of Kimi K2.5 on four B200: 2 is half as fast.",
        each_replica(lambda replica, _: replica.speed.factor),
        Merge.MAX,
    ),
    Family(
        "warmroute_decode_step_seconds",
        "gauge",
        "seconds",
        (of.REPLICA,),
        "Learned seconds between two tokens of a lone answer.",
        each_replica(lambda replica, _: replica.speed.decode[0]),
        Merge.MAX,
    ),
    Family(
        "warmroute_decode_slope_seconds",
        "gauge",
        "seconds",
        (of.REPLICA,),
        "Learned seconds added for each request in flight.",
        each_replica(lambda replica, _: replica.speed.decode[1]),
        Merge.MAX,
    ),
    Family(
        "warmroute_decode_stall_ratio",
        "gauge",
        "ratio",
        (of.REPLICA,),
        "Learned share of a neighbour's prefill for which answers rest.",
        each_replica(lambda replica, _: replica.speed.decode[2]),
        Merge.MAX,
    ),
    Family(
        "warmroute_upstream_connections",
        "gauge",
        "connections",
        (of.REPLICA,),
        "Open connections to it, idle ones included.",
        each_replica(_connections),
        Merge.SUM,
    ),
)
