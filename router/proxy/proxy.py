"""What all connections of a process share: the Balancer, limits, counters, and the one-second sweep."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from policies import cost
from policies.admission import Admission
from policies.balancer import Balancer
from policies.lease import Lease
from policies.policy import Policy
from policies.types import Needs, Outcome, Replica, Usage
from router import keys
from router.breaker import Breaker
from router.decisions import Decisions
from router.identity import CREDENTIALS, Identity, IdentityRules, chain
from router.logs import AccessLog
from router.metrics import Metrics
from router.pools import Pools
from router.proxy.budget import RetryBudget
from router.proxy.cors import Cors
from router.proxy.downstream import Downstream
from router.proxy.exchange import Exchange
from router.proxy.headers import Drop
from router.proxy.room import Room
from router.proxy.upstream import Upstream
from router.rates import Rates, Sample
from router.settings import Settings
from router.spread import Spread

if TYPE_CHECKING:
    from router.sharing import Sharing
    from router.tracing import Tracing

log = logging.getLogger("warmroute.proxy")

SWEEP_S = 1.0
"""Resolution of all timeouts but the connect timeout."""


class Health(Protocol):
    """Who is told how replicas answer."""

    panic: bool
    """Whether so few are well that others are used, too."""

    def breaker(self, replica: Replica) -> Breaker | None:
        """The replica's circuit breaker; None when nobody watches it."""

    def succeeded(self, replica: Replica) -> None:
        """The head of an answer arrived that does not speak against the replica."""

    def answered(self, replica: Replica, status: int) -> None:
        """An answer of that status was passed on whole."""

    def gone(self, replica: Replica) -> bool:
        """Whether the replica answers nothing at all any more, not even its probes."""

    def failed(self, replica: Replica, why: str) -> None:
        """The replica did not answer, or broke off: connect, connect_timeout, reset, invalid, broken, ..."""


@dataclass(slots=True, frozen=True)
class Wants:
    """What the policies need, as plain booleans: asking a Flag costs more than looking at a body's head."""

    policy: Policy
    shadow: Policy | None
    session: bool
    fingerprint: bool
    blocks: bool
    body: bool
    """The body's head is looked at in every request."""


def _wants(policy: Policy, shadow: Policy | None) -> Wants:
    needs = policy.needs if shadow is None else policy.needs | shadow.needs
    fingerprint, blocks = Needs.FINGERPRINT in needs, Needs.BLOCKS in needs
    return Wants(policy, shadow, Needs.SESSION in needs, fingerprint, blocks, fingerprint or blocks)


def _drop(deny: list[str], allow: list[str]) -> Drop | None:
    return Drop(deny=deny, allow=allow) if deny or allow else None


