"""Draws from the distributions that sessions are described by."""

from __future__ import annotations

import math
from random import Random
from typing import Final

_WIDTH: Final = 4.0 * math.exp(-0.5) / math.sqrt(2.0)
"""Of the rectangle that `normal` draws from."""


def lognormal(random: Random, median: float, sigma: float) -> float:
    """`sigma` is the standard deviation of the logarithm."""
    return math.exp(math.log(median) + normal(random) * sigma)


def normal(random: Random) -> float:
    """By the ratio of uniform draws: the very numbers of `Random.normalvariate`, which is never compiled."""
    while True:
        share, under = random.random(), 1.0 - random.random()
        ratio = _WIDTH * (share - 0.5) / under
        if ratio * ratio / 4.0 <= -math.log(under):
            return ratio


def geometric(random: Random, mean: float) -> int:
    """At least 1."""
    return 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - 1.0 / mean)) if mean > 1 else 1
