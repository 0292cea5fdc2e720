"""Whether a replica's requests fail: a circuit breaker. Pure: told of requests and of the time, asked for a state."""

from __future__ import annotations

from enum import StrEnum

from router.settings import HealthSettings
from router.units import counted


class Circuit(StrEnum):
    """States of a circuit breaker (M. Nygard, Release It!, 2007)."""

    CLOSED = "closed"
    """Requests go through."""
    OPEN = "open"
    """None does, until the time is up."""
    HALF_OPEN = "half_open"
    """A few may try."""


_CLOSED = Circuit.CLOSED
"""Taken once: an enum's member is looked up through its metaclass each time it is named, 60 ns in Python 3.11."""


class Breaker:
    """Opens when requests fail, in a row or a share of the last ones; each time again soon after for twice as long.

    A replica that was well for as long as it was out is forgiven one opening: faults that have nothing to do with each
    other do not add up.

    Requests sent before it opened end whenever they end: as long as it is open nothing is concluded from them, and on
    trial one of them counts like any other, as it was served by the same engine. Every `now` is of one clock, seconds.
    """

    __slots__ = ("_closed_at", "_row", "_seen", "_settings", "_window", "retry_at", "state", "trips", "why")

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self.state = Circuit.CLOSED
        self.why = ""
        """Why it opened last."""
        self.retry_at = 0.0
        """When it is half open, if it is open, seconds."""
        self.trips = 0
        """How often it opened, less those forgiven."""
        self._closed_at = 0.0
        self._row = 0
        self._window = 0
        """Of the last requests a bit each, the latest lowest: 1 for a failure."""
        self._seen = 0

    def configure(self, settings: HealthSettings) -> None:
        """From now on by these settings; only a window of another length begins anew."""
        if settings.failure_window != self._settings.failure_window:
            self._window = self._seen = 0
        self._settings = settings

    def answered(self, now: float) -> None:
        """A request was answered whole, by anything that does not speak against the replica."""
        state = self.state
        if state is _CLOSED:
            self._row = 0
            self._note(0)
        elif state is Circuit.HALF_OPEN:
            self.close(now)

    def failed(self, why: str, now: float, *, answered: bool = False) -> None:
        """A request was not answered, broken off, or, as `answered` says, answered with an error of the replica's."""
        if self.state is Circuit.OPEN:
            return
        if self.state is Circuit.HALF_OPEN:
            self._open(f"a request failed while it was on trial, by {why}", now)
            return
        settings = self._settings
        self._row += 1
        self._note(1)
        failures = self._window.bit_count()
        if self._row >= (settings.error_fail_after if answered else settings.passive_fail_after):
            self._open(f"{counted(self._row, 'request')} in a row failed, the last by {why}", now)
        elif self._seen == settings.failure_window and failures >= settings.failure_share * self._seen:
            self._open(f"{failures} of the last {counted(self._seen, 'request')} failed, the last by {why}", now)

    def tick(self, now: float) -> None:
        """Time went on."""
        if self.state is Circuit.OPEN and now >= self.retry_at:
            self.state = Circuit.HALF_OPEN

    def close(self, now: float) -> None:
        """Let all through again. Failures before do not count any more, but how often it opened lately does."""
        if self.state is not Circuit.CLOSED:
            self.state = Circuit.CLOSED
            self._closed_at = now
        self._row = self._window = self._seen = 0

    def _open(self, why: str, now: float) -> None:
        if self.state is Circuit.CLOSED and self.trips:
            self.trips -= min(self.trips, int((now - self._closed_at) / self._out_s()))
        if not self.trips or self._out_s() < self._settings.open_max_s:
            self.trips += 1  # no further: what opened all night must not take all day to be forgiven
        self.state = Circuit.OPEN
        self.why = why
        self.retry_at = now + self._out_s()

    def _out_s(self) -> float:
        """How long it was open the last time."""
        settings = self._settings
        return min(settings.open_s * 2.0 ** min(self.trips - 1, 60), settings.open_max_s)

    def _note(self, failed: int) -> None:
        window = self._settings.failure_window
        self._window = (self._window << 1 | failed) & ((1 << window) - 1)
        if self._seen < window:
            self._seen += 1
