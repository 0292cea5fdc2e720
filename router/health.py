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
import time
from collections.abc import Awaitable, Callable

from policies.balancer import Balancer
from policies.types import Replica, State
from router.ask import Asker
from router.settings import HealthSettings
from router.standing import Standing

log = logging.getLogger("warmroute.health")

READY, HEALTH, ROOT = "/ready", "/health", "/"
"""What is asked, in this order of preference: older engines have no `/ready`, other servers neither of both."""

_ABSENT = (404, 405, 501)

RETRY_UPWARD_S = 60.0
"""How long a fallback is kept before `/ready` is tried again: a gateway's 404 may pass."""

STATEMENT_S = 1.0
"""`/health` looks once a second whether the engine has generated: what fails sooner says that the server starts or
drains, not that it is silent."""


class Health:
    """Watches every replica that joins until it leaves. Tells the Balancer of each change of state."""

    def __init__(self, balancer: Balancer, settings: HealthSettings, clock: Callable[[], float]) -> None:
        self._balancer = balancer
        self._settings = settings
        self._clock = clock
        self._watches: dict[Replica, _Watch] = {}

    def watch(self, replica: Replica, asker: Asker) -> None:
        """Begin to probe it."""
        self._watches[replica] = _Watch(self, replica, asker, self._settings, self._clock)

    async def forget(self, replica: Replica) -> None:
        """Stop probing it."""
        if (watch := self._watches.pop(replica, None)) is not None:
            await watch.stop()

    @property
    def probed(self) -> bool:
        """Whether every replica has been probed at least once."""
        return all(watch.probed for watch in self._watches.values())

    def why(self, replica: Replica) -> str:
        """Why it is in the state it is in."""
        watch = self._watches.get(replica)
        return watch.standing.why if watch is not None else "not watched"

    def since(self, replica: Replica) -> float | None:
        """When it came into that state, seconds since the epoch; None when it is not watched."""
        watch = self._watches.get(replica)
        return watch.since if watch is not None else None

    # Told by the data path

    def succeeded(self, replica: Replica) -> None:
        """It answered a request."""
        if (watch := self._watches.get(replica)) is not None:
            watch.standing.request_succeeded()

    def failed(self, replica: Replica, why: str) -> None:
        """It left a request unanswered, or broke off."""
        if (watch := self._watches.get(replica)) is not None:
            watch.standing.request_failed(why)
            self.settle(watch)

    def gone(self, replica: Replica) -> bool:
        """Whether it is out because not even its probes are answered: what waits there waits in vain."""
        watch = self._watches.get(replica)
        return watch is not None and watch.standing.silent

    def settle(self, watch: _Watch) -> None:
        """Carry a change of standing over to the Balancer."""
        replica, standing = watch.replica, watch.standing
        if replica.state is not standing.state:
            level = logging.INFO if standing.state is State.READY else logging.WARNING
            log.log(level, "replica %s is %s (was %s): %s", replica.id, standing.state, replica.state, standing.why)
            watch.since = time.time()
            self._balancer.set_state(replica, standing.state, self._clock())


class _Watch:
    """The probes of one replica."""

    def __init__(
        self, health: Health, replica: Replica, asker: Asker, settings: HealthSettings, clock: Callable[[], float]
    ) -> None:
        self._health = health
        self._asker = asker
        self._settings = settings
        self._clock = clock
        self.replica = replica
        self.standing = Standing(settings)
        self.since = time.time()
        self.probed = False
        self._path = READY
        self._retry_at = 0.0
        self._answered = 0
        """Requests it had answered when `/health` was last due."""
        # Delayed by chance: a router that starts must not ask all of a fleet at the same moment, still less
        # make all of it generate.
        self._tasks = [
            asyncio.create_task(self._forever(self._probe, settings.interval_s / 4)),
            asyncio.create_task(self._forever(self._probe_deeply, settings.deep_interval_s)),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _forever(self, probe: Callable[[], Awaitable[float]], delay_s: float) -> None:
        """Probe again and again; `probe` tells how many seconds to wait before the next."""
        await asyncio.sleep(delay_s * random.random())
        while True:
            try:
                pause_s = await probe()
            except Exception:
                log.exception("probing %s failed in a way it should not", self.replica.id)
                pause_s = self._settings.interval_s
            self._health.settle(self)
            await asyncio.sleep(pause_s * (0.9 + 0.2 * random.random()))

    async def _probe(self) -> float:
        settings, standing = self._settings, self.standing
        if self._path != READY and self._clock() >= self._retry_at:
            self._path = READY
        while True:
            path = self._path
            began, successes = self._clock(), standing.successes
            try:
                answer = await self._asker.get(path, settings.deep_timeout_s if path == HEALTH else settings.timeout_s)
            except OSError as error:
                self._failed(path, str(error), began, successes)
                self._path = READY  # what comes back may be another version
                break
            if answer.status in _ABSENT and path != ROOT:
                self._path = HEALTH if path == READY else ROOT
                if path == READY:
                    self._retry_at = self._clock() + RETRY_UPWARD_S
                log.debug("replica %s has no %s, asking %s", self.replica.id, path, self._path)
                continue
            if answer.status >= 500:
                self._failed(path, f"{path} says {answer.status}", began, successes, answer.status)
            else:
                if path != READY:
                    standing.deep_probe_passed()
                standing.probe_passed()
            break
        self.probed = True
        seldom = self._path == HEALTH and standing.state is State.READY
        return settings.deep_interval_s if seldom else settings.interval_s

    def _failed(self, path: str, why: str, began: float, successes: int, status: int | None = None) -> None:
        if path == HEALTH and self._clock() - began >= STATEMENT_S:
            self.standing.deep_probe_failed(f"{why}: it generates nothing", successes)
        elif status == 503 and path != ROOT:
            self.standing.probe_not_ready(f"{why}: it drains, is paused, or starts")
        else:
            self.standing.probe_failed(why)

    async def _probe_deeply(self) -> float:
        """Ask `/health` of a replica that is judged by `/ready`, unless its answers show that it is alive."""
        settings, standing = self._settings, self.standing
        successes = standing.successes
        idle, self._answered = successes == self._answered, successes
        if self._path != READY or not (idle or standing.state is not State.READY):
            return settings.deep_interval_s
        began = self._clock()
        try:
            answer = await self._asker.get(HEALTH, settings.deep_timeout_s)
            passed, why = answer.status < 500, f"/health says {answer.status}"
        except OSError as error:
            passed, why = False, str(error)
        if passed:
            standing.deep_probe_passed()
        elif self._clock() - began >= STATEMENT_S:
            standing.deep_probe_failed(f"{why}: it generates nothing", successes)
            # A failed /health makes /ready say 503 until one succeeds: ask again soon, lest it stays out for nothing.
            return settings.interval_s
        return settings.deep_interval_s
