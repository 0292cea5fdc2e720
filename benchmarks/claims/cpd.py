"""The claim that keeping cold prefills apart from warm ones makes more load sustainable."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from benchmarks.claims.claim import Claim, Line, times
from benchmarks.claims.play import AFFINITY, HASH, Figures, Run, Setting, find, measure, values
from sim.jobs import Candidate
from sim.results import estimate

REPLICAS = 16
LIVE = (16, 32, 48, 72, 96, 120, 144)
"""Sessions that are under way at a time."""
SPLITS = (5, 6)
"""Replicas set apart for cold prompts, of 16."""
MACHINE = "kimi-nvfp4-tp4-fp8"
OBJECTIVES: dict[str, dict[str, float]] = {
    "TTFT p99 of all within 12 s": {"ttft_p99_s": 12.0},
    "of warm ones within 8 s, of cold ones within 20 s": {"warm_p99_s": 8.0, "cold_p99_s": 20.0},
    "of warm ones within 5 s, of cold ones within 20 s": {"warm_p99_s": 5.0, "cold_p99_s": 20.0},
}
POLICIES: dict[str, Candidate] = {"session_affinity": AFFINITY, "rendezvous": HASH}


def _run(policy: Candidate, live: int, cold: int) -> Run:
    if not cold:
        return Run(find("claim-cpd", full=live / REPLICAS), policy)
    fleet = [
        {"name": "warm", "role": "warm", "machine": MACHINE, "count": REPLICAS - cold},
        {"name": "cold", "role": "cold", "machine": MACHINE, "count": cold},
    ]
    return Run(find("claim-cpd", full=live / REPLICAS, fleet=fleet), policy)


def sustained(rows: Sequence[Figures], objective: dict[str, float]) -> float:
    """Requests a second at the load where the first figure passes its objective, between two of the loads that were
    tried; the greatest that was tried when none does, the least when all do.

    `rows` are of one seed, by ascending load.
    """
    before: Figures | None = None
    for row in rows:
        late = max(_logs(row, objective))
        if late > 0.0:
            if before is None:
                return row["requests_per_s"]
            early = max(_logs(before, objective))
            share = -early / (late - early)
            return before["requests_per_s"] + share * max(0.0, row["requests_per_s"] - before["requests_per_s"])
        before = row
    return rows[-1]["requests_per_s"]


def _logs(row: Figures, objective: dict[str, float]) -> list[float]:
    """Above 0 is beyond the objective."""
    return [log(max(row[key], 1e-3) / most) for key, most in objective.items()]


def cpd(setting: Setting) -> Claim:
    """Row 12."""
    runs = {
        f"{name}/{cold}/{live}": _run(policy, live, cold)
        for name, policy in POLICIES.items()
        for cold in (0, *SPLITS)
        for live in LIVE
    }
    found = measure(setting, runs)

    def most(name: str, cold: int, objective: dict[str, float]) -> list[float]:
        """Requests a second that are sustained, for each seed."""
        by_seed = zip(*(found[f"{name}/{cold}/{live}"] for live in LIVE), strict=True)
        return [sustained(rows, objective) for rows in by_seed]

    lines, details = [], [["policy", "objective", "unified", *(f"{16 - n} warm, {n} cold" for n in SPLITS)]]
    for what, objective in OBJECTIVES.items():
        for name in POLICIES:
            rates = {cold: most(name, cold, objective) for cold in (0, *SPLITS)}
            best = max(SPLITS, key=lambda cold: estimate(rates[cold]).mean)
            lines.append(
                Line(
                    f"requests/s, {what}: {name}, {REPLICAS - best} + {best} replicas over unified",
                    "1.35 to 1.40",
                    times(rates[best], rates[0]),
                    1.3,
                    1.5,
                    1.0,
                )
            )
            details.append([name, what, *(str(estimate(rates[cold])) for cold in (0, *SPLITS))])
    details.append([""] * len(details[0]))
    details.append(["policy", "TTFT p99 at 72 sessions", "unified", *(f"{16 - n} warm, {n} cold" for n in SPLITS)])
    for name in POLICIES:
        for what, key in (("warm", "warm_p99_s"), ("cold", "cold_p99_s")):
            cells = [str(estimate(values(found[f"{name}/{cold}/72"], key))) for cold in (0, *SPLITS)]
            details.append([name, f"{what} requests, s", *cells])
    return Claim("cpd: cold prefills kept apart from warm ones (row 12)", lines, details)
