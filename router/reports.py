"""Load reports: each replica asked in turn, its answers handed to the Balancer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from policies.balancer import Balancer
from policies.types import Replica
from router import loads
from router.ask import Asker
from router.loads import Report
from router.settings import ReportSettings

log = logging.getLogger("warmroute.reports")

RETRY_UPWARD_S = 60.0
"""How long a fallback is kept before the better source is tried again."""
IDENTITY_S = 10.0
"""How often it is asked whether the engine is still the one it was."""
METRICS_BYTES = 8 << 20
MIN_PREFILL_TOKENS = 256
"""Fewer tokens than this between two reports say nothing about prefill speed."""
SPEED_BOUNDS = (100.0, 1e7)
"""Tokens per second that are believed, from a tiny model on a CPU to beyond any accelerator."""
SPEED_WEIGHT = 0.3
"""Of the newest measurement in the moving average."""

_SOURCES: tuple[tuple[str, Callable[[bytes, float], Report]], ...] = (
    ("/v1/loads", loads.from_loads),
    ("/get_load", loads.from_get_load),
    ("/metrics", loads.from_metrics),
)


class Reports:
    """Polls every replica that joins until it leaves."""

    def __init__(self, balancer: Balancer, settings: ReportSettings, clock: Callable[[], float]) -> None:
        self._balancer = balancer
        self._settings = settings
        self._clock = clock
        self._polls: dict[Replica, _Poll] = {}

    def watch(self, replica: Replica, url: str) -> None:
        """Begin to poll it."""
        self._polls[replica] = _Poll(self._balancer, replica, Asker(url), self._settings, self._clock)

    async def forget(self, replica: Replica) -> None:
        """Stop polling it."""
        if (poll := self._polls.pop(replica, None)) is not None:
            await poll.stop()

    async def stop(self) -> None:
        for replica in list(self._polls):
            await self.forget(replica)


class _Poll:
    """The polling of one replica."""

    def __init__(
        self,
        balancer: Balancer,
        replica: Replica,
        asker: Asker,
        settings: ReportSettings,
        clock: Callable[[], float],
    ) -> None:
        self._balancer = balancer
        self._replica = replica
        self._asker = asker
        self._settings = settings
        self._clock = clock
        self._source = 0
        """Index into the sources; past the end, none has worked."""
        self._retry_at = clock() + RETRY_UPWARD_S
        self._trouble = ""
        self._last: Report | None = None
        self._speed: float | None = None
        self._mark: str | None = None
        self._mark_due = 0.0
        self._task = asyncio.create_task(self._forever())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._asker.close()

    async def _forever(self) -> None:
        interval = self._settings.interval_s
        await asyncio.sleep(interval * random.random())
        while True:
            try:
                now = self._clock()
                if now >= self._retry_at and self._source:
                    self._source = 0
                    self._retry_at = now + RETRY_UPWARD_S
                if self._source < len(_SOURCES):
                    await self._poll()
                if now >= self._mark_due:
                    self._mark_due = now + IDENTITY_S
                    await self._look_for_restart()
                self._note("")
            except (OSError, ValueError) as error:
                self._note(str(error))
            except Exception:
                log.exception("polling %s failed in a way it should not", self._replica.id)
            await asyncio.sleep(interval * (0.9 + 0.2 * random.random()))

    def _note(self, trouble: str) -> None:
        """Log a change between working and not, once."""
        if bool(trouble) != bool(self._trouble):
            if trouble:
                log.warning("replica %s tells no load: %s", self._replica.id, trouble)
            else:
                log.info("replica %s tells its load again", self._replica.id)
        self._trouble = trouble

    async def _poll(self) -> None:
        path, parse = _SOURCES[self._source]
        size = METRICS_BYTES if path == "/metrics" else 1 << 20
        answer = await self._asker.get(path, self._settings.timeout_s, size)
        if answer.status in (404, 405, 501):
            self._source += 1
            self._retry_at = self._clock() + RETRY_UPWARD_S
            if self._source == len(_SOURCES):
                raise ValueError("it has none of " + ", ".join(path for path, _ in _SOURCES))
            await self._poll()
            return
        if answer.status != 200:
            raise ValueError(f"{path} says {answer.status}")
        report = parse(answer.body, self._clock())
        self._take(report)

    def _take(self, report: Report) -> None:
        now = self._clock()
        last, self._last = self._last, report
        if last is not None and report.prefilled_tokens is not None and last.prefilled_tokens is not None:
            tokens = report.prefilled_tokens - last.prefilled_tokens
            if tokens < 0:
                self._restarted("its total of prefilled tokens fell")
            elif report.prefill_busy_us is not None and last.prefill_busy_us is not None:
                self._measure(tokens, report.prefill_busy_us - last.prefill_busy_us)
        report.load.prefill_tokens_per_s = self._speed
        self._balancer.report(self._replica, report.load, now)

    def _measure(self, tokens: int, busy_us: int) -> None:
        if tokens < MIN_PREFILL_TOKENS or busy_us <= 0:
            return
        speed = min(max(tokens / busy_us * 1e6, SPEED_BOUNDS[0]), SPEED_BOUNDS[1])
        self._speed = speed if self._speed is None else self._speed + SPEED_WEIGHT * (speed - self._speed)

    async def _look_for_restart(self) -> None:
        answer = await self._asker.get("/server_info", self._settings.timeout_s)
        if answer.status == 404:
            answer = await self._asker.get("/get_server_info", self._settings.timeout_s)
        if answer.status != 200:
            return
        mark = loads.startup_mark(answer.body)
        if mark is not None and self._mark is not None and mark != self._mark:
            self._restarted("its startup_time changed")
        self._mark = mark if mark is not None else self._mark

    def _restarted(self, why: str) -> None:
        log.warning("replica %s restarted (%s): its KV cache is empty", self._replica.id, why)
        self._last = self._mark = None  # the same restart must not be seen twice
        self._balancer.cache_cleared(self._replica, self._clock())
