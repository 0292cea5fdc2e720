"""Dispersion: variance over mean of running requests, over time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.spread import MAX_GAP_S, TAU_S, Spread


def test_it_is_the_mean_variance_over_the_mean() -> None:
    spread = Spread()
    spread.sample([[0, 0]], 0.0)
    spread.sample([[0, 4]], 1.0)  # mean 2, variance 4
    spread.sample([[3, 3]], 3.0)  # mean 3, variance 0, for two seconds
    assert (spread.variance_s, spread.mean_s) == (pytest.approx(4.0), pytest.approx(8.0))
    assert 0 < spread.dispersion < 2


def test_nothing_running_and_nowhere_to_run_is_even() -> None:
    spread = Spread()
    assert spread.dispersion == 0
    for now in range(10):
        spread.sample([[0, 0, 0]], float(now))
    assert (spread.dispersion, spread.mean_s) == (0, 0)
    spread.sample([[]], 11.0)
    assert spread.dispersion == 0


def test_the_last_minute_counts_most() -> None:
    spread = Spread()
    now = 0.0
    for running, seconds in (([0, 10], 600), ([5, 5], 5 * int(TAU_S))):
        for _ in range(seconds):
            now += 1.0
            spread.sample([running], now)
    assert spread.dispersion < 0.05
    assert spread.variance_s == pytest.approx(25 * 599)


def test_a_pause_is_not_taken_for_what_is_seen_after_it() -> None:
    spread = Spread()
    spread.sample([[1, 1]], 0.0)
    spread.sample([[2, 2]], 1000.0)
    assert spread.mean_s == 2 * MAX_GAP_S
    spread.sample([[2, 2]], 900.0)
    assert spread.mean_s == 2 * MAX_GAP_S, "no time passes backwards"


@given(st.lists(st.lists(st.integers(0, 1000), min_size=4, max_size=4), min_size=2, max_size=30))
def test_sums_never_fall_and_one_busy_replica_is_the_worst(samples: list[list[int]]) -> None:
    spread = Spread()
    last = (0.0, 0.0)
    for now, running in enumerate(samples):
        spread.sample([running], float(now))
        assert spread.variance_s >= last[0]
        assert spread.mean_s >= last[1]
        last = (spread.variance_s, spread.mean_s)
        assert 0 <= spread.dispersion <= max(map(sum, samples)) * (1 + 1e-9)


def test_pools_are_not_compared() -> None:
    """A busy model beside an idle one is not uneven."""
    spread = Spread()
    spread.sample([[], []], 0.0)
    spread.sample([[9, 9], [1, 1, 1], []], 1.0)
    assert spread.variance_s == 0.0
    assert spread.mean_s == pytest.approx(21 / 5)
    spread.sample([[9, 9], [0, 3, 0]], 2.0)
    assert spread.variance_s == pytest.approx((1 + 4 + 1) / 5)
