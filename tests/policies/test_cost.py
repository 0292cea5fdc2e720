"""Facts of the expected seconds: which knowledge counts, for how long, and that bad figures do no harm."""

from __future__ import annotations

from math import inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import cost
from policies.balancer import Balancer
from policies.cost import REPORT_MAX_AGE_S, expected_wait
from policies.least_loaded import LeastLoaded
from policies.speed import HOST_TOKENS_PER_S
from policies.types import Load, Replica, Resident

NOW = 100.0


def _reported(*loads: Load, in_flight: int = 0, tokens: int = 0) -> Replica:
    """A replica with requests of our own, of which the engine has said these."""
    balancer, replica = Balancer(LeastLoaded()), Replica("a", in_flight=in_flight, prefill_tokens=tokens)
    for load in loads:
        balancer.report(replica, load, load.at)
    return replica


# The wait


def test_a_replica_with_nothing_to_do_serves_at_once() -> None:
    assert expected_wait(Replica("a"), NOW) == 0.0
    assert expected_wait(Replica("a", prefill_ends=NOW - 1.0), NOW) == 0.0


def test_the_wait_is_until_what_was_sent_there_is_expected_to_be_prefilled() -> None:
    replica = Replica("a", prefill_ends=NOW + 2.0)
    assert [expected_wait(replica, NOW + later) for later in (0.0, 1.5, 2.0, 9.0)] == [2.0, 0.5, 0.0, 0.0]


def test_a_report_adds_what_others_sent() -> None:
    replica = _reported(Load(at=NOW, waiting_tokens=20_000), tokens=5_000)
    replica.prefill_ends = NOW + 2.0
    others = expected_wait(replica, NOW) - 2.0
    assert others == pytest.approx(replica.speed.prefill_s(15_000, 22_500) - replica.speed.prefill_s(0, 0), rel=0.1)


def test_an_idle_report_hides_nothing_of_our_own() -> None:
    replica = _reported(Load(at=NOW, running=0, waiting=0, waiting_tokens=0), in_flight=5, tokens=9_000)
    replica.prefill_ends = NOW + 3.0
    assert (expected_wait(replica, NOW), cost.requests(replica, NOW)) == (3.0, 5)


def test_own_requests_seen_by_the_engine_are_not_counted_twice() -> None:
    replica = _reported(Load(at=NOW, running=2, waiting=1, waiting_tokens=700), in_flight=3, tokens=700)
    assert (expected_wait(replica, NOW), cost.requests(replica, NOW)) == (0.0, 3)


def test_requests_of_others_are_added_to_our_own_as_of_now() -> None:
    replica = _reported(Load(at=NOW, running=4, waiting=2), in_flight=1)
    assert cost.requests(replica, NOW) == 6
    replica.in_flight = 3  # since then
    assert cost.requests(replica, NOW + 1.0) == 8


def test_only_what_two_reports_in_a_row_see_is_taken_for_others() -> None:
    """A report and our own count are not of one instant: what is ours and has just begun or ended differs for once."""
    loads = [(2, 100), (9, 9_000), (8, 50), (0, 0), (4, 4)]
    reports = [Load(at=NOW + n, running=running, waiting_tokens=tokens) for n, (running, tokens) in enumerate(loads)]
    seen = [_reported(*reports[: n + 1]) for n in range(len(loads))]
    assert [(r.others_running, r.others_tokens) for r in seen] == [(2, 100), (2, 100), (8, 50), (0, 0), (0, 0)]
    assert cost.requests(seen[2], NOW + 2) == 8


@pytest.mark.parametrize(("age", "counts"), [(0.0, True), (REPORT_MAX_AGE_S, True), (REPORT_MAX_AGE_S + 0.001, False)])
def test_an_old_report_says_nothing(age: float, counts: bool) -> None:
    loaded = _reported(Load(at=NOW - age, running=50, waiting=9, waiting_tokens=90_000), in_flight=1)
    assert (expected_wait(loaded, NOW) > 0.0) is counts
    assert cost.requests(loaded, NOW) == (59 if counts else 1)
    assert cost.fresh(loaded, NOW) is counts


