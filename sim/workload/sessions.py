"""What makes sessions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

from sim.hardware import Hardware
from sim.workload.conversation import Conversation, Turn
from sim.workload.patience import PATIENT, Patience

NOMINAL_BATCH = 3
"""Running requests at which a session's length is reckoned when arrivals are set to reach a number of live sessions."""

GAP_CAP_S = 300.0
"""A longer pause between two turns counts as so long."""


class Workload:
    """Makes sessions. `page_size` in tokens; `seed` of all chance."""

    def __init__(
        self,
        page_size: int,
        seed: int,
        *,
        estimate_sigma: float = 0.1,
        gap_cap_s: float = GAP_CAP_S,
        patience: Patience = PATIENT,
    ) -> None:
        self.page_size = page_size
        self.seed = seed
        self.estimate_sigma = estimate_sigma
        self.gap_cap_s = gap_cap_s
        self.patience = patience

    def random(self, name: str) -> Random:
        """The stream of that name."""
        return Random(f"{self.seed}/{name}")

    def session(self, index: int, *, initial: bool) -> Conversation:
        """The main thread of a session; one that is `initial` has a part of its life behind it."""
        raise NotImplementedError

    def session_seconds(self, hardware: Hardware) -> float:
        """Mean length of a session on a replica that is neither idle nor overloaded."""
        raise NotImplementedError

    def _conversation(self, name: str, key: bytes, turns: Iterator[Turn], random: Random, main: bool) -> Conversation:
        turns = self.patience.limit(turns, lambda: self.random(f"{name}/patience"))
        return Conversation(name, key, main, turns, math.exp(random.gauss(0.0, self.estimate_sigma)))


def service(hardware: Hardware, new: int, resident: int, output: int) -> float:
    """Seconds that a request takes on a replica with `NOMINAL_BATCH` running."""
    context = resident + new
    return hardware.prefill.seconds(new, resident) + output * hardware.token_seconds(NOMINAL_BATCH, context)


def nominal(conversation: Conversation, hardware: Hardware) -> float:
    """Seconds that a conversation lasts when each turn finds all of the one before resident."""
    total, before = 0.0, 0
    for turn in conversation.turns:
        resident = min(before, turn.prompt_tokens)
        total += turn.gap_s + service(hardware, turn.prompt_tokens - resident, resident, turn.output_tokens)
        total += max((nominal(fork, hardware) for fork in turn.forks), default=0.0)
        before = turn.prompt_tokens
    return total
