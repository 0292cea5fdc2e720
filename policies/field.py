"""What is known of each candidate, as vectors: the cost of a new placement anywhere is a few operations on them.

Kept up to date one replica at a time as events come, and made anew when the set of candidates changes. Quantities that
decay with time are read on a grid of GRID_S, so that asking more often changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, floor, inf

import numpy as np
from numpy.typing import NDArray

from policies import cost
from policies.residency import LIVE_TAU_S
from policies.types import Replica

Vector = NDArray[np.float64]

MOST_BUSY = 0.7
"""Share of time in prefill beyond which the value function is not followed: it has a pole at 1 (placement study)."""

MOST_DIRTY = 32
"""Changes left for the next look, which are cheaper to see to at once than one by one; beyond, they would add up."""

GRID_S = 1.0
"""Grid on which rates and live tokens decay, seconds."""


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
        """Arrivals a second over twice the idle share, as in `Field.arrivals`."""
        left = self.left(tau_s, now)
        return self.arrivals * left / (2.0 * (1.0 - min(self.busy * left, MOST_BUSY)))

    def left(self, tau_s: float, now: float) -> float:
        """What has not decayed by `now`, of 1."""
        return exp((self.at - now) / tau_s) if self.at < now else 1.0


class Field:
    """Vectors over the candidates, in their order."""

    __slots__ = (
        "_arrivals_per_s",
        "_busy",
        "_capacity",
        "_dirty",
        "_expires",
        "_grid",
        "_index",
        "_live",
        "_others_running",
        "_rates",
        "_tau_s",
        "_told",
        "arrivals",
        "barred",
        "born",
        "candidates",
        "crowding",
        "elder",
        "ends",
        "factor",
        "least_factor",
        "opened",
        "others",
        "running",
        "stall",
        "started",
        "youngest",
    )

    def __init__(
        self,
        candidates: Sequence[Replica],
        rates: dict[Replica, Rates],
        tau_s: float,
        now: float,
        former: Field | None = None,
    ) -> None:
        """`former` are the vectors over the candidates of before: what it knows need not be looked up again."""
        size = len(candidates)
        self.candidates = candidates
        self._rates = rates
        self._tau_s = tau_s
        self._index = {replica: i for i, replica in enumerate(candidates)}
        self._told: list[tuple[float, ...]] = [()] * size
        """What the last report of each changed here."""
        self._dirty = set(candidates)
        """Replicas of which something changed since their vectors' elements were set."""
        self._grid = floor(now / GRID_S) * GRID_S
        self.ends: Vector = np.zeros(size)
        """When its prefills are expected to be done."""
        self.others: Vector = np.zeros(size)
        """Prefill seconds of others."""
        self.running: Vector = np.zeros(size)
        """Requests in flight, others' included."""
        self._others_running: Vector = np.zeros(size)
        """Those of others among them."""
        self._expires: Vector = np.full(size, inf)
        """When the report of others is too old to say anything; infinite when it says nothing now."""
        self.stall: Vector = np.zeros(size)
        """Seconds for which each of them rests in a second of prefill."""
        paces = [replica.speed.pace for replica in candidates]
        self.factor: Vector = np.array(paces)
        """Of its speed."""
        self.opened: Vector = np.zeros(size)
        """Overhead of a prefill pass, seconds, where a prompt waits already, whose pass another joins; else 0."""
        self.least_factor = min(paces)
        """The best speed there is, or was since the vectors were brought up."""
        self._arrivals_per_s: Vector = np.zeros(size)
        self._busy: Vector = np.zeros(size)
        self.arrivals: Vector = np.zeros(size)
        """Arrivals a second over twice the idle share: of the value function of M/G/1."""
        self._live: Vector = np.zeros(size)
        self._capacity: Vector = np.ones(size)
        self.crowding: Vector = np.zeros(size)
        """Live tokens over capacity and weight."""
        self.born: Vector = np.array([replica.since for replica in candidates])
        """When it joined, or its cache was last seen to be empty."""
        self.started: Vector = np.array([replica.started for replica in candidates])
        """When it joined, or was made ready again."""
        self.youngest = float(self.started.max())
        """When the last of them was."""
        self.elder = float(np.sort(self.started)[(size - 1) // 2])
        """When half of them were."""
        weightless = np.array([replica.weight <= 0.0 for replica in candidates])
        self.barred = weightless if weightless.any() and not weightless.all() else None
        """Which may get no new sessions: those without weight, unless none has any. None when all may."""
        if former is not None:
            self._take_over(former)

    def _take_over(self, former: Field) -> None:
        kept = [replica for replica in self.candidates if replica in former._index]
        here = np.array([self._index[replica] for replica in kept], np.intp)
        there = np.array([former._index[replica] for replica in kept], np.intp)
        for name in _COPIED:
            getattr(self, name)[here] = getattr(former, name)[there]
        self._grid = former._grid
        self._dirty.difference_update(kept)
        self._dirty.update(replica for replica in former._dirty if replica in self._index)

    def index(self, replica: Replica) -> int:
        """Its place in the vectors. Raises KeyError when it is no candidate."""
        return self._index[replica]

    def changed(self, replica: Replica) -> None:
        """Something happened there."""
        i = self._index.get(replica)
        if i is None:
            return
        if len(self._dirty) < MOST_DIRTY:
            self._dirty.add(replica)
        else:
            self._set(i, replica)
        pace = replica.speed.pace
        if pace < self.least_factor:
            self.least_factor = pace

    def reported(self, replica: Replica) -> None:
        """As `changed`, but seen to at once: a thousand reports must not wait for one request.

        Most say nothing new: nobody else is there, and the capacities are those of before.
        """
        i = self._index.get(replica)
        if i is None:
            return
        told = (replica.others_running, replica.others_tokens, replica.speed.pace, replica.cache.capacity)
        if told == self._told[i] and not (replica.others_running or replica.others_tokens):
            return
        self._told[i] = told
        self._set(i, replica)
        self.least_factor = min(self.least_factor, replica.speed.pace)

    def bring_up(self, now: float) -> None:
        """Bring all vectors up to the grid's present point and to what happened."""
        grid = floor(now / GRID_S) * GRID_S
        if grid > self._grid:
            self._pass(grid)
        if len(self._dirty) > MOST_DIRTY:
            self._fill()
        else:
            for replica in self._dirty:
                self._set(self._index[replica], replica)
        if self._dirty:
            self._dirty.clear()

    def _pass(self, grid: float) -> None:
        """Time went on, for all of them alike."""
        passed, self._grid = grid - self._grid, grid
        self._arrivals_per_s *= exp(-passed / self._tau_s)
        self._busy *= exp(-passed / self._tau_s)
        self._live *= exp(-passed / LIVE_TAU_S)
        self.arrivals = self._arrivals_per_s / (2.0 * (1.0 - np.minimum(self._busy, MOST_BUSY)))
        self.crowding = self._live / self._capacity
        self.least_factor = float(self.factor.min())
        old = self._expires < grid
        if old.any():
            self.running[old] -= self._others_running[old]
            self._others_running[old] = 0.0
            self.others[old] = 0.0
            self._expires[old] = inf

    def _set(self, i: int, replica: Replica) -> None:
        now = self._grid
        self.born[i] = replica.since
        self.ends[i] = replica.prefill_ends
        running = cost.requests(replica, now)
        self.running[i] = running
        self._others_running[i] = running - replica.in_flight
        self.others[i] = cost.others_s(replica, now)
        self._expires[i] = _expiry(replica, now)
        self.factor[i] = replica.speed.pace
        self.opened[i] = replica.speed.overhead_s if replica.pending else 0.0
        self.stall[i] = replica.speed.decode[2]
        self._live[i] = live = replica.cache.live(now)
        self._capacity[i] = capacity = replica.cache.capacity * max(replica.weight, 1e-9)
        self.crowding[i] = live / capacity
        rates = self._rates.get(replica)
        if rates is not None:
            left = rates.left(self._tau_s, now)
            self._arrivals_per_s[i] = rates.arrivals * left
            self._busy[i] = busy = rates.busy * left
            self.arrivals[i] = rates.arrivals * left / (2.0 * (1.0 - min(busy, MOST_BUSY)))

    def _fill(self) -> None:
        """As `_set` for each that is dirty, but column by column: at a router's start all of a fleet are new at once.

        So many are dirty only after they were new, and what has happened to one since was set at once (`changed`): when
        they were born and how fast they are stands as it was made.
        """
        now = self._grid
        replicas = self.candidates
        at: slice | list[int] = slice(None)
        if len(self._dirty) < len(replicas):
            replicas = list(self._dirty)
            at = [self._index[replica] for replica in replicas]
        live = np.array([replica.cache.live(now) for replica in replicas])
        capacity = np.array([replica.cache.capacity for replica in replicas])
        capacity *= np.maximum([replica.weight for replica in replicas], 1e-9)
        self.ends[at] = [replica.prefill_ends for replica in replicas]
        self.running[at] = [replica.in_flight for replica in replicas]
        self._others_running[at] = 0.0
        self.others[at] = 0.0
        self._expires[at] = inf
        self.opened[at] = [replica.speed.overhead_s if replica.pending else 0.0 for replica in replicas]
        self.stall[at] = [replica.speed.decode[2] for replica in replicas]
        self._live[at] = live
        self._capacity[at] = capacity
        self.crowding[at] = live / capacity
        for replica in replicas:
            if replica.others_running or replica.others_tokens or replica in self._rates:
                self._set(self._index[replica], replica)


def _expiry(replica: Replica, now: float) -> float:
    """When what others have there is too old to say anything; infinite when it says nothing now."""
    if not (replica.others_running or replica.others_tokens) or not cost.told(replica, now):
        return inf
    return replica.others_at + cost.REPORT_MAX_AGE_S


_COPIED = (
    "ends",
    "others",
    "running",
    "_others_running",
    "_expires",
    "stall",
    "opened",
    "_arrivals_per_s",
    "_busy",
    "arrivals",
    "_live",
    "_capacity",
    "crowding",
)
"""Vectors of what is known of a replica whoever the other candidates are, but for what is looked up for all anew."""
