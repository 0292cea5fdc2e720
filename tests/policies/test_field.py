"""The vectors over the replicas: whatever came and went, and when it was seen to, they say what is so."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.field import MOST_DIRTY, PLACES, Field
from policies.rates import Rates
from policies.registry import make
from policies.selection import Selection
from policies.types import Load, Replica, Request
from tests.fakes.fleet import fleet

VECTORS = (
    "born",
    "ends",
    "others",
    "running",
    "factor",
    "opened",
    "arrivals",
    "crowding",
    "fixed",
    "rate",
    "started",
    "weight",
)


def _lived(seed: int, count: int) -> tuple[list[Replica], dict[Replica, Rates]]:
    """Replicas that differ in all that the vectors tell."""
    random = Random(seed)
    balancer = fleet(make("session_affinity"), "".join(chr(ord("A") + n) for n in range(count)))
    rates: dict[Replica, Rates] = {}
    for n in range(6 * count):
        now = 0.1 * n
        lease = balancer.acquire(Request(b"%d" % (n % 50), prompt_tokens=random.randrange(100_000)), now)
        rates.setdefault(lease.replica, Rates()).add(1.0, 120.0, now)
        if random.random() < 0.5:
            lease.first_token(now)
        replica = random.choice(balancer.ready)
        replica.speed.factor = random.uniform(0.5, 2.0)
        replica.speed.slowness = random.choice((1.0, 2.5))
        balancer.report(replica, Load(now, running=random.randrange(9), waiting_tokens=random.randrange(10**5)), now)
        balancer.set_weight(replica, random.choice((0.0, 1.0, 3.0)), now)
    # Only some were sent anything lately.
    return list(balancer.ready), dict(list(rates.items())[::3])


def _field(rates: dict[Replica, Rates]) -> Field:
    return Field(rates, tau_s=120.0, beta=0.8, gamma=0.5, theta_s=4.0, spread_s=0.3)


def _seen(field: Field, replicas: list[Replica]) -> dict[str, list[float]]:
    places = [field.place(replica) for replica in replicas]
    return {name: getattr(field, name)[places].tolist() for name in VECTORS}


@pytest.mark.parametrize("seed", range(8))
def test_many_changes_at_once_are_seen_as_one_by_one(seed: int) -> None:
    replicas, rates = _lived(seed, MOST_DIRTY + 8)
    now = 25.0
    told, asked = _field(rates), _field(rates)
    for replica in replicas:
        told.add(replica, now)
        asked.add(Replica("another"), now)
        asked.add(replica, 0.0)  # when nothing of the present was known
    for replica in replicas:
        asked.changed(replica, now)
        asked.bring_up(now)
    told.bring_up(now)
    seen = _seen(told, replicas)
    assert seen == _seen(asked, replicas)
    assert len(set(seen["running"])) > 3
    assert seen["factor"] == [replica.speed.factor * replica.speed.slowness for replica in replicas]
    assert seen["weight"] == [replica.weight for replica in replicas]
    assert seen["ends"] == [replica.prefill_ends for replica in replicas]
    assert any(seen["others"])
    assert any(seen["opened"])
    later = now + 11.0
    told.bring_up(later)
    asked.bring_up(later)
    assert _seen(told, replicas) == _seen(asked, replicas)
    assert _seen(told, replicas)["running"] == [replica.in_flight for replica in replicas], "others' reports are old"


@pytest.mark.parametrize("how", ["changed", "reported", "settled"])
def test_what_happens_is_seen_however_it_is_told_and_however_much_else_happened(how: str) -> None:
    field = _field({})
    replicas = [Replica(str(n)) for n in range(3 * PLACES)]
    for replica in replicas:
        field.add(replica, 0.0)
    for n, replica in enumerate(replicas):
        replica.others_running, replica.others_at = n + 1, 5.0
        getattr(field, how)(replica, 5.0)
    field.bring_up(5.0)
    assert _seen(field, replicas)["running"] == [n + 1 for n in range(len(replicas))]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=120))
def test_a_place_is_its_replicas_until_that_leaves(steps: list[tuple[bool, int]]) -> None:
    """Each has its own elements, whoever had the place before, and none that has left is a candidate."""
    field = _field({})
    replicas = [Replica(str(n), weight=n + 1.0, since=float(n)) for n in range(41)]
    there: set[Replica] = set()
    for joins, n in steps:
        replica = replicas[n]
        if joins:
            field.add(replica, 0.0)
            there.add(replica)
        else:
            field.changed(replica, 0.0)
            field.remove(replica)
            there.discard(replica)
        field.bring_up(0.0)
        assert field.least_factor == (1.0 if there else field.least_factor)
    members = sorted(there, key=lambda replica: replica.id)
    assert len({field.place(replica) for replica in members}) == len(members)
    for replica in members:
        place = field.place(replica)
        assert field.replica(place) is replica
        assert (field.weight[place], field.born[place]) == (replica.weight, replica.since)
    assert {replica for replica in field.replicas if replica is not None} == there
    for vector in VECTORS:
        assert np.isfinite(getattr(field, vector)).all(), "a place that nobody has must not make others' costs NaN"
    if members:
        selection = Selection(field, members[1:] or members)
        assert {field.replica(int(i)) for i in np.flatnonzero(selection.shut == 0.0)} == set(members[1:] or members)


def test_a_replica_that_has_left_is_not_the_fastest_any_more() -> None:
    field = _field({})
    slow, fast = Replica("slow"), Replica("fast")
    slow.speed.factor, fast.speed.factor = 2.0, 0.5
    field.add(slow, 0.0)
    field.add(fast, 0.0)
    assert field.least_factor == 0.5
    field.remove(fast)
    field.bring_up(2.0)
    assert field.least_factor == 2.0


def test_what_became_faster_is_the_fastest_before_its_elements_are_set() -> None:
    field = _field({})
    quick, other = Replica("quick"), Replica("other")
    for replica in (quick, other):
        replica.speed.factor = 2.0
        field.add(replica, 0.0)
    quick.speed.factor = 0.5
    field.changed(quick, 5.0)
    field.settled(other, 5.0)  # time goes on for all, before anybody looks
    assert field.least_factor == 0.5


def test_among_equal_costs_the_candidate_first_in_order_of_id_is_taken_whenever_it_joined() -> None:
    field = _field({})
    late, early, dear = Replica("z"), Replica("b"), Replica("a")
    for replica in (late, early, dear):
        field.add(replica, 0.0)
    costs = np.full(len(field.replicas), np.inf)
    costs[[field.place(late), field.place(early)]] = 1.0
    costs[field.place(dear)] = 1.5
    assert field.replica(Selection(field, (dear, early, late)).least(costs)) is early
