"""Draws from the distributions that sessions are described by."""

from __future__ import annotations

import math
from random import Random


def lognormal(random: Random, median: float, sigma: float) -> float:
    """`sigma` is the standard deviation of the logarithm."""
    return math.exp(random.normalvariate(math.log(median), sigma))


def geometric(random: Random, mean: float) -> int:
    """At least 1."""
    return 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - 1.0 / mean)) if mean > 1 else 1
