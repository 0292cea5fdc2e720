"""The claim that a session header lifts the hit rate: fleets of which some clients name their sessions."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.claims.claim import Claim, Line, times
from benchmarks.claims.play import AFFINITY, HASH, Run, Setting, find, measure, values
from sim.jobs import Candidate
from sim.results import estimate
from sim.scenario import PAGE_TOKENS, Scenario
from sim.workload import Conversation, Population, RecordedWorkload, Workload, arrivals, load_recorded

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
LOADS = {"int4-nohost": 0.8, "int4": 0.5}
"""Without a host tier at its peak, and with one at half of what it takes."""


def recorded(scenario: Scenario, seed: int) -> Workload:
    """Recorded sessions, as the scenario has them."""
    return RecordedWorkload(load_recorded(), PAGE_TOKENS, seed)


def some_named(run: Run, workload: Workload) -> Iterator[tuple[float, Conversation]]:
    """The scenario's sessions; a share of them is named, and a balancer cannot tell what the others are."""
    scenario = run.scenario
    seconds = workload.session_seconds(scenario.equipment().hardware)
    population = Population(scenario.live, seconds, scenario.spread_s, scenario.burst_share)
    for time, index, initial in arrivals(population, workload.random("arrivals"), scenario.end):
        conversation = workload.session(index, initial=initial)
        if workload.random(f"{index}/named").random() >= run.share:
            conversation.key = None
        yield time, conversation


def affinity(setting: Setting) -> Claim:
    """Row 11."""
    runs = {
        f"{name}/{share}": Run(find(name, load=load), HASH, some_named, recorded, share)
        for name, load in LOADS.items()
        for share in SHARES
    }
    for name, load in LOADS.items():
        runs[f"{name}/session_affinity"] = Run(find(name, load=load), AFFINITY, some_named, recorded, 1.0)
        runs[f"{name}/least_loaded"] = Run(find(name, load=load), Candidate("least_loaded"))
    found = measure(setting, runs)

    def hit(name: str) -> list[float]:
        return values(found[name], "hit_total")

    gain = {
        "no client sends a header -> all do": ("int4-nohost/1.0", "int4-nohost/0.0"),
        "the same, with a host tier": ("int4/1.0", "int4/0.0"),
        "half of them send one -> three in four, with a host tier": ("int4/0.75", "int4/0.5"),
        "three in four -> all, with a host tier": ("int4/1.0", "int4/0.75"),
        "hash of the header -> placing by expected seconds": ("int4-nohost/session_affinity", "int4-nohost/1.0"),
    }
    lines = [
        Line(f"hit rate: {what}", "0.60 -> 0.80 (1.33)", times(hit(after), hit(before)), 1.2, 1.47, 1.0)
        for what, (after, before) in gain.items()
    ]
    keys = {"hit rate": "hit_total", "TTFT p50, s": "ttft_p50_s", "tokens/s": "tokens_per_s"}
    details = [["clients that send a header", *(f"{name}: {title}" for name in LOADS for title in keys)]]
    for share in (*SHARES, "session_affinity", "least_loaded"):
        cells = [str(estimate(values(found[f"{name}/{share}"], key))) for name in LOADS for key in keys.values()]
        details.append([f"{share:.0%}" if isinstance(share, float) else f"({share}, all)", *cells])
    return Claim("affinity: a session header and the hit rate (row 11)", lines, details)
