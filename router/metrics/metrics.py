"""What is counted. Plain integers on the data path, made into Prometheus families only when scraped.

A labelled child's `inc()` of prometheus-client costs about a microsecond and takes a lock; several of
them a request would be a tenth of what the whole request costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from policies.balancer import Balancer
from policies.lease import Lease
from policies.types import Choice, Outcome, Reason, Usage
from router.metrics.heartbeat import Heartbeat
from router.metrics.histogram import GAPS, RATIOS, Histogram
from router.metrics.live import LiveSessions
from router.metrics.tally import ReasonTally, ReplicaTally, Tally
from router.metrics.turn import turn_of

if TYPE_CHECKING:
    from router.discovery.discovery import Discovery
    from router.journal import Journal
    from router.proxy.exchange import Exchange
    from router.proxy.proxy import Proxy

LEAST_EXPECTED_S = 1e-3
"""A first token cannot be expected sooner; so a ratio never divides by nothing."""


class Metrics:
    """All counters of a process. `router.metrics.table` says what each means."""

    def __init__(self, balancer: Balancer, clock: Callable[[], float] = time.monotonic) -> None:
        self.balancer = balancer
        self.clock = clock
        self.proxy: Proxy | None = None
        """Set once the proxy exists, for the gauges that are its own."""
        self.journal: Journal | None = None
        """Set when one is kept."""
        self.discovery: Discovery | None = None
        """Set in a router."""
        self.outcomes: dict[Outcome, int] = {}
        self.refusals: dict[str, int] = {}
        self.redispatches: dict[str, int] = {}
        self.replicas: dict[str, ReplicaTally] = {}
        self.waits = Histogram()
        self.reasons = {reason: ReasonTally() for reason in Reason}
        self.gaps = Histogram(GAPS)
        self.durations = Histogram()
        self.ratios = Histogram(RATIOS)
        self.live = LiveSessions(balancer.directory.max_sessions)
        self.sent_bytes = 0
        self.received_bytes = 0
        self.prompt_tokens = 0
        """As engines reported them, of replicas that have left, too."""
        self.cached_tokens = 0
        """Of those."""
        self.reloads: dict[str, int] = {}
        self.config_in_force = True
        self.config_applied_at = time.time()
        self.heartbeat = Heartbeat(clock)

    def start(self) -> None:
        """Begin to watch the running loop."""
        self.heartbeat.start()

    def stop(self) -> None:
        """End that."""
        self.heartbeat.stop()

    # Told by the data path

    def routed(self, choice: Choice) -> None:
        self._tally(choice.replica.id, choice.reason).choices += 1

    def first_byte(self, reason: Reason, seconds: float) -> None:
        self.reasons[reason].first_bytes.observe(seconds)

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
        lease = exchange.lease
        if lease is None:
            return
        self.waits.observe(lease.opened_at - exchange.received_at)
        self._served(lease, now)
        if exchange.chunks > 1 and lease.begun and lease.timed:
            self.gaps.observe((now - exchange.first_byte_at) / (exchange.chunks - 1))
        if usage is not None:
            tally = self._tally(lease.replica.id, lease.choice.reason)
            prompt_tokens, cached_tokens = usage.prompt_tokens or 0, usage.cached_tokens or 0
            self.prompt_tokens += prompt_tokens
            self.cached_tokens += cached_tokens
            tally.prompt_tokens += prompt_tokens
            tally.cached_tokens += cached_tokens
            tally.completion_tokens += usage.completion_tokens or 0

    def _tally(self, replica_id: str, reason: Reason) -> Tally:
        tally = self.replicas.get(replica_id)
        if tally is None:
            # Bounded by the fleet: what is counted for replicas long gone goes with them.
            for gone in [known for known in self.replicas if known not in self.balancer.replicas]:
                del self.replicas[gone]
            tally = self.replicas[replica_id] = ReplicaTally()
        return tally.of(reason)

    def _served(self, lease: Lease, now: float) -> None:
        """How a turn was placed, and how well that was foreseen."""
        turn, choice = turn_of(lease), lease.choice
        tally = self.reasons[choice.reason]
        if turn is not None:
            tally.turns[turn] = tally.turns.get(turn, 0) + 1
            assert lease.request.key is not None
            self.live.ended(lease.request.key, now)
        if lease.first_token_at is not None and lease.request.turn:
            observed_s = lease.first_token_at - lease.opened_at
            tally.queue_s += choice.wait_s
            tally.prefill_s += choice.prefill_s
            tally.observed_s += observed_s
            expected_s = choice.wait_s + choice.prefill_s
            self.ratios.observe(observed_s / (expected_s if expected_s > LEAST_EXPECTED_S else LEAST_EXPECTED_S))

    # Told by the control plane

    def reloaded(self, applied: bool) -> None:
        """The configuration was read anew, and put in force or refused."""
        result = "applied" if applied else "refused"
        self.reloads[result] = self.reloads.get(result, 0) + 1
        self.config_in_force = applied
        if applied:
            self.config_applied_at = time.time()
