"""Pools: requests stay within theirs, and what happens in one is no matter to another."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.admission import Admission, AdmissionConfig, Ticket
from policies.balancer import Balancer, NoReplica
from policies.events import Event, Routed
from policies.lease import Lease
from policies.least_loaded import LeastLoaded
from policies.registry import POLICIES, make
from policies.sharing import Note
from policies.types import Load, Reason, Replica, Request, State, Usage
from tests.fakes.fleet import DONE, fleet, turn
from tests.policies.test_admission_gate import Scene

SMALL = "small"


def pooled(policy: str = "session_affinity", default: str = "ab", small: str = "yz") -> Balancer:
    balancer = fleet(make(policy), default)
    for name in small:
        balancer.join(Replica(name, pool=SMALL), 0.0)
    return balancer


_steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "end", "state", "leave", "join", "clear", "hear", "weight"]),
        st.integers(0, 5),
        st.sampled_from(["", SMALL, "third"]),
        st.integers(0, 60_000),
    ),
    min_size=10,
    max_size=60,
)


@pytest.mark.parametrize("name", POLICIES)
@given(_steps)
@settings(max_examples=15)
def test_no_request_leaves_its_pool_whatever_happens(name: str, steps: list[tuple[str, int, str, int]]) -> None:
    """Also when replicas move between pools, and when keys of two pools are equal, though drivers never let them be."""
    balancer, shadow = fleet(make(name), "abc"), make(name)
    balancer.run_shadow(shadow, 0.0)
    leases: list[Lease] = []
    for now, (step, number, pool, tokens) in enumerate(steps, 1):
        id = "abcdef"[number]
        replica = balancer.replicas.get(id)
        if step == "ask":
            blocks = tuple(range(number, number + tokens // 4096))
            request = Request(b"%d" % number, None, number, tokens, blocks, pool=pool)
            if replica is not None:
                request.failed = (replica,)
            try:
                explained = balancer.explain(request, now).replica
                lease = balancer.acquire(request, now)
            except NoReplica:
                assert all(r.pool != pool or r in request.failed for r in balancer.ready)
                continue
            assert lease.replica.pool == explained.pool == pool
            assert all(resident.replica.pool == pool for resident in request.residents)
            leases.append(lease)
        elif step == "end" and leases:
            lease = leases.pop(number % len(leases))
            lease.first_token(now)
            lease.finish(DONE, Usage(tokens, tokens // 2, 10), now)
        elif step == "join":
            balancer.join(Replica(id, pool=pool), now)
        elif replica is None:
            continue
        elif step == "state":
            balancer.set_state(replica, list(State)[tokens % len(State)], now)
        elif step == "leave":
            balancer.leave(id, now)
        elif step == "clear":
            balancer.cache_cleared(replica, now)
        elif step == "hear":
            balancer.hear(Note(b"%d" % number, number, b"", False, 1.0, id, "", tokens, tokens), now)
        elif step == "weight":
            balancer.set_weight(replica, tokens % 3, now)
    assert not balancer.shadow_fault
    for lease in leases:
        lease.finish(DONE, None, 1000.0)
    for replica in balancer.replicas.values():
        assert (replica.in_flight, replica.pending) == (0, 0)


def test_reasons_why_there_is_none_are_of_the_pool() -> None:
    balancer = pooled(small="z")
    with pytest.raises(NoReplica, match="no_replicas"):
        balancer.acquire(Request(pool="unknown"), 1.0)
    small = balancer.replicas["z"]
    with pytest.raises(NoReplica, match="all_failed"):
        balancer.acquire(Request(pool=SMALL, failed=(small,)), 1.0)
    balancer.set_state(small, State.DRAINING, 2.0)
    with pytest.raises(NoReplica, match="all_draining"):
        balancer.acquire(Request(pool=SMALL), 3.0)
    assert turn(balancer, Request(), 3.0).replica.id in "ab", "the other pool serves"
    balancer.set_state(small, State.EJECTED, 4.0)
    with pytest.raises(NoReplica, match="all_ejected"):
        balancer.explain(Request(pool=SMALL), 5.0)


def test_the_default_pool_is_not_another_though_no_other_has_a_replica() -> None:
    balancer = fleet(make("session_affinity"), "ab")
    lease = balancer.acquire(Request(prompt_tokens=100), 1.0)
    for leaves in (False, True):
        if leaves:
            balancer.join(Replica("z", pool=SMALL), 2.0)
            balancer.leave("z", 3.0)
        with pytest.raises(NoReplica, match="no_replicas"):
            balancer.acquire(Request(pool=SMALL), 4.0)
        assert not list(balancer.within(SMALL))
        assert balancer.under_way(SMALL) == (0, 0)
        assert sum(balancer.counts(SMALL)) == 0
        assert balancer.under_way("") == (1, 100)
    lease.finish(DONE, None, 5.0)


def test_a_change_in_one_pool_leaves_the_others_candidates_the_very_same() -> None:
    """Policies know a fleet by the tuple: making vectors of a large one anew for each change elsewhere would cost."""
    balancer = pooled()
    default, small = balancer.ready_in(""), balancer.ready_in(SMALL)
    assert [r.id for r in default] == ["a", "b"]
    assert [r.id for r in small] == ["y", "z"]
    assert [r.id for r in balancer.ready] == ["a", "b", "y", "z"]
    balancer.set_state(balancer.replicas["a"], State.EJECTED, 1.0)
    assert balancer.ready_in(SMALL) is small
    default = balancer.ready_in("")
    balancer.set_weight(balancer.replicas["y"], 2.0, 2.0)
    assert balancer.ready_in(SMALL) is not small
    balancer.leave("y", 3.0)
    balancer.leave("z", 3.0)
    assert balancer.ready_in("") is default
    assert balancer.ready_in(SMALL) == ()


class Heard(LeastLoaded):
    """Remembers whom it was told of."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.of: list[str] = []

    def observe(self, event: Event) -> None:
        self.of.append((event.choice if isinstance(event, Routed) else event).replica.id)


