"""Policies that follow a hash: consistent_hash, weighted rendezvous, and bounded_load with its bound."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.registry import make
from policies.types import Reason, Replica, Request, State
from tests.fakes.fleet import REFUSED, fleet, turn

KEYS = [f"session-{n}".encode() for n in range(300)]
HASHES = ["consistent_hash", "rendezvous"]

_fleets = st.lists(
    st.builds(
        Replica,
        id=st.text("abc:/.019", max_size=8),
        weight=st.sampled_from([0.0, 0.25, 1.0, 2.0, 7.0]),
        in_flight=st.integers(0, 60),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda r: r.id,
)


def _bound(factor: int, replica: Replica, replicas: list[Replica]) -> int:
    """Most requests that the replica may have with one more in the fleet: arXiv 1608.01350, by weight."""
    weighty = [r for r in replicas if r.weight > 0] or replicas
    weights = [Fraction(r.weight if r.weight > 0 else 1.0) for r in weighty]
    share = Fraction(replica.weight if replica.weight > 0 else 1.0) / sum(weights)
    return ceil(Fraction(factor, 100) * (sum(r.in_flight for r in weighty) + 1) * share)


# Plain hashes


@pytest.mark.parametrize("policy", [*HASHES, "bounded_load"])
def test_routers_that_share_nothing_agree(policy: str) -> None:
    """Whatever each has seen before, and in whatever order the replicas joined."""
    one, other = fleet(make(policy), "abcde"), fleet(make(policy), "xedcba")
    for key in KEYS[:50]:
        turn(other, Request(key=key), 1.0)
    other.leave("x", 2.0)
    for n, key in enumerate(KEYS):
        assert turn(one, Request(key=key), 3.0 + n).replica.id == turn(other, Request(key=key), 3.0 + n).replica.id


@pytest.mark.parametrize("policy", HASHES)
def test_load_is_no_matter(policy: str) -> None:
    balancer = fleet(make(policy))
    for n in range(60):
        lease = balancer.acquire(Request(key=b"k", fingerprint=n), float(n))
        assert (lease.replica, lease.choice.reason) == (
            balancer.acquire(Request(key=b"k"), n + 0.5).replica,
            Reason.HASH,
        )


@pytest.mark.parametrize("policy", HASHES)
def test_sessions_follow_the_weights(policy: str) -> None:
    balancer = fleet(make(policy), "")
    balancer.join(Replica("big", weight=3.0), 0.0)
    balancer.join(Replica("small", weight=1.0), 0.0)
    balancer.join(Replica("spare", weight=0.0), 0.0)
    homes = Counter(turn(balancer, Request(key=b"%d" % n), float(n)).replica.id for n in range(2_000))
    assert homes["spare"] == 0
    assert homes["big"] / homes["small"] == pytest.approx(3.0, rel=0.25)


@pytest.mark.parametrize("policy", [*HASHES, "bounded_load"])
def test_a_failed_request_goes_to_the_heir_of_its_replica_and_the_session_comes_back(policy: str) -> None:
    balancer = fleet(make(policy), "abcd")
    for n, key in enumerate(KEYS[:40]):
        request = Request(key=key)
        first = balancer.acquire(request, float(n))
        first.finish(REFUSED, None, n + 0.1)
        request.failed = (first.replica,)
        second = balancer.acquire(request, n + 0.2)
        second.finish(REFUSED, None, n + 0.3)
        rest = fleet(make(policy), "".join(i for i in "abcd" if i != first.replica.id))
        assert second.replica.id == turn(rest, Request(key=key), 1.0).replica.id
        assert turn(balancer, Request(key=key), n + 0.4).replica is first.replica


@pytest.mark.parametrize("policy", HASHES)
def test_an_ejected_replica_gets_its_sessions_back_and_no_others_move(policy: str) -> None:
    balancer = fleet(make(policy), "abcd")
    before = {key: turn(balancer, Request(key=key), 1.0).replica for key in KEYS}
    ejected = balancer.replicas["b"]
    balancer.set_state(ejected, State.EJECTED, 2.0)
    during = {key: turn(balancer, Request(key=key), 3.0).replica for key in KEYS}
    balancer.set_state(ejected, State.READY, 4.0)
    after = {key: turn(balancer, Request(key=key), 5.0).replica for key in KEYS}
    assert after == before
    assert {key for key in KEYS if during[key] is not before[key]} == {key for key in KEYS if before[key] is ejected}


@pytest.mark.parametrize("policy", [*HASHES, "bounded_load", "dual_choice", "sticky"])
def test_requests_without_a_session_go_by_load(policy: str) -> None:
    replicas = [Replica("a", in_flight=1), Replica("b", last_lease=9), Replica("c", last_lease=3)]
    choice = make(policy).pick(Request(), replicas, 0.0)
    assert (choice.replica.id, choice.reason) == ("c", Reason.NO_SESSION)


# Bounded loads


def test_an_idle_fleet_is_hashed_like_a_ring_without_bounds() -> None:
    bounded, plain = fleet(make("bounded_load")), fleet(make("consistent_hash", {"virtual_nodes": 256}))
    for n, key in enumerate(KEYS):
        lease = turn(bounded, Request(key=key), float(n))
        assert (lease.replica.id, lease.choice.reason) == (
            turn(plain, Request(key=key), float(n)).replica.id,
            Reason.HASH,
        )


@given(_fleets, st.binary(max_size=8), st.integers(100, 400))
def test_the_bound_holds_whatever_the_load(replicas: list[Replica], key: bytes, factor: int) -> None:
    choice = make("bounded_load", {"hash_balance_factor": factor}).pick(Request(key=key), replicas, 0.0)
    assert choice.replica.in_flight + 1 <= _bound(factor, choice.replica, replicas)
    assert choice.replica.weight > 0 or all(r.weight <= 0 for r in replicas)


@given(_fleets, st.binary(max_size=8), st.integers(100, 400))
def test_a_request_spills_only_from_a_full_replica_and_past_full_ones(
    replicas: list[Replica], key: bytes, factor: int
) -> None:
    bounded = make("bounded_load", {"hash_balance_factor": factor}).pick(Request(key=key), replicas, 0.0)
    plain = make("consistent_hash", {"virtual_nodes": 256})
    passed: list[Replica] = []
    while (owner := plain.pick(Request(key=key), [r for r in replicas if r not in passed], 0.0).replica) is not (
        bounded.replica
    ):
        assert owner.in_flight + 1 > _bound(factor, owner, replicas)
        passed.append(owner)
    assert bounded.reason is (Reason.SPILLED if passed else Reason.HASH)


@given(st.integers(1, 12), st.lists(st.binary(max_size=2), max_size=120), st.integers(100, 200))
def test_requests_that_stay_never_exceed_the_bound(size: int, keys: list[bytes], factor: int) -> None:
    """However skewed the keys: mirrors the paper's theorem for insertions."""
    balancer = fleet(make("bounded_load", {"hash_balance_factor": factor}), "abcdefghijkl"[:size])
    for n, key in enumerate(keys, start=1):
        balancer.acquire(Request(key=key), float(n))
        assert max(r.in_flight for r in balancer.ready) <= ceil(factor * n / (100 * size))


