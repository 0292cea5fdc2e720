"""Virtual time: calls, each due at a time, run in order."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, Final

SLOTS_PER_S: Final = 16.0
"""Some calls of a large fleet are due in each: to sort a few at a time takes less than a heap of them all."""

_Due = tuple[float, Callable[..., None], tuple[Any, ...]]
"""A time, and the call with its arguments."""

_time = itemgetter(0)


class Engine:
    """A heap of slots of time, and the calls that are due in each, which are sorted when their time has come. Those of
    one time run in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self.calls = 0
        """Calls run."""
        self._numbers: list[int] = []
        """Of the slots to come, a heap."""
        self._slots: dict[int, list[_Due]] = {}
        """By number."""
        self._number = -1
        """Of the slot under way."""
        self._slot: list[_Due] = []
        """Its calls, in order of time."""
        self._done = 0
        """Of these, the ones that were run."""

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call(*arguments)` at `time`, or now if that is past."""
        self._add(time if time > self.now else self.now, call, arguments)

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Run `call(*arguments)` in so many seconds."""
        self._add(self.now + seconds if seconds > 0.0 else self.now, call, arguments)

    def _add(self, time: float, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        number = int(time * SLOTS_PER_S)
        if number == self._number:
            insort(self._slot, (time, call, arguments), self._done, key=_time)
            return
        slot = self._slots.get(number)
        if slot is None:
            self._slots[number] = [(time, call, arguments)]
            heappush(self._numbers, number)
        else:
            slot.append((time, call, arguments))

    def run(self, until: float) -> None:
        """Run all that is due by then; the time is `until` afterwards."""
        while self._begin(until):
            time, call, arguments = self._slot[self._done]
            if time > until:
                break
            self.now = time
            self._done += 1
            self.calls += 1
            call(*arguments)
        self.now = max(self.now, until)

    def _begin(self, until: float) -> bool:
        """Whether a slot that begins by then is under way and has calls left; the next one is begun if need be."""
        if self._done < len(self._slot):
            return True
        if not self._numbers or self._numbers[0] > until * SLOTS_PER_S:
            return False
        self._number = heappop(self._numbers)
        self._slot = self._slots.pop(self._number)
        self._slot.sort(key=_time)
        self._done = 0
        return True
