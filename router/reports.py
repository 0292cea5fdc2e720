"""Load reports: each replica asked in turn, its answers handed to the Balancer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from hashlib import blake2b

from policies.balancer import Balancer
from policies.types import Replica, State
from router import loads
from router.ask import MAX_BYTES, Asker
from router.loads import Info, Report
from router.settings import ReportSettings

log = logging.getLogger("warmroute.reports")

RETRY_UPWARD_S = 60.0
"""How long a fallback is kept before the better source is tried again."""
INFO_S = 10.0
"""How often it is asked whether the engine is still the one it was."""
METRICS_BYTES = 8 << 20
MIN_PREFILL_TOKENS = 256
"""Fewer tokens than this between two reports say nothing about prefill speed."""
SPEED_BOUNDS = (100.0, 1e7)
"""Tokens per second that are believed, from a tiny model on a CPU to beyond any accelerator."""
SPEED_WEIGHT = 0.3
"""Of the newest measurement in the moving average."""

_ABSENT = (401, 403, 404, 405, 501)
"""Not there, or not for us: with an API key set, SGLang leaves only its health and `/metrics` open."""

_SOURCES: tuple[tuple[str, Callable[[bytes, float, int | None], Report]], ...] = (
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

    def configure(self, settings: ReportSettings) -> None:
        """From now on by these settings."""
        self._settings = settings
        for poll in self._polls.values():
            poll.settings = settings

    def watch(self, replica: Replica, asker: Asker, rank: int | None = None, ranks: int = 1) -> None:
        """Begin to poll it: a whole engine, or one rank of an engine that is said to have so many."""
        self._polls[replica] = _Poll(self._balancer, replica, asker, rank, ranks, self._settings, self._clock)

    def expect(self, replica: Replica, ranks: int) -> None:
        """From now on its engine is said to have so many ranks. KeyError when it is not polled."""
        self._polls[replica].ranks = ranks

    async def forget(self, replica: Replica) -> None:
        """Stop polling it."""
        if (poll := self._polls.pop(replica, None)) is not None:
            await poll.stop()


class _Poll:
    """The polling of one replica."""

    def __init__(
        self,
        balancer: Balancer,
        replica: Replica,
        asker: Asker,
        rank: int | None,
        ranks: int,
        settings: ReportSettings,
        clock: Callable[[], float],
    ) -> None:
        self._balancer = balancer
        self._replica = replica
        self._asker = asker
        self._rank = rank
        self.ranks = ranks
        self.settings = settings
        self._clock = clock
        self._source = 0
        """Index into the sources; past the end, none has worked."""
        self._retry_at = 0.0
        self._trouble = ""
        self._counted = (ranks, ranks)
        """Ranks when they were last compared: those that there are, and those that there were said to be."""
        self._last: Report | None = None
        self._speed: float | None = None
        self._info = Info()
        self._info_due = 0.0
        self._was_ready = True
        self._task = asyncio.create_task(self._forever())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _forever(self) -> None:
        await asyncio.sleep(self.settings.interval_s * random.random())
        while True:
            try:
                await self._look_for_restart()
                await self._poll()
            except Exception:
                log.exception("polling %s failed in a way it should not", self._replica.id)
            await asyncio.sleep(self.settings.interval_s * (0.9 + 0.2 * random.random()))

    def _note(self, trouble: str) -> None:
        """Log a change between working and not, once."""
        if bool(trouble) != bool(self._trouble):
            if trouble:
                log.warning("replica %s tells no load: %s", self._replica.id, trouble)
            else:
                log.info("replica %s tells its load again", self._replica.id)
        self._trouble = trouble

    async def _poll(self) -> None:
        now = self._clock()
        if self._source and now >= self._retry_at:
            self._source = 0
        while self._source < len(_SOURCES):
            path, parse = _SOURCES[self._source]
            try:
                size = METRICS_BYTES if path == "/metrics" else MAX_BYTES
                asked = f"{path}?dp_rank={self._rank}" if path == "/v1/loads" and self._rank is not None else path
                answer = await self._asker.get(asked, self.settings.timeout_s, size)
                if answer.status == 200:
                    self._take(parse(answer.body, self._clock(), self._rank))
                    self._note("")
                    return
            except OSError as error:
                self._note(str(error))
                return
            except ValueError as error:
                self._note(f"{path}: {error}")
                return
            if answer.status not in _ABSENT:
                self._note(f"{path} says {answer.status}")
                return
            if self._source == 0:
                self._retry_at = now + RETRY_UPWARD_S
            self._source += 1
        self._note("it has none of " + ", ".join(path for path, _ in _SOURCES))

    def _take(self, report: Report) -> None:
        load = report.load
        last, self._last = self._last, report
        if last is not None:
            if report.taken is not None and report.taken == last.taken:
                load.at = min(load.at, last.load.at)  # the same numbers again, whatever the answer's own time says
            if report.prefilled_tokens is not None and last.prefilled_tokens is not None:
                tokens = report.prefilled_tokens - last.prefilled_tokens
                if tokens < 0:
                    self._restarted("its total of prefilled tokens fell")
                elif report.prefill_busy_us is not None and last.prefill_busy_us is not None:
                    self._measure(tokens * report.ranks, report.prefill_busy_us - last.prefill_busy_us)
        load.prefill_tokens_per_s = self._speed
        load.capacity_tokens = load.capacity_tokens or self._info.capacity_tokens
        load.host_capacity_tokens = load.host_capacity_tokens or self._info.host_capacity_tokens
        self._balancer.report(self._replica, load, self._clock())

    def _measure(self, tokens: int, busy_us: int) -> None:
        if tokens < MIN_PREFILL_TOKENS or busy_us <= 0:
            return
        speed = min(max(tokens / busy_us * 1e6, SPEED_BOUNDS[0]), SPEED_BOUNDS[1])
        self._speed = speed if self._speed is None else self._speed + SPEED_WEIGHT * (speed - self._speed)

    async def _look_for_restart(self) -> None:
        """Now and then, and whenever it has come back: is the engine still the one it was?"""
        was_ready, self._was_ready = self._was_ready, self._replica.state is State.READY
        if self._clock() < self._info_due and (was_ready or not self._was_ready):
            return
        self._info_due = self._clock() + INFO_S
        for path in ("/server_info", "/get_server_info"):
            try:
                answer = await self._asker.get(path, self.settings.timeout_s)
                if answer.status in _ABSENT:
                    continue
                if answer.status == 200:
                    info = loads.from_server_info(answer.body, self._rank)
                    self._compare(info.ranks)
                    last, self._info = self._info.mark, info
                    info.mark = info.mark or last
                    if last is not None and last != info.mark:
                        self._restarted("its startup_time changed")
                        self._info = info
                    self._replica.incarnation = _incarnation(info.mark)
                    self._replica.keeps_responses = info.keeps_responses
            except (OSError, ValueError) as error:
                log.debug("replica %s: %s: %s", self._replica.id, path, error)
            return

    def _compare(self, found: int | None) -> None:
        """Say once, for all ranks of an engine together, that it has more or fewer than was said."""
        if found is None or self._rank not in (None, 0) or (found, self.ranks) == self._counted:
            return
        self._counted = (found, self.ranks)
        if found == self.ranks:
            log.info("replica %s: its engine has as many data-parallel ranks as `ranks` says", self._replica.id)
            return
        if self.ranks == 1:
            means = f"the engine spreads a session's turns over {found} KV caches, and affinity is worth 1/{found}"
        elif found < self.ranks:
            means = "what is sent to the ranks that it does not have, it refuses (400)"
        else:
            means = "nothing is sent to the ranks beyond"
        log.warning(
            "replica %s: its engine has %d data-parallel ranks (--dp-size), and `ranks` says %d: %s: set ranks: %d "
            "where the replica, or what finds it, is configured",
            self._replica.id,
            found,
            self.ranks,
            means,
            found,
        )

    def _restarted(self, why: str) -> None:
        log.warning("replica %s restarted (%s): its KV cache is empty", self._replica.id, why)
        self._last = None  # the same restart must not be seen twice
        self._info = Info()
        self._replica.incarnation = ""
        self._balancer.cache_cleared(self._replica, self._clock())


def _incarnation(mark: str | None) -> str:
    """A short name of an engine's process, equal wherever its mark is read."""
    return "" if mark is None else blake2b(mark.encode(), digest_size=8).hexdigest()
