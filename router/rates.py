"""What happened in the last minute: counters sampled once a second, and their differences."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import NamedTuple

WINDOW = 60
"""Samples looked back on: as many seconds, at one a second."""

SHORT = 10
"""Samples for a rate that people watch."""


class Sample(NamedTuple):
    """Counters since the start at one moment."""

    at: float
    """Seconds of a monotonic clock."""
    requests: int
    """Ended."""
    prompt_tokens: int
    cached_tokens: int


class Rates:
    """Differences of the samples kept. None where there is nothing to tell yet, or nothing happened."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=WINDOW + 1)

    def add(self, sample: Sample) -> None:
        """Once a second."""
        self._samples.append(sample)

    @property
    def requests_per_s(self) -> float | None:
        """Requests ended a second, over the last ten samples."""
        recent = list(self._samples)[-SHORT - 1 :]
        return _rate(recent[0], recent[-1]) if len(recent) > 1 else None

    @property
    def series(self) -> list[float]:
        """Requests ended a second, a value for each pair of neighbouring samples, the oldest first."""
        samples = list(self._samples)
        return [_rate(before, after) for before, after in pairwise(samples)]

    @property
    def hit_rate(self) -> float | None:
        """Cached over prompt tokens of the answers that ended within the window."""
        if not self._samples:
            return None
        first, last = self._samples[0], self._samples[-1]
        prompt = last.prompt_tokens - first.prompt_tokens
        return (last.cached_tokens - first.cached_tokens) / prompt if prompt > 0 else None


def _rate(before: Sample, after: Sample) -> float:
    seconds = after.at - before.at
    return max(0, after.requests - before.requests) / seconds if seconds > 0 else 0.0
