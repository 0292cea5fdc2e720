"""The judgement of the policies: all of them over all scenarios, on fresh seeds, and the bars set for them.

    tune        each policy that has parameters, several values of each, on seeds 1 to 3 and four scenarios. TUNED below
                holds the outcome: peers get the same effort as our own policy.
    synthetic   the scenarios of the placement study's synthetic sessions, and its bars (section 6 of that study)
    recorded    recorded Claude Code sessions at 30 to 95 % of four fleets' capacity, with subagents, forks, long
                pauses, scale-out, a crash, a slow replica and lost state; the bars of the study on real sessions

Prints Markdown; `--output` keeps each run as a JSON line, `--input` makes the page from kept runs. Ratios are geometric
means over seeds paired with each other, with 95 % intervals (Student's t over seeds).

    python -m benchmarks.judgement synthetic --seeds 81..88 --jobs 2 --output runs.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

from benchmarks.study import STAR
from sim import jobs, scenario_file
from sim.results import estimate

Row = dict[str, Any]

SYNTHETIC = (
    *("r30", "r60", "r80", "r95", "nohost80", "forkheavy", "nofork80", "burst80", "skew80", "fp8_r80", "N8", "N64"),
    *("N50x250", "scaleout", "scalein", "crash", "lost", "routers4", "routers4-lost", "routers4-alone"),
)
FLEETS = ("int4", "fp8", "int4-nohost", "fp8-nohost")
LOADS = (0.3, 0.6, 0.8, 0.95)
RECORDED = (
    *(f"{fleet}@{load}" for fleet in FLEETS for load in LOADS),
    *(f"{fleet}-{kind}" for fleet in FLEETS for kind in ("spawn", "fork", "scaleout")),
    *("int4-long", "int4-crash", "int4-slow", "int4-lost"),
)

TUNED = (
    *("prefix_aware:balance_abs_threshold=16", "dual_choice:ttft_slo_s=2", "weighted_score:queue_scorer=1"),
    *("kv_cost:prefill_load_scale=20:router_ttl_secs=600", "weighted_score:prefix_cache_scorer=6"),
    "kv_cost:prefill_load_scale=20:router_ttl_secs=1800",
)
"""Peers beside their defaults: the best by `tune`, and the last two as the placement study weighed them."""
DEFAULTS = (
    *(STAR, "sticky", "prefix_aware", "dual_choice", "kv_cost", "weighted_score", "bounded_load", "rendezvous"),
    *("consistent_hash", "power_of_two", "least_loaded", "round_robin", "random"),
)
POLICIES = (*DEFAULTS, *TUNED)
INFORMED = ("dual_choice", "kv_cost", "weighted_score")
"""Those that see residency and load."""

GRID = {
    STAR: ("hysteresis_s=0.3", "hysteresis_s=4", "gamma=1", "gamma=0.25", "beta=0.5", "theta_s=8", "spread_s=0.3"),
    "prefix_aware": (
        "balance_abs_threshold=8",
        "balance_abs_threshold=16",
        "cache_threshold=0.5",
        "cache_threshold=0.1",
    ),
    "dual_choice": ("ttft_slo_s=1", "ttft_slo_s=2", "ttft_slo_s=10", "ttft_slo_s=20"),
    "kv_cost": tuple(
        f"prefill_load_scale={scale}:router_ttl_secs={ttl}" for scale in (1, 5, 20, 50) for ttl in (600, 1800)
    ),
    "weighted_score": ("prefix_cache_scorer=6", "prefix_cache_scorer=12", "queue_scorer=4", "queue_scorer=1"),
    "bounded_load": ("hash_balance_factor=110", "hash_balance_factor=150", "hash_balance_factor=200"),
}
TUNING = ("int4@0.8", "fp8-nohost@0.8", "r80", "nohost80")

FIGURES = (
    ("excess_mean_s", "excess TTFT, mean", True),
    ("ttft_p99_s", "TTFT p99", True),
    ("ttft_p50_s", "TTFT p50", True),
    ("tpot_p99_s", "TPOT p99", True),
    ("tokens_per_s", "tokens/s", False),
)


def job(name: str, candidate: jobs.Candidate, seed: int) -> jobs.Job:
    """`name` is a scenario, or `scenario@load`."""
    scenario, _, load = name.partition("@")
    return jobs.Job(scenario_file.find(scenario, {"load": float(load)} if load else {}), candidate, seed)


def runs(names: Sequence[str], policies: Sequence[str], seeds: Sequence[int], processes: int) -> Iterator[Row]:
    """One row for each run."""
    candidates = [jobs.candidates(policy)[0] for policy in policies]
    labels = [(name, c.label) for name in names for _ in seeds for c in candidates]
    todo = [job(name, candidate, seed) for name in names for seed in seeds for candidate in candidates]
    for (name, label), result in zip(labels, jobs.run_all(jobs.run, todo, processes), strict=True):
        yield {**result.row(), "name": name, "label": label}


class Runs:
    """Rows by scenario, policy and seed."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {(row["name"], row["label"], row["seed"]): row for row in rows}
        self.names = tuple(dict.fromkeys(name for name, _, _ in self._rows))
        self.labels = tuple(dict.fromkeys(label for _, label, _ in self._rows))
        self.seeds = tuple(dict.fromkeys(seed for _, _, seed in self._rows))

    def values(self, name: str, label: str, key: str) -> list[float]:
        """In the order of seeds."""
        return [float(self._rows[name, label, seed][key]) for seed in self.seeds]

    def ratio(self, names: Sequence[str], label: str, base: str, key: str, base_name: str = "") -> tuple[float, float]:
        """`label` over `base`: the geometric mean, and its 95 % interval as a factor to multiply or divide by."""
        by_seed = []
        for at, _ in enumerate(self.seeds):
            logs = [
                log(max(self.values(n, label, key)[at], 1e-3) / max(self.values(base_name or n, base, key)[at], 1e-3))
                for n in names
            ]
            by_seed.append(sum(logs) / len(logs))
        found = estimate(by_seed)
        return exp(found.mean), exp(found.high - found.mean)

    def best(self, names: Sequence[str], labels: Sequence[str], key: str, *, least: bool = True) -> str:
        """Whose geometric mean is best."""
        scored = [
            (sum(log(max(v, 1e-3)) for n in names for v in self.values(n, label, key)), label) for label in labels
        ]
        return (min if least else max)(scored)[1]

    def mean(self, name: str, label: str, key: str) -> float:
        values = self.values(name, label, key)
        return sum(values) / len(values)


