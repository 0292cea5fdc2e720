"""Garbage in cycles is collected when it hurts nobody.

Requests make little of it, while the collector, left to itself, would now and then walk all sessions known: with
100,000 of them every stream would stand still for tens of milliseconds. So it is switched off; the youngest
generation is collected each second, what survives a minute is set aside, and the whole is walked when nothing runs.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

STEP_S = 1.0
SET_ASIDE_STEPS = 60
WHOLE_IDLE_S = 600.0
"""Least time between two whole collections while nothing runs."""
WHOLE_BUSY_S = 6 * 3600.0
"""After so long without one it is done whatever runs."""


class Garbage:
    """The collector of one process, driven by its loop."""

    def __init__(self, busy: Callable[[], bool], clock: Callable[[], float]) -> None:
        self._busy = busy
        self._clock = clock
        self._steps = 0
        self._whole_at = clock()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Take over from the automatic collector. To be called in the running loop, when all that stays is made."""
        gc.disable()
        self._whole()
        self._timer = asyncio.get_running_loop().call_later(STEP_S, self._step)

    def stop(self) -> None:
        """Give back to the automatic collector."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gc.unfreeze()
        gc.enable()

    def _step(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(STEP_S, self._step)
        self._steps += 1
        waited_s = self._clock() - self._whole_at
        if waited_s > (WHOLE_BUSY_S if self._busy() else WHOLE_IDLE_S):
            self._whole()
        elif self._steps % SET_ASIDE_STEPS == 0:
            gc.collect(1)
            gc.freeze()
        else:
            gc.collect(0)

    def _whole(self) -> None:
        self._whole_at = self._clock()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
