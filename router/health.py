"""Whether replicas are well: probes, and what the data path sees.

Facts about SGLang's endpoints (0.5.23, seen on a real server): `/ready` is a flag, answered in milliseconds, 503 while
starting, draining, paused, or after a failed `/health` until one succeeds. `/health` makes the engine generate a
token: a good answer takes a second, a hung scheduler 20. Only a `/health` uncovers a hung scheduler, and a long prefill
can make one fail though all is well, so it is asked only of replicas that have not answered a request lately.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from policies.balancer import Balancer
from policies.types import Replica, State
from router.ask import Asker
from router.settings import HealthSettings
from router.standing import Standing

log = logging.getLogger("warmroute.health")

_ABSENT = (404, 405, 501)


class Health:
    """Watches every replica that joins until it leaves. Tells the Balancer of each change of state."""

    def __init__(self, balancer: Balancer, settings: HealthSettings, clock: Callable[[], float]) -> None:
        self._balancer = balancer
        self._settings = settings
        self._clock = clock
        self._watches: dict[Replica, _Watch] = {}

    def watch(self, replica: Replica, url: str) -> None:
        """Begin to probe it."""
        self._watches[replica] = _Watch(self, replica, url)

    async def forget(self, replica: Replica) -> None:
        """Stop probing it."""
        if (watch := self._watches.pop(replica, None)) is not None:
            await watch.stop()

    async def stop(self) -> None:
        for replica in list(self._watches):
            await self.forget(replica)

    @property
    def probed(self) -> bool:
        """Whether every replica has been probed at least once."""
        return all(watch.probed for watch in self._watches.values())

    def why(self, replica: Replica) -> str:
        """Why it is in the state it is in."""
        watch = self._watches.get(replica)
        return watch.standing.why if watch is not None else "not watched"

    # Told by the data path

    def succeeded(self, replica: Replica) -> None:
        if (watch := self._watches.get(replica)) is not None:
            watch.standing.request_succeeded()

    def failed(self, replica: Replica, why: str) -> None:
        if (watch := self._watches.get(replica)) is not None:
            watch.standing.request_failed(why)
            self.settle(replica, watch.standing)

    def settle(self, replica: Replica, standing: Standing) -> None:
        """Carry a change of standing over to the Balancer."""
        if replica.state is not standing.state:
            level = logging.INFO if standing.state is State.READY else logging.WARNING
            log.log(level, "replica %s is %s (was %s): %s", replica.id, standing.state, replica.state, standing.why)
            self._balancer.set_state(replica, standing.state, self._clock())


class _Watch:
    """The probes of one replica."""

    def __init__(self, health: Health, replica: Replica, url: str) -> None:
        self._health = health
        self._settings = health._settings
        self._replica = replica
        self._asker = Asker(url)
        self.standing = Standing(self._settings)
        self.probed = False
        self._path = "/ready"
        """What is asked: `/ready`, or `/health` of older engines, or `/` of servers that have neither."""
        self._answered = 0
        """Requests it had answered when `/health` was last due."""
        self._tasks = [
            asyncio.create_task(self._forever(self._probe, lambda: self._interval)),
            asyncio.create_task(self._forever(self._probe_deeply, lambda: self._settings.deep_interval_s)),
        ]

    @property
    def _interval(self) -> float:
        return self._settings.deep_interval_s if self._path == "/health" else self._settings.interval_s

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._asker.close()

    async def _forever(self, probe: Callable[[], Awaitable[None]], interval: Callable[[], float]) -> None:
        if probe == self._probe_deeply:
            # A router that restarts must not make every engine of the fleet generate at the same moment.
            await asyncio.sleep(interval() * random.random())
        while True:
            try:
                await probe()
            except Exception:
                log.exception("probing %s failed in a way it should not", self._replica.id)
            self._health.settle(self._replica, self.standing)
            await asyncio.sleep(interval() * (0.9 + 0.2 * random.random()))

    async def _probe(self) -> None:
        settings, standing = self._settings, self.standing
        deep = self._path == "/health"
        seen = standing.successes
        try:
            answer = await self._asker.get(self._path, settings.deep_timeout_s if deep else settings.timeout_s)
        except OSError as error:
            if not (deep and standing.successes > seen):
                standing.probe_failed(f"{self._path}: {error}")
            self._path = "/ready"  # what comes back may be another version
        else:
            status = answer.status
            if status in _ABSENT and self._path != "/":
                self._path = "/health" if self._path == "/ready" else "/"
                log.info("replica %s has no such endpoint, asking %s from now on", self._replica.id, self._path)
                await self._probe()
                return
            if status < 500:
                standing.probe_passed()
            elif status == 503 and self._path == "/ready":
                standing.probe_not_ready("/ready says 503: it drains, is paused, or starts")
            elif not (deep and standing.successes > seen):
                standing.probe_failed(f"{self._path} says {status}")
        self.probed = True

    async def _probe_deeply(self) -> None:
        """Ask `/health` where `/ready` is what decides: its failure, or its success, shows in `/ready`."""
        answered, self._answered = self.standing.successes > self._answered, self.standing.successes
        if self._path != "/ready" or (answered and self.standing.state is State.READY):
            return
        try:
            await self._asker.get("/health", self._settings.deep_timeout_s)
        except OSError as error:
            log.info("replica %s: /health: %s", self._replica.id, error)
