"""Counts by reason, and by replica and reason."""

from __future__ import annotations

from policies.types import Reason
from router.metrics.histogram import Histogram
from router.metrics.turn import Turn


class ReasonTally:
    """How choices for one reason turned out, over all replicas."""

    __slots__ = ("first_bytes", "observed_s", "prefill_s", "queue_s", "turns")

    def __init__(self) -> None:
        self.first_bytes = Histogram()
        self.turns: dict[Turn, int] = {}
        self.queue_s = 0.0
        """Expected until prefills begin, of turns that had a first token."""
        self.prefill_s = 0.0
        """Expected for their prefills."""
        self.observed_s = 0.0
        """What they took to the first token."""


class Tally:
    """Counts of one replica's choices for one reason."""

    __slots__ = ("cached_tokens", "choices", "completion_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.choices = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0


class ReplicaTally:
    """Counts of one replica id."""

    __slots__ = ("reasons",)

    def __init__(self) -> None:
        self.reasons: dict[Reason, Tally] = {}

    def of(self, reason: Reason) -> Tally:
        tally = self.reasons.get(reason)
        if tally is None:
            tally = self.reasons[reason] = Tally()
        return tally

    @property
    def prompt_tokens(self) -> int:
        return sum(tally.prompt_tokens for tally in self.reasons.values())

    @property
    def cached_tokens(self) -> int:
        return sum(tally.cached_tokens for tally in self.reasons.values())

    @property
    def completion_tokens(self) -> int:
        return sum(tally.completion_tokens for tally in self.reasons.values())
