"""Times against the tables they come from, and against what the study of these tables found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import hardware
from sim.hardware import CHUNK_TOKENS, DEFAULT_PRESET, PRESETS

NAMES = list(PRESETS)


@pytest.mark.parametrize("name", NAMES)
def test_prefill_fits_the_table(name: str) -> None:
    """On average within 6 %, nowhere further off than 19 % (short prompts: 512 tokens too low, 256 too high)."""
    fit = hardware.load(name).prefill
    rows = hardware.prefill_rows(PRESETS[name].key)
    assert len(rows) == 42
    errors = [abs(fit.chunk_seconds(int(new), int(prefix)) / seconds - 1) for new, prefix, seconds in rows]
    assert sum(errors) / len(errors) < 0.06
    assert max(errors) < 0.19


@pytest.mark.parametrize("name", NAMES)
def test_decode_is_the_table(name: str) -> None:
    decode = hardware.load(name).decode
    rows = hardware.decode_rows(PRESETS[name].key)
    assert len(rows) == 36
    for context, batch, seconds in rows:
        assert decode.step_seconds(int(batch), context) == pytest.approx(seconds)


def test_the_studys_coefficients() -> None:
    """INT4, TP4, BF16: 54.2 ms + 0.02534 ms n + 9.53e-7 ms n p + 6.46e-7 ms n^2 / 2."""
    fit = hardware.load().prefill
    assert fit.a == pytest.approx(0.0542, rel=0.001)
    assert fit.b == pytest.approx(2.534e-5, rel=0.001)
    assert fit.c == pytest.approx(9.53e-10, rel=0.001)
    assert fit.d == pytest.approx(6.46e-10, rel=0.001)


@pytest.mark.parametrize(
    ("name", "cold", "resident"),
    [("kimi-int4-tp4-bf16", 7.9, 0.137), ("kimi-int4-tp4-fp8", 6.8, 0.122), ("kimi-nvfp4-tp4-fp8", 5.5, 0.085)],
)
def test_the_studys_prompts(name: str, cold: float, resident: float) -> None:
    """100,000 cold tokens, and 700 new ones on 98,000 resident."""
    fit = hardware.load(name).prefill
    assert fit.seconds(100_000, 0) == pytest.approx(cold, rel=0.015)
    assert fit.seconds(700, 98_000) == pytest.approx(resident, rel=0.015)


def test_speculation_divides_the_step() -> None:
    times = hardware.load()
    assert times.token_seconds(4, 100_000) == pytest.approx(0.016128 / 2.3)


def test_nothing_new_takes_no_time() -> None:
    assert hardware.load().prefill.seconds(0, 5000) == 0.0


@given(st.integers(1, 64), st.integers(1, 260_000), st.integers(1, 50_000))
def test_decode_never_gets_faster_with_context(batch: int, context: int, more: int) -> None:
    decode = hardware.load(DEFAULT_PRESET).decode
    assert 0 < decode.step_seconds(batch, context) <= decode.step_seconds(batch, context + more) * 1.006


@given(st.integers(1, 60_000), st.integers(0, 200_000))
def test_prefill_is_the_sum_of_its_chunks(new: int, prefix: int) -> None:
    fit = hardware.load().prefill
    first = min(new, CHUNK_TOKENS)
    rest = fit.seconds(new - first, prefix + first)
    assert fit.seconds(new, prefix) == pytest.approx(fit.chunk_seconds(first, prefix) + rest)


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="no hardware preset 'h100'; known: kimi-int4-tp4-bf16, "):
        hardware.load("h100")
