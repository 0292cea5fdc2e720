"""What is learned of an engine's speed: recovered from synthetic observations, bounded, and not led astray."""

from __future__ import annotations

from math import inf, isfinite, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.speed import (
    FACTOR_BOUNDS,
    MIN_COMPLETION,
    MIN_TOKENS,
    REFERENCE_TOKENS,
    SLOPE_BOUNDS,
    SLOPE_S,
    STALL,
    STALL_BOUNDS,
    STEP_BOUNDS,
    STEP_S,
    Speed,
)

GARBAGE_S = [0.0, -1.0, nan, inf, -inf]


def _observed(factor: float, noise: float = 0.0, times: int = 60, seed: int = 1) -> Speed:
    """After prefills of all sizes on an engine of this speed."""
    speed, true, random = Speed(), Speed(), Random(seed)
    true.factor = factor
    for _ in range(times):
        new, prefix = random.randrange(1_000, 120_000), random.randrange(0, 100_000)
        speed.observe_prefill(new, prefix, true.prefill_s(new, prefix) * random.uniform(1 - noise, 1 + noise))
    return speed


# Prefill


@pytest.mark.parametrize("factor", [0.1, 0.7, 1.0, 3.0, 40.0])
def test_the_factor_is_recovered(factor: float) -> None:
    assert _observed(factor).factor == pytest.approx(factor, rel=0.01)
    assert _observed(factor, noise=0.2).factor == pytest.approx(factor, rel=0.05)
    assert _observed(factor).prefill_s(50_000, 20_000) == pytest.approx(
        factor * Speed().prefill_s(50_000, 20_000), rel=0.01
    )


def test_a_few_observations_are_enough_to_tell_a_slow_engine_from_a_fast_one() -> None:
    assert _observed(3.0, times=4).factor == pytest.approx(3.0, rel=0.15)
    assert _observed(20.0, times=10).factor > 10.0


@pytest.mark.parametrize("times", [0, 1, 20])
@pytest.mark.parametrize("stray", [100.0, 0.01])
def test_one_answer_moves_it_twofold_at_most(times: int, stray: float) -> None:
    """A first answer is late when the engine warms up: that must not keep away those that would show better."""
    speed = _observed(1.0, times=times)
    speed.observe_prefill(50_000, 0, stray * speed.prefill_s(50_000, 0))
    assert 0.499 <= speed.factor <= 2.001


def test_an_engine_that_changes_is_followed() -> None:
    speed, true = _observed(1.0), Speed()
    true.factor = 4.0
    for _ in range(40):
        speed.observe_prefill(50_000, 0, true.prefill_s(50_000, 0))
    assert speed.factor == pytest.approx(4.0, rel=0.05)


def test_one_stray_observation_among_many_moves_it_little() -> None:
    speed = _observed(1.0)
    speed.observe_prefill(50_000, 0, 100.0 * speed.prefill_s(50_000, 0))
    assert 1.0 < speed.factor < 1.7


def test_a_longer_prompt_and_a_longer_prefix_take_longer() -> None:
    speed = Speed()
    times = [speed.prefill_s(n, p) for n, p in ((0, 0), (10_000, 0), (10_000, 90_000), (100_000, 0), (100_000, 90_000))]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


@pytest.mark.parametrize("seconds", GARBAGE_S)
def test_impossible_times_of_prefills_are_ignored(seconds: float) -> None:
    speed = _observed(2.0)
    before = (speed.factor, speed.prefills)
    speed.observe_prefill(50_000, 0, seconds)
    assert (speed.factor, speed.prefills) == before


def test_prefills_too_small_to_say_anything_are_ignored() -> None:
    speed = Speed()
    speed.observe_prefill(MIN_TOKENS - 1, 0, 60.0)
    speed.observe_prefill(-5, 0, 60.0)
    assert (speed.factor, speed.prefills) == (1.0, 0)


@given(st.lists(st.tuples(st.integers(-10, 10**9), st.integers(0, 10**9), st.floats()), max_size=40), st.floats())
def test_the_factor_stays_within_its_bounds(seen: list[tuple[int, int, float]], told: float) -> None:
    speed = Speed()
    speed.tell(told)
    for new, prefix, seconds in seen:
        speed.observe_prefill(new, prefix, seconds)
        assert FACTOR_BOUNDS[0] * 0.999 <= speed.factor <= FACTOR_BOUNDS[1] * 1.001


# What the engine says


