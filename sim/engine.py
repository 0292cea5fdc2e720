"""Virtual time: calls, each due at a time, run in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Engine:
    """A heap of times, and the calls that are due at each. Those of one time run in the order in which they were asked
    for.

    Numbers alone are compared quickly: most of a heap of (time, sequence, call) would be comparing tuples.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self.calls = 0
        """Calls run."""
        self._times: list[float] = []
        self._due: dict[float, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call(*arguments)` at `time`, or now if that is past."""
        self._add(time if time > self.now else self.now, call, arguments)

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call(*arguments)` in so many seconds."""
        self._add(self.now + seconds if seconds > 0.0 else self.now, call, arguments)

    def _add(self, time: float, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        due = self._due.get(time)
        if due is None:
            self._due[time] = [(call, arguments)]
            heapq.heappush(self._times, time)
        else:
            due.append((call, arguments))

    def run(self, until: float) -> None:
        """Run all that is due by then; the time is `until` afterwards."""
        times, pop = self._times, heapq.heappop
        while times and times[0] <= until:
            self.now = pop(times)
            for call, arguments in self._due.pop(self.now):
                self.calls += 1
                call(*arguments)
        self.now = max(self.now, until)
