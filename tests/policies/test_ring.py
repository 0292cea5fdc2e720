"""The ring: even and weighted shares, few moves, and one ring for each fleet."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.ring import MAX_POINTS, MAX_VIRTUAL_NODES, Rings, check_virtual_nodes, place
from policies.types import Replica

KEYS = [f"session-{n}".encode() for n in range(8_000)]

_fleets = st.dictionaries(
    st.text("abc:/.019", max_size=8), st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=2, max_size=6
)


def _fleet(*weights: float) -> tuple[Replica, ...]:
    return tuple(Replica(f"http://10.0.0.{n}:30000", weight=w) for n, w in enumerate(weights))


def _owners(fleet: tuple[Replica, ...], virtual_nodes: int = 160) -> dict[bytes, Replica]:
    ring = Rings(virtual_nodes).of(fleet)
    return {key: ring.owner(place(key)) for key in KEYS}


def _shares(owners: dict[bytes, Replica]) -> dict[str, float]:
    return {replica_id: n / len(owners) for replica_id, n in Counter(r.id for r in owners.values()).items()}


# Shares


def test_shares_are_as_even_as_the_number_of_points_makes_them() -> None:
    """An arc's share deviates by about 1/sqrt(points): 8 % at 160. Four times that would be a defect."""
    shares = _shares(_owners(_fleet(*[1.0] * 10)))
    assert len(shares) == 10
    assert max(shares.values()) < 0.1 * 1.32
    assert min(shares.values()) > 0.1 * 0.68


def test_more_points_share_more_evenly() -> None:
    def unevenness(virtual_nodes: int) -> float:
        return max(_shares(_owners(_fleet(*[1.0] * 10), virtual_nodes)).values())

    assert unevenness(4) > unevenness(2_000)


def test_shares_follow_the_weights() -> None:
    fleet = _fleet(1.0, 2.0, 5.0)
    shares = _shares(_owners(fleet, 1_000))
    for replica in fleet:
        assert shares[replica.id] == pytest.approx(replica.weight / 8, rel=0.15)


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_one_without_weight_owns_nothing_beside_others(weight: float) -> None:
    assert _shares(_owners(_fleet(weight, 1.0, weight))).keys() == {"http://10.0.0.1:30000"}


def test_those_without_weight_share_when_they_are_alone() -> None:
    shares = _shares(_owners(_fleet(0.0, 0.0, 0.0, 0.0)))
    assert len(shares) == 4
    assert max(shares.values()) < 0.25 * 1.32


def test_the_least_weight_still_has_a_point() -> None:
    ring = Rings(160).of(_fleet(1.0, 1e-9))
    assert Counter(r.id for r in ring.clockwise(0)) == {"http://10.0.0.0:30000": 160, "http://10.0.0.1:30000": 1}


def test_a_ring_of_huge_weights_stays_bounded_and_keeps_their_ratio() -> None:
    fleet = _fleet(1e6, 3e6)
    points = Counter(r.weight for r in Rings(160).of(fleet).clockwise(0))
    assert points.total() == pytest.approx(MAX_POINTS, rel=0.001)
    assert points[3e6] / points[1e6] == pytest.approx(3.0, rel=0.001)


def test_weights_with_an_infinite_sum_make_a_ring() -> None:
    assert len(set(Rings(160).of(_fleet(1e308, 1e308)).clockwise(0))) == 2


# Moves


def test_when_a_replica_leaves_only_its_keys_move() -> None:
    fleet = _fleet(1.0, 2.0, 1.0, 0.5, 1.0)
    gone = fleet[1]
    before, after = _owners(fleet), _owners(tuple(r for r in fleet if r is not gone))
    moved = {key for key in KEYS if before[key] is not after[key]}
    assert moved == {key for key in KEYS if before[key] is gone}
    assert len({after[key] for key in moved}) == len(fleet) - 1, "its keys spread over all that are left"


