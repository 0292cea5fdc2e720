"""The ring of consistent hashing, for the policies that walk one.

Karger et al. 1997: a replica has points on a circle of 64-bit hashes, and a key belongs to the owner of the first
point past the key's own hash. When a replica leaves, only its keys move, each to the next owner on the ring; a
replica that joins takes only its share. The points are the hashes of `ID-0`, `ID-1` and so on, `virtual_nodes` of
them for each unit of weight, as uhashring places them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from policies.types import Replica

Points = NDArray[np.uint64]

MAX_VIRTUAL_NODES = 65_536
MAX_POINTS = 1 << 20
"""Points of one ring, 12 bytes each. Where weights ask for more, every replica gets fewer, by one factor."""


def check_virtual_nodes(virtual_nodes: int) -> None:
    """Raises ValueError for a number of points that no ring can have for each replica."""
    if not 1 <= virtual_nodes <= MAX_VIRTUAL_NODES:
        raise ValueError(f"virtual_nodes must be 1 to {MAX_VIRTUAL_NODES} points, got {virtual_nodes}")


def place(key: bytes, seed: int = 0) -> int:
    """Where a key lies on the ring. Another seed gives an independent place."""
    return xxh3_64_intdigest(key, seed)


def weight_of(replica: Replica) -> float:
    """Its weight; 1 for one without, as such are on a ring only among their like."""
    return replica.weight if replica.weight > 0.0 else 1.0


class Ring:
    """The ring of one set of candidates, never changed."""

    __slots__ = ("_allowed", "_everyone", "_owners", "_points", "replicas", "weight")

    def __init__(
        self, everyone: Sequence[Replica], points: array[int], owners: array[int], allowed: Sequence[Replica]
    ) -> None:
        """The owner of `points[i]` is `everyone[owners[i]]`; those not `allowed` are passed over."""
        self._everyone = everyone
        self._points = points
        self._owners = owners
        self._allowed = None if len(allowed) == len(everyone) else frozenset(allowed)
        self.replicas = allowed
        """Those of the candidates that are on the ring: all with weight; if none has any, all."""
        self.weight = sum(map(weight_of, allowed))

    def owner(self, at: int) -> Replica:
        """The replica to which a place on the ring belongs."""
        return next(self.clockwise(at))

    def clockwise(self, at: int) -> Iterator[Replica]:
        """The owners of all points from a place on, once around: each replica comes, and most come often."""
        everyone, owners, allowed = self._everyone, self._owners, self._allowed
        first = bisect_right(self._points, at)
        for index in chain(range(first, len(owners)), range(first)):
            replica = everyone[owners[index]]
            if allowed is None or replica in allowed:
                yield replica

    def only(self, replicas: Sequence[Replica]) -> Ring:
        """The ring without all others: their points are passed over, which leads where a ring without them would."""
        return Ring(self._everyone, self._points, self._owners, replicas)


class Rings:
    """Makes the ring of a request's candidates and keeps the last one.

    The Balancer passes the same tuple as long as the fleet is the same, so that a ring is made once for each fleet.
    """

    __slots__ = ("_candidates", "_points", "_ring", "_virtual_nodes")

    def __init__(self, virtual_nodes: int) -> None:
        self._virtual_nodes = virtual_nodes
        self._points: dict[str, Points] = {}
        """Of the replicas on the last ring."""
        self._candidates: Sequence[Replica] = ()
        self._ring: Ring | None = None

    def of(self, candidates: Sequence[Replica], failed: Sequence[Replica] = ()) -> Ring:
        """The ring of `candidates`, from which those `failed` are missing for the sake of one request."""
        ring = self._ring
        if ring is not None:
            if candidates is self._candidates:
                return ring
            if failed:
                rest = _on_ring(candidates)
                if rest and set(ring.replicas).issuperset(rest):
                    return ring.only(rest)
        made = self._make(candidates)
        if not failed and isinstance(candidates, tuple):
            self._candidates, self._ring = candidates, made
        return made

    def _make(self, candidates: Sequence[Replica]) -> Ring:
        replicas = _on_ring(candidates)
        asked = self._virtual_nodes * sum(map(weight_of, replicas))
        scale = min(1.0, MAX_POINTS / asked)
        self._points = {
            r.id: self._points_of(r.id, max(1, round(self._virtual_nodes * (weight_of(r) * scale)))) for r in replicas
        }
        points = np.concatenate(list(self._points.values()))
        owners = np.repeat(np.arange(len(replicas), dtype=np.uint32), list(map(len, self._points.values())))
        order = np.argsort(points)
        return Ring(replicas, array("Q", points[order].tobytes()), array("I", owners[order].tobytes()), replicas)

    def _points_of(self, replica_id: str, count: int) -> Points:
        known = self._points.get(replica_id)
        if known is not None and len(known) == count:
            return known
        name = replica_id.encode()
        return np.array([xxh3_64_intdigest(b"%b-%d" % (name, n)) for n in range(count)], dtype=np.uint64)


def _on_ring(candidates: Sequence[Replica]) -> tuple[Replica, ...]:
    """All with weight; if none has any, all."""
    return tuple(r for r in candidates if r.weight > 0.0) or tuple(candidates)
