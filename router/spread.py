"""How unevenly running requests are spread over the replicas: variance over mean, the field's figure for it."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

TAU_S = 60.0
"""Time over which `dispersion` averages."""

MAX_GAP_S = 10.0
"""One sample stands for no longer than this: what happened in a longer pause nobody saw."""


class Spread:
    """Variance and mean of the replicas' running requests, summed over time.

    Random placement without sessions gives a dispersion of 1 (Poisson: variance = mean), forks several; 0 is even.
    """

    __slots__ = ("_at", "_mean", "_variance", "mean_s", "variance_s")

    def __init__(self) -> None:
        self.variance_s = 0.0
        """Variance times seconds, since the start: over any window, its increase by that of `mean_s` is the
        dispersion there."""
        self.mean_s = 0.0
        """Mean times seconds, since the start."""
        self._variance = 0.0
        self._mean = 0.0
        self._at: float | None = None

    def sample(self, pools: Sequence[Sequence[int]], now: float) -> None:
        """Take note of how many requests run on each replica of each pool; none: of nothing.

        Pools are not compared: they have different models to serve. `now` is of a monotonic clock.
        """
        last, self._at = self._at, now
        count = sum(map(len, pools))
        if last is None or not count:
            return
        mean = sum(map(sum, pools)) / count
        means = [sum(running) / len(running) if running else 0.0 for running in pools]
        variance = sum((each - own) ** 2 for running, own in zip(pools, means, strict=True) for each in running) / count
        gap_s = min(max(now - last, 0.0), MAX_GAP_S)
        self.variance_s += variance * gap_s
        self.mean_s += mean * gap_s
        left = exp(-gap_s / TAU_S)
        self._variance = self._variance * left + variance * (1.0 - left)
        self._mean = self._mean * left + mean * (1.0 - left)

    @property
    def dispersion(self) -> float:
        """Mean variance over mean, the last minute counting most; 0 when nothing ran."""
        return self._variance / self._mean if self._mean > 1e-9 else 0.0
