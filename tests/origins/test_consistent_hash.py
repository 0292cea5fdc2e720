"""`consistent_hash` against its origin: uhashring, the ring of vLLM's production-stack.

Given our hash function, uhashring places the same points and so gives every key to the same owner: with weights, after
joins and leaves, and in the order in which others follow when one fails. Two differences are known:

- Its own hash is MD5, of 128 bits; ours is XXH3. So the sessions of its users land elsewhere, but as evenly, and as few
  of them move.
- Its weights are whole numbers. Ours need not be: a replica has `virtual_nodes` times its weight points, rounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import pstdev

import pytest
from uhashring import HashRing
from xxhash import xxh3_64_intdigest

from policies.registry import make
from policies.ring import Rings, place
from policies.types import Replica, Request

KEYS = [f"session-{n}" for n in range(5_000)]
WEIGHTS = {f"http://10.0.0.{n}:30000": 1 + n % 3 for n in range(12)}


def _fleet(weights: dict[str, int]) -> tuple[Replica, ...]:
    return tuple(Replica(replica_id, weight=float(weight)) for replica_id, weight in weights.items())


def _origin(weights: dict[str, int], virtual_nodes: int) -> HashRing:
    return HashRing(weights, vnodes=virtual_nodes, hash_fn=lambda text: xxh3_64_intdigest(text.encode()))


def _ours(fleet: tuple[Replica, ...], **parameters: object) -> dict[str, str]:
    policy = make("consistent_hash", parameters)
    return {key: policy.pick(Request(key=key.encode()), fleet, 0.0).replica.id for key in KEYS}


def _spread(owners: Iterable[str]) -> float:
    """Standard deviation of the keys per owner over their mean."""
    counts = Counter(owners).values()
    return pstdev(counts) / (sum(counts) / len(counts))


@pytest.mark.parametrize("virtual_nodes", [1, 40, 160])
def test_every_key_has_the_same_owner_as_there(virtual_nodes: int) -> None:
    origin = _origin(WEIGHTS, virtual_nodes)
    ours = _ours(_fleet(WEIGHTS), virtual_nodes=virtual_nodes)
    assert ours == {key: origin.get_node(key) for key in KEYS}


def test_it_stays_so_through_joins_leaves_and_changed_weights() -> None:
    """On both sides one ring lives through all of it."""
    origin, rings, weights = _origin(WEIGHTS, 160), Rings(160), dict(WEIGHTS)
    for replica_id, weight in [("new", 2), ("http://10.0.0.4:30000", 0), ("http://10.0.0.7:30000", 5), ("new", 0)]:
        if weight:
            origin.add_node(replica_id, {"weight": weight})
            weights[replica_id] = weight
        else:
            origin.remove_node(replica_id)
            del weights[replica_id]
        ring = rings.of(_fleet(weights))
        assert {key: ring.owner(place(key.encode())).id for key in KEYS} == {key: origin.get_node(key) for key in KEYS}


def test_when_replicas_fail_the_next_in_order_are_the_same() -> None:
    origin, fleet = _origin(WEIGHTS, 160), _fleet(WEIGHTS)
    policy = make("consistent_hash")
    for key in KEYS[:100]:
        tried: list[Replica] = []
        while len(tried) < len(fleet):
            rest = tuple(r for r in fleet if r not in tried)
            tried.append(policy.pick(Request(key=key.encode(), failed=tuple(tried)), rest, 0.0).replica)
        assert [r.id for r in tried] == [node["nodename"] for node in origin.range(key)]


def test_its_own_hash_spreads_no_more_evenly_and_moves_no_fewer() -> None:
    ids = [f"http://10.0.0.{n}:30000" for n in range(20)]
    theirs, theirs_after = HashRing(ids), HashRing(ids[1:])
    there = {key: theirs.get_node(key) for key in KEYS}
    ours, after = _ours(_fleet(dict.fromkeys(ids, 1))), _ours(_fleet(dict.fromkeys(ids[1:], 1)))
    assert _spread(ours.values()) == pytest.approx(_spread(there.values()), abs=0.05)
    moved = sum(ours[key] != after[key] for key in KEYS)
    moved_there = sum(there[key] != theirs_after.get_node(key) for key in KEYS)
    assert moved == Counter(ours.values())[ids[0]]
    assert moved_there == Counter(there.values())[ids[0]]
