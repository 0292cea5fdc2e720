"""power_of_two: two by lot, the better of them, nearly as even as asking all."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.power_of_two import Urn
from policies.registry import make
from policies.types import Reason, Replica, Request
from tests.fakes.fleet import fleet, turn

_chances = st.floats(0, 1, exclude_min=True, exclude_max=True)


def _most(policy: str, requests: int) -> int:
    """Requests on the fullest of 50 replicas, when they stay."""
    balancer = fleet(make(policy), "")
    for n in range(50):
        balancer.join(Replica(f"r{n}"), 0.0)
    for n in range(requests):
        balancer.acquire(Request(key=b"%d" % n), float(n))
    return max(r.in_flight for r in balancer.ready)


def test_two_choices_are_nearly_as_even_as_all_and_far_more_than_one() -> None:
    """Mitzenmacher 2001: above the mean by log log n / log 2, about 2 of 50, where one choice adds sqrt(m log n)."""
    assert _most("power_of_two", 2_500) <= 50 + 3
    assert _most("random", 2_500) >= 50 + 10


def test_of_two_replicas_the_less_loaded_is_taken() -> None:
    replicas = [Replica("a", in_flight=4), Replica("b", in_flight=2)]
    choice = make("power_of_two").pick(Request(key=b"k"), replicas, 0.0)
    assert (choice.replica.id, choice.reason) == ("b", Reason.LEAST_LOADED)


def test_the_fullest_of_all_is_never_taken_and_every_other_is() -> None:
    balancer = fleet(make("power_of_two"), "abcd")
    balancer.replicas["c"].in_flight = 99
    assert {turn(balancer, Request(), float(n)).replica.id for n in range(60)} == set("abd")


@pytest.mark.parametrize("policy", ["power_of_two", "least_loaded"])
def test_among_replicas_without_weight_requests_in_flight_still_count(policy: str) -> None:
    replicas = [Replica("a", weight=0.0, in_flight=4), Replica("b", weight=0.0, in_flight=2, last_lease=7)]
    assert make(policy).pick(Request(), replicas, 0.0).replica.id == "b"


def test_it_repeats_with_its_seed() -> None:
    draws = []
    for seed in (1, 1, 2):
        balancer = fleet(make("power_of_two", {"seed": seed}), "abcdef")
        draws.append([turn(balancer, Request(), float(n)).replica.id for n in range(60)])
    assert draws[0] == draws[1] != draws[2]


def test_a_fleet_that_is_filled_follows_its_weights() -> None:
    balancer = fleet(make("power_of_two"), "")
    for replica_id, weight in [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 4.0), ("spare", 0.0)]:
        balancer.join(Replica(replica_id, weight=weight), 0.0)
    for n in range(400):
        balancer.acquire(Request(), float(n))
    loads = {r.id: r.in_flight for r in balancer.ready}
    assert loads.pop("spare") == 0
    assert loads == pytest.approx({"a": 50, "b": 50, "c": 100, "d": 200}, rel=0.1)


def test_every_pair_is_as_likely_as_any_other() -> None:
    urn = Urn(tuple(Replica(i) for i in "abcd"))
    steps = [(n + 0.5) / 24 for n in range(24)]
    pairs = Counter(frozenset(r.id for r in urn.two(one, other)) for one in steps for other in steps)
    assert len(pairs) == 6
    assert set(pairs.values()) == {96}


@given(st.lists(st.sampled_from([0.0, 1e-20, 0.1, 1.0, 3.0, 1e15]), min_size=1, max_size=6), _chances, _chances)
def test_two_draws_are_two_replicas_whatever_their_weights(weights: list[float], one: float, other: float) -> None:
    replicas = tuple(Replica(str(n), weight=w) for n, w in enumerate(weights))
    weighty = {r for r in replicas if r.weight > 0} or set(replicas)
    drawn = Urn(replicas).two(one, other)
    assert set(drawn) <= weighty
    assert len(set(drawn)) == len(drawn) == min(2, len(weighty))
