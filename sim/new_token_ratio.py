"""How much KV the scheduler keeps back for answers that are under way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sim.work import Work

INITIAL: Final = 0.7
LEAST: Final = 0.14
"""Of the initial one."""
DECAY_STEPS: Final = 600
CLIP_TOKENS: Final = 4096
"""More output than that is not reckoned with, whatever a client asks for."""
RETRACT_STEPS: Final = 20
"""Decode steps for which there must be room after a retraction."""


class NewTokenRatio:
    """The share of what running requests may yet produce for which KV is kept back.

    It begins at 0.7 times the conservativeness, falls with every decode step to 0.14 of that over 600 steps, is put at
    what was really produced when requests had to be retracted, and begins anew when the engine is idle. SGLang:
    managers/scheduler_components/new_token_ratio_tracker.py, `_get_running_request_total_token_offset` in
    managers/schedule_policy.py, `retract_decode` in managers/schedule_batch.py, and the defaults in environ.py.
    """

    def __init__(self, conservativeness: float) -> None:
        self._initial = min(INITIAL * conservativeness, 1.0)
        self._least = self._initial * LEAST
        self._decay = (self._initial - self._least) / DECAY_STEPS
        self.reset()

    @property
    def value(self) -> float:
        return max(self._from - self._steps * self._decay, self._least)

    def reset(self) -> None:
        """The engine is idle."""
        self._from = self._initial
        self._steps = 0

    def decoded(self, steps: int) -> None:
        """So many decode steps were taken."""
        self._steps += steps

    def retracted(self, kept: Iterable[Work]) -> None:
        """Requests were retracted, and these were not. The decode step that follows does not count."""
        produced = possible = 0
        for work in kept:
            produced += work.produced + RETRACT_STEPS
            possible += work.max_new_tokens
        self._from = min(1.0, produced / (possible + 1))
        self._steps = -1

    def reserve(self, running: list[Work]) -> float:
        """KV tokens to keep back for these requests."""
        possible = 0
        for work in running:
            possible += min(work.max_new_tokens - work.produced, CLIP_TOKENS)
        return self.value * possible
