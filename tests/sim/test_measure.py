"""Figures by hand."""

from __future__ import annotations

import pytest

from sim.measure import Measure, Served, percentile


def test_percentiles() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([0.0, 10.0], 0.25) == 2.5
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0


def test_spread() -> None:
    """Variance over replicas, averaged over seconds, over the mean; and the fullest in a window over the mean."""
    measure = Measure(10.0, 100.0)
    measure.sample(9.0, [100, 0], 1)  # before its time
    measure.sample(10.0, [2, 4], 6)  # variance 1, mean 3
    measure.sample(11.0, [1, 1], 2)  # variance 0, mean 1
    result = measure.result()
    assert result["inflight_dispersion"] == pytest.approx(0.5 / 2)
    assert result["inflight_mean"] == 2.0
    assert result["running_mean"] == 2.0
    assert result["inflight_max_over_mean"] == pytest.approx(5 / 4)
    assert measure.result() == result


def test_history_is_kept_every_ten_seconds() -> None:
    measure = Measure(10.0, 100.0)
    for second in range(25):
        measure.remember(float(second), ["a"], [second])
    assert measure.history == [(0.0, {"a": 0}), (10.0, {"a": 10}), (20.0, {"a": 20})]


def served(arrived: float, first: float | None, finished: float | None, **other: float) -> Served:
    made = Served("x", arrived, True, 0.5, 1000, 11)
    made.first_token, made.finished = first, finished
    for name, value in other.items():
        setattr(made, name, value)
    return made


REQUESTS = [
    served(50.0, 51.0, 52.0),  # before its time
    served(100.0, 101.0, 103.0, cached_tokens=600, host_tokens=100),
    served(110.0, 110.5, 111.5, cached_tokens=200, elsewhere_tokens=300, evicted_tokens=100),
    served(120.0, None, None, left=122.0),  # counts with its patience
    served(190.0, None, None),  # counts with its age
]


@pytest.mark.parametrize("closing", [(), (0, 1, 2, 3), (3, 1), (2, 0, 1)], ids=str)
def test_times_and_tokens(closing: tuple[int, ...]) -> None:
    """Whatever has ended, and in whatever order."""
    measure = Measure(100.0, 200.0)
    for request in REQUESTS:
        request.closed = False
        measure.begin(request)
    for index in closing:
        measure.close(REQUESTS[index])
    result = measure.result()
    assert (result["requests"], result["unserved"]) == (4, 2)
    assert result["ttft_p50_s"] == 1.5
    assert result["ttft_mean_s"] == pytest.approx((1.0 + 0.5 + 2.0 + 10.0) / 4, abs=1e-4)
    assert result["excess_mean_s"] == pytest.approx((0.5 + 0.0 + 1.5 + 9.5) / 4, abs=1e-4)
    assert result["e2e_p50_s"] == pytest.approx(2.25)
    assert result["tpot_p50_s"] == pytest.approx(0.15)
    assert result["tokens_per_s"] == round(2 * 1011 / 100)
    assert (result["hit_total"], result["hit_gpu"]) == (0.4, 0.35)
    assert (result["regretted_prefill_share"], result["evicted_prefill_share"]) == (0.15, 0.05)
    assert measure.waits == [0.5, 1.0, 2.0, 10.0]
    whole = Measure(100.0, 200.0)
    for request in REQUESTS:
        whole.begin(request)
    assert result["digest"] == whole.result()["digest"]


def test_closed_requests_are_not_kept_unless_asked_for() -> None:
    for keep in (False, True):
        measure = Measure(0.0, 100.0)
        measure.keep = keep
        for second in range(50):
            request = served(float(second), second + 0.5, second + 1.0)
            measure.begin(request)
            measure.close(request)
        assert len(measure.served) == (50 if keep else 0)
        assert measure.result()["requests"] == 50
