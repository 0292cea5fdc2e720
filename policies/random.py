"""By lot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policies.events import Event, Routed
from policies.policy import Policy
from policies.scoring import draw
from policies.types import Choice, Reason, Replica, Request


@dataclass(frozen=True, slots=True)
class RandomConfig:
    """Parameters of `random`."""

    seed: int = 0
    """Of the draws: the same seed and the same requests give the same choices."""


class Random(Policy):
    """Every replica is as likely as any other, whatever the session or the load.

    The draws come from hashing a counter with the seed, so that a run can be repeated.
    """

    name = "random"
    Config = RandomConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._seed = str(self.config.seed)
        self._draws = 0

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        drawn = draw(self._draws, self._seed)
        return Choice(candidates[int(drawn * len(candidates))], Reason.RANDOM)

    def observe(self, event: Event) -> None:
        if type(event) is Routed:
            self._draws += 1
