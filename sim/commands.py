"""What the commands of `sim.cli` do. Each returns an exit code; ValueError and OSError say what was wrong."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar, cast

from tqdm import tqdm

from policies import registry
from sim import capacity as capacities
from sim import replay as decisions
from sim import report, results, scenario_file
from sim.capacity import MOST_SLO_S, Question, search
from sim.events import MOST_S
from sim.jobs import Candidate, Job, Result, candidates, run, run_all
from sim.machine import find_machine
from sim.scenario import Scenario, load_trace, requests_left_out
from sim.scenario_parts import MOST_REPLICAS, Group, Play, TraceFile
from sim.traces import journal

T = TypeVar("T")
Changes = dict[str, object]

MOST_SEEDS = 10_000
Table = Callable[[Sequence[Result]], Iterable[tuple[str, list[list[str]]]]]


def run_one(given: Namespace) -> int:
    """One policy over scenarios and seeds."""
    _one(given.policies)
    return compare(given)


def compare(given: Namespace) -> int:
    """Policies over scenarios and seeds, paired."""
    found = _run(given, _scenarios(given, _changes(given)))
    _print(given, found, results.tables)
    report.write(found, given.html, given.png)
    return 0


def sweep(given: Namespace) -> int:
    """Policies over scenarios, of which keys take several values."""
    changes, axes = _changes(given), dict(map(_axis, given.vary))
    for key in axes:
        if key in changes or len(axes) < len(given.vary):
            raise ValueError(f"--vary {key}: a key is given twice: leave one out, as in --vary {key}=1,2")
    points = [dict(zip(axes, point, strict=True)) for point in product(*axes.values())]
    by_point = [
        [replace(scenario, varied=tuple(point.items())) for scenario in _scenarios(given, changes | point)]
        for point in points
    ]
    scenarios = [scenario for by_name in zip(*by_point, strict=True) for scenario in by_name]
    found = _run(given, scenarios)
    _print(given, found, results.sweep_table)
    report.write(found, given.html, given.png)
    return 0


def replay(given: Namespace) -> int:
    """Policies on a trace; of a router's journal the decisions, too."""
    scenario = _of_trace(given)
    assert scenario.trace is not None
    trace = load_trace(scenario.trace)
    told = f"{given.file}: {trace.format}, sessions: {len(trace.sessions)}, requests: {trace.requests}"
    if left_out := requests_left_out(scenario):
        told += f", of which {left_out} are left out with their sessions, as a prompt in them is too long for a replica"
    print(told, file=sys.stderr)
    found = _run(given, [scenario])
    _print(given, found, results.tables)
    if trace.format == journal.NAME and not (given.json or given.csv):
        print("The same decisions asked of each policy again", "", sep="\n")
        print(*results.aligned(list(_decisions(given))), sep="\n")
    report.write(found, given.html, given.png)
    return 0


def _of_trace(given: Namespace) -> Scenario:
    """A scenario of a trace: played at its own times, or again and again when it has none."""
    for name, number, most in (
        ("replicas", given.replicas, MOST_REPLICAS),
        ("agents", given.agents, scenario_file.MOST_SESSIONS),
        ("speed", given.speed, 1e6),
    ):
        if not 0 < number <= most:
            raise ValueError(f"--{name} {number:,}: must be above 0 and at most {most:,.0f}")
    find_machine(given.machine)
    trace = load_trace(TraceFile(str(given.file), given.format))
    group = Group(given.machine, given.replicas, host_tier=given.host_tier)
    play: Play = given.play or ("open" if trace.timed else "again")
    file = TraceFile(str(given.file), given.format, play, given.speed)
    full = given.agents / given.replicas
    scenario = Scenario((group,), full, load=1.0, name=given.file.name, sessions="trace", trace=file)
    if play == "again":
        return scenario
    last = max((step.at_s or 0.0 for session in trace.sessions for step in session.steps), default=0.0)
    measured_s = (last + trace.resolution_s) / given.speed + 1.0
    if not measured_s <= MOST_S:
        raise ValueError(
            f"{given.file}: takes {measured_s:.3g} s at --speed {given.speed:g}, and {MOST_S:g} s is the most: choose "
            "a higher --speed, or --play again"
        )
    return replace(scenario, warm_up_s=0.0, measured_s=measured_s)


def _decisions(given: Namespace) -> Iterator[list[str]]:
    yield ["policy", "requests", "same replica as recorded", "share"]
    again = decisions.replay(given.file)
    asked = again.choices + again.refusals
    same = asked - again.different
    yield ["(as recorded)", str(asked), str(same), f"{same / max(1, asked):.1%}"]
    for candidate in candidates(given.policies):
        beside = decisions.replay(given.file, candidate.policy, candidate.parameters).beside
        asked, same = int(str(beside["choices"])), int(str(beside["same_replica"]))
        yield [candidate.label, str(asked), str(same), f"{same / max(1, asked):.1%}"]
        if untold := beside["untold"]:
            wanted = ", ".join(cast(list[str], untold))
            print(
                f"{candidate.label}: this journal does not tell {wanted} of requests, which the policy goes by: run "
                "it in the shadow while a journal is written",
                file=sys.stderr,
            )


