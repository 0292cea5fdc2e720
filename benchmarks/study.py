"""The placement study, in the simulator: which term earns its place, and what even load costs.

    ablation     session_affinity with one parameter changed, against itself as it is by default: four fleets (INT4 and
                 FP8 KV, with and without host tier) at 30, 60, 80 and 95 % of capacity, recorded sessions
    dispersion   what a smaller variance of running requests costs: the setting of the published claims (about five
                 running on each replica, short gaps, forks), and recorded sessions at 80 %

Prints tables in Markdown; `--output` keeps each run as a JSON line. Ratios are geometric means over paired scenarios
and seeds. Deterministic, but for its own speed.

    python -m benchmarks.study ablation --seeds 41..43 --jobs 2
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sim import scenario as scenarios
from sim import scenario_file

FLEETS = ("int4", "fp8", "int4-nohost", "fp8-nohost")
STAR = "session_affinity"
Parameters = dict[str, float]
Row = dict[str, Any]

ABLATIONS: tuple[Parameters, ...] = (
    {},
    {"beta": 0.0},
    {"gamma": 0.0},
    {"beta": 0.0, "gamma": 0.0},
    {"theta_s": 0.0},
    {"hysteresis_s": 0.0},
    {"hysteresis_s": 0.3},
    {"hysteresis_s": 4.0},
    {"hysteresis_s": 1e6},
    {"grace_s": 0.0},
    {"gamma": 1.0},
    {"theta_s": 16.0},
    {"spread_s": 0.3},
    {"spread_s": 1.0},
)
SPREADS: tuple[Parameters, ...] = (
    {},
    {"hysteresis_s": 0.0},
    {"beta": 3.0},
    {"beta": 10.0},
    {"spread_s": 0.3},
    {"spread_s": 0.3, "hysteresis_s": 0.0},
    {"spread_s": 1.0},
    {"spread_s": 1.0, "hysteresis_s": 0.0},
    {"spread_s": 3.0},
    {"spread_s": 10.0},
)
FIGURES = (
    ("excess_mean_s", "excess TTFT mean s"),
    ("ttft_p50_s", "TTFT p50 s"),
    ("ttft_p99_s", "TTFT p99 s"),
    ("tpot_p99_s", "TPOT p99 s"),
    ("tokens_per_s", "tokens/s"),
    ("hit_total", "hit rate"),
    ("regretted_prefill_share", "regretted prefill"),
    ("inflight_dispersion", "dispersion"),
    ("moved_share", "moved"),
)


@dataclass(frozen=True)
class Job:
    """One run."""

    policy: str
    parameters: tuple[tuple[str, float], ...]
    scenario: str
    load: float | None
    seed: int

    @property
    def name(self) -> str:
        """The policy as the table calls it."""
        changed = ", ".join(f"{key}={value:g}" for key, value in self.parameters)
        if self.policy != STAR:
            return self.policy
        return changed or STAR


def run(job: Job) -> Row:
    """The figures of one run."""
    scenario = scenario_file.find(job.scenario, {} if job.load is None else {"load": job.load})
    about = {"policy": job.policy, "parameters": dict(job.parameters), "scenario": job.scenario}
    result = scenarios.run(scenario, job.seed, job.policy, dict(job.parameters)).measure.result()
    return {**about, "load": scenario.load, "seed": job.seed, **result}


def ratios(rows: Sequence[Row], base: Sequence[Row], key: str) -> tuple[float, float]:
    """Geometric mean of paired ratios, and the half-width of its 95 % interval as a factor minus 1."""
    paired = {(r["scenario"], r["load"], r["seed"]): r for r in base}
    logs = [log(max(r[key], 1e-4) / max(paired[r["scenario"], r["load"], r["seed"]][key], 1e-4)) for r in rows]
    mean = sum(logs) / len(logs)
    deviation = sqrt(sum((x - mean) ** 2 for x in logs) / max(1, len(logs) - 1))
    return exp(mean), exp(1.96 * deviation / sqrt(len(logs))) - 1


RATIOS = (
    ("excess mean", "excess_mean_s", ""),
    ("with host tier", "excess_mean_s", "host"),
    ("without", "excess_mean_s", "nohost"),
    ("p99", "ttft_p99_s", ""),
    ("p50", "ttft_p50_s", ""),
    ("TPOT p99", "tpot_p99_s", ""),
    ("tokens/s", "tokens_per_s", ""),
)


def ratio_table(named: dict[str, list[Row]]) -> Iterable[str]:
    """Each variant against the first."""
    yield "| variant | load | " + " | ".join(title for title, _, _ in RATIOS) + " | dispersion | moved |"
    yield "|---" * (len(RATIOS) + 4) + "|"
    base = next(iter(named.values()))
    for name, rows in named.items():
        for label, least, most in (("30 %", 0.0, 0.5), ("60-95 %", 0.5, 9.0)):
            these = [row for row in rows if least <= row["load"] < most and row["scenario"] in FLEETS]
            if not these:
                continue
            cells = []
            for _, key, tier in RATIOS:
                value, width = ratios([row for row in these if _has(row, tier)], base, key)
                cells.append(f"{value:.2f} ± {value * width:.2f}" if width else f"{value:.2f}")
            cells += [f"{mean(these, key):.3f}" for key in ("inflight_dispersion", "moved_share")]
            yield f"| {name} | {label} | " + " | ".join(cells) + " |"


def _has(row: Row, tier: str) -> bool:
    return not tier or ("nohost" in row["scenario"]) == (tier == "nohost")


def figure_table(named: dict[str, list[Row]]) -> Iterable[str]:
    """Means of each variant in each scenario."""
    yield "| scenario | policy | " + " | ".join(title for _, title in FIGURES) + " |"
    yield "|---" * (len(FIGURES) + 2) + "|"
    first = next(iter(named.values()))
    for scenario, load in dict.fromkeys((r["scenario"], r["load"]) for r in first):
        for name, rows in named.items():
            these = [r for r in rows if (r["scenario"], r["load"]) == (scenario, load)]
            cells = [f"{mean(these, key):.3g}" for key, _ in FIGURES]
            yield f"| {scenario} {load:g} | {name} | " + " | ".join(cells) + " |"


def mean(rows: Sequence[Row], key: str) -> float:
    return float(sum(row[key] for row in rows) / len(rows))


def jobs(what: str, seeds: Iterable[int]) -> list[Job]:
    """What is to be run."""
    variants: list[tuple[str, Parameters]]
    if what == "dispersion":
        variants = [(STAR, changed) for changed in SPREADS]
        settings = [("claims", None), ("int4", 0.8), ("int4-nohost", 0.8)]
    else:
        variants = [(STAR, changed) for changed in ABLATIONS]
        settings = [(name, load) for name in FLEETS for load in (0.3, 0.6, 0.8, 0.95)]
    return [
        Job(policy, tuple(changed.items()), scenario, load, seed)
        for policy, changed in variants
        for scenario, load in settings
        for seed in seeds
    ]


def main() -> None:
    cli = argparse.ArgumentParser(description="The placement study, in the simulator.")
    cli.add_argument("what", choices=("ablation", "dispersion"))
    cli.add_argument("--seeds", default="41..43", help="first..last (default: %(default)s)")
    cli.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    cli.add_argument("--output", type=Path, help="file that gets each run as a JSON line")
    args = cli.parse_args()
    first, _, last = args.seeds.partition("..")
    todo = jobs(args.what, range(int(first), int(last or first) + 1))
    named: dict[str, list[Row]] = {}
    with get_context("spawn").Pool(args.jobs) as pool:
        for job, row in zip(todo, pool.imap(run, todo, chunksize=1), strict=True):
            named.setdefault(job.name, []).append(row)
            if args.output:
                with args.output.open("a") as output:
                    output.write(json.dumps(row) + "\n")
    table = figure_table if args.what == "dispersion" else ratio_table
    print("\n".join(table(named)))


if __name__ == "__main__":
    main()