def test_a_speed_that_is_told_is_taken_at_its_word_until_something_is_seen() -> None:
    speed = Speed()
    speed.tell(10_000.0)
    # Told speeds are meant at some context: neither for a tiny prompt nor for the longest.
    assert speed.prefill_s(REFERENCE_TOKENS, REFERENCE_TOKENS / 2) == pytest.approx(
        REFERENCE_TOKENS / 10_000.0, rel=0.1
    )
    speed.tell(20_000.0)
    twice = speed.factor
    speed.observe_prefill(50_000, 0, 9.0)
    seen = speed.factor
    assert seen != twice
    speed.tell(1.0)
    assert speed.factor == seen


@pytest.mark.parametrize("told", GARBAGE_S)
def test_an_impossible_speed_is_not_believed(told: float) -> None:
    speed = Speed()
    speed.tell(told)
    assert speed.factor == 1.0


# Decoding


def _decoded(step: float, slope: float, stall: float, noise: float = 0.0, times: int = 300) -> Speed:
    """After answers of all sizes beside neighbours of all kinds."""
    speed, random = Speed(), Random(2)
    for _ in range(times):
        tokens, batch = random.randrange(50, 2_000), random.uniform(1, 30)
        neighbours_s = random.choice([0.0, random.uniform(0.0, 30.0)])
        seconds = tokens * (step + slope * batch) + stall * neighbours_s
        speed.observe_decode(tokens, batch, neighbours_s, seconds * random.uniform(1 - noise, 1 + noise))
    return speed


@pytest.mark.parametrize("step", [0.002, 0.02])
@pytest.mark.parametrize("slope", [0.0002, 0.004])
@pytest.mark.parametrize("stall", [0.4, 1.0, 1.3])
def test_step_slope_and_stall_are_recovered(step: float, slope: float, stall: float) -> None:
    seen = _decoded(step, slope, stall).decode
    typical = step + 10 * slope
    assert seen[0] == pytest.approx(step, abs=0.1 * typical)
    assert seen[1] == pytest.approx(slope, rel=0.1, abs=0.01 * typical)
    assert seen[2] == pytest.approx(stall, rel=0.05)
    noisy = _decoded(step, slope, stall, noise=0.15).decode
    assert noisy[0] + 10 * noisy[1] == pytest.approx(typical, rel=0.15)
    assert noisy[2] == pytest.approx(stall, rel=0.25)


def test_before_anything_is_seen_there_is_a_sane_default() -> None:
    assert Speed().decode == (STEP_S, SLOPE_S, STALL)
    speed = Speed()
    speed.observe_decode(500, 4.0, 1.0, 500 * (STEP_S + 4 * SLOPE_S) + STALL)
    assert speed.decode == pytest.approx((STEP_S, SLOPE_S, STALL), rel=0.01)


def test_an_engine_whose_decoding_changes_is_followed() -> None:
    speed = _decoded(0.004, 0.001, 1.0)
    random = Random(3)
    for _ in range(500):
        tokens, batch, neighbours_s = random.randrange(50, 2_000), random.uniform(1, 30), random.uniform(0.0, 30.0)
        speed.observe_decode(tokens, batch, neighbours_s, tokens * (0.01 + 0.002 * batch) + 0.5 * neighbours_s)
    step, slope, stall = speed.decode
    assert step + 10 * slope == pytest.approx(0.03, rel=0.1)
    assert stall == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("seconds", GARBAGE_S)
def test_impossible_times_of_answers_are_ignored(seconds: float) -> None:
    speed = _decoded(0.01, 0.001, 0.7)
    before = (speed.decode, speed.decodes)
    speed.observe_decode(500, 4.0, 1.0, seconds)
    assert (speed.decode, speed.decodes) == before


def test_answers_too_short_to_say_anything_are_ignored() -> None:
    speed = Speed()
    speed.observe_decode(MIN_COMPLETION - 1, 1.0, 0.0, 60.0)
    assert (speed.decode, speed.decodes) == ((STEP_S, SLOPE_S, STALL), 0)


_answers = st.tuples(
    st.integers(-5, 10**7),
    st.floats(0.5, 1e5),
    st.floats(0, 1e6),
    st.floats(-1.0, 1e9) | st.sampled_from(GARBAGE_S),
)


@given(st.lists(_answers, max_size=30))
def test_decode_figures_stay_within_their_bounds(seen: list[tuple[int, float, float, float]]) -> None:
    speed = Speed()
    for answer in seen:
        speed.observe_decode(*answer)
        for value, bounds in zip(speed.decode, (STEP_BOUNDS, SLOPE_BOUNDS, STALL_BOUNDS), strict=True):
            assert isfinite(value)
            assert bounds[0] <= value <= bounds[1]
