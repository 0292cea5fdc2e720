"""Replicas coming and going: one place that tells the Balancer, the probes and the reports alike."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from policies.balancer import Balancer
from policies.types import Replica
from router.ask import Asker
from router.discovery.targets import Given, Target, listed, union
from router.drains import Drain, Homes
from router.health import Health
from router.keys import credential_line
from router.pools import Pools
from router.proxy.upstream import Upstream
from router.reports import Reports
from router.settings import ReplicaSettings, Settings
from router.tls import ReplicaTls

log = logging.getLogger("warmroute.fleet")

SETTINGS = "settings"
"""The source of replicas that the configuration lists itself. It is heard first."""

TOLD_LEFT_OUT = 8
"""Targets named in the log that are left out at one time: by DNS thousands of names may lead to one address."""


class Fleet:
    """The replicas of one process."""

    def __init__(
        self,
        balancer: Balancer,
        health: Health,
        reports: Reports,
        settings: Settings,
        clock: Callable[[], float],
    ) -> None:
        self._balancer = balancer
        self._health = health
        self._reports = reports
        self._settings = settings
        self._clock = clock
        self.pools = Pools(settings.pools)
        """Those that sources may put replicas into."""
        self.given: dict[str, Given] = {}
        """Replicas by id, as they were given."""
        self.drains: dict[Replica, Drain] = {}
        """By operators; those that say themselves that they drain are not among them."""
        self.joined: Callable[[str], None] | None = None
        """Called with the id of each replica that has joined."""
        self._told: dict[str, Sequence[Target]] = {SETTINGS: ()}
        """What each source said last, in the order in which they are heard."""
        self._left_out: set[str] = set()
        """Sentences, told once, of targets that are no replicas."""
        self._left: set[Replica] = set()
        self._forgetting: set[asyncio.Task[None]] = set()
        given = settings.tls.replicas
        self.tls = ReplicaTls(given.ca_file, given.cert_file, given.key_file, verify=given.verify)

    # What sources say

    def hear(self, sources: Sequence[str]) -> None:
        """These are heard from now on, in this order, after the settings. `settle` makes it so."""
        self._told = {name: self._told.get(name, ()) for name in (SETTINGS, *sources)}

    def tell(self, source: str, targets: Sequence[Target]) -> None:
        """The whole set of one that is heard. `settle` makes it so."""
        if source in self._told:
            self._told[source] = targets

    def settle(self) -> Iterator[None]:
        """Make the fleet what the sources say, one change at a time: what this yields is gone through at once, or in
        parts as long as no source says anything new.

        Another URL, uid or pool under a known id is another replica. One that drains stays; it is not worth joining
        when it does not even serve.
        """
        wanted, left_out = union({name: list(self._placed(targets)) for name, targets in self._told.items()})
        new = [sentence for sentence in left_out if sentence not in self._left_out]
        for sentence in new[:TOLD_LEFT_OUT]:
            log.warning("%s", sentence)
        if (more := len(new) - TOLD_LEFT_OUT) > 0:
            log.warning("%d more are left out likewise", more)
        self._left_out = set(left_out)
        for name, given in list(self.given.items()):
            if name not in wanted or not wanted[name].target.same_as(given.target):
                self.leave(name)
                yield
        for name, given in wanted.items():
            if name in self.given:
                if given != self.given[name]:
                    self._change(name, given)
                    yield
            elif given.target.serving or not given.target.drains:
                self._join(given)
                yield

    def _placed(self, targets: Iterable[Target]) -> Iterator[Target]:
        """With their pools as the core calls them. Those of a pool that is no more are not used until told anew."""
        for target in targets:
            if not target.pool:
                yield target
            elif self.pools.knows(target.pool):
                yield replace(target, pool=self.pools.core(target.pool))

    def _change(self, name: str, given: Given) -> None:
        """Another weight, more or fewer ranks beside it, or a drain that begins or ends: of the same replica."""
        before, replica = self.given[name].target, self._balancer.replicas[name]
        self.given[name] = given
        if replica.weight != given.target.weight:
            self._balancer.set_weight(replica, given.target.weight, self._clock())
        if before.ranks != given.target.ranks:
            self._reports.expect(replica, given.target.ranks)
        if before.drains != given.target.drains:
            self._order(replica)

    def join(self, given: ReplicaSettings) -> list[Replica]:
        """Add what an entry of the settings is, a replica or one for each rank, and begin to watch it.

        Raises ValueError for a URL that cannot be used.
        """
        targets = listed([given])
        self._told[SETTINGS] = [*self._told[SETTINGS], *targets]
        return [self._join(Given(target, SETTINGS)) for target in self._placed(targets)]

    def leave(self, replica_id: str) -> None:
        """Remove a replica: nothing new is sent there, what runs there ends in its own time. KeyError if unknown."""
        replica = self._balancer.leave(replica_id, self._clock())
        self.given.pop(replica_id, None)
        self.drains.pop(replica, None)
        if isinstance(replica.address, Upstream):
            replica.address.close()
        if replica.in_flight:
            self._left.add(replica)
        task = asyncio.create_task(self._forget(replica))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    @property
    def leaving(self) -> list[Replica]:
        """Those that have left the fleet, and still answer requests sent there before."""
        self._left = {replica for replica in self._left if replica.in_flight}
        return sorted(self._left, key=lambda replica: replica.id)

    def prepare(self, settings: Settings) -> Callable[[], None]:
        """What puts the replicas and pools of other settings in force, and how replicas are reached. Raises ValueError.

        A known id at another URL or in another pool is another replica. Those that other sources tell stay.
        """
        targets = listed(settings.replicas)
        for target in targets:
            self._upstream(target, settings)

        def commit() -> None:
            self._settings = settings
            self.pools = Pools(settings.pools)
            for replica in self._balancer.replicas.values():
                if isinstance(replica.address, Upstream):
                    replica.address.connect_s = settings.timeouts.connect_s
                    replica.address.idle_s = settings.pool.idle_s
                    replica.address.show(credential_line(settings.keys))
            self._told[SETTINGS] = targets
            for _ in self.settle():
                pass

        return commit

    def _upstream(self, target: Target, settings: Settings) -> Upstream:
        return Upstream(
            target.url,
            connect_s=settings.timeouts.connect_s,
            idle_s=settings.pool.idle_s,
            tls=self.tls,
            credential=credential_line(settings.keys),
            rank=target.rank,
        )

    def _join(self, given: Given) -> Replica:
        target = given.target
        upstream = self._upstream(target, self._settings)
        replica = Replica(target.id, target.weight, target.pool, upstream)
        self._balancer.join(replica, self._clock())
        self.given[target.id] = given
        asker = Asker(upstream)
        self._health.watch(replica, asker)
        self._reports.watch(replica, asker, target.rank, target.ranks)
        if self.joined is not None:
            self.joined(target.id)
        if target.drains:
            self._order(replica)
        return replica

    async def _forget(self, replica: Replica) -> None:
        await self._health.forget(replica)
        await self._reports.forget(replica)

    # Drains

    def drain(self, replica_id: str, homes: Homes, who: str) -> Replica:
        """Empty a replica, whatever its probes say, until that is taken back. Raises KeyError when it is unknown."""
        replica = self._balancer.replicas[replica_id]
        before = self.drains.get(replica)
        since = time.time() if before is None else before.since
        self.drains[replica] = Drain(homes, since, who)
        if before is None or before.homes is not homes:
            log.info("replica %s drains, its sessions %s: asked by %s", replica_id, homes, who)
            self._order(replica)
        return replica

    def undrain(self, replica_id: str, who: str) -> Replica:
        """Take a drain back. Nothing happens to a replica without one. Raises KeyError when it is unknown."""
        replica = self._balancer.replicas[replica_id]
        if self.drains.pop(replica, None) is not None:
            log.info("replica %s drains no more: asked by %s", replica_id, who)
            self._order(replica)
        return replica

    def why_drained(self, replica: Replica) -> str:
        """What its source says of it; empty when that does not have it drain."""
        given = self.given.get(replica.id)
        return "" if given is None or not given.target.drains else f"{given.target.drains} ({given.source})"

    def _order(self, replica: Replica) -> None:
        """An operator's drain goes before that of a source, under which sessions finish."""
        drain, why = self.drains.get(replica), self.why_drained(replica)
        if drain is not None:
            why = f"drained by an operator, its sessions {drain.homes}"
            self._health.order(replica, drain.homes.state, why)
        elif why:
            self._health.order(replica, Homes.FINISH.state, why)
        else:
            self._health.order(replica, None)

    async def close(self) -> None:
        """All leave."""
        for replica_id in list(self._balancer.replicas):
            self.leave(replica_id)
        await asyncio.gather(*self._forgetting)
