"""Replicas coming and going: one place that tells the Balancer, the probes and the reports alike."""

from __future__ import annotations

from collections.abc import Callable

from policies.balancer import Balancer
from policies.types import Replica
from router.ask import Asker
from router.health import Health
from router.proxy.upstream import Upstream
from router.reports import Reports
from router.settings import ReplicaSettings, Settings


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

    def join(self, given: ReplicaSettings) -> Replica:
        """Add a replica and begin to watch it. Raises ValueError for a URL that cannot be used."""
        settings = self._settings
        upstream = Upstream(given.url, connect_s=settings.timeouts.connect_s, idle_s=settings.pool.idle_s)
        replica = Replica(given.id, weight=given.weight, address=upstream)
        self._balancer.join(replica, self._clock())
        asker = Asker(upstream)
        self._health.watch(replica, asker)
        self._reports.watch(replica, asker)
        return replica

    async def leave(self, replica_id: str) -> None:
        """Remove a replica: nothing new is sent there, what runs there ends in its own time."""
        replica = self._balancer.leave(replica_id, self._clock())
        if isinstance(replica.address, Upstream):
            replica.address.close()
        await self._health.forget(replica)
        await self._reports.forget(replica)

    async def close(self) -> None:
        """All leave."""
        for replica_id in list(self._balancer.replicas):
            await self.leave(replica_id)
