"""A replica that finishes its sessions, and a weight that changes: the same under every policy."""

from __future__ import annotations

from random import Random

import pytest

from policies.balancer import Balancer, NoReplica
from policies.registry import POLICIES, make
from policies.types import Reason, Replica, Request, State
from tests.fakes.fleet import fleet, turn

each_policy = pytest.mark.parametrize("name", POLICIES)


def session(number: int, **more: object) -> Request:
    """The next turn of a session."""
    return Request(b"session %d" % number, prompt_tokens=10_000, blocks=(number, 1, 2, 3), **more)  # type: ignore[arg-type]


def settled(balancer: Balancer, count: int = 40) -> dict[int, Replica]:
    """Sessions by number, and where each lives after its first turn."""
    return {number: turn(balancer, session(number), number, 10_000).replica for number in range(count)}


@each_policy
def test_sessions_stay_where_they_live_and_nothing_else_comes(name: str) -> None:
    balancer = fleet(make(name))
    homes = settled(balancer)
    finishing = balancer.replicas["a"]
    living = [number for number, replica in homes.items() if replica is finishing]
    assert living, "some live there"
    balancer.set_state(finishing, State.FINISHING, 100.0)
    for now in (101.0, 150.0):
        for number in living:
            explained = balancer.explain(session(number), now)
            lease = turn(balancer, session(number), now, 10_000)
            assert explained.replica is lease.replica is finishing
            assert lease.choice.reason is explained.reason is Reason.HOME
            assert lease.choice.resident_tokens == 10_000
    strangers = [Request(b"new %d" % number, prompt_tokens=10) for number in range(40)]
    strangers += [Request(prompt_tokens=10) for _ in range(10)]
    assert all(turn(balancer, request, 200.0).replica is not finishing for request in strangers)
    elsewhere = [number for number, replica in homes.items() if replica is not finishing]
    assert all(turn(balancer, session(number), 300.0).replica is not finishing for number in elsewhere)


@each_policy
def test_one_that_fails_there_goes_elsewhere_and_is_lost_to_it(name: str) -> None:
    balancer = fleet(make(name))
    homes = settled(balancer)
    finishing = balancer.replicas["a"]
    number = next(number for number, replica in homes.items() if replica is finishing)
    balancer.set_state(finishing, State.FINISHING, 100.0)
    moved = turn(balancer, session(number, failed=(finishing,)), 101.0, 10_000)
    assert moved.replica is not finishing
    assert turn(balancer, session(number), 102.0, 10_000).replica is not finishing, "it lives with another now"


@each_policy
def test_it_may_be_taken_back(name: str) -> None:
    balancer = fleet(make(name), "a")
    settled(balancer, 3)
    (replica,) = balancer.replicas.values()
    balancer.set_state(replica, State.FINISHING, 100.0)
    assert turn(balancer, session(1), 101.0, 10_000).replica is replica, "though none is ready"
    with pytest.raises(NoReplica, match="all_draining"):
        balancer.acquire(Request(b"new"), 102.0)
    balancer.set_state(replica, State.READY, 103.0)
    assert turn(balancer, Request(b"new"), 104.0).replica is replica


def test_what_left_its_cache_leaves_it() -> None:
    balancer = fleet(make("session_affinity"))
    homes = settled(balancer)
    finishing = balancer.replicas["a"]
    balancer.set_state(finishing, State.FINISHING, 100.0)
    balancer.cache_cleared(finishing, 101.0)
    for number, replica in homes.items():
        if replica is finishing:
            lease = turn(balancer, session(number), 102.0, 10_000)
            assert (lease.replica is not finishing, lease.choice.reason) == (True, Reason.HOME_LOST)


def test_a_conversation_begun_anew_is_placed_among_the_others() -> None:
    balancer = fleet(make("session_affinity"))
    first = turn(balancer, Request(b"s", fingerprint=1, prompt_tokens=10_000, blocks=(1, 2, 3, 4)), 1.0, 10_000)
    balancer.set_state(first.replica, State.FINISHING, 2.0)
    compacted = Request(b"s", fingerprint=2, prompt_tokens=9_000, blocks=(5, 6, 7, 8))
    assert turn(balancer, compacted, 3.0, 9_000).replica is not first.replica


def test_a_subagent_of_a_session_there_is_a_new_session() -> None:
    balancer = fleet(make("session_affinity"))
    first = turn(balancer, Request(b"main", fingerprint=1, prompt_tokens=10_000, blocks=(1, 2, 3, 4)), 1.0, 10_000)
    balancer.set_state(first.replica, State.FINISHING, 2.0)
    agent = Request(b"agent", parent=b"main", fingerprint=1, prompt_tokens=10_000, blocks=(1, 2, 3, 4))
    assert turn(balancer, agent, 3.0, 10_000).replica is not first.replica


# Weights


def _served(balancer: Balancer, now: float) -> set[str]:
    """Who serves some hundred new sessions."""
    draw = Random(now)
    return {turn(balancer, Request(draw.randbytes(16), prompt_tokens=10), now + i).replica.id for i in range(100)}


@each_policy
def test_a_weight_that_changes_is_as_if_it_had_always_been(name: str) -> None:
    """What a policy has made of the fleet, as rings are, is made anew."""
    fresh = fleet(make(name), "ac")
    fresh.join(Replica("b", weight=0.0), 0.0)
    balancer = fleet(make(name))
    assert "b" in _served(balancer, 1000.0)
    balancer.set_weight(balancer.replicas["b"], 0.0, 2000.0)
    assert _served(balancer, 3000.0) == _served(fresh, 3000.0)
    balancer.set_weight(balancer.replicas["b"], 2.0, 4000.0)
    assert "b" in _served(balancer, 5000.0)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_an_impossible_weight_changes_nothing(weight: float) -> None:
    balancer = fleet(make("random"))
    with pytest.raises(ValueError, match="replica a: weight must be 0 or more and finite"):
        balancer.set_weight(balancer.replicas["a"], weight, 1.0)
    assert balancer.replicas["a"].weight == 1.0
