"""One source, followed: what it last told, whether it is well, and when it is asked again after it was not."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from router.discovery.targets import Target

log = logging.getLogger("warmroute.discovery")

MAX_TARGETS = 10_000
"""Of one source. Far more than one router can serve: it is a mistake in what was asked for."""

FIRST_PAUSE_S = 0.5
"""Before a source that failed is asked again. Each further time twice as long, up to its `longest_pause_s`."""

MAX_REASONS = 8
"""Told in the log of one outage."""


class Trouble(Exception):
    """A source tells nothing at present, or nothing that can be believed. The message says why, and the remedy."""

    def __init__(self, what: str, detail: str = "") -> None:
        """`what` is told in the log once in an outage, whatever details it comes with."""
        super().__init__(f"{what}: {detail}" if detail else what)
        self.what = what


class Source(Protocol):
    """Something that knows replicas."""

    @property
    def name(self) -> str:
        """What it is called in log and metrics; no two have one name."""

    @property
    def made_of(self) -> object:
        """Two that were made of equal things do the same."""

    @property
    def longest_pause_s(self) -> float:
        """Before it is asked again."""

    @property
    def empty_after_s(self) -> float:
        """How long it must tell an empty set until that is believed."""

    async def follow(self, feed: Feed) -> None:
        """Tell `feed` the whole set, and again as it changes. Raises Trouble; then it is called again after a pause."""


class Feed:
    """Follows a source in a task. What it told last stands, whatever comes, until it tells something else."""

    def __init__(self, source: Source, tell: Callable[[str, Sequence[Target]], None]) -> None:
        """`tell` takes the source's name and what it told."""
        self.source = source
        self.name = source.name
        self.up = False
        """Whether it does what it is asked for."""
        self.why = "it has not answered yet"
        """Why not."""
        self.heard = False
        """Whether it ever told a set."""
        self.heard_at: float | None = None
        """When it last said anything that made sense, seconds since the epoch."""
        self.faults = 0
        self.targets: Sequence[Target] = ()
        """The last set."""
        self._tell = tell
        self._pause_s = FIRST_PAUSE_S
        self._down_since = time.monotonic()
        self._empty_since: float | None = None
        self._reasons: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, in the running loop."""
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """End; what was told stands."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # Told by the source

    def tell(self, targets: Sequence[Target]) -> None:
        """The whole set, as it is now. Raises Trouble when it cannot be taken."""
        if len(targets) > MAX_TARGETS:
            raise Trouble(
                f"it tells {len(targets)} replicas, and {MAX_TARGETS} are the most that are taken: ask it for fewer"
            )
        if not self._believed(targets):
            raise Trouble(
                f"it tells no replica, which is believed when it stays so for {self.source.empty_after_s:g} s"
            )
        self.targets = targets
        self.heard = True
        self._tell(self.name, targets)
        self.alive()

    def alive(self) -> None:
        """It is heard, whether it has news or not."""
        self.heard_at = time.time()
        self._pause_s = FIRST_PAUSE_S
        if not self.up:
            if self._reasons:
                down_s = time.monotonic() - self._down_since
                log.info("%s answers again, after %.0f s: %d replicas", self.name, down_s, len(self.targets))
            self.up, self.why = True, ""
            self._reasons.clear()

    def _believed(self, targets: Sequence[Target]) -> bool:
        """Whether a set may be taken: an empty one may come from somebody who knows nothing yet, or of a wrong name."""
        if targets:
            self._empty_since = None
            return True
        now = time.monotonic()
        self._empty_since = now if self._empty_since is None else self._empty_since
        return now - self._empty_since >= self.source.empty_after_s

    async def _follow(self) -> None:
        while True:
            try:
                await self.source.follow(self)
            except Trouble as trouble:
                self._troubled(trouble)
            except Exception as error:
                log.exception("following %s failed in a way it should not", self.name)
                self._troubled(Trouble(repr(error)))
            else:
                continue
            await asyncio.sleep(self._pause_s * (0.5 + 0.5 * random.random()))
            self._pause_s = min(2 * self._pause_s, self.source.longest_pause_s)

    def _troubled(self, trouble: Trouble) -> None:
        """One line for each reason of an outage."""
        if self.up:
            self._down_since = time.monotonic()
        self.up, self.why = False, str(trouble)
        self.faults += 1
        if trouble.what in self._reasons or len(self._reasons) >= MAX_REASONS:
            return
        self._reasons.add(trouble.what)
        stands = f"the {len(self.targets)} replicas that it told last stay" if self.heard else "it has told none yet"
        log.error("%s: %s; %s", self.name, self.why, stands)