def test_the_policy_of_each_pool_hears_of_its_own_alone() -> None:
    default = Heard()
    balancer = fleet(default, "ab")
    balancer.join(Replica("z", pool=SMALL), 0.0)
    own = balancer.policy_in(SMALL)
    assert isinstance(own, Heard)
    turn(balancer, Request(b"s", pool=SMALL), 1.0)
    turn(balancer, Request(b"s"), 2.0)
    assert own.of == ["z"] * 4, "it joined, and was chosen, began and ended"
    assert sorted(set(default.of)) == ["a", "b"]


def test_a_switch_and_a_shadow_hold_in_every_pool() -> None:
    balancer = pooled("random")
    balancer.switch(make("round_robin"), 1.0)
    assert {turn(balancer, Request(pool=SMALL), 2.0).choice.reason for _ in range(2)} == {Reason.ROTATION}
    balancer.run_shadow(make("random"), 3.0)
    turn(balancer, Request(pool=SMALL), 4.0)
    turn(balancer, Request(), 4.0)
    assert sum(balancer.disagreements.values()) == 2
    assert {other for _, other, _ in balancer.disagreements} == {Reason.RANDOM}
    balancer.join(Replica("t", pool="third"), 5.0)
    assert turn(balancer, Request(pool="third"), 6.0).choice.reason is Reason.ROTATION
    assert sum(balancer.disagreements.values()) == 3
    balancer.run_shadow(None, 7.0)
    turn(balancer, Request(pool=SMALL), 8.0)
    assert not balancer.disagreements


def test_a_slow_model_is_no_slow_replica() -> None:
    """Each is compared with those that serve the same: the large model's answers always begin later."""
    balancer = pooled(default="ab", small="xyz")
    for replica in balancer.replicas.values():
        for _ in range(30):
            replica.speed.lag.observe(2.0, 2.0 if replica.pool else 8.0, 10.0)
    turn(balancer, Request(), 10.0)  # it is at ends of requests that they are judged
    assert {r.speed.slowness for r in balancer.replicas.values()} == {1.0}


def test_the_gate_counts_the_caches_of_its_own_pool() -> None:
    scene = Scene()
    scene.balancer.join(Replica("z", pool=SMALL), 0.0)
    scene.balancer.report(scene.balancer.replicas["z"], Load(0.0, capacity_tokens=10_000_000), 0.0)
    beside = Admission(scene.balancer, AdmissionConfig(), SMALL)
    scene.run(300, *"wxyz")
    assert scene.admission.gate.active, "the large cache of another model helps nobody here"
    beside.due(scene.now)
    assert not beside.gate.active
    assert isinstance(beside.enter(Request(b"s", prompt_tokens=50_000, pool=SMALL), scene.now), Lease)


@pytest.mark.parametrize("cap", ["max_running", "max_running_per_replica"])
def test_a_full_pool_lets_nobody_of_another_wait(cap: str) -> None:
    balancer = pooled(default="a", small="z")
    config = AdmissionConfig(**{cap: 1})
    default, small = Admission(balancer, config), Admission(balancer, config, SMALL)
    first = default.enter(Request(b"1", prompt_tokens=10), 0.0)
    assert isinstance(first, Lease)
    waits = default.enter(Request(b"2", prompt_tokens=10), 1.0)
    assert isinstance(waits, Ticket)
    placed = small.enter(Request(b"3", prompt_tokens=10, pool=SMALL), 2.0)
    assert isinstance(placed, Lease)
    assert placed.replica.id == "z"
    assert isinstance(small.enter(Request(b"4", prompt_tokens=10, pool=SMALL), 3.0), Ticket)
    first.finish(DONE, None, 4.0)
    assert [ticket.request.key for ticket in default.due(4.0)] == [b"2"]
    assert small.due(4.0) == []