def capacity(given: Namespace) -> int:
    """What each kind of replica takes, with and without host tier."""
    _check(given)
    if given.agents < 1:
        raise ValueError(f"--agents {given.agents}: must be above 0")
    if not 0 < given.slo_ttft_p99 <= MOST_SLO_S:
        raise ValueError(f"--slo-ttft-p99 {given.slo_ttft_p99:g}: must be above 0 and at most {MOST_SLO_S:g} seconds")
    candidate = _one(given.policies)
    questions = [
        Question(machine, host_tier, candidate, given.slo_ttft_p99, tuple(seeds(given.seeds)))
        for machine in given.machine.split(",")
        for host_tier in (True, False)
        if find_machine(machine)
    ]
    found = []
    for each in progress(run_all(search, questions, given.jobs), len(questions)):
        found.append(each)
        if given.json:
            print(json.dumps(capacities.row(each, given.agents)), flush=True)
    if not given.json:
        print(f"{candidate.label}; TTFT p99 of at most {given.slo_ttft_p99:g} s", "", sep="\n")
        print(*results.aligned(list(capacities.table(found, given.agents))), sep="\n")
    return 0


def _scenarios(given: Namespace, changes: Mapping[str, object]) -> list[Scenario]:
    found = [scenario_file.find(name, changes) for name in given.scenario.split(",")]
    names = [scenario.name for scenario in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{given.scenario!r}: two scenarios are named {name!r}: leave one out, or rename a file")
    return found


def _changes(given: Namespace) -> Changes:
    changes: Changes = {}
    for text in given.set:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise ValueError(f"--set {text!r}: write KEY=VALUE, as in fleet.count=8")
        if key in changes or (key == "load" and given.load is not None):
            raise ValueError(f"--set {text!r}: {key} is given twice: leave one out")
        if key in _parameters() and key not in scenario_file.KEYS:
            raise ValueError(f"--set {text!r}: a policy's parameter goes behind its name: {_parameters()[key]}:{text}")
        changes[key] = scenario_file.value(value)
    if given.load is not None:
        changes["load"] = given.load
    return changes


def _parameters() -> dict[str, str]:
    """A policy that has it, by parameter."""
    return {key: policy for policy in reversed(registry.POLICIES) for key in registry.parameters(policy)}


def _axis(text: str) -> tuple[str, list[object]]:
    key, equals, values = text.partition("=")
    if not equals or not key or not all(values.split(",")):
        raise ValueError(f"--vary {text!r}: write KEY=VALUE,VALUE, as in load=0.3,0.6,0.8")
    found = [scenario_file.value(value) for value in values.split(",")]
    if len(set(map(repr, found))) < len(found):
        raise ValueError(f"--vary {text!r}: a value is given twice: leave one out")
    return key, found


def seeds(text: str) -> list[int]:
    """From `31-34`, or `31,33`."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--seeds {text!r}: write 31-34, or 31,33")
        if max(len(first), len(last)) > 18 or len(found) + int(last or first) - int(first) >= MOST_SEEDS:
            raise ValueError(f"--seeds {text!r}: choose at most {MOST_SEEDS} seeds, each of at most 18 digits")
        found += range(int(first), int(last or first) + 1)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"--seeds {text!r}: names {'one twice' if found else 'none'}; write 31-34, or 31,33")
    return found


def _run(given: Namespace, scenarios: Sequence[Scenario]) -> list[Result]:
    _check(given)
    report.check(given.html, given.png)
    jobs = [
        Job(scenario, candidate, seed)
        for scenario in scenarios
        for seed in seeds(given.seeds)
        for candidate in candidates(given.policies)
    ]
    found = []
    for result in progress(run_all(run, jobs, given.jobs), len(jobs)):
        found.append(result)
        if given.json:
            results.write_json(result, sys.stdout)
            sys.stdout.flush()
    for heading in dict.fromkeys(results.heading(result) for result in found if not result.value("requests")):
        print(f"{heading}: no request came while it was measured: choose a longer measured_s", file=sys.stderr)
    return found


def _one(policies: str) -> Candidate:
    candidate, *more = candidates(policies)
    if more:
        raise ValueError(f"--policy {policies!r}: name one policy; `warmroute sim compare` takes several")
    return candidate


def _check(given: Namespace) -> None:
    if not 1 <= given.jobs <= 1000:
        raise ValueError(f"--jobs {given.jobs}: must be from 1 to 1000")


def progress(each: Iterable[T], total: int) -> Iterable[T]:
    """A bar on standard error when that is a terminal."""
    bar: Iterable[T] = tqdm(each, total=total, unit="run", disable=None, leave=False)
    return bar


def _print(given: Namespace, found: Sequence[Result], table: Table) -> None:
    if given.csv:
        results.write_csv(found, sys.stdout)
    elif not given.json:
        for title, rows in table(found):
            print(title, "", *results.aligned(rows), "", sep="\n")
