"""Numbers for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import units


@pytest.mark.parametrize(("count", "told"), [(0, "0 requests"), (1, "1 request"), (2, "2 requests")])
def test_what_is_counted_agrees_with_its_number(count: int, told: str) -> None:
    assert units.counted(count, "request") == told


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 k"),
        (12_345, "12.3 k"),
        (999_499, "999 k"),
        (999_999, "1.00 M"),
        (2.5e9, "2.50 G"),
    ],
)
def test_tokens(count: float, told: str) -> None:
    assert units.tokens(count) == told


@given(st.integers(0, 10**14))
def test_tokens_are_told_to_three_figures(count: int) -> None:
    number, _, unit = units.tokens(count).partition(" ")
    assert float(number) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[unit] == pytest.approx(count, rel=0.0051, abs=0.5)


@pytest.mark.parametrize(("value", "told"), [(0.0, "0 ms"), (0.0994, "99 ms"), (0.0995, "0.1 s"), (61.04, "61.0 s")])
def test_seconds(value: float, told: str) -> None:
    assert units.seconds(value) == told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.9, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_duration(value: float, told: str) -> None:
    assert units.duration(value) == told


@pytest.mark.parametrize(
    ("share", "told"), [(0, "0 %"), (0.934, "93.4 %"), (0.9999, "99.9 %"), (1, "100 %"), (1.02, "102 %")]
)
def test_percent(share: float, told: str) -> None:
    assert units.percent(share) == told