def test_one_hot_session_is_spread_in_the_order_of_its_ring() -> None:
    balancer = fleet(make("bounded_load"), "abcd")
    leases = [balancer.acquire(Request(key=b"hot"), float(n)) for n in range(8)]
    assert [lease.choice.reason for lease in leases[:2]] == [Reason.HASH, Reason.SPILLED]
    assert leases[0].replica.in_flight == max(r.in_flight for r in balancer.ready) == 3  # 1.25 * 8 / 4, rounded up


def test_a_higher_factor_keeps_more_sessions_at_their_owner() -> None:
    spilled = {}
    for factor in (100, 125, 200, 100_000):
        balancer = fleet(make("bounded_load", {"hash_balance_factor": factor}), "abcdefghij")
        reasons = Counter(balancer.acquire(Request(key=key), float(n)).choice.reason for n, key in enumerate(KEYS))
        spilled[factor] = reasons[Reason.SPILLED]
    assert spilled[100] > spilled[125] > spilled[200] >= spilled[100_000] == 0


def test_weights_without_a_finite_sum_are_borne() -> None:
    replicas = [Replica("a", weight=1e308, in_flight=1), Replica("b", weight=1e308)]
    assert make("bounded_load").pick(Request(key=b"k"), replicas, 0.0).replica.id == "b"


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("bounded_load", {"hash_balance_factor": 99}, "hash_balance_factor must be 100 to 1000000 percent.*got 99"),
        ("bounded_load", {"hash_balance_factor": 10**400}, "hash_balance_factor must be 100 to"),
        ("bounded_load", {"virtual_nodes": 0}, "virtual_nodes must be 1 to 65536 points, got 0"),
        ("consistent_hash", {"virtual_nodes": -5}, "virtual_nodes must be 1 to 65536 points, got -5"),
        ("dual_choice", {"virtual_nodes": 10**6}, "virtual_nodes must be 1 to 65536 points, got 1000000"),
    ],
)
def test_a_bad_parameter_is_refused_with_what_is_allowed(name: str, given: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make(name, given)
