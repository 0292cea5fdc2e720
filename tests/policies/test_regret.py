"""Regretted prefill: tokens computed again though the fleet had them, or had them once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.balancer import Balancer
from policies.registry import make
from policies.regret import Regret
from policies.types import Choice, Reason, Replica, Request, State, Usage
from tests.fakes.fleet import CLIENT_LEFT, DONE, fleet


def _fleet(policy: str = "session_affinity", ids: str = "ab") -> Balancer:
    balancer = fleet(make(policy), ids)
    for replica in balancer.ready:
        replica.reports_cached = True
    return balancer


def _turn(balancer: Balancer, now: float, prompt: int, cached: int | None, on: str = "", key: bytes = b"k") -> Reason:
    """A turn on that replica, whatever the policy would have; without one, wherever the policy has it."""
    others = tuple(r for r in balancer.ready if on and r.id != on)
    lease = balancer.acquire(Request(key, None, 7, prompt, failed=others), now)
    lease.first_token(now + 1.0)
    lease.finish(DONE, Usage(prompt, cached, 0), now + 2.0)
    return lease.choice.reason


def test_what_had_to_be_computed_is_not_regretted() -> None:
    balancer = _fleet()
    _turn(balancer, 0.0, 50_000, 0)
    _turn(balancer, 10.0, 60_000, 50_000)
    _turn(balancer, 20.0, 70_000, 3_000, key=b"other")
    assert (balancer.regret.elsewhere, balancer.regret.evicted) == ({}, {})


def test_what_another_replica_holds_is_regretted_by_the_reason_of_the_choice() -> None:
    balancer = _fleet("round_robin")
    _turn(balancer, 0.0, 50_000, 0, on="a")
    _turn(balancer, 10.0, 60_000, 20_000, on="b")  # 20,000 of tools are there anyway
    assert balancer.regret.elsewhere == {Reason.ROTATION: 30_000}
    assert balancer.regret.evicted == {}
    assert {r.id: r.regretted_tokens for r in balancer.ready} == {"a": 0, "b": 30_000}
    _turn(balancer, 20.0, 70_000, 60_000, on="b")
    assert balancer.regret.elsewhere == {Reason.ROTATION: 30_000}


def test_what_nobody_holds_any_more_is_regretted_as_evicted() -> None:
    balancer = _fleet()
    _turn(balancer, 0.0, 50_000, 0, on="a")
    for replica in balancer.ready:
        replica.cache.resize(100_000, None)
    for n in range(4):
        for on in "ab":
            _turn(balancer, 1.0 + n, 90_000, 0, on=on, key=b"%d%s" % (n, on.encode()))
    assert _turn(balancer, 10.0, 52_000, 5_000) is Reason.EVICTED
    assert balancer.regret.evicted == {Reason.EVICTED: 45_000}
    assert balancer.regret.elsewhere == {}


def test_what_was_evicted_on_one_and_held_by_another_is_counted_once() -> None:
    balancer = _fleet()
    _turn(balancer, 0.0, 50_000, 0, on="a")
    _turn(balancer, 5.0, 80_000, 0, on="b")
    (branch,) = balancer.directory.branches(b"k", 6.0)
    balancer.replicas["b"].cache.forget(branch.homes[0])
    before = sum(balancer.regret.elsewhere.values())
    balancer.set_state(balancer.replicas["a"], State.DRAINING, 7.0)
    balancer.join(Replica("c", reports_cached=True), 7.0)
    _turn(balancer, 10.0, 80_000, 0, on="c")
    assert sum(balancer.regret.elsewhere.values()) - before == 50_000
    assert sum(balancer.regret.evicted.values()) == 30_000


def test_what_was_lost_with_a_cache_is_nobodys_choice() -> None:
    balancer = _fleet(ids="a")
    _turn(balancer, 0.0, 50_000, 0)
    balancer.cache_cleared(balancer.replicas["a"], 5.0)
    _turn(balancer, 10.0, 60_000, 0)
    assert (balancer.regret.elsewhere, balancer.regret.evicted) == ({}, {})


@pytest.mark.parametrize("cached", [None, 0])
def test_nothing_is_regretted_where_nobody_says_what_was_cached(cached: int | None) -> None:
    balancer = fleet(make("round_robin"), "ab")
    _turn(balancer, 0.0, 50_000, cached, on="a")
    _turn(balancer, 10.0, 60_000, cached, on="b")
    assert (balancer.regret.elsewhere, balancer.regret.evicted) == ({}, {})


def test_a_request_that_came_to_nothing_is_not_regretted() -> None:
    balancer = _fleet("round_robin")
    _turn(balancer, 0.0, 50_000, 0, on="a")
    balancer.acquire(Request(b"k", None, 7, 60_000), 10.0).finish(CLIENT_LEFT, None, 11.0)
    assert balancer.regret.elsewhere == {}


_tokens = st.integers(0, 10**7)


@given(st.sampled_from(Reason), _tokens, _tokens, _tokens, _tokens)
def test_no_more_is_regretted_than_was_recomputed(
    reason: Reason, prompt: int, cached: int, elsewhere: int, once: int
) -> None:
    cached = min(cached, prompt)
    balancer = fleet(make("random"), "a")
    lease = balancer.acquire(Request(b"k"), 0.0)
    lease.choice = Choice(lease.replica, reason)
    lease.elsewhere, lease.request.once_tokens = elsewhere, once
    regret = Regret()
    regret.add(lease, prompt, cached)
    assert set(regret.elsewhere) | set(regret.evicted) <= {reason}
    assert all(tokens > 0 for tokens in (*regret.elsewhere.values(), *regret.evicted.values()))
    total = regret.elsewhere.get(reason, 0) + regret.evicted.get(reason, 0)
    assert total <= prompt - cached
    assert total == max(0, min(prompt, max(elsewhere, once)) - cached)
