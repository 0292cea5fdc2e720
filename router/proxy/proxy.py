"""What all connections of a process share: the Balancer, limits, counters, and the one-second sweep."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from policies import cost
from policies.balancer import Balancer
from policies.lease import Lease
from policies.policy import Policy
from policies.types import Needs, Outcome, Replica, Usage
from router.identity import Identity, IdentityRules, chain
from router.logs import AccessLog
from router.metrics import Metrics
from router.proxy.budget import RetryBudget
from router.proxy.downstream import Downstream
from router.proxy.exchange import Exchange
from router.proxy.upstream import Upstream
from router.settings import Settings
from router.spread import Spread

log = logging.getLogger("warmroute.proxy")

SWEEP_S = 1.0
"""Resolution of all timeouts but the connect timeout."""


class Health(Protocol):
    """Who is told how replicas answer."""

    def succeeded(self, replica: Replica) -> None:
        """The head of an answer arrived that does not speak against the replica."""

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
        self.allowed_admin_paths = frozenset(path.strip("/") for path in settings.admin_paths.allow)
        self.response_headers = settings.response_headers
        self.downstreams: set[Downstream] = set()
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

    def start(self) -> None:
        """Begin sweeping. To be called in the running loop, before the first connection."""
        self.loop = asyncio.get_running_loop()
        self.now = self.clock()
        self._sweeper = self.loop.call_later(self._sweep_s, self._sweep)

    def stop(self) -> None:
        """Stop sweeping."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def begin_drain(self) -> None:
        """Answer what comes, with `connection: close`, and close what is idle."""
        self.draining = True
        for downstream in list(self.downstreams):
            downstream.shutdown()

    def cut(self) -> int:
        """Break off every connection. Returns how many requests were under way."""
        self.cutting = True
        under_way = sum(downstream.busy for downstream in self.downstreams)
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
        self.spread.sample([cost.requests(replica, now) for replica in self.balancer.ready], now)

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
