"""Whether the fleet drowns: what it waits, and how much of its time goes into computing again what it had.

Past a number of live sessions the caches do not hold them, each turn computes its whole context anew, and that takes
the time in which others would have had theirs. Operating systems met the same with pages (Denning, "Thrashing: its
causes and prevention", 1968): the working sets did not fit, the share of time that faults took told it, and the remedy
was to let fewer programs run.

All of it is read from counts that the Balancer keeps anyway, about once a second.
"""

from __future__ import annotations

from math import exp

from policies.balancer import Balancer

TAU_S = 60.0
"""Over which all is averaged: longer than a burst, shorter than a fleet takes to go under."""

LONGEST_LOOK_S = 10.0
"""A longer time without a look counts as this: a driver that stood still has seen nothing meanwhile."""


class Pressure:
    """Moving averages over the fleet, or over one pool of it."""

    def __init__(self) -> None:
        self.wait_s = 0.0
        """From placing to the first token beyond the request's own prefill, mean: by Little's law, those that wait over
        those that begin a second."""
        self.cold_s = 0.0
        """To compute the typical context anew, on an idle replica."""
        self.again = 0.0
        """Share of the replicas' time that goes into computing again what one of them had."""
        self.pending = 0
        """Requests that awaited their first token at the last look."""
        self._at: float | None = None
        self._opened = self._regretted = 0
        self._prefilled = 0.0
        self._weight = self._own = self._waiting = self._begun = self._running = self._tokens = self._lost = 0.0

    @property
    def ratio(self) -> float:
        """How much the mean wait for others is of a cold prefill. At 1 a cache spares nobody any time."""
        return self.wait_s / self.cold_s if self.cold_s > 0.0 else 0.0

    def look(self, balancer: Balancer, now: float, pool: str = "") -> None:
        """Take in what has happened in that pool since the last look."""
        ready = balancer.ready_in(pool)
        opened, in_flight, in_flight_tokens, pending, prefilled, regretted = balancer.counts(pool)
        last = self._at
        begun = opened - self._opened - (pending - self.pending)
        lost, own = regretted - self._regretted, prefilled - self._prefilled
        self._at, self._opened, self.pending = now, opened, pending
        self._regretted, self._prefilled = regretted, prefilled
        if last is None or now <= last or not ready:
            return
        passed = now - last
        seen = min(passed, LONGEST_LOOK_S)
        keep, part = exp(-passed / TAU_S), seen / passed
        self._weight = self._weight * keep + seen
        self._waiting = self._waiting * keep + pending * seen
        self._begun = self._begun * keep + part * max(0, begun)
        self._running = self._running * keep + in_flight * seen
        self._tokens = self._tokens * keep + in_flight_tokens * seen
        self._lost = self._lost * keep + part * max(0, lost)
        self._own = self._own * keep + part * max(0.0, own)
        self.wait_s = max(0.0, self._waiting - self._own) / max(1.0, self._begun)
        typical = self._tokens / self._running if self._running > 0.0 else 0.0
        self.cold_s = sum([replica.speed.prefill_s(int(typical), 0) for replica in ready]) / len(ready)
        a_token = self.cold_s / typical if typical > 0.0 else 0.0
        self.again = self._lost / self._weight * a_token / len(ready)
