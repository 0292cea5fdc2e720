"""Rates of the last minute from counters sampled once a second."""

from __future__ import annotations

import pytest

from router.rates import WINDOW, Rates, Sample


def test_there_is_nothing_to_tell_before_two_samples() -> None:
    rates = Rates()
    assert (rates.requests_per_s, rates.hit_rate, rates.series) == (None, None, [])
    rates.add(Sample(0.0, 5, 100, 50))
    assert (rates.requests_per_s, rates.hit_rate, rates.series) == (None, None, [])


def test_a_rate_is_of_the_last_ten_seconds_and_the_hit_rate_of_the_window() -> None:
    rates = Rates()
    requests = prompt = cached = 0
    for second in range(WINDOW + 30):
        late = second > WINDOW + 19
        requests += 20 if late else 2
        prompt += 100
        cached += 100 if second >= 60 else 0
        rates.add(Sample(float(second), requests, prompt, cached))
    assert rates.requests_per_s == pytest.approx(20)
    assert rates.hit_rate == pytest.approx(30 / 60)
    assert len(rates.series) == WINDOW
    assert rates.series[-1] == pytest.approx(20)


def test_counters_that_go_back_with_a_replica_are_no_negative_rate() -> None:
    rates = Rates()
    rates.add(Sample(0.0, 10, 1000, 900))
    rates.add(Sample(1.0, 10, 200, 100))
    assert rates.requests_per_s == 0
    assert rates.hit_rate is None