class Proxy:
    """The data plane of one process."""

    def __init__(
        self,
        *,
        balancer: Balancer,
        identity: IdentityRules,
        settings: Settings,
        metrics: Metrics,
        access_log: AccessLog,
        health: Health,
        sweep_s: float = SWEEP_S,
    ) -> None:
        self.balancer = balancer
        self.identity = identity
        self.metrics = metrics
        self.access_log = access_log
        self.health = health
        self.limits = settings.limits
        self.timeouts = settings.timeouts
        self.tries = settings.retries.tries
        self.budget = RetryBudget(settings.retries.budget_share, settings.retries.budget_burst)
        self.allowed_admin_paths = settings.admin_paths.paths
        self.response_headers = settings.response_headers
        self.keys: keys.Keys | None = None
        """None when none are asked for; so with the others."""
        self.request_drop: Drop | None = None
        self.response_drop: Drop | None = None
        self.cors: Cors | None = None
        self.prepare(settings)()
        self.room = Room(self, Admission(balancer, settings.admission.config()))
        self.priority_header = settings.admission.priority
        self.downstreams: set[Downstream] = set()
        self.pools: Pools | None = None
        """None where there is only one."""
        self._pool_names: tuple[str, ...] = ()
        self.choose_pools(Pools(settings.pools))
        self.tracing: Tracing | None = None
        """Set when requests are traced."""
        self.sharing: Sharing | None = None
        """Set when there are other routers to share with."""
        self.body_bytes = 0
        """Request bodies held at present, bytes."""
        self.draining = False
        self.cutting = False
        """Connections that end now are broken off by the router, not left by their clients."""
        self.now = 0.0
        """The clock at the last sweep, seconds: good enough for timeouts."""
        self.loop: asyncio.AbstractEventLoop
        self.clock: Callable[[], float] = time.monotonic
        """The clock of everything here; uvloop's own is the same one, but counts whole milliseconds."""
        self.spread = Spread()
        self.rates = Rates()
        self.decisions = Decisions()
        self._wants = _wants(balancer.policy, balancer.shadow)
        self._prefix = os.urandom(6).hex().encode()
        self.name = b"warmroute-" + self._prefix
        """What it calls itself to replicas, in `via`: by it a request that comes back is known."""
        self._requests = 0
        self._sweep_s = sweep_s
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """Open client connections."""
        return len(self.downstreams)

    def protocol(self, *, server_state: Any, **_: Any) -> Downstream:
        """For uvicorn's `http=`: makes the protocol of a new connection."""
        return Downstream(self, server_state)

    def prepare(self, settings: Settings) -> Callable[[], None]:
        """What puts in force who may use the port, from which pages, and which headers go on, by other settings.

        Raises ValueError.
        """
        accepted = keys.made(settings.keys, self.keys)
        request, response = settings.headers.request, settings.headers.response
        passed = settings.keys.credential == "pass"
        credentials = [name.decode() for name in CREDENTIALS]
        request_drop = _drop(
            [*request.deny, *([] if passed or request.allow else credentials)],
            [*request.allow, *(credentials if passed and request.allow else [])],
        )
        response_drop = _drop(response.deny, response.allow)
        cors = Cors(settings.cors.origins) if settings.cors.origins else None

        def commit() -> None:
            self.keys, self.request_drop, self.response_drop, self.cors = accepted, request_drop, response_drop, cors

        return commit

    def choose_pools(self, pools: Pools) -> None:
        """Have requests choose among these from now on, those that wait, too."""
        before, self._pool_names = self._pool_names, pools.names
        self.pools = pools if pools.several else None
        if before != pools.names:
            for downstream in self.downstreams:
                downstream.pools_changed()
        self.room.serve(pools.all, anew=bool(before and pools.names) and before[0] != pools.names[0])

    def start(self) -> None:
        """Begin sweeping. To be called in the running loop, before the first connection."""
        self.loop = asyncio.get_running_loop()
        self.now = self.clock()
        self._sweeper = self.loop.call_later(self._sweep_s, self._sweep)
        self.metrics.start()

    def stop(self) -> None:
        """Stop sweeping."""
        self.metrics.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def begin_drain(self) -> None:
        """Answer what comes, with `connection: close`, and close what stays idle."""
        self.draining = True
        for downstream in list(self.downstreams):
            downstream.shutdown()

    @property
    def under_way(self) -> int:
        """Requests that are not answered yet."""
        return sum(downstream.busy for downstream in self.downstreams)

    def cut(self) -> int:
        """Break off every connection. Returns how many requests were under way."""
        self.cutting = True
        under_way = self.under_way
        for downstream in list(self.downstreams):
            downstream.abort()
        return under_way

    def _sweep(self) -> None:
        self.now = now = self.clock()
        self._sweeper = self.loop.call_later(self._sweep_s, self._sweep)
        for downstream in list(self.downstreams):
            try:
                downstream.sweep(now)
            except Exception:  # one connection's trouble must not switch off the timeouts of all others
                log.exception("sweeping a connection failed in a way it should not")
                downstream.abort()
        for replica in self.balancer.replicas.values():
            if isinstance(replica.address, Upstream):
                replica.address.sweep(now)
        self.room.look()
        pools = ("",) if self.pools is None else self.pools.all
        self.spread.sample(
            [[cost.requests(replica, now) for replica in self.balancer.ready_in(pool)] for pool in pools], now
        )
        self.rates.add(self._sample(now))

    def _sample(self, now: float) -> Sample:
        metrics = self.metrics
        return Sample(now, sum(metrics.outcomes.values()), metrics.prompt_tokens, metrics.cached_tokens)

    def allows(self, admin_path: str) -> bool:
        """Whether an engine's administration under this normal path may be reached from the data port."""
        return admin_path in self.allowed_admin_paths or "*" in self.allowed_admin_paths

    def wants(self) -> Wants:
        """What the policy in charge needs, and the one in its shadow."""
        wants, balancer = self._wants, self.balancer
        if wants.policy is not balancer.policy or wants.shadow is not balancer.shadow:
            self._wants = wants = _wants(balancer.policy, balancer.shadow)
        return wants

    def look_into(self, identity: Identity, body: bytes, content_type: bytes, now: float) -> Identity:
        """Complete what the headers told from the body, as far as the policies want it; returned."""
        wants = self.wants()
        if wants.blocks and not identity.encoded:
            identity.blocks = chain(body)
        if identity.key is None or (wants.fingerprint and self.balancer.unsure(identity.key, identity.blocks, now)):
            return self.identity.from_body(identity, body, content_type, want_fingerprint=wants.fingerprint)
        return identity

    def new_identifier(self) -> bytes:
        """A request id: unique to this process by its prefix."""
        self._requests += 1
        return b"%b-%x" % (self._prefix, self._requests)

    def explain(self, lease: Lease) -> bytes:
        """Response headers that tell the choice, if they are switched on."""
        if not self.response_headers:
            return b""
        return b"x-warmroute-replica: %b\r\nx-warmroute-reason: %b\r\n" % (
            lease.replica.id.encode("latin-1", "replace"),
            lease.choice.reason.encode(),
        )

    def finished(self, exchange: Exchange, outcome: Outcome, usage: Usage | None, now: float) -> None:
        """The exchange is over: count it and log it."""
        self.metrics.finished(exchange, outcome, usage, now)
        self.access_log.write(exchange, outcome, usage, now)
        self.decisions.finished(exchange, outcome, usage, now)
        if self.tracing is not None:
            self.tracing.end(exchange, outcome, usage, now)