def test_a_replica_that_joins_takes_its_share_and_no_more_moves() -> None:
    fleet = _fleet(*[1.0] * 9)
    newcomer = Replica("http://10.0.0.99:30000")
    before, after = _owners(fleet), _owners((*fleet, newcomer))
    moved = [key for key in KEYS if before[key] is not after[key]]
    assert {after[key] for key in moved} == {newcomer}
    assert len(moved) == pytest.approx(len(KEYS) / 10, rel=0.32)


def test_a_raised_weight_only_draws_keys_in() -> None:
    before, after = _owners(_fleet(1.0, 1.0, 1.0)), _owners(_fleet(1.0, 2.0, 1.0))
    assert {after[key].id for key in KEYS if after[key].id != before[key].id} == {"http://10.0.0.1:30000"}


@given(_fleets, st.binary(max_size=16), st.data())
def test_passing_over_the_failed_leads_where_a_ring_without_them_would(
    weights: dict[str, float], key: bytes, data: st.DataObject
) -> None:
    fleet = tuple(Replica(i, weight=w) for i, w in sorted(weights.items()))
    failed = tuple(data.draw(st.lists(st.sampled_from(fleet), min_size=1, max_size=len(fleet) - 1, unique_by=id)))
    rest = tuple(r for r in fleet if r not in failed)
    rings = Rings(20)
    whole = rings.of(fleet)
    without = rings.of(rest, failed)
    afresh = Rings(20).of(rest)
    at = place(key)
    assert without.owner(at) is afresh.owner(at)
    assert list(without.clockwise(at)) == list(afresh.clockwise(at))
    assert set(without.replicas) == set(afresh.replicas)
    assert without.weight == pytest.approx(afresh.weight)
    assert rings.of(fleet) is whole, "the failed are missing for one request alone"


# Walks and places


@given(_fleets, st.integers(0, 2**64 - 1))
def test_a_walk_begins_with_the_owner_and_meets_every_point_once(weights: dict[str, float], at: int) -> None:
    fleet = tuple(Replica(i, weight=w) for i, w in sorted(weights.items()))
    ring = Rings(20).of(fleet)
    walk = list(ring.clockwise(at))
    assert walk[0] is ring.owner(at)
    expected = {r.id: round(20 * (r.weight or 1.0)) for r in ring.replicas}
    assert Counter(r.id for r in walk) == expected


@pytest.mark.parametrize("at", [0, 2**64 - 1])
def test_the_ring_closes(at: int) -> None:
    """The first and the last place belong to the same replica: none of 320 points lies between them."""
    ring = Rings(160).of(_fleet(1.0, 1.0))
    assert list(islice(ring.clockwise(at), 320)) == list(ring.clockwise(0))


def test_seeds_give_independent_places() -> None:
    ring = Rings(160).of(_fleet(*[1.0] * 10))
    same = sum(ring.owner(place(key)) is ring.owner(place(key, seed=1)) for key in KEYS)
    assert 0.07 < same / len(KEYS) < 0.14


# One ring for each fleet


def test_the_same_tuple_gives_the_same_ring() -> None:
    rings, fleet = Rings(160), _fleet(1.0, 1.0)
    assert rings.of(fleet) is rings.of(fleet)


def test_a_list_is_looked_at_anew_as_it_may_have_changed() -> None:
    rings, fleet = Rings(160), [Replica("a")]
    assert rings.of(fleet).owner(0).id == "a"
    fleet[0] = Replica("b")
    assert rings.of(fleet).owner(0).id == "b"


def test_a_replica_back_under_its_id_with_another_weight_has_other_points() -> None:
    rings = Rings(100)
    a, b = Replica("a"), Replica("b")
    rings.of((a, b))
    assert Counter(r.id for r in rings.of((Replica("a", weight=3.0), b)).clockwise(0)) == {"a": 300, "b": 100}


@pytest.mark.parametrize("bad", [0, -1, MAX_VIRTUAL_NODES + 1])
def test_an_impossible_number_of_points_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=f"virtual_nodes must be 1 to {MAX_VIRTUAL_NODES} points, got {bad}"):
        check_virtual_nodes(bad)
    check_virtual_nodes(1)
    check_virtual_nodes(MAX_VIRTUAL_NODES)
