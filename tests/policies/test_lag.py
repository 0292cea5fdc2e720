"""Which replicas are slow: by their own measure and by their fleet's, and for how long."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import cost
from policies.balancer import Balancer
from policies.lag import JUDGED_EVERY_S, MOST_LATE, SLACK_S, TAU_S, judge
from policies.registry import make
from policies.types import Reason, Replica, Request, Usage
from tests.fakes.fleet import DONE, fleet


def replicas(count: int) -> list[Replica]:
    return [Replica(f"r{n}") for n in range(count)]


def observe(replica: Replica, ratio: float, count: int, now: float) -> None:
    for _ in range(count):
        replica.speed.lag.observe(2.0, ratio * (2.0 + SLACK_S) - SLACK_S, now)


def slow(those: list[Replica], now: float) -> list[str]:
    judge(those, now)
    return [replica.id for replica in those if replica.speed.slowness > 1.0]


def test_one_that_takes_three_times_as_long_is_slow_after_some_observations() -> None:
    those = replicas(4)
    for replica in those[1:]:
        observe(replica, 1.0, 30, 10.0)
    found = []
    for _ in range(30):
        observe(those[0], 3.0, 1, 10.0)
        found.append(bool(slow(those, 10.0)))
    assert found == sorted(found), "once it is, it stays so"
    assert 5 < found.index(True) < 15, "neither one late answer nor a hundred"
    assert 2.0 < those[0].speed.slowness < 3.0
    assert cost.prefill(those[0], 10_000) == pytest.approx(those[0].speed.slowness * cost.prefill(those[1], 10_000)), (
        "its load costs more"
    )


def test_no_single_answer_makes_it_slow_however_late() -> None:
    those = replicas(4)
    for replica in those:
        observe(replica, 1.0, 30, 10.0)
    observe(those[0], 1e6, 1, 10.0)
    assert not slow(those, 10.0)


@pytest.mark.parametrize("bias", [0.2, 5.0])
def test_what_all_have_in_common_is_no_ones_fault(bias: float) -> None:
    """A table that is wrong for the engine, or overload."""
    those = replicas(5)
    for replica in those:
        observe(replica, bias, 50, 10.0)
    assert not slow(those, 10.0)
    observe(those[0], 20.0, 50, 10.0)
    assert slow(those, 10.0) == ([] if bias > 1.0 else ["r0"]), "beyond MOST_LATE nothing is told apart"


def test_one_that_is_in_time_is_not_slow_beside_those_that_are_early() -> None:
    """It may just get the short prompts."""
    those = replicas(4)
    for replica in those:
        observe(replica, 1.1 if replica is those[0] else 0.25, 50, 10.0)
    assert not slow(those, 10.0)


def test_of_two_the_quicker_one_is_the_measure() -> None:
    those = replicas(2)
    observe(those[0], 1.0, 30, 10.0)
    observe(those[1], 3.5, 30, 10.0)
    assert slow(those, 10.0) == ["r1"]


def test_the_only_one_there_is_is_never_slow() -> None:
    those = replicas(1)
    observe(those[0], 4.0, 100, 10.0)
    assert not slow(those, 10.0)


def test_those_of_which_nothing_is_known_are_not_slow_beside_quick_ones() -> None:
    those = replicas(4)
    observe(those[0], 0.2, 50, 10.0)
    assert not slow(those, 10.0)


def test_it_is_tried_again_when_it_gets_no_requests() -> None:
    those = replicas(4)
    for replica in those:
        observe(replica, 4.0 if replica is those[0] else 1.0, 50, 0.0)
    assert slow(those, 0.0) == ["r0"]
    seen = [those[0].speed.slowness]
    now = 0.0
    while those[0].speed.slowness > 1.0:
        now += 5.0
        judge(those, now)
        seen.append(those[0].speed.slowness)
    assert seen == sorted(seen, reverse=True)
    assert TAU_S < now < 5 * TAU_S


def test_one_that_has_recovered_is_soon_seen_to() -> None:
    those = replicas(4)
    for replica in those:
        observe(replica, 4.0 if replica is those[0] else 1.0, 50, 0.0)
    assert slow(those, 0.0)
    observe(those[0], 1.0, 35, 0.0)
    assert not slow(those, 0.0)


def test_what_the_factor_has_learned_is_not_counted_twice() -> None:
    """Three times as slow from now on: as lone prefills teach the factor, the slowness goes; their product holds."""
    those = replicas(4)
    for replica in those[1:]:
        observe(replica, 1.0, 50, 0.0)
    speed = those[0].speed
    speed.prefills = 100  # which told of another speed
    observe(those[0], 3.0, 30, 0.0)
    judge(those, 0.0)
    products = [speed.pace]
    for _ in range(60):
        speed.lag.observe(speed.factor * 2.0, 6.0, 0.0)
        speed.observe_prefill(40_000, 0, 3.0 * speed.prefill_s(40_000, 0) / speed.pace)
        judge(those, 0.0)
        products.append(speed.pace)
    assert speed.factor == pytest.approx(3.0, rel=0.05)
    assert speed.slowness == 1.0
    assert max(products) < 3.1, "4.3 when it is counted twice"


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.floats(0, 1e6),
            st.floats(0, 1e6),
            st.floats(0, 100),
        ),
        max_size=60,
    )
)
def test_slowness_is_bounded_whatever_is_observed(seen: list[tuple[int, float, float, float]]) -> None:
    those = replicas(4)
    now = 0.0
    for number, expected_s, observed_s, passed_s in seen:
        now += passed_s
        those[number].speed.lag.observe(expected_s, observed_s, now)
        judge(those, now)
        assert all(1.0 <= replica.speed.slowness <= exp(2 * MOST_LATE) for replica in those)
        assert sum(replica.speed.slowness > 1.0 for replica in those) <= 2, "never more than half of them"
    judge(those, now + 100 * TAU_S)
    assert all(replica.speed.slowness == 1.0 for replica in those)


# Told by the Balancer


def turn(balancer: Balancer, key: bytes, now: float, took_s: float, cached: int | None, on: str = "") -> Replica:
    """A cold prompt whose first token comes after that time; returns where it was."""
    request = Request(key, prompt_tokens=20_000, failed=tuple(r for r in balancer.ready if on and r.id != on))
    lease = balancer.acquire(request, now)
    lease.first_token(now + took_s)
    lease.finish(DONE, Usage(20_000, cached, 10), now + took_s + 0.5)
    return lease.replica


def expected_s(balancer: Balancer) -> float:
    return cost.prefill(balancer.ready[0], 20_000)


def test_new_sessions_avoid_the_slow_one_until_it_has_been_forgotten() -> None:
    balancer = fleet(make("session_affinity"), "abcd")
    usual, now = expected_s(balancer), 0.0
    for n in range(80):
        on = "abcd"[n % 4]
        now += 1.0
        turn(balancer, b"%d" % n, now, usual * (4.0 if on == "a" else 1.0), None, on)
    a = balancer.replicas["a"]
    assert a.speed.slowness > 2.0
    assert (a.speed.factor, a.speed.prefills) == (1.0, 0), "engines that report no cached tokens teach no factor"
    placed = [turn(balancer, b"new %d" % n, now + n, usual, None).id for n in range(30)]
    assert "a" not in placed
    choice = balancer.explain(Request(b"x", prompt_tokens=20_000), now)
    terms = {each.replica.id: each.terms for each in choice.candidates}
    assert terms["a"]["prefill"] == pytest.approx(a.speed.slowness * usual)
    later = now + 10 * TAU_S
    placed = [turn(balancer, b"later %d" % n, later + 2 * n * JUDGED_EVERY_S, usual, None).id for n in range(30)]
    assert "a" in placed


def test_a_warm_session_leaves_the_slow_one_only_when_that_is_quicker() -> None:
    balancer = fleet(make("session_affinity"), "abcd")
    usual, now = expected_s(balancer), 1000.0
    home = turn(balancer, b"home", now, usual, None, "a")
    for n in range(80):
        on = "abcd"[n % 4]
        now += 1.0
        turn(balancer, b"%d" % n, now, usual * (4.0 if on == "a" else 1.0), None, on)
    assert home.speed.slowness > 2.0
    choice = balancer.explain(Request(b"home", prompt_tokens=21_000), now + 20.0)
    assert (choice.replica, choice.reason) == (home, Reason.HOME)


def test_a_prompt_that_was_not_cached_any_more_is_late_for_another_reason() -> None:
    """The engine says so: its whole prefill was to be expected."""
    balancer = fleet(make("session_affinity"), "abcd")
    usual, now = expected_s(balancer), 0.0
    for n in range(4):
        turn(balancer, b"%d" % n, now, usual, 10_000, "abcd"[n])
    for n in range(60):
        now += 20.0
        turn(balancer, b"%d" % (n % 4), now, usual if n % 4 == 0 else 0.1, 0 if n % 4 == 0 else 19_900, "abcd"[n % 4])
    assert balancer.replicas["a"].speed.lag.mean(now)[0] < 0.2
    assert balancer.replicas["a"].speed.slowness == 1.0


def test_a_slow_reader_and_answers_that_come_whole_say_nothing() -> None:
    balancer = fleet(make("session_affinity"), "ab")
    for n in range(40):
        lease = balancer.acquire(Request(b"%d" % n, prompt_tokens=1000), 10.0 * n)
        lease.timed = False
        lease.first_token(10.0 * n + 9.0)
        lease.finish(DONE, None, 10.0 * n + 9.5)
    assert [replica.speed.lag.mean(400.0) for replica in balancer.ready] == [(0.0, 0.0)] * 2
