"""Results of many runs as people and programs read them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, floor, log, log10, sqrt
from typing import TextIO

from sim.figures import FIGURES, Figure
from sim.jobs import Result

_STUDENT = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13),
    *(2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)
"""Student's t for a two-sided interval of 95 % with 1 to 30 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval; no interval from a single value."""

    mean: float
    low: float
    high: float
    values: int

    def __str__(self) -> str:
        if self.values < 2:
            return f"{self.mean:,.0f}" if self.mean == round(self.mean) else _number(self.mean)
        return f"{_number(self.mean)} ± {_number(self.high - self.mean, 2)}"


def estimate(values: Sequence[float]) -> Estimate:
    """Of independent values. ValueError when there is none."""
    if not values:
        raise ValueError("an estimate needs at least one value")
    mean = sum(values) / len(values)
    freedom = len(values) - 1
    if not freedom:
        return Estimate(mean, mean, mean, 1)
    deviation = sqrt(sum((value - mean) ** 2 for value in values) / freedom)
    student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96
    width = student * deviation / sqrt(len(values))
    return Estimate(mean, mean - width, mean + width, len(values))


def ratio(values: Sequence[float], base: Sequence[float]) -> Estimate | None:
    """Geometric mean of paired ratios; None when a value is 0, or less, which has no logarithm."""
    if min(*values, *base) <= 0:
        return None
    logs = estimate([log(value / below) for value, below in zip(values, base, strict=True)])
    return Estimate(exp(logs.mean), exp(logs.low), exp(logs.high), logs.values)


def by_candidate(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Grouped by policy, in order of appearance, each in order of seeds."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.job.candidate.label, []).append(result)
    return {label: sorted(group, key=lambda each: each.job.seed) for label, group in found.items()}


def by_scenario(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Grouped by scenario and what was varied in it, in order of appearance."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(heading(result), []).append(result)
    return found


def heading(result: Result) -> str:
    """What the runs of a scenario have in common."""
    scenario = result.job.scenario
    varied = "".join(f", {key} = {value}" for key, value in scenario.varied)
    return f"{scenario.name}{varied}: {scenario.replicas} replicas, {scenario.demand}"


def tables(results: Sequence[Result]) -> Iterator[tuple[str, list[list[str]]]]:
    """For each scenario a title and a table: means, 95 % intervals over seeds, and ratios to the first policy."""
    for title, group in by_scenario(results).items():
        named = by_candidate(group)
        seeds = [result.job.seed for result in next(iter(named.values()))]
        yield f"{title}; {'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}", list(_rows(named))


def _rows(named: dict[str, list[Result]]) -> Iterator[list[str]]:
    base = next(iter(named.values()))
    head = [""]
    for label, group in named.items():
        head += [label] if group is base else [label, "ratio"]
    yield head
    for figure in FIGURES:
        if not _shown(figure, [result for group in named.values() for result in group]):
            continue
        row = [figure.title]
        below = [result.value(figure.key) for result in base]
        for group in named.values():
            values = [result.value(figure.key) for result in group]
            row.append(str(estimate(values)))
            if group is not base:
                row.append(_ratio(ratio(values, below)))
        yield row


def _shown(figure: Figure, results: Sequence[Result]) -> bool:
    if figure.beside:
        return any(result.value(figure.key) != result.value(figure.beside) for result in results)
    return figure.always or any(result.value(figure.key) for result in results)


SWEPT = ("ttft_p50_s", "ttft_p99_s", "excess_mean_s", "tokens_per_s", "hit_total", "inflight_max_over_mean")

HELD = ("ttft_placed_p99_s", "let_in_longest_s", "sessions_served_share")
"""In a sweep, when anyone waited to be let in."""


def sweep_table(results: Sequence[Result]) -> Iterator[tuple[str, list[list[str]]]]:
    """One table: a line for each value of what was varied and each policy, with means and 95 % intervals."""
    seeds = dict.fromkeys(result.job.seed for result in results)
    yield f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}", list(_sweep_rows(results))


def _sweep_rows(results: Sequence[Result]) -> Iterator[list[str]]:
    titles = {figure.key: figure.title for figure in FIGURES}
    varied = [key for key, _ in results[0].job.scenario.varied]
    swept = (*SWEPT, *HELD) if any(result.value("let_in_longest_s") for result in results) else SWEPT
    yield ["scenario", *varied, "policy", *(titles[key] for key in swept)]
    for group in by_scenario(results).values():
        scenario = group[0].job.scenario
        for label, runs in by_candidate(group).items():
            figures = [str(estimate([run.value(key) for run in runs])) for key in swept]
            yield [scenario.name, *(str(value) for _, value in scenario.varied), label, *figures]


def _ratio(found: Estimate | None) -> str:
    if found is None:
        return "-"
    if found.values < 2:
        return _number(found.mean)
    return f"{_number(found.mean)} ({_number(found.low)} to {_number(found.high)})"


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A Markdown table whose columns stand under each other; the first row is its head."""
    cells = list(rows)
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for number, row in enumerate(cells):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        if not number:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"


def _number(value: float, figures: int = 3) -> str:
    """To so many significant figures, and never with an exponent."""
    if not value:
        return "0"
    before = floor(log10(abs(value))) + 1
    return f"{value:,.{max(0, figures - before)}f}" if before > -3 else f"{value:.1g}"


def write_json(result: Result, out: TextIO) -> None:
    """One object on one line."""
    out.write(json.dumps(result.row()) + "\n")


def write_csv(results: Sequence[Result], out: TextIO) -> None:
    """With a head. What is not a number or a word is JSON."""
    rows = [result.row() for result in results]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: json.dumps(value) if isinstance(value, dict) else value for key, value in row.items()})