def tables(data: Runs) -> Iterator[str]:
    """Each policy against ours over all scenarios, and the figures themselves by scenario."""
    yield "Ratios to `session_affinity`, geometric means over all these scenarios; above 1 is worse, but for tokens/s."
    yield ""
    yield "| policy | " + " | ".join(title for _, title, _ in FIGURES) + " |"
    yield "|---" * (len(FIGURES) + 1) + "|"
    for label in data.labels:
        cells = []
        for key, _, _ in FIGURES:
            value, factor = data.ratio(data.names, label, STAR, key)
            cells.append("1" if label == STAR else f"{value:.3g} ({value / factor:.3g} to {value * factor:.3g})")
        yield f"| `{label}` | " + " | ".join(cells) + " |"
    for key, title in (("ttft_p99_s", "TTFT p99, seconds"), ("excess_mean_s", "Excess TTFT, mean, seconds")):
        yield ""
        yield f"{title}, means over seeds:"
        yield ""
        yield "| policy | " + " | ".join(data.names) + " |"
        yield "|---" * (len(data.names) + 1) + "|"
        for label in data.labels:
            yield f"| `{label}` | " + " | ".join(f"{data.mean(name, label, key):.3g}" for name in data.names) + " |"


class Bars:
    """Lines of the table of bars, and which bars were left out."""

    def __init__(self, data: Runs) -> None:
        self._data = data
        self._lines = ["| bar | scenario | wanted | seen | met |", "|---|---|---|---|---|"]
        self._left_out: list[str] = []

    @property
    def lines(self) -> list[str]:
        told = ["", "Left out, as what they are about was not run:", ""] if self._left_out else []
        return [*self._lines, *told, *self._left_out]

    def can_be(self, what: str, names: Sequence[str], labels: Sequence[str]) -> bool:
        """Whether all scenarios and policies of a bar were run. If not, it is left out, and that is told."""
        missing = [name for name in names if name not in self._data.names]
        missing += [label for label in labels if label not in self._data.labels]
        if missing:
            self._left_out.append(f"- {what}, {' and '.join(names) or 'all'}: without {', '.join(missing)}")
        return not missing

    def add(self, what: str, where: str, wanted: str, seen: str, met: bool) -> None:
        self._lines.append(f"| {what} | {where} | {wanted} | {seen} | {'yes' if met else '**no**'} |")

    def at_most(self, what: str, where: str, bound: float, ratio: tuple[float, float], *, whole: bool = False) -> None:
        """With `whole`, all of the interval must be below."""
        value, factor = ratio
        seen = f"{value:.3g} ({value / factor:.3g} to {value * factor:.3g})"
        self.add(what, where, f"≤ {bound:g}", seen, (value * factor if whole else value) <= bound)


