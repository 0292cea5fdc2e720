"""One source, followed: what it last told, whether it is well, and when it is asked again after it was not."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from router.cutting import cut
from router.discovery.targets import Target

log = logging.getLogger("warmroute.discovery")

MAX_TARGETS = 10_000
"""Of one source. Far more than one router can serve: it is a mistake in what was asked for."""

FIRST_PAUSE_S = 0.5
"""Before a source that failed is asked again. Each further time twice as long, up to its `longest_pause_s`."""

MAX_ASKED_PAUSE_S = 60.0
"""The longest pause that a source may ask for."""

MAX_REASONS = 8
"""Told in the log of one outage."""

WHY_CHARS = 1_000


class Trouble(Exception):
    """A source tells nothing at present, or nothing that can be believed. The message says why, and the remedy."""

    def __init__(self, what: str, detail: str = "", again_s: float = 0.0) -> None:
        """`what` is told in the log once in an outage, whatever details it comes with.

        `again_s` is how long the source asks to be left alone.
        """
        super().__init__(cut(f"{what}: {detail}" if detail else what, WHY_CHARS))
        self.what = cut(what, WHY_CHARS)
        self.again_s = again_s


class _Empty(Trouble):
    """It tells no replica, which is not believed yet."""


def check_size(found: Collection[object]) -> None:
    """Raises ValueError when one source tells more replicas than are taken."""
    if len(found) > MAX_TARGETS:
        raise ValueError(
            f"it tells {len(found)} replicas, and {MAX_TARGETS} are the most that are taken: ask it for fewer"
        )


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

    def tell(self, targets: Sequence[Target], *, ends_outage: bool = True) -> None:
        """The whole set, as it is now. Raises Trouble when it cannot be taken.

        A source of which more is to be seen before an outage is over calls `well` then, and does not have it end here.
        """
        try:
            check_size(targets)
        except ValueError as error:
            raise Trouble(str(error)) from None
        self._believe(targets)
        self.targets = targets
        self.heard = True
        self._tell(self.name, targets)
        if ends_outage or not self._reasons:
            self.well()
        else:
            self.alive()

    def alive(self) -> None:
        """It is heard, whether it has news or not."""
        self.heard_at = time.time()

    def well(self) -> None:
        """It does what it is asked for: an outage is over."""
        self.alive()
        self._pause_s = FIRST_PAUSE_S
        if not self.up:
            if self._reasons:
                down_s = time.monotonic() - self._down_since
                log.info("%s answers again, after %.0f s: %d replicas", self.name, down_s, len(self.targets))
            self.up, self.why = True, ""
            self._reasons.clear()

    def _believe(self, targets: Sequence[Target]) -> None:
        """An empty set may come from somebody who knows nothing yet, or of a wrong name: it is believed when nothing
        else was told for a while, and nothing failed. Raises Trouble when it is not."""
        if targets:
            self._empty_since = None
            return
        now = time.monotonic()
        self._empty_since = now if self._empty_since is None else self._empty_since
        empty_s = now - self._empty_since
        if empty_s < self.source.empty_after_s:
            raise _Empty(f"it tells no replica, which is believed when it stays so for {self.source.empty_after_s:g} s")
        if self.targets:
            gone = len(self.targets)
            log.warning("%s has told no replica for %.0f s, and is believed: %d leave", self.name, empty_s, gone)

    async def _follow(self) -> None:
        while True:
            again_s = 0.0
            try:
                await self.source.follow(self)
            except Trouble as trouble:
                again_s = min(trouble.again_s, MAX_ASKED_PAUSE_S)
                self._troubled(trouble)
            except Exception as error:
                self._troubled(Trouble("following it failed in a way it should not", repr(error)), error)
            else:
                continue
            pause_s = self._pause_s * (0.5 + 0.5 * random.random())
            await asyncio.sleep(max(pause_s, again_s * (1 + 0.1 * random.random())))
            self._pause_s = min(2 * self._pause_s, self.source.longest_pause_s)

    def _troubled(self, trouble: Trouble, error: Exception | None = None) -> None:
        """One line for each reason of an outage."""
        if not isinstance(trouble, _Empty):
            self._empty_since = None
        if self.up:
            self._down_since = time.monotonic()
        self.up, self.why = False, str(trouble)
        self.faults += 1
        if trouble.what in self._reasons or len(self._reasons) >= MAX_REASONS:
            return
        self._reasons.add(trouble.what)
        stands = f"the {len(self.targets)} replicas that it told last stay" if self.heard else "it has told none yet"
        log.error("%s: %s; %s", self.name, self.why, stands, exc_info=error)
