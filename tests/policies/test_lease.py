"""What a lease counts for while it lasts: prefill seconds that are set right by first tokens, and given back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import cost
from policies.balancer import Balancer
from policies.lease import Lease
from policies.registry import make
from policies.speed import OVERHEAD_S, unit_prefill_s
from policies.types import Load, Replica, Request, Usage
from tests.fakes.fleet import CLIENT_LEFT, DONE, REFUSED, fleet


def _one() -> tuple[Balancer, Replica]:
    balancer = fleet(make("session_affinity"), "a")
    return balancer, balancer.ready[0]


def _work_s(new: int, held: int) -> float:
    """Seconds of a prefill in a pass that others have begun."""
    return unit_prefill_s(new, held) - OVERHEAD_S


def _send(balancer: Balancer, tokens: int, now: float) -> Lease:
    return balancer.acquire(Request(prompt_tokens=tokens), now)


def test_a_prefill_is_expected_to_end_after_those_sent_before_it() -> None:
    balancer, a = _one()
    first, second = _send(balancer, 50_000, 10.0), _send(balancer, 20_000, 10.0)
    each = [_work_s(tokens, 0) for tokens in (50_000, 20_000)]
    assert [first.choice.wait_s, second.choice.wait_s] == pytest.approx([0.0, OVERHEAD_S + each[0]])
    assert cost.expected_wait(a, 10.0) == pytest.approx(OVERHEAD_S + sum(each))
    assert a.pending_s == pytest.approx(sum(each))
    assert cost.expected_wait(a, 11.0) == pytest.approx(OVERHEAD_S + sum(each) - 1.0)


def test_an_engine_computes_all_that_waits_in_one_pass_so_its_overhead_counts_once() -> None:
    """A thousand pings at once are no minute of prefill: else homes look overloaded and sessions leave their KV."""
    balancer, a = _one()
    leases = [_send(balancer, 20, 10.0) for _ in range(1_000)]
    assert cost.expected_wait(a, 10.0) == pytest.approx(OVERHEAD_S + 1_000 * _work_s(20, 0))
    leases[0].first_token(10.1)
    assert cost.expected_wait(a, 10.1) == pytest.approx(OVERHEAD_S + 999 * _work_s(20, 0))
    for lease in leases[1:]:
        lease.first_token(10.2)
    assert cost.expected_wait(a, 10.2) == 0.0
    assert a.prefilled_s == pytest.approx(OVERHEAD_S + 1_000 * _work_s(20, 0))


def test_a_first_token_says_when_the_next_prefill_begins() -> None:
    balancer, a = _one()
    leases = [_send(balancer, 50_000, 10.0) for _ in range(3)]
    each = leases[0].work_s
    leases[0].first_token(10.1)  # sooner than expected
    assert cost.expected_wait(a, 10.1) == pytest.approx(OVERHEAD_S + 2 * each)
    leases[1].first_token(10.1 + 5 * each)  # later
    assert cost.expected_wait(a, 10.1 + 5 * each) == pytest.approx(OVERHEAD_S + each)
    leases[2].first_token(10.2 + 5 * each)
    assert (cost.expected_wait(a, 10.2 + 5 * each), a.pending_s) == (0.0, 0.0)
    assert a.prefilled_s == pytest.approx(OVERHEAD_S + 3 * each)


def test_an_aborted_prefill_is_waited_for_no_longer() -> None:
    balancer, a = _one()
    kept, aborted = _send(balancer, 50_000, 10.0), _send(balancer, 30_000, 10.0)
    aborted.finish(CLIENT_LEFT, None, 10.5)
    assert cost.expected_wait(a, 10.5) == pytest.approx(kept.choice.prefill_s - 0.5)
    kept.finish(REFUSED, None, 10.5)
    assert (cost.expected_wait(a, 10.5), a.pending_s, a.prefilled_s) == (0.0, 0.0, 0.0)


def test_a_replica_that_stood_idle_does_not_owe_what_was_expected_of_it_long_ago() -> None:
    balancer, a = _one()
    _send(balancer, 50_000, 10.0).finish(DONE, Usage(50_000, 0, 10), 100.0)  # no first token was ever seen
    assert cost.expected_wait(a, 100.0) == 0.0
    late = _send(balancer, 20_000, 200.0)
    assert cost.expected_wait(a, 200.0) == pytest.approx(late.choice.prefill_s)


def test_what_is_resident_is_neither_pending_nor_prefilled_again() -> None:
    balancer, a = _one()
    balancer.acquire(Request(b"k", prompt_tokens=100_000), 0.0).finish(DONE, Usage(100_000, 0, 0), 5.0)
    lease = balancer.acquire(Request(b"k", prompt_tokens=101_000), 10.0)
    assert lease.choice.prefill_s == a.speed.prefill_s(1_000, 100_000)
    assert a.pending_s == pytest.approx(_work_s(1_000, 100_000))


def test_the_seconds_are_those_expected_when_it_was_sent() -> None:
    """A speed learned meanwhile changes neither what it counts for nor what is given back."""
    balancer, a = _one()
    lease = _send(balancer, 50_000, 10.0)
    before = a.pending_s
    balancer.report(a, Load(at=10.1, prefill_tokens_per_s=1_000.0), 10.1)
    assert a.pending_s == before
    lease.finish(CLIENT_LEFT, None, 10.2)
    assert (a.pending_s, cost.expected_wait(a, 10.2)) == (0.0, 0.0)


def test_speed_is_learned_from_a_request_that_found_the_replica_idle() -> None:
    balancer, a = _one()
    turn = [(0.0, 20_000), (100.0, 40_000), (200.0, 60_000)]
    a.reports_cached = True
    for now, prompt in turn:
        lease = balancer.acquire(Request(prompt_tokens=prompt), now)
        first = now + 3.0 * (a.speed.prefill_s(prompt, 0) / a.speed.factor)
        lease.first_token(first)
        lease.finish(DONE, Usage(prompt, 0, 10), first + 1.0)
    assert a.speed.prefills == 3
    assert a.speed.factor == pytest.approx(3.0, rel=0.2)
    busy = [_send(balancer, 50_000, 300.0) for _ in range(2)]
    busy[1].first_token(900.0)
    busy[1].finish(DONE, Usage(50_000, 0, 10), 901.0)
    assert a.speed.prefills == 3, "it waited for another"


def test_speed_is_not_learned_where_nobody_says_what_was_cached() -> None:
    for cached in (None, 0):  # an engine that is not told to report it says 0
        balancer, a = _one()
        lease = _send(balancer, 50_000, 0.0)
        lease.first_token(40.0)
        lease.finish(DONE, Usage(50_000, cached, 10), 41.0)
        assert a.speed.prefills == 0


def test_a_request_of_others_makes_a_replica_not_idle() -> None:
    balancer, a = _one()
    a.reports_cached = True
    balancer.report(a, Load(at=0.0, running=2), 0.0)
    lease = _send(balancer, 50_000, 0.5)
    lease.first_token(40.0)
    lease.finish(DONE, Usage(50_000, 0, 10), 41.0)
    assert a.speed.prefills == 0


def test_decoding_is_learned_from_answers_their_batch_and_the_prefills_beside_them() -> None:
    balancer, a = _one()
    lease = _send(balancer, 1_000, 0.0)
    lease.first_token(1.0)
    beside = [_send(balancer, 50_000, 2.0) for _ in range(3)]
    assert (lease.batch, lease.prefilled_s) == (1, a.prefilled_s)
    for other in beside:
        other.first_token(5.0)
    pause = a.prefilled_s - lease.prefilled_s
    assert pause == pytest.approx(OVERHEAD_S + 3 * beside[0].work_s)
    lease.finish(DONE, Usage(1_000, None, 400), 11.0)
    assert a.speed.decodes == 1


@pytest.mark.parametrize("timed", [True, False])
def test_nothing_is_learned_of_speed_from_an_answer_that_the_engine_did_not_pace(timed: bool) -> None:
    """A whole answer at once, or a client that read slowly, says how long neither prefill nor decoding took."""
    balancer, a = _one()
    a.reports_cached = True
    lease = _send(balancer, 50_000, 0.0)
    lease.timed = timed
    lease.first_token(30.0)
    lease.finish(DONE, Usage(50_000, 0, 400), 30.001)
    assert (a.speed.prefills, a.speed.decodes) == ((1, 1) if timed else (0, 0))


_steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("send"), st.integers(0, 200_000) | st.just(0), st.sampled_from([b"k", b"l", b"m"]) | st.none()
        ),
        st.tuples(st.just("first"), st.integers(0, 20), st.none()),
        st.tuples(st.just("done"), st.integers(0, 20), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 20), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0, 1, 7, 500]), st.none()),
    ),
    max_size=60,
)


@given(_steps)
@settings(max_examples=200)
def test_whatever_happens_no_more_is_waited_for_than_is_pending(steps: list[tuple[str, int, bytes | None]]) -> None:
    balancer, a = _one()
    leases: list[Lease] = []
    now = 0.0
    for verb, number, key in steps:
        now += 0.25
        if verb == "send":
            leases.append(balancer.acquire(Request(key, prompt_tokens=number), now))
        elif verb == "wait":
            now += number
        elif leases:
            lease = leases[number % len(leases)]
            if verb == "first":
                lease.first_token(now)
            else:
                leases.remove(lease)
                lease.finish(DONE if verb == "done" else CLIENT_LEFT, None, now)
        pending = [lease for lease in leases if not lease.begun]
        expected = sum(lease.work_s for lease in pending)
        assert a.pending == len(pending)
        assert a.pending_s == pytest.approx(expected, abs=1e-9)
        if not pending:
            assert (a.pending_s, a.prefill_tokens) == (0.0, 0)
            assert cost.expected_wait(a, now) < 1e-9
        assert cost.expected_wait(a, now) <= expected + OVERHEAD_S + 1e-9
    for lease in leases:
        lease.finish(CLIENT_LEFT, None, now)
    assert (a.in_flight, a.pending, a.prefill_tokens, a.pending_s) == (0, 0, 0, 0.0)
