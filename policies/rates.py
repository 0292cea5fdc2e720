"""How much each replica is asked to prefill: what a prefill costs those who are still to come."""

from __future__ import annotations

from math import exp
from typing import Final

MOST_BUSY: Final = 0.7
"""Share of time in prefill beyond which the value function is not followed: it has a pole at 1 (placement study)."""


class Rates:
    """How often and how much a replica is asked to prefill: exponentially weighted means over `tau_s` seconds."""

    __slots__ = ("arrivals", "at", "busy")

    def __init__(self) -> None:
        self.arrivals = 0.0
        """Requests a second."""
        self.busy = 0.0
        """Prefill seconds a second."""
        self.at = 0.0

    def add(self, prefill_s: float, tau_s: float, now: float) -> None:
        """A request was sent there."""
        left = self.left(tau_s, now)
        self.arrivals = self.arrivals * left + 1.0 / tau_s
        self.busy = self.busy * left + prefill_s / tau_s
        if now > self.at:
            self.at = now

    def delay(self, tau_s: float, now: float) -> float:
        """Arrivals a second over twice the idle share, as in `Field.arrivals`, but for gamma."""
        left = self.left(tau_s, now)
        return self.arrivals * left / (2.0 * (1.0 - min(self.busy * left, MOST_BUSY)))

    def left(self, tau_s: float, now: float) -> float:
        """What has not decayed by `now`, of 1."""
        return exp((self.at - now) / tau_s) if self.at < now else 1.0
