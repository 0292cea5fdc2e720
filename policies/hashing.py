"""Rendezvous order: every router ranks the replicas of a key alike, with no state to share.

Highest random weight hashing (Thaler & Ravishankar 1998), with the logarithmic weighting of
Schindelhauer & Schomaker 2005: a replica's score is -w / ln(u), u uniform in (0, 1) from the hash of
(key, replica id). When a replica leaves, only its keys move; a replica that joins takes only its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from xxhash import xxh3_64_intdigest

from policies.types import Replica

_SCALE = 1.0 / (1 << 52)


def uniform(key: bytes, salt: str) -> float:
    """A number in (0, 1) drawn by hashing `key` with `salt`."""
    return ((xxh3_64_intdigest(key + b"\x00" + salt.encode()) >> 12) + 0.5) * _SCALE


def score(key: bytes, replica: Replica) -> float:
    """The replica's rendezvous score for the key; the highest wins. Weight 0 or less never wins over more."""
    if replica.weight <= 0.0:
        return log(uniform(key, replica.id))  # negative, and spread even when every weight is 0
    return -replica.weight / log(uniform(key, replica.id))


def rendezvous(key: bytes, candidates: Sequence[Replica]) -> Replica:
    """The candidate that ranks first for the key. Raises ValueError when there is none."""
    if not candidates:
        raise ValueError("there is no candidate to rank")
    weight = candidates[0].weight
    best = candidates[0]
    highest = -1
    for replica in candidates:
        if replica.weight != weight:
            return max(_best_by_weight(key, candidates), key=lambda r: (score(key, r), r.id))
        # Among equal weights the score grows with the digest, so the logarithm need not be taken.
        digest = xxh3_64_intdigest(key + replica.salt)
        if digest > highest:
            best, highest = replica, digest
    return best


def _best_by_weight(key: bytes, candidates: Sequence[Replica]) -> list[Replica]:
    """Of each weight the replica that ranks first: weights are few, so few logarithms are left to take."""
    best: dict[float, tuple[int, Replica]] = {}
    for replica in candidates:
        digest = xxh3_64_intdigest(key + replica.salt)
        first = best.get(replica.weight)
        if first is None or digest > first[0]:
            best[replica.weight] = digest, replica
    return [replica for _, replica in best.values()]
