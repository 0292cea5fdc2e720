"""The retry budget: an outage must not be multiplied by redispatching."""

from __future__ import annotations


class RetryBudget:
    """A bucket of retries. Each request puts in its share, each redispatch takes one whole.

    So redispatches stay below `share` of the requests in the long run, and a quiet router
    can still redispatch `burst` times in a row.
    """

    __slots__ = ("_burst", "_share", "_tokens")

    def __init__(self, share: float, burst: float) -> None:
        self._share = share
        self._burst = burst
        self._tokens = burst

    def configure(self, share: float, burst: float) -> None:
        """From now on by these; what was saved stays, as far as it fits."""
        self._share = share
        self._burst = burst
        self._tokens = min(self._tokens, burst)

    def earn(self) -> None:
        """A request came in."""
        tokens = self._tokens + self._share
        self._tokens = tokens if tokens < self._burst else self._burst

    def spend(self) -> bool:
        """Take one retry. False when there is none left."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
