"""What is known of each replica, as vectors: the cost of a new placement anywhere is a few operations on them.

Each replica has a place in them for as long as it is in the fleet, and its elements are set when something happens to
it: one that comes or goes costs what is to be known of one. Quantities that decay with time are read on a grid of
GRID_S, so that asking more often changes nothing.
"""

from __future__ import annotations

from math import exp, floor, inf
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from policies import cost, room
from policies.rates import MOST_BUSY, Rates
from policies.residency import LIVE_TAU_S
from policies.types import Replica

Vector = NDArray[np.float64]

MOST_DIRTY: Final = 32
"""Replicas whose change is left for the next look, which sees several changes of one as one. What comes beyond is seen
to at once, so that no look has much to do."""

GRID_S: Final = 1.0
"""Grid on which rates and live tokens decay, seconds."""

PLACES: Final = 16
"""Places that there are at first; they are doubled when all are taken."""

NOBODYS_FACTOR: Final = 1e9
"""Speed factor of a place that no replica has: so slow that it is the best of none."""


class Field:
    """Vectors over all places. What stands in one that no replica has means nothing, and is finite."""

    __slots__ = (
        "_arrivals_per_s",
        "_beta",
        "_busy",
        "_capacity",
        "_columns",
        "_dirty",
        "_expires",
        "_free",
        "_gamma",
        "_grid",
        "_live",
        "_others_held",
        "_others_running",
        "_packed",
        "_places",
        "_rates",
        "_spread_s",
        "_stall",
        "_tau_s",
        "_theta_s",
        "_told",
        "_unpacked",
        "answer",
        "arrivals",
        "born",
        "crowding",
        "ends",
        "factor",
        "fixed",
        "free",
        "gpu",
        "least_factor",
        "opened",
        "others",
        "rate",
        "replicas",
        "running",
        "started",
        "weight",
    )

    ends: Vector
    """When its prefills are expected to be done."""
    others: Vector
    """Prefill seconds of others."""
    running: Vector
    """Requests in flight, others' included."""
    _others_running: Vector
    """Those of others among them."""
    _expires: Vector
    """When the report of others is too old to say anything; infinite when it says nothing now."""
    _stall: Vector
    """Seconds for which each of them rests in a second of prefill."""
    factor: Vector
    """Of its speed."""
    opened: Vector
    """Overhead of a prefill pass, seconds, where a prompt waits already, whose pass another joins; else 0."""
    _arrivals_per_s: Vector
    _busy: Vector
    arrivals: Vector
    """What a second of prefill, squared, costs those to come: gamma times arrivals a second over twice the idle share,
    the value function of M/G/1."""
    _live: Vector
    _capacity: Vector
    crowding: Vector
    """Price of living there, seconds: theta times live tokens over capacity and weight."""
    fixed: Vector
    """Seconds that a new placement costs there whatever its prompt: `opened`, `crowding`, each in flight."""
    rate: Vector
    """Seconds that a second of prefill costs there, its own and its neighbours', while nobody else is to come."""
    free: Vector
    """Room for a prompt's KV, tokens: see `policies.room`."""
    _others_held: Vector
    """What others' requests take of it."""
    gpu: Vector
    """Tokens of KV that fit its GPU memory."""
    answer: Vector
    """Mean seconds of an answer."""
    born: Vector
    """When it joined, or its cache was last seen to be empty."""
    started: Vector
    """When it joined, or was made ready again."""
    weight: Vector
    """Its share of traffic."""

    def __init__(
        self, rates: dict[Replica, Rates], *, tau_s: float, beta: float, gamma: float, theta_s: float, spread_s: float
    ) -> None:
        """`rates` decay by `tau_s`; the others are weights and prices of `session_affinity`."""
        self._rates = rates
        self._tau_s = tau_s
        self._beta, self._gamma, self._theta_s, self._spread_s = beta, gamma, theta_s, spread_s
        self._grid = -inf
        self._places: dict[Replica, int] = {}
        self._dirty: set[Replica] = set()
        """Replicas of which something changed since their elements were set."""
        self.replicas: list[Replica | None] = []
        """Whose each place is."""
        self._told: list[tuple[float, ...]] = []
        """What the last report of each changed here."""
        self._free: list[int] = []
        """Places that nobody has."""
        self.least_factor = NOBODYS_FACTOR
        """The best speed there is, or was since time last went on."""
        self._columns: Vector = np.empty((0, len(_NOBODYS)))
        """The elements of each place in all of the vectors, so that they can be set in one operation."""
        self._packed = bytearray(_PACKED.size)
        """One place's elements to be: numpy takes them from an array sooner than from numbers."""
        self._unpacked: Vector = np.frombuffer(self._packed)
        """The same, as that array."""
        self._grow()

    def _grow(self) -> None:
        old = len(self.replicas)
        size = 2 * old or PLACES
        rows = np.empty((len(_NOBODYS), size))
        rows[:, :old] = self._columns.T
        rows[:, old:] = np.array(_NOBODYS)[:, np.newaxis]
        self._columns = rows.T
        (
            self.ends,
            self.others,
            self.running,
            self._others_running,
            self._expires,
            self._stall,
            self.factor,
            self.opened,
            self._arrivals_per_s,
            self._busy,
            self.arrivals,
            self._live,
            self._capacity,
            self.crowding,
            self.fixed,
            self.rate,
            self.free,
            self._others_held,
            self.gpu,
            self.answer,
            self.born,
            self.started,
            self.weight,
        ) = rows
        self.replicas += [None] * (size - old)
        self._told += [()] * (size - old)
        self._free += range(size - 1, old - 1, -1)

    # Who has a place

    def place(self, replica: Replica) -> int:
        """Where its elements are. Raises KeyError when it has no place."""
        return self._places[replica]

    def replica(self, place: int) -> Replica:
        """Whose place it is; it must be somebody's."""
        replica = self.replicas[place]
        assert replica is not None
        return replica

    def add(self, replica: Replica, now: float) -> None:
        """Give it a place. Nothing happens when it has one."""
        if replica in self._places:
            return
        if not self._free:
            self._grow()
        i = self._places[replica] = self._free.pop()
        self.replicas[i] = replica
        self.settled(replica, now)

    def remove(self, replica: Replica) -> None:
        """It has left. Nothing happens when it has no place."""
        i = self._places.pop(replica, None)
        if i is not None:
            self._dirty.discard(replica)
            self.replicas[i] = None
            self._told[i] = ()
            self._columns[i] = _NOBODYS
            self._free.append(i)

    # What happens

    def changed(self, replica: Replica, now: float) -> None:
        """Something happened there."""
        if replica not in self._places:
            return
        if len(self._dirty) < MOST_DIRTY:
            self._dirty.add(replica)
            pace = replica.speed.pace
            if pace < self.least_factor:
                self.least_factor = pace
        else:
            self.settled(replica, now)

    def reported(self, replica: Replica, now: float) -> None:
        """As `changed`, but seen to at once: a thousand reports must not wait for one request.

        Most say nothing new: nobody else is there, and the capacities are those of before.
        """
        i = self._places.get(replica)
        if i is None:
            return
        cache, pace = replica.cache, replica.speed.pace
        told = (replica.others_running, replica.others_tokens, pace, cache.capacity, cache.gpu_tokens or 0)
        if told == self._told[i] and not (replica.others_running or replica.others_tokens):
            return
        self._told[i] = told
        self.settled(replica, now)

    def settled(self, replica: Replica, now: float) -> None:
        """As `changed`, but seen to at once, as it must be where its state or weight is another."""
        if replica in self._places:
            self._pass(now)
            self._set(replica)

    def bring_up(self, now: float) -> None:
        """Bring all vectors up to the grid's present point and to what happened."""
        self._pass(now)
        if self._dirty:
            for replica in self._dirty:
                self._set(replica)
            self._dirty.clear()

    def _pass(self, now: float) -> None:
        """Time went on, for all of them alike."""
        grid = floor(now / GRID_S) * GRID_S
        if grid <= self._grid:
            return
        passed, self._grid = grid - self._grid, grid
        self._arrivals_per_s *= exp(-passed / self._tau_s)
        self._busy *= exp(-passed / self._tau_s)
        self._live *= exp(-passed / LIVE_TAU_S)
        self.arrivals[:] = self._gamma * self._arrivals_per_s / (2.0 * (1.0 - np.minimum(self._busy, MOST_BUSY)))
        self.crowding[:] = self._theta_s * self._live / self._capacity
        # What has changed since its elements were set may be faster than they say.
        self.least_factor = min([float(self.factor.min()), *[replica.speed.pace for replica in self._dirty]])
        old = self._expires < grid
        if old.any():
            self.running[old] -= self._others_running[old]
            self._others_running[old] = 0.0
            self.others[old] = 0.0
            self.free[old] += self._others_held[old]
            self._others_held[old] = 0.0
            self._expires[old] = inf
            self.rate[:] = 1.0 + self._beta * self._stall * self.running
        self.fixed[:] = self.opened + self.crowding + self._spread_s * self.running

    def _set(self, replica: Replica) -> None:
        """Bring the elements of one that has a place up to what is known of it at the grid's present point."""
        now = self._grid
        speed = replica.speed
        pace, stall = speed.pace, speed.decode[2]
        if pace < self.least_factor:
            self.least_factor = pace
        running = cost.requests(replica, now)
        opened = speed.overhead_s if replica.pending else 0.0
        live = replica.cache.live(now)
        capacity = replica.cache.capacity * max(replica.weight, 1e-9)
        arrivals = busy = 0.0
        rates = self._rates.get(replica)
        if rates is not None:
            left = rates.left(self._tau_s, now)
            arrivals, busy = rates.arrivals * left, rates.busy * left
        crowding = self._theta_s * live / capacity
        others_held = room.others_tokens(replica, now)
        _PACKED.pack_into(
            self._packed,
            0,
            replica.prefill_ends,
            cost.others_s(replica, now),
            running,
            running - replica.in_flight,
            _expiry(replica, now),
            stall,
            pace,
            opened,
            arrivals,
            busy,
            self._gamma * arrivals / (2.0 * (1.0 - min(busy, MOST_BUSY))),
            live,
            capacity,
            crowding,
            opened + crowding + self._spread_s * running,
            1.0 + self._beta * stall * running,
            room.free_tokens(replica) - others_held,
            others_held,
            replica.cache.gpu_tokens or 1.0,
            speed.answer_s,
            replica.since,
            replica.started,
            replica.weight,
        )
        self._columns[self._places[replica]] = self._unpacked


def _expiry(replica: Replica, now: float) -> float:
    """When what others have there is too old to say anything; infinite when it says nothing now."""
    if not (replica.others_running or replica.others_tokens) or not cost.told(replica, now):
        return inf
    return replica.others_at + cost.REPORT_MAX_AGE_S


_NOBODYS = (
    *(0.0, 0.0, 0.0, 0.0, inf),  # ends, others, running, those of others, when they expire
    *(0.0, NOBODYS_FACTOR, 0.0),  # stall, factor, opened
    *(0.0, 0.0, 0.0),  # arrivals a second, busy, arrivals
    *(0.0, 1.0, 0.0),  # live, capacity, crowding
    *(0.0, 1.0),  # fixed, rate
    *(inf, 0.0, 1.0, 0.0),  # free, what others hold, of the GPU, answer
    *(0.0, 0.0, 0.0),  # born, started, weight
)
"""The elements of a place that no replica has, in the order of the rows."""

_PACKED = Struct(f"{len(_NOBODYS)}d")
