"""Replicas coming and going: one place that tells the Balancer, the probes and the reports alike."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from policies.balancer import Balancer
from policies.types import Replica
from router.ask import Asker
from router.drains import Drain, Homes
from router.health import Health
from router.keys import credential_line
from router.proxy.upstream import Upstream
from router.reports import Reports
from router.settings import ReplicaSettings, Settings
from router.tls import ReplicaTls

log = logging.getLogger("warmroute.fleet")


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
        self.given: dict[str, ReplicaSettings] = {}
        """Replicas by id, as they were given."""
        self.drains: dict[Replica, Drain] = {}
        """By operators; those that say themselves that they drain are not among them."""
        self.joined: Callable[[str], None] | None = None
        """Called with the id of each replica that has joined."""
        self._left: set[Replica] = set()
        self._forgetting: set[asyncio.Task[None]] = set()
        given = settings.tls.replicas
        self.tls = ReplicaTls(given.ca_file, given.cert_file, given.key_file, verify=given.verify)

    def join(self, given: ReplicaSettings) -> Replica:
        """Add a replica and begin to watch it. Raises ValueError for a URL that cannot be used."""
        return self._join(given, self._upstream(given, self._settings))

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
        """What puts the replicas of other settings in force, and how replicas are reached. Raises ValueError.

        A known id at another URL is another replica. Those that came otherwise than by settings stay.
        """
        wanted = {given.id: given for given in settings.replicas}
        gone = [name for name, given in self.given.items() if name not in wanted or wanted[name].url != given.url]
        new = [given for name, given in wanted.items() if name not in self.given or name in gone]
        joining = [(given, self._upstream(given, settings)) for given in new]

        def commit() -> None:
            self._settings = settings
            for replica in self._balancer.replicas.values():
                if isinstance(replica.address, Upstream):
                    replica.address.connect_s = settings.timeouts.connect_s
                    replica.address.idle_s = settings.pool.idle_s
                    replica.address.credential = credential_line(settings.keys)
            for name in gone:
                self.leave(name)
            for given, upstream in joining:
                self._join(given, upstream)
            for name, given in wanted.items():
                replica = self._balancer.replicas[name]
                if replica.weight != given.weight:
                    self._balancer.set_weight(replica, given.weight, self._clock())
                self.given[name] = given

        return commit

    def _upstream(self, given: ReplicaSettings, settings: Settings) -> Upstream:
        return Upstream(
            given.url,
            connect_s=settings.timeouts.connect_s,
            idle_s=settings.pool.idle_s,
            tls=self.tls,
            credential=credential_line(settings.keys),
        )

    def _join(self, given: ReplicaSettings, upstream: Upstream) -> Replica:
        replica = Replica(given.id, weight=given.weight, address=upstream)
        self._balancer.join(replica, self._clock())
        self.given[given.id] = given
        asker = Asker(upstream)
        self._health.watch(replica, asker)
        self._reports.watch(replica, asker)
        if self.joined is not None:
            self.joined(given.id)
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
            self._health.order(replica, homes.state, f"drained by an operator, its sessions {homes}")
        return replica

    def undrain(self, replica_id: str, who: str) -> Replica:
        """Take a drain back. Nothing happens to a replica without one. Raises KeyError when it is unknown."""
        replica = self._balancer.replicas[replica_id]
        if self.drains.pop(replica, None) is not None:
            log.info("replica %s drains no more: asked by %s", replica_id, who)
            self._health.order(replica, None)
        return replica

    async def close(self) -> None:
        """All leave."""
        for replica_id in list(self._balancer.replicas):
            self.leave(replica_id)
        await asyncio.gather(*self._forgetting)
