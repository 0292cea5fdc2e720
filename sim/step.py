"""What a replica is computing: one pass, or in bulk several passes over one prompt, or several decode steps."""

from __future__ import annotations

from math import sqrt

from sim.work import Work


class Step:
    """A prefill pass or a decode step under way; with bulk, several passes over one prompt, or decode steps."""

    def __init__(self, start: float, end: float, prefill: list[Work], tokens: list[int]) -> None:
        """`prefill` are those whose prompts are computed, `tokens` how much of each; both empty in decode."""
        self.start = start
        self.end = end
        self.prefill = prefill
        self.tokens = tokens
        self.load_seconds = 0.0
        """Before the first pass, for what comes from the host tier."""
        self.mixed = False
        """A prefill pass beside which the others decode."""
        self.count = 0
        """Decode steps."""
        self.first = 0.0
        """Seconds of the first of them."""
        self.slope = 0.0
        """Seconds by which each is longer than the one before, as contexts grow."""

    def decode_seconds(self, count: int) -> float:
        """Of the first `count` steps."""
        return count * self.first + self.slope * (count * (count - 1) / 2)

    def decode_steps(self, seconds: float) -> int:
        """How many whole decode steps fit into so many seconds."""
        half = self.slope / 2
        if half * self.count < 1e-9 * self.first:
            count = int(seconds / self.first)
        else:  # count * first + half * count * (count - 1) = seconds
            linear = self.first - half
            count = int((sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half))
        while count > 0 and self.decode_seconds(count) > seconds:
            count -= 1
        while self.decode_seconds(count + 1) <= seconds:
            count += 1
        return count
