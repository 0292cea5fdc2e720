"""Slow start: a replica that joined or came back meets no crowd; nobody is refused, and no warm session leaves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.balancer import Balancer
from policies.lease import Lease
from policies.registry import make
from policies.slow_start import GROWN, START_S
from policies.types import Reason, Replica, Request, State, Usage
from tests.fakes.fleet import DONE, fleet

SLOW_START_S = 30.0
JOINED = 1000.0


def grown(slow_start_s: float = SLOW_START_S, ids: str = "abcd") -> tuple[Balancer, Replica]:
    """A fleet that is busy enough for a new replica to be the best for everybody, and the new one."""
    balancer = fleet(make("session_affinity", {"slow_start_s": slow_start_s}), ids)
    for n in range(8 * len(ids)):
        balancer.acquire(Request(b"old %d" % n, prompt_tokens=20_000), JOINED - 1.0)
    new = Replica("new")
    balancer.join(new, JOINED)
    return balancer, new


def ask(balancer: Balancer, name: str, now: float, tokens: int = 2_000) -> Lease:
    return balancer.acquire(Request(name.encode(), prompt_tokens=tokens), now)


def test_a_crowd_of_new_sessions_meets_it_one_at_a_time() -> None:
    balancer, new = grown()
    placed = [ask(balancer, f"crowd {n}", JOINED).replica for n in range(20)]
    assert placed.count(new) == 1
    balancer, new = grown(slow_start_s=0.0)
    placed = [ask(balancer, f"crowd {n}", JOINED).replica for n in range(20)]
    assert placed.count(new) == 20, "without it all of them go there"


def test_its_next_one_comes_when_the_first_is_answered() -> None:
    balancer, new = grown()
    for n in range(5):
        lease = ask(balancer, f"crowd {n}", JOINED + 0.1 * n)
        assert lease.replica is new
        assert ask(balancer, f"other {n}", JOINED + 0.1 * n).replica is not new
        lease.first_token(JOINED + 0.1 * n + 0.05)


@pytest.mark.parametrize("age", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_its_share_grows_with_its_age(age: float) -> None:
    balancer, new = grown()
    now = JOINED + age * SLOW_START_S
    for replica in balancer.ready:  # as busy as they were
        replica.prefill_ends = now + 10.0 if replica is not new else 0.0
    placed = [ask(balancer, f"crowd {n}", now, 100).replica for n in range(40)]
    assert placed.count(new) == (40 if age == 1.0 else 1 + int(GROWN * age))


def test_one_that_comes_back_starts_again_and_its_own_sessions_return_at_once() -> None:
    balancer = fleet(make("session_affinity"), "abcd")
    home = ask(balancer, "warm", 0.0, 50_000)
    home.first_token(1.0)
    home.finish(DONE, Usage(50_000, 0, 100), 2.0)
    replica = home.replica
    balancer.set_state(replica, State.EJECTED, 100.0)
    for n in range(32):
        ask(balancer, f"old {n}", 109.0, 20_000)
    balancer.set_state(replica, State.READY, 110.0)
    assert ask(balancer, "first", 110.0).replica is replica
    assert ask(balancer, "second", 110.0).replica is not replica
    lease = ask(balancer, "warm", 110.0, 50_000)
    assert (lease.replica, lease.choice.reason) == (replica, Reason.HOME)


def test_when_only_it_is_left_it_gets_all() -> None:
    balancer, new = grown()
    for replica in balancer.ready:
        if replica is not new:
            balancer.set_state(replica, State.EJECTED, JOINED)
    assert [ask(balancer, f"crowd {n}", JOINED).replica for n in range(9)] == [new] * 9


def test_a_fleet_that_is_new_as_a_whole_fills_evenly() -> None:
    balancer = fleet(make("session_affinity"), "abcdefgh")
    placed = [ask(balancer, f"session {n}", 0.0, 10_000).replica for n in range(40)]
    assert {placed.count(replica) for replica in balancer.ready} == {5}


def test_where_most_are_new_none_is_spared() -> None:
    balancer, new = grown(ids="a")
    newer = Replica("newer")
    balancer.join(newer, JOINED)
    placed = [ask(balancer, f"crowd {n}", JOINED).replica for n in range(20)]
    assert placed.count(new) + placed.count(newer) == 20


def test_explain_names_what_holds_them_off() -> None:
    balancer, _ = grown()
    ask(balancer, "first", JOINED)
    choice = balancer.explain(Request(b"second", prompt_tokens=2_000), JOINED)
    terms = {each.replica.id: each.terms["start"] for each in choice.candidates}
    assert terms == {"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.0, "new": START_S}


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 60_000)), max_size=30), st.integers(1, 6))
def test_nobody_is_refused_for_it(asked: list[tuple[float, int]], joining: int) -> None:
    balancer = fleet(make("session_affinity"), "ab")
    for n in range(joining):
        balancer.join(Replica(f"new {n}"), 50.0)
    now = 50.0
    for n, (passed_s, tokens) in enumerate(asked):
        now += passed_s
        ask(balancer, f"session {n}", now, tokens)
