"""The judgement's bars, of whatever was run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.judgement import POLICIES, RECORDED, SYNTHETIC, Row, Runs, recorded_bars, synthetic_bars

FIGURES = (
    *("excess_mean_s", "ttft_p99_s", "ttft_p50_s", "tokens_per_s", "hit_total", "inflight_max_over_mean"),
    *("moved_share", "kv_lost_moves_to_new", "resident_sessions"),
)


def made(names: Sequence[str], labels: Sequence[str]) -> Runs:
    """Runs in which all policies are equal."""
    rows: list[Row] = [
        {"name": name, "label": label, "seed": seed, **dict.fromkeys(FIGURES, 1.0)}
        for name in names
        for label in labels
        for seed in (1, 2)
    ]
    return Runs(rows)


def told(lines: list[str]) -> tuple[list[str], list[str]]:
    """Bars, and what was left out."""
    return [line for line in lines[2:] if line.startswith("|")], [line for line in lines if line.startswith("- ")]


def test_of_all_runs_no_bar_is_left_out() -> None:
    synthetic, left_out = told(synthetic_bars(made(SYNTHETIC, POLICIES)))
    assert (len(synthetic), left_out) == (31, [])
    recorded, left_out = told(recorded_bars(made(RECORDED, POLICIES)))
    assert (len(recorded), left_out) == (28, [])


@pytest.mark.parametrize("names", [SYNTHETIC, SYNTHETIC[:1], ("nohost80",), ("routers4",)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, len(POLICIES)])
def test_bars_of_what_was_not_run_are_left_out_and_told(names: Sequence[str], count: int) -> None:
    bars, left_out = told(synthetic_bars(made(names, POLICIES[:count])))
    assert len(bars) + len(left_out) == 31
    assert left_out or (names == SYNTHETIC and count == len(POLICIES))
    if "r80" not in names:
        assert "- turns of main threads that moved, r80: without r80" in left_out


def test_recorded_bars_against_what_was_not_run_are_told() -> None:
    bars, left_out = told(recorded_bars(made(("int4-long",), ("session_affinity", "sticky"))))
    assert [bar.split("|")[1].strip() for bar in bars] == ["p99 / sticky", "excess mean / sticky"]
    assert left_out == [
        f"- p99 / {peer}, all: without {peer}" for peer in ("prefix_aware", "dual_choice", "kv_cost", "weighted_score")
    ]
