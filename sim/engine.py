"""Virtual time: calls, each due at a time, run in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Engine:
    """A heap of (time, sequence, call). Calls due at the same time run in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self.calls = 0
        """Calls run."""
        self._sequence = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call(*arguments)` at `time`, or now if that is past."""
        self._sequence += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._sequence, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call(*arguments)` in so many seconds."""
        self._sequence += 1
        time = self.now + seconds if seconds > 0.0 else self.now
        heapq.heappush(self._heap, (time, self._sequence, call, arguments))

    def run(self, until: float) -> None:
        """Run all that is due by then; the time is `until` afterwards."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, call, arguments = pop(heap)
            self.calls += 1
            call(*arguments)
        self.now = max(self.now, until)