def synthetic_bars(data: Runs) -> list[str]:
    """Section 6 of the placement study, fair column. The upper end of the interval counts for the first five."""
    bars = Bars(data)
    hrw, key = "rendezvous", "ttft_p99_s"

    def judge(what: str, name: str, bound: float, peer: str, figure: str, *, whole: bool, base_name: str = "") -> None:
        if bars.can_be(what, [name, base_name] if base_name else [name], [STAR, peer]):
            bars.at_most(what, name, bound, data.ratio([name], STAR, peer, figure, base_name), whole=whole)

    judge("p99 / rendezvous", "r80", 0.50, hrw, key, whole=True)
    for name in ("r60", "r95", "burst80", "skew80", "forkheavy", "scaleout", "scalein", "crash"):
        judge("p99 / rendezvous", name, 0.55, hrw, key, whole=name != "crash")
    judge("p99 / rendezvous", "nohost80", 0.35, hrw, key, whole=True)
    judge("excess mean / rendezvous", "r80", 0.30, hrw, "excess_mean_s", whole=True)
    for peer, bound in (("bounded_load", 0.60), ("weighted_score", 0.75), ("kv_cost", 0.60)):
        judge(f"p99 / {peer}", "r80", bound, peer, key, whole=True)
    known = ("sticky", "prefix_aware", "dual_choice")
    keepers = [peer for peer in known if peer in data.labels]
    for name in ("r80", "r95", "burst80", "scaleout"):
        for figure, title, bound in (("ttft_p99_s", "p99", 1.05), ("excess_mean_s", "excess mean", 0.95)):
            what = f"{title} / best of {', '.join(keepers or known)}"
            if bars.can_be(what, [name], [STAR] if keepers else [STAR, *known]):
                rival = data.best([name], keepers, figure)
                bars.at_most(f"{what} ({rival})", name, bound, data.ratio([name], STAR, rival, figure))
    others = [label for label in data.labels if label != STAR]
    against = [STAR] if others else [STAR, "any other policy"]
    if bars.can_be("p50 / best of all", [], against):
        figure = "ttft_p50_s"
        worst = max(data.names, key=lambda n: data.ratio([n], STAR, data.best([n], others, figure), figure)[0])
        rival = data.best([worst], others, figure)
        bars.at_most(
            f"p50 / best of all ({rival})", f"worst of all: {worst}", 1.08, data.ratio([worst], STAR, rival, figure)
        )
    if bars.can_be("tokens/s / rendezvous", ["r80"], [STAR, hrw]):
        value, factor = data.ratio(["r80"], STAR, hrw, "tokens_per_s")
        bars.add("tokens/s / rendezvous", "r80", "≥ 1.08", f"{value:.3g} (*/ {factor:.3g})", value >= 1.08)
    if bars.can_be("tokens/s / best of all", [], against):
        worst = min(
            data.names,
            key=lambda n: data.ratio([n], STAR, data.best([n], others, "tokens_per_s", least=False), "tokens_per_s")[0],
        )
        rival = data.best([worst], others, "tokens_per_s", least=False)
        value, factor = data.ratio([worst], STAR, rival, "tokens_per_s")
        bars.add(
            f"tokens/s / best of all ({rival})",
            f"worst of all: {worst}",
            "≥ 0.98",
            f"{value:.3g} (*/ {factor:.3g})",
            value >= 0.98,
        )
    hosted = [name for name in data.names if "nohost" not in name]
    if bars.can_be("hit rate / sticky", [] if hosted else ["any with a host tier"], [STAR, "sticky"]):
        worst = min(hosted, key=lambda n: data.ratio([n], STAR, "sticky", "hit_total")[0])
        value, _ = data.ratio([worst], STAR, "sticky", "hit_total")
        bars.add("hit rate / sticky", f"worst of all: {worst}", "≥ 0.975", f"{value:.3g}", value >= 0.975)
    figure = "inflight_max_over_mean"
    judge(f"in flight, fullest over mean / {hrw}", "N50x250", 0.75, hrw, figure, whole=False)
    if bars.can_be("resident sessions sent to a new replica", ["scaleout"], [STAR]):
        lost = sum(data.values("scaleout", STAR, "kv_lost_moves_to_new"))
        resident = sum(data.values("scaleout", STAR, "resident_sessions"))
        bars.add("resident sessions sent to a new replica", "scaleout", "0", f"{lost:g} of {resident:g}", lost == 0)
    if bars.can_be("turns of main threads that moved", ["r80"], [STAR]):
        moved = data.mean("r80", STAR, "moved_share")
        bars.add("turns of main threads that moved", "r80", "≤ 0.04", f"{moved:.3g}", moved <= 0.04)
    judge("p99 of four routers / one", "routers4", 1.4, STAR, key, whole=False, base_name="r80")
    judge("p99 of four that share nothing / four with rendezvous", "routers4-alone", 0.6, hrw, key, whole=False)
    return bars.lines


