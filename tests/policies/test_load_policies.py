"""Facts of the policies that know no sessions: round_robin, random, least_loaded, and rendezvous."""

from __future__ import annotations

from collections import Counter

import pytest

from policies.hashing import rendezvous
from policies.registry import make
from policies.types import Reason, Replica, Request
from tests.fakes.fleet import REFUSED, fleet, turn


def test_round_robin_takes_each_in_turn() -> None:
    balancer = fleet(make("round_robin"))
    assert [turn(balancer, Request(), float(n)).replica.id for n in range(6)] == ["a", "b", "c"] * 2


def test_round_robin_knows_no_session_and_no_load() -> None:
    balancer = fleet(make("round_robin"), "ab")
    leases = [balancer.acquire(Request(key=b"k"), float(n)) for n in range(4)]
    assert [lease.replica.id for lease in leases] == ["a", "b", "a", "b"]
    assert {lease.choice.reason for lease in leases} == {Reason.ROTATION}


def test_random_is_even_and_repeats_with_its_seed() -> None:
    draws = []
    for seed in (1, 1, 2):
        balancer = fleet(make("random", {"seed": seed}), "abcd")
        draws.append([turn(balancer, Request(key=b"k"), float(n)).replica.id for n in range(2_000)])
    assert draws[0] == draws[1] != draws[2]
    counts = Counter(draws[0])
    chi_square = sum((counts[i] - 500) ** 2 / 500 for i in "abcd")
    assert chi_square < 16.27  # 0.999 quantile, 3 degrees of freedom


def test_least_loaded_takes_the_fewest_in_flight() -> None:
    replicas = [Replica("a", in_flight=4), Replica("b", in_flight=2), Replica("c", in_flight=3)]
    choice = make("least_loaded").pick(Request(key=b"k"), replicas, 0.0)
    assert (choice.replica.id, choice.reason) == ("b", Reason.LEAST_LOADED)


def test_least_loaded_counts_for_weight() -> None:
    balancer = fleet(make("least_loaded"), "")
    balancer.join(Replica("big", weight=3.0), 0.0)
    balancer.join(Replica("small", weight=1.0), 0.0)
    for n in range(40):
        balancer.acquire(Request(), float(n))
    assert {r.id: r.in_flight for r in balancer.ready} == {"big": 30, "small": 10}


def test_least_loaded_spreads_a_quiet_fleet() -> None:
    balancer = fleet(make("least_loaded"))
    assert Counter(turn(balancer, Request(), float(n)).replica.id for n in range(9)) == {"a": 3, "b": 3, "c": 3}


def test_least_loaded_spares_a_replica_without_weight() -> None:
    balancer = fleet(make("least_loaded"), "a")
    balancer.join(Replica("spare", weight=0.0), 0.0)
    assert {turn(balancer, Request(), float(n)).replica.id for n in range(6)} == {"a"}


@pytest.mark.parametrize("policy", ["least_loaded", "rendezvous", "session_affinity"])
def test_a_newcomer_to_a_quiet_fleet_gets_its_turn_not_all_of_them(policy: str) -> None:
    balancer = fleet(make(policy))
    for n in range(300):
        turn(balancer, Request(), float(n))
    balancer.join(Replica("new"), 300.0)
    heard = Counter(turn(balancer, Request(), 301.0 + n).replica.id for n in range(40))
    assert heard == {"a": 10, "b": 10, "c": 10, "new": 10}


def test_rendezvous_follows_the_hash_and_nothing_else() -> None:
    balancer = fleet(make("rendezvous"))
    for n in range(60):
        key = b"%d" % (n % 20)
        lease = balancer.acquire(Request(key=key, fingerprint=n), float(n))  # never finished: load is no matter
        assert (lease.replica, lease.choice.reason) == (rendezvous(key, balancer.ready), Reason.HASH)


def test_rendezvous_sends_a_failed_session_to_the_next_in_its_order() -> None:
    balancer = fleet(make("rendezvous"))
    request = Request(key=b"k")
    first = balancer.acquire(request, 1.0)
    first.finish(REFUSED, None, 1.1)
    request.failed = (first.replica,)
    second = balancer.acquire(request, 1.1)
    assert second.replica is rendezvous(b"k", [r for r in balancer.ready if r is not first.replica])
    second.finish(REFUSED, None, 1.2)
    assert balancer.acquire(Request(key=b"k"), 2.0).replica is first.replica


def test_rendezvous_places_requests_without_a_session_by_load() -> None:
    replicas = [Replica("a", in_flight=1), Replica("b"), Replica("c", served=9)]
    choice = make("rendezvous").pick(Request(), replicas, 0.0)
    assert (choice.replica.id, choice.reason) == ("b", Reason.NO_SESSION)
