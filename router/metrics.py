"""What is counted. Plain integers on the data path, made into Prometheus families only when scraped.

A labelled child's `inc()` of prometheus-client costs about a microsecond and takes a lock; several of
them a request would be a tenth of what the whole request costs.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from policies import cost
from policies.balancer import Balancer
from policies.types import Choice, Outcome, Reason, State, Usage

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange
    from router.proxy.proxy import Proxy

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
"""Upper bounds of buckets, from an idle small model's first byte to the default first-byte timeout."""


class Histogram:
    """Counts by bucket, and a sum."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        running = 0
        out: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self.counts, strict=True):
            running += count
            out.append((bound, float(running)))
        return out


class ReplicaTally:
    """Counts of one replica id."""

    __slots__ = ("cached_tokens", "choices", "completion_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.choices: dict[Reason, int] = {}
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0


class Metrics:
    """All counters of a process, and their exposition."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, balancer: Balancer, clock: Callable[[], float] = time.monotonic) -> None:
        self._balancer = balancer
        self._clock = clock
        self.proxy: Proxy | None = None
        """Set once the proxy exists, for the gauges that are its own."""
        self.outcomes: dict[Outcome, int] = {}
        self.refusals: dict[str, int] = {}
        self.redispatches: dict[str, int] = {}
        self.replicas: dict[str, ReplicaTally] = {}
        self.first_bytes = {reason: Histogram() for reason in Reason}
        self.durations = Histogram()
        self.sent_bytes = 0
        self.received_bytes = 0
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(self)
        self._registry = registry

    # Told by the data path

    def routed(self, choice: Choice) -> None:
        tally = self._tally(choice.replica.id)
        tally.choices[choice.reason] = tally.choices.get(choice.reason, 0) + 1

    def first_byte(self, reason: Reason, seconds: float) -> None:
        self.first_bytes[reason].observe(seconds)

    def redispatched(self, why: str) -> None:
        self.redispatches[why] = self.redispatches.get(why, 0) + 1

    def refused(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def finished(self, exchange: Exchange, outcome: Outcome, usage: Usage | None, now: float) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if exchange.refusal is not None:
            self.refused(exchange.refusal.reason)
        self.durations.observe(now - exchange.started_at)
        self.sent_bytes += exchange.sent_bytes
        self.received_bytes += exchange.body_bytes
        if usage is not None and exchange.lease is not None:
            tally = self._tally(exchange.lease.replica.id)
            tally.prompt_tokens += usage.prompt_tokens or 0
            tally.cached_tokens += usage.cached_tokens or 0
            tally.completion_tokens += usage.completion_tokens or 0

    def _tally(self, replica_id: str) -> ReplicaTally:
        tally = self.replicas.get(replica_id)
        if tally is None:
            # Bounded by the fleet: what is counted for replicas long gone goes with them.
            for gone in [r for r in self.replicas if r not in self._balancer.replicas]:
                del self.replicas[gone]
            tally = self.replicas[replica_id] = ReplicaTally()
        return tally

    # Scraped

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: names are known only when collected, and collecting at registration would be too early."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self._placement()
        yield from self._gauges()
        yield from self._beliefs()

    def _counters(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "warmroute_requests",
            "Requests ended, by who ended them and how far they had come.",
            labels=["cause", "phase"],
        )
        for outcome, count in self.outcomes.items():
            requests.add_metric([outcome.cause, outcome.phase], count)
        yield requests
        refusals = CounterMetricFamily("warmroute_refusals", "Requests the router answered itself.", labels=["reason"])
        for reason, count in self.refusals.items():
            refusals.add_metric([reason], count)
        yield refusals
        redispatches = CounterMetricFamily(
            "warmroute_redispatches", "Requests sent to another replica after one failed them.", labels=["why"]
        )
        for why, count in self.redispatches.items():
            redispatches.add_metric([why], count)
        yield redispatches
        choices = CounterMetricFamily("warmroute_choices", "Choices of a replica.", labels=["replica", "reason"])
        tokens = {
            kind: CounterMetricFamily(
                f"warmroute_{kind}_tokens", f"{kind.capitalize()} tokens reported by the engine.", labels=["replica"]
            )
            for kind in ("prompt", "cached", "completion")
        }
        for replica_id, tally in self.replicas.items():
            for reason, count in tally.choices.items():
                choices.add_metric([replica_id, reason], count)
            tokens["prompt"].add_metric([replica_id], tally.prompt_tokens)
            tokens["cached"].add_metric([replica_id], tally.cached_tokens)
            tokens["completion"].add_metric([replica_id], tally.completion_tokens)
        yield choices
        yield from tokens.values()
        first = HistogramMetricFamily(
            "warmroute_first_byte_seconds", "From the whole request to the answer's first byte.", labels=["reason"]
        )
        for reason, histogram in self.first_bytes.items():
            if any(histogram.counts):
                first.add_metric([reason], histogram.buckets(), histogram.total)
        yield first
        duration = HistogramMetricFamily("warmroute_request_seconds", "From a request's first byte to its end.")
        duration.add_metric([], self.durations.buckets(), self.durations.total)
        yield duration
        yield CounterMetricFamily("warmroute_sent_bytes", "Bytes of answers sent to clients.", value=self.sent_bytes)
        yield CounterMetricFamily("warmroute_received_bytes", "Bytes of request bodies.", value=self.received_bytes)

    def _placement(self) -> Iterator[Metric]:
        """How well the policies place."""
        balancer = self._balancer
        regretted = CounterMetricFamily(
            "warmroute_regretted_prefill_tokens",
            "Tokens prefilled anew that another replica held (elsewhere), or that one had held before (evicted).",
            labels=["kind", "reason"],
        )
        for kind, tokens in (("elsewhere", balancer.regret.elsewhere), ("evicted", balancer.regret.evicted)):
            for reason, count in tokens.items():
                regretted.add_metric([kind, reason], count)
        yield regretted
        shadow = CounterMetricFamily(
            "warmroute_shadow_choices",
            "Choices by the reason of the policy in charge, the shadow's, and whether both chose the same replica.",
            labels=["reason", "shadow_reason", "same"],
        )
        for (reason, other, same), count in balancer.disagreements.items():
            shadow.add_metric([reason, other, str(same).lower()], count)
        yield shadow
        policy = GaugeMetricFamily(
            "warmroute_policy_info", "1 for the policy in charge and the one in its shadow.", labels=["role", "policy"]
        )
        policy.add_metric(["live", balancer.policy.name], 1.0)
        if balancer.shadow is not None:
            policy.add_metric(["shadow", balancer.shadow.name], 1.0)
        yield policy

    def _gauges(self) -> Iterator[Metric]:
        labels = ["replica"]
        in_flight = GaugeMetricFamily("warmroute_in_flight_requests", "Requests in flight, by replica.", labels=labels)
        pending = GaugeMetricFamily(
            "warmroute_pending_prefill_tokens", "Estimated tokens awaiting prefill.", labels=labels
        )
        state = GaugeMetricFamily("warmroute_replica_state", "1 for the state it is in.", labels=["replica", "state"])
        for replica in self._balancer.replicas.values():
            in_flight.add_metric([replica.id], replica.in_flight)
            pending.add_metric([replica.id], replica.prefill_tokens)
            for name in State:
                state.add_metric([replica.id, name], float(replica.state is name))
        yield in_flight
        yield pending
        yield state
        directory = self._balancer.directory
        yield GaugeMetricFamily("warmroute_sessions", "Sessions whose home is known.", value=len(directory))
        yield GaugeMetricFamily(
            "warmroute_sessions_limit", "Sessions that are remembered at most.", value=directory.max_sessions
        )
        yield CounterMetricFamily(
            "warmroute_evicted_sessions", "Sessions forgotten for want of room.", value=directory.evicted
        )
        if self.proxy is not None:
            spread = self.proxy.spread
            yield GaugeMetricFamily(
                "warmroute_dispersion",
                "Variance over mean of running requests per replica, the last minute counting most.",
                value=spread.dispersion,
            )
            yield CounterMetricFamily(
                "warmroute_spread_variance_seconds",
                "Variance of running requests per replica, summed over seconds.",
                value=spread.variance_s,
            )
            yield CounterMetricFamily(
                "warmroute_spread_mean_seconds",
                "Mean of running requests per replica, summed over seconds.",
                value=spread.mean_s,
            )
            yield GaugeMetricFamily("warmroute_connections", "Open client connections.", value=self.proxy.connections)
            yield GaugeMetricFamily("warmroute_body_bytes", "Request bodies held.", value=self.proxy.body_bytes)
            dropped = CounterMetricFamily("warmroute_log_lines_dropped", "Log lines that nobody took in time.")
            dropped.add_metric([], self.proxy.access_log.dropped)
            yield dropped

    def _beliefs(self) -> Iterator[Metric]:
        """What is believed of each replica, and goes into the cost of sending a request there."""
        now = self._clock()
        found: dict[str, GaugeMetricFamily] = {}

        def tell(name: str, meaning: str, value: float) -> None:
            family = found.get(name)
            if family is None:
                family = found[name] = GaugeMetricFamily(f"warmroute_{name}", meaning, labels=["replica"])
            family.add_metric([replica.id], value)

        for replica in self._balancer.replicas.values():
            cache, speed = replica.cache, replica.speed
            step_s, slope_s, stall = speed.decode
            others = cost.requests(replica, now) - replica.in_flight
            tell("others_in_flight_requests", "Requests of others, as the engine reports them.", others)
            tell("expected_wait_seconds", "Until a prefill sent now would begin.", cost.expected_wait(replica, now))
            tell("resident_tokens", "Tokens believed to be in its KV cache, either tier.", cache.held_tokens)
            tell("resident_conversations", "Conversations believed to be in its KV cache.", len(cache))
            tell("capacity_tokens", "Tokens believed to fit its KV cache, both tiers.", cache.capacity)
            tell("live_tokens", "Resident tokens, each weighed by how lately its session was here.", cache.live(now))
            tell("prefill_factor", "Learned seconds of prefill over those of the engine assumed.", speed.factor)
            tell("decode_step_seconds", "Learned seconds between two tokens of a lone answer.", step_s)
            tell("decode_slope_seconds", "Learned seconds added for each request in flight.", slope_s)
            tell("decode_stall_ratio", "Learned share of a neighbour's prefill for which answers rest.", stall)
        yield from found.values()