def test_absent_figures_are_unknown_not_idle() -> None:
    replica = _reported(Load(at=NOW), in_flight=2, tokens=500)
    replica.prefill_ends = NOW + 1.0
    assert (expected_wait(replica, NOW), cost.requests(replica, NOW)) == (1.0, 2)
    assert not cost.fresh(Replica("a"), NOW)


# Prefill


def test_prefill_is_of_what_is_not_resident() -> None:
    replica = Replica("a")
    whole = cost.prefill(replica, 100_000)
    rest = cost.prefill(replica, 100_000, Resident(replica, 90_000, 90_000))
    assert whole == replica.speed.prefill_s(100_000, 0)
    assert rest == replica.speed.prefill_s(10_000, 90_000)
    assert rest < 0.2 * whole


def test_what_is_in_the_host_tier_is_loaded_back() -> None:
    replica = Replica("a")
    gpu = cost.prefill(replica, 100_000, Resident(replica, 90_000, 90_000))
    host = cost.prefill(replica, 100_000, Resident(replica, 90_000, 20_000))
    assert host - gpu == pytest.approx(70_000 / HOST_TOKENS_PER_S)


def test_no_more_is_resident_than_the_prompt() -> None:
    replica = Replica("a")
    for gpu_tokens in (0, 500_000):
        full = cost.prefill(replica, 1_000, Resident(replica, 500_000, gpu_tokens))
        assert full == pytest.approx(
            replica.speed.prefill_s(0, 1_000) + (0 if gpu_tokens else 1_000 / HOST_TOKENS_PER_S)
        )


def test_each_replica_by_its_own_speed() -> None:
    fast, slow = (
        _reported(Load(at=NOW, prefill_tokens_per_s=20_000.0)),
        _reported(Load(at=NOW, prefill_tokens_per_s=5e3)),
    )
    assert cost.prefill(slow, 50_000) == pytest.approx(4.0 * cost.prefill(fast, 50_000))


def test_a_measured_speed_outlives_its_report() -> None:
    replica = _reported(Load(at=NOW - 10 * REPORT_MAX_AGE_S, prefill_tokens_per_s=5_000.0))
    assert cost.prefill(replica, 50_000) > 2 * cost.prefill(Replica("b"), 50_000)


@pytest.mark.parametrize("speed", [None, 0.0, -5.0, nan, inf, -inf])
def test_an_impossible_speed_is_not_believed(speed: float | None) -> None:
    replica = _reported(Load(at=NOW, prefill_tokens_per_s=speed))
    assert cost.prefill(replica, 15_000) == cost.prefill(Replica("b"), 15_000)


_counts = st.none() | st.integers(-(10**9), 10**9)
_loads = st.builds(
    Load,
    at=st.floats(0, 200),
    running=_counts,
    waiting=_counts,
    waiting_tokens=_counts,
    capacity_tokens=_counts,
    host_capacity_tokens=_counts,
    prefill_tokens_per_s=st.none() | st.floats(),
)


@given(st.integers(0, 10**6), st.integers(0, 10**9), st.floats(0, 1e9), st.lists(_loads, max_size=3))
def test_whatever_is_reported_our_own_counts_in_full(
    in_flight: int, tokens: int, ends: float, loads: list[Load]
) -> None:
    replica = _reported(*loads, in_flight=in_flight, tokens=tokens)
    replica.prefill_ends = ends
    assert isfinite(expected_wait(replica, NOW))
    assert expected_wait(replica, NOW) >= max(0.0, ends - NOW)
    assert cost.requests(replica, NOW) >= in_flight
    assert 0.0 < cost.prefill(replica, tokens) < inf
    assert replica.cache.capacity > 0.0


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7))
def test_more_resident_never_costs_more_and_less_never_costs_less(prompt: int, more: int, less: int, gpu: int) -> None:
    replica = Replica("a")
    less, more = sorted((less, more))
    cold = cost.prefill(replica, prompt)
    assert cold > 0.0
    some = cost.prefill(replica, prompt, Resident(replica, less, min(less, gpu)))
    much = cost.prefill(replica, prompt, Resident(replica, more, min(more, gpu)))
    # Both tiers: a load-back costs less than the prefill it spares.
    assert much <= some + 1e-9
    assert some <= cold + 1e-9
