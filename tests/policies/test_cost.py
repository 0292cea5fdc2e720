"""Facts of the expected wait: which knowledge counts, for how long, and that bad figures do no harm."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost import PREFILL_TOKENS_PER_S, REPORT_MAX_AGE_S, RUNNING_S, expected_wait
from policies.types import Load, Replica

NOW = 100.0


def test_a_replica_with_nothing_to_do_serves_at_once() -> None:
    assert expected_wait(Replica("a"), NOW) == 0.0


def test_own_requests_count_from_the_moment_they_are_sent() -> None:
    replica = Replica("a", in_flight=3, prefill_tokens=30_000)
    assert expected_wait(replica, NOW) == pytest.approx(30_000 / PREFILL_TOKENS_PER_S + 3 * RUNNING_S)


def test_a_report_adds_what_others_sent() -> None:
    load = Load(at=NOW, running=4, waiting=2, waiting_tokens=20_000, own_running=1, own_tokens=5_000)
    replica = Replica("a", in_flight=2, prefill_tokens=8_000, load=load)
    others_running, others_tokens = 4 + 2 - 1, 20_000 - 5_000
    assert expected_wait(replica, NOW) == pytest.approx(
        (8_000 + others_tokens) / PREFILL_TOKENS_PER_S + (2 + others_running) * RUNNING_S
    )


def test_an_idle_report_does_not_hide_own_requests() -> None:
    busy = Replica("a", in_flight=5, prefill_tokens=1_000)
    idle = Load(at=NOW, running=0, waiting=0, waiting_tokens=0)
    reported = Replica("a", in_flight=5, prefill_tokens=1_000, load=idle)
    assert expected_wait(reported, NOW) == expected_wait(busy, NOW)


def test_own_requests_seen_by_the_engine_are_not_counted_twice() -> None:
    load = Load(at=NOW, running=3, waiting=0, waiting_tokens=700, own_running=3, own_tokens=700)
    assert expected_wait(Replica("a", in_flight=3, prefill_tokens=700, load=load), NOW) == expected_wait(
        Replica("a", in_flight=3, prefill_tokens=700), NOW
    )


@pytest.mark.parametrize(("age", "counts"), [(0.0, True), (REPORT_MAX_AGE_S, True), (REPORT_MAX_AGE_S + 0.001, False)])
def test_an_old_report_says_nothing(age: float, counts: bool) -> None:
    loaded = Replica("a", in_flight=1, load=Load(at=NOW - age, running=50, waiting=9, waiting_tokens=90_000))
    own_only = expected_wait(Replica("a", in_flight=1), NOW)
    assert (expected_wait(loaded, NOW) > own_only) is counts
    assert counts or expected_wait(loaded, NOW) == own_only


def test_a_measured_speed_replaces_the_assumed_one_and_outlives_its_report() -> None:
    load = Load(at=NOW - 10 * REPORT_MAX_AGE_S, prefill_tokens_per_s=1_000.0)
    assert expected_wait(Replica("a", prefill_tokens=2_000, load=load), NOW) == pytest.approx(2.0)


@pytest.mark.parametrize("speed", [None, 0.0, -5.0, nan, -inf])
def test_an_impossible_speed_is_not_believed(speed: float | None) -> None:
    load = Load(at=NOW, prefill_tokens_per_s=speed)
    assert expected_wait(Replica("a", prefill_tokens=15_000, load=load), NOW) == 15_000 / PREFILL_TOKENS_PER_S


def test_absent_figures_are_unknown_not_idle() -> None:
    replica = Replica("a", in_flight=2, prefill_tokens=500, load=Load(at=NOW))
    assert expected_wait(replica, NOW) == expected_wait(Replica("a", in_flight=2, prefill_tokens=500), NOW)


_counts = st.none() | st.integers(0, 10**9)
_loads = st.builds(
    Load,
    at=st.floats(0, 200),
    running=_counts,
    waiting=_counts,
    waiting_tokens=_counts,
    prefill_tokens_per_s=st.none() | st.floats(),
    own_running=st.integers(0, 10**6),
    own_tokens=st.integers(0, 10**9),
)


@given(st.integers(0, 10**6), st.integers(0, 10**12), st.none() | _loads)
def test_more_of_our_own_never_means_less_wait(in_flight: int, tokens: int, load: Load | None) -> None:
    wait = expected_wait(Replica("a", in_flight=in_flight, prefill_tokens=tokens, load=load), NOW)
    assert wait >= 0.0
    assert expected_wait(Replica("a", in_flight=in_flight + 1, prefill_tokens=tokens, load=load), NOW) >= wait
    assert expected_wait(Replica("a", in_flight=in_flight, prefill_tokens=tokens + 1, load=load), NOW) >= wait
    without = expected_wait(Replica("a", in_flight=in_flight, prefill_tokens=tokens), NOW)
    if load is None or not load.prefill_tokens_per_s:
        assert wait >= without
