"""How late the event loop is: what holds it up holds up every stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.metrics.histogram import LATENESS, Histogram

BEAT_S = 0.1
"""Between two beats. Something that holds the loop up for as long is seen each time; for half as long, every second
time. uvloop's timers count whole milliseconds: up to one of lateness is no one's fault."""

MAX_S = 30.0
"""The maximum is of the last one to two spans of this length."""


class Heartbeat:
    """A timer that is due ten times a second, and its lateness."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.lateness = Histogram(LATENESS)
        self._due = self._span_ends = 0.0
        self._max = self._last_max = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def max_s(self) -> float:
        """The most that a beat was late, seconds, in the last 30 to 60 s."""
        return max(self._max, self._last_max)

    def start(self) -> None:
        """Begin. To be called in the running loop."""
        loop = asyncio.get_running_loop()

        def beat() -> None:
            self.beat(self._clock())
            self._timer = loop.call_later(BEAT_S, beat)

        self._due = self._clock() + BEAT_S
        self._timer = loop.call_later(BEAT_S, beat)

    def stop(self) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def beat(self, now: float) -> None:
        """One beat has come at `now`."""
        late = max(0.0, now - self._due)
        self.lateness.observe(late)
        if now >= self._span_ends:
            self._last_max, self._max = self._max if now < self._span_ends + MAX_S else 0.0, 0.0
            self._span_ends = now + MAX_S
        self._max = max(self._max, late)
        self._due = now + BEAT_S
