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
SHAPES: dict[str, dict[str, int]] = {
    "unified": {},
    "11 warm, 5 cold": {"warm": 11, "cold": 5},
    "10 warm, 6 cold": {"warm": 10, "cold": 6},
    "10 prefill, 6 decode": {"prefill": 10, "decode": 6},
    "5 warm, 5 cold, 6 decode": {"warm": 5, "cold": 5, "decode": 6},
    "4 warm, 6 cold, 6 decode": {"warm": 4, "cold": 6, "decode": 6},
}
"""Replicas of each role, of 16. 10 + 6 is the best of 8 + 8 to 12 + 4 for prefill and decode."""
YARDSTICKS = {
    "unified": ("11 warm, 5 cold", "10 warm, 6 cold"),
    "10 prefill, 6 decode": ("5 warm, 5 cold, 6 decode", "4 warm, 6 cold, 6 decode"),
}
"""What each is compared with: the better of those."""
MACHINE = "kimi-nvfp4-tp4-fp8"
OBJECTIVES: dict[str, dict[str, float]] = {
    "TTFT p99 of all within 12 s": {"ttft_p99_s": 12.0},
    "of warm ones within 8 s, of cold ones within 20 s": {"warm_p99_s": 8.0, "cold_p99_s": 20.0},
    "of warm ones within 5 s, of cold ones within 20 s": {"warm_p99_s": 5.0, "cold_p99_s": 20.0},
}
POLICIES: dict[str, Candidate] = {"session_affinity": AFFINITY, "rendezvous": HASH}


def _run(policy: Candidate, live: int, shape: dict[str, int]) -> Run:
    if not shape:
        return Run(find("claim-cpd", full=live / REPLICAS), policy)
    fleet = [{"name": role, "role": role, "machine": MACHINE, "count": count} for role, count in shape.items()]
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
        f"{name}/{shape}/{live}": _run(policy, live, counts)
        for name, policy in POLICIES.items()
        for shape, counts in SHAPES.items()
        for live in LIVE
    }
    found = measure(setting, runs)

    def most(name: str, shape: str, objective: dict[str, float]) -> list[float]:
        """Requests a second that are sustained, for each seed."""
        by_seed = zip(*(found[f"{name}/{shape}/{live}"] for live in LIVE), strict=True)
        return [sustained(rows, objective) for rows in by_seed]

    lines, details = [], [["policy", "objective", *SHAPES]]
    for what, objective in OBJECTIVES.items():
        for name in POLICIES:
            rates = {shape: most(name, shape, objective) for shape in SHAPES}
            for yardstick, apart in YARDSTICKS.items():
                best = max(apart, key=lambda shape: estimate(rates[shape]).mean)
                lines.append(
                    Line(
                        f"requests/s, {what}: {name}, {best} over {yardstick}",
                        "1.35 to 1.40",
                        times(rates[best], rates[yardstick]),
                        1.3,
                        1.5,
                        1.0,
                    )
                )
            details.append([name, what, *(str(estimate(rates[shape])) for shape in SHAPES)])
    details.append([""] * len(details[0]))
    details.append(["policy", "TTFT p99 at 72 sessions", *SHAPES])
    for name in POLICIES:
        for what, key in (("warm", "warm_p99_s"), ("cold", "cold_p99_s")):
            cells = [str(estimate(values(found[f"{name}/{shape}/72"], key))) for shape in SHAPES]
            details.append([name, f"{what} requests, s", *cells])
    return Claim("cpd: cold prefills kept apart from warm ones (row 12)", lines, details)
