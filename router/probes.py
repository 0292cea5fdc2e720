"""The probes of one replica: what is asked when, and what the answers say for or against it.

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

from policies.types import Replica, State
from router.ask import Asker, Nobody, Short
from router.settings import HealthSettings
from router.standing import PLAINLY_READY, Missing, Standing

log = logging.getLogger("warmroute.health")

READY, HEALTH, ROOT = "/ready", "/health", "/"
"""What is asked, in this order of preference: older engines have no `/ready`, other servers neither of both."""

_ABSENT = (404, 405, 501)

RETRY_UPWARD_S = 60.0
"""How long a fallback is kept before `/ready` is tried again: a gateway's 404 may pass."""

STATEMENT_S = 1.0
"""`/health` looks once a second whether the engine has generated: what fails sooner says that the server starts or
drains, not that it is silent."""


class Probes:
    """Asks from when it is made, in the running loop, until it is stopped. Tells a `Standing` what came of it."""

    def __init__(
        self,
        replica: Replica,
        standing: Standing,
        asker: Asker,
        settings: HealthSettings,
        clock: Callable[[], float],
        settle: Callable[[], None],
    ) -> None:
        """`settle` is called after each probe."""
        self._replica = replica
        self._standing = standing
        self._asker = asker
        self._settings = settings
        self._clock = clock
        self._told = settle
        self.probed = False
        """Whether it was at least once."""
        self._path = READY
        self._absent = 0
        """The status that said last that there is no such endpoint."""
        self._retry_at = 0.0
        self._answered = 0
        """Requests it had answered when `/health` was last due."""
        # Delayed by chance: a router that starts must not ask all of a fleet at the same moment, still less
        # make all of it generate.
        self._tasks = [
            asyncio.create_task(self._forever(self._probe, settings.interval_s / 4)),
            asyncio.create_task(self._forever(self._probe_deeply, settings.deep_interval_s)),
        ]

    def configure(self, settings: HealthSettings) -> None:
        """From now on by these settings."""
        self._settings = settings

    async def stop(self) -> None:
        """Ask no more."""
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
                log.exception("probing %s failed in a way it should not", self._replica.id)
                pause_s = self._settings.interval_s
            self._settle()
            await self._pause(pause_s * (0.9 + 0.2 * random.random()))

    def _settle(self) -> None:
        try:
            self._told()
        except Exception:  # what others make of a probe must not be the last one's end
            log.exception("settling what is known of %s failed in a way it should not", self._replica.id)

    async def _pause(self, seconds: float) -> None:
        """Until the next probe. Where that is far off, a circuit breaker's time may be up before it."""
        while seconds > (step_s := 2.0 * self._settings.interval_s):
            await asyncio.sleep(step_s)
            self._settle()
            seconds -= step_s
        await asyncio.sleep(seconds)

    async def _probe(self) -> float:
        settings, standing = self._settings, self._standing
        if self._path != READY and self._clock() >= self._retry_at:
            self._path = READY
        while True:
            path = self._path
            began, successes = self._clock(), standing.successes
            try:
                answer = await self._asker.get(path, settings.deep_timeout_s if path == HEALTH else settings.timeout_s)
            except Short as error:  # else a router in need would eject a healthy fleet
                log.warning("cannot probe replica %s, which is not to blame: %s", self._replica.id, error)
                break
            except OSError as error:
                missing = Missing.NOBODY if isinstance(error, Nobody) else Missing.NOTHING
                self._failed(path, str(error), began, successes, missing)
                self._path = READY  # what comes back may be another version
                break
            if answer.status in _ABSENT and path != ROOT:
                self._path = HEALTH if path == READY else ROOT
                self._absent = answer.status
                if path == READY:
                    self._retry_at = self._clock() + RETRY_UPWARD_S
                log.debug("replica %s has no %s, asking %s", self._replica.id, path, self._path)
                continue
            if answer.status >= 500:
                why = f"{path} says {answer.status}"
                self._failed(path, why, began, successes, Missing.NONSENSE, answer.status)
            else:
                if path != READY:
                    standing.deep_probe_passed()
                standing.probe_passed(self._clock(), self._questionable() if path == ROOT else PLAINLY_READY)
            break
        self.probed = True
        seldom = self._path == HEALTH and standing.probed is State.READY
        return settings.deep_interval_s if seldom else settings.interval_s

    def _questionable(self) -> str:
        """Why a server is ready that has none of an engine's endpoints for health."""
        untold = " and tells no load" if self._replica.load is None else ""
        return f"it answers {self._absent} to {READY} and {HEALTH}{untold}: is this an engine?"

    def _failed(
        self, path: str, why: str, began: float, successes: int, missing: Missing, status: int | None = None
    ) -> None:
        if path == HEALTH and self._clock() - began >= STATEMENT_S:
            self._standing.deep_probe_failed(f"{why}: it generates nothing", successes)
        elif status == 503 and path != ROOT:
            self._standing.probe_not_ready(f"{why}: it drains, is paused, or starts")
        else:
            self._standing.probe_failed(why, missing)

    async def _probe_deeply(self) -> float:
        """Ask `/health` of a replica that is judged by `/ready`, unless its answers show that it is alive."""
        settings, standing = self._settings, self._standing
        successes = standing.successes
        idle, self._answered = successes == self._answered, successes
        if self._path != READY or not (idle or standing.probed is not State.READY):
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
