"""Clients that give up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from sim.workload.conversation import Turn


@dataclass(frozen=True, slots=True)
class Patience:
    """Some turns' clients leave when their answer does not begin in time, as an agent with a timeout does."""

    abandon_share: float = 0.0
    """Of turns whose client would leave; the others wait for ever."""
    patience_s: float = 60.0
    """Seconds such a client waits for a first token."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.abandon_share <= 1.0:
            raise ValueError(f"abandon_share must be from 0 to 1, got {self.abandon_share}")
        if not 0.0 < self.patience_s < math.inf:
            raise ValueError(f"patience_s must be more than 0 seconds and finite, got {self.patience_s}")

    def limit(self, turns: Iterator[Turn], random: Callable[[], Random]) -> Iterator[Turn]:
        """The same turns, some with bounded patience. `random` makes a stream that nothing else draws from, so that
        the sessions are the same with and without."""
        return self._limited(turns, random()) if self.abandon_share else turns

    def _limited(self, turns: Iterator[Turn], random: Random) -> Iterator[Turn]:
        for turn in turns:
            if random.random() < self.abandon_share:
                turn.patience_s = self.patience_s
            yield turn


PATIENT = Patience()
"""Nobody leaves."""