def recorded_bars(data: Runs) -> list[str]:
    """p99 at most 0.75 of sticky's and SGLang's default's, and 1.05 of every policy's that sees residency and load;
    excess mean at most 0.75 of all: over all scenarios, and how many of them meet it one by one."""
    bars = Bars(data)
    key = "ttft_p99_s"

    def judge(what: str, rivals: Sequence[str], figure: str, bound: float) -> None:
        for rival in rivals:
            if not bars.can_be(f"{what} / {rival}", [], [STAR, rival]):
                continue
            each = [data.ratio([name], STAR, rival, figure)[0] for name in data.names]
            where = f"all; {sum(value <= bound for value in each)} of {len(each)} one by one"
            bars.at_most(f"{what} / {rival}", where, bound, data.ratio(data.names, STAR, rival, figure))

    judge("p99", ("sticky", "prefix_aware"), key, 0.75)
    informed = [label for label in data.labels if label.partition(":")[0] in INFORMED]
    judge("p99", list(dict.fromkeys((*informed, *INFORMED))), key, 1.05)
    judge("excess mean", [label for label in data.labels if label != STAR], "excess_mean_s", 0.75)
    return bars.lines


def tune(processes: int) -> Iterator[str]:
    """What each variant does against its policy's defaults."""
    for policy, variants in GRID.items():
        labels = [policy, *(f"{policy}:{variant}" for variant in variants)]
        data = Runs(runs(TUNING, labels, (1, 2, 3), processes))
        yield f"| {policy} | excess mean | p99 |"
        yield "|---|---|---|"
        for label in data.labels:
            cells = [f"{data.ratio(data.names, label, policy, key)[0]:.3f}" for key in ("excess_mean_s", "ttft_p99_s")]
            yield f"| `{label}` | " + " | ".join(cells) + " |"
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "synthetic", "recorded"))
    parser.add_argument("--seeds", default="81..88", help="first..last")
    parser.add_argument("--policies", default=",".join(POLICIES), help="separated by commas, with ours for a page")
    parser.add_argument("--scenarios", default="", help="separated by commas, instead of all")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--output", type=Path, help="file that gets every run as a JSON line")
    parser.add_argument("--input", type=Path, help="runs kept before; nothing is run")
    given = parser.parse_args()
    if given.what == "tune":
        for line in tune(given.jobs):
            print(line, flush=True)
        return
    names = tuple(given.scenarios.split(",")) if given.scenarios else {"synthetic": SYNTHETIC}.get(given.what, RECORDED)
    if given.input:
        rows = [json.loads(line) for line in given.input.read_text().splitlines()]
    else:
        first, last = map(int, given.seeds.split(".."))
        rows = []
        for row in runs(names, given.policies.split(","), range(first, last + 1), given.jobs):
            rows.append(row)
            if given.output:
                with given.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    data = Runs(rows)
    if STAR not in data.labels:
        print(f"No page: {STAR}, with which all others are compared, was not run.")
        return
    for line in tables(data):
        print(line)
    print()
    print("\n".join((synthetic_bars if given.what == "synthetic" else recorded_bars)(data)))


if __name__ == "__main__":
    main()
