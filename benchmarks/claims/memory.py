"""Claims about memory: NVFP4 KV, and a host tier that takes what comes for a short time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import inf

from benchmarks.claims.claim import Claim, Line, times
from benchmarks.claims.play import PARTS, Run, Setting, find, measure, values
from sim.machine import DFLASH
from sim.results import estimate
from sim.scenario import PAGE_TOKENS, Scenario
from sim.workload import Conversation, SyntheticWorkload, Workload

SESSIONS = (6, 9, 12, 14)
"""On each replica."""


def nvfp4(setting: Setting) -> Claim:
    """Row 7."""
    kinds = {"FP8": "kimi-nvfp4-tp4-fp8", "NVFP4": "kimi-nvfp4-tp4-nvfp4"}
    runs = {
        f"{kind}/{n}": Run(find("claim-nvfp4", full=n, fleet__machine=machine))
        for kind, machine in kinds.items()
        for n in SESSIONS
    }
    found = measure(setting, runs)

    def more(n: int, key: str) -> tuple[list[float], list[float]]:
        return values(found[f"NVFP4/{n}"], key), values(found[f"FP8/{n}"], key)

    lines = []
    for n in SESSIONS:
        hit = times(*more(n, "hit_total"))
        if n == SESSIONS[0]:
            lines.append(Line(f"hit rate over FP8, {n} sessions, which FP8 holds", "the gap narrows", hit, 0.95, 1.1))
        else:
            lines.append(Line(f"hit rate over FP8, {n} sessions", "1.2", hit, 1.1, 1.3, 1.0))
    latency = {n: times(*more(n, "ttft_mean_s")[::-1]) for n in SESSIONS}
    worst = max(SESSIONS, key=lambda n: latency[n].mean)
    lines.append(Line(f"mean TTFT, FP8 over NVFP4, {worst} sessions", "up to 3", latency[worst], 2.4, 3.6, 1.0))
    details = [
        ["sessions a replica", *(f"{kind}: {title}" for title in ("hit rate", "TTFT mean, s") for kind in kinds)]
    ]
    for n in SESSIONS:
        cells = [str(estimate(values(found[f"{k}/{n}"], key))) for key in ("hit_total", "ttft_mean_s") for k in kinds]
        details.append([str(n), *cells])
    return Claim("nvfp4: NVFP4 KV against FP8, when memory is short (row 7)", lines, details)


BASE, MORE, TURNS = 3, 8, 10
"""Users who are there all the time, those who come for a while, and the requests that each of these makes."""
FROM = 4
"""In which twelfth of the time measured they come."""


def synthetic(scenario: Scenario, seed: int) -> Workload:
    """The workload of synthetic sessions."""
    return SyntheticWorkload(scenario.synthetic, PAGE_TOKENS, seed)


def overshooting(run: Run, workload: Workload) -> Iterator[tuple[float, Conversation]]:
    """A few users all the time, and others who come at once and leave when they have made their requests."""
    scenario = run.scenario
    for index in range(BASE):
        yield scenario.spread_s * index / BASE, workload.session(index, initial=True)
    begin = scenario.warm_up_s + FROM * scenario.measured_s / PARTS
    for index in range(BASE, BASE + MORE):
        conversation = workload.session(index, initial=True)
        conversation.turns = islice(conversation.turns, TURNS)
        yield begin, conversation


def overshoot(setting: Setting) -> Claim:
    """Row 8."""
    runs = {
        name: Run(
            find("claim-replica", fleet__host_tier=host, fleet__accept_length=DFLASH),
            sessions=overshooting,
            workload=synthetic,
        )
        for name, host in (("without", False), ("with", True))
    }
    found = measure(setting, runs)

    def hit(name: str, parts: range) -> list[float]:
        """The lowest of these parts, for each seed."""
        return [min(row[f"hit_{part}"] for part in parts) for row in found[name]]

    during = range(FROM, FROM + 2)
    lines = [
        Line("lowest hit rate, without host tier", "falls at once", estimate(hit("without", during)), 0.0, 0.6, 0.9),
        Line("lowest hit rate, with host tier", "falls late", estimate(hit("with", during)), 0.8, 1.0, 0.6),
        Line(
            "TTFT p99, without over with",
            "absorbed",
            times(values(found["without"], "ttft_p99_s"), values(found["with"], "ttft_p99_s")),
            2.0,
            inf,
            1.0,
        ),
    ]
    details = [["part of the time", "hit rate without host tier", "with"]]
    for part in range(PARTS):
        cells = [str(estimate([row[f"hit_{part}"] for row in found[name]])) for name in runs]
        details.append([f"{part + 1}/{PARTS}" + (" (8 more users come)" if part == FROM else ""), *cells])
    return Claim("overshoot: a host tier takes more users for a while (row 8)", lines, details)
