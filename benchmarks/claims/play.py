"""Runs, and the figures that claims are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from sim import scenario as scenarios
from sim import scenario_file
from sim.jobs import Candidate, run_all
from sim.measure import Measure, Served, percentile
from sim.scenario import Scenario
from sim.workload import Conversation, Workload
from sim.world import World

COLD_TOKENS = 20_000
"""A request is cold when more of its prompt was never computed anywhere, as in `sim.fleet.Fleet`."""

Figures = Mapping[str, float]
Sessions = Callable[["Run", "Workload"], Iterator[tuple[float, Conversation]]]

AFFINITY = Candidate("session_affinity")
HASH = Candidate("rendezvous")


@dataclass(frozen=True, slots=True)
class Setting:
    """How all claims are measured."""

    seeds: tuple[int, ...] = (71, 72, 73, 74)
    jobs: int = 1
    time: float = 1.0
    """Scenarios' times are multiplied by it; less than 1 is for trying things out."""


@dataclass(frozen=True, slots=True)
class Run:
    """A scenario under a policy, with other sessions than the scenario's if there is a function that makes them."""

    scenario: Scenario
    candidate: Candidate = AFFINITY
    sessions: Sessions | None = None
    workload: Callable[[Scenario, int], Workload] | None = None
    """Of `sessions`."""
    share: float = 0.0
    """What `sessions` may want to know."""


def find(name: str, **changes: object) -> Scenario:
    """A packaged scenario. Changes are by dotted key, with two underscores for each dot."""
    return scenario_file.find(name, {key.replace("__", "."): value for key, value in changes.items()})


def measure(setting: Setting, runs: Mapping[str, Run]) -> dict[str, list[Figures]]:
    """The figures of each run, by its name, in order of seeds."""
    tasks = [(run, seed, setting.time) for run in runs.values() for seed in setting.seeds]
    found = run_all(_play, tasks, setting.jobs)
    return {name: [next(found) for _ in setting.seeds] for name in runs}


def values(rows: list[Figures], key: str) -> list[float]:
    """One figure of all seeds."""
    return [row[key] for row in rows]


def _play(task: tuple[Run, int, float]) -> Figures:
    run, seed, time = task
    run = replace(run, scenario=_hurried(run.scenario, time))
    return play(run, seed)


def _hurried(scenario: Scenario, time: float) -> Scenario:
    return replace(
        scenario,
        warm_up_s=scenario.warm_up_s * time,
        measured_s=scenario.measured_s * time,
        spread_s=scenario.spread_s * time,
        events=tuple(replace(event, at_s=event.at_s * time) for event in scenario.events),
    )


def play(run: Run, seed: int) -> Figures:
    """One run."""
    scenario = run.scenario
    world = _world(run, seed)
    world.measure.keep = True
    world.run(scenario.end)
    world.close()
    result = {key: float(value) for key, value in world.measure.result().items() if isinstance(value, int | float)}
    return {**result, **_more(world.measure, world, scenario)}


def _world(run: Run, seed: int) -> World:
    scenario, candidate = run.scenario, run.candidate
    if run.sessions is None or run.workload is None:
        return scenarios.build(scenario, seed, candidate.policy, candidate.parameters)
    workload = run.workload(scenario, seed)
    return World(
        candidate.policy,
        candidate.parameters,
        scenario.equipment(),
        run.sessions(run, workload),
        workload.random("reports"),
        Measure(scenario.warm_up_s, scenario.end),
    )


def _more(measure: Measure, world: World, scenario: Scenario) -> Figures:
    """Figures that `Measure.result` does not have: rates by second, TTFT of warm and cold requests apart."""
    prefill = world.fleet.hardware.prefill
    counted = [s for s in measure.served if measure.start <= s.arrived < measure.end]
    ended = [s for s in measure.served if s.finished is not None and measure.start <= s.finished < measure.end]
    waits: dict[bool, list[float]] = {False: [], True: []}
    for s in counted:
        cold = s.prompt_tokens > COLD_TOKENS and s.ideal_s > prefill.seconds(COLD_TOKENS, s.prompt_tokens - COLD_TOKENS)
        waits[cold].append((s.first_token if s.first_token is not None else measure.end) - s.arrived)
    answers = [s for s in ended if s.first_token is not None and s.output_tokens > 1]
    speeds = sorted((s.output_tokens - 1) / (s.finished - s.first_token) for s in answers)  # type: ignore[operator]
    prompt = sum(s.prompt_tokens for s in counted) or 1
    return {
        "requests_per_s": len(ended) / scenario.measured_s,
        "output_per_s": sum(s.output_tokens for s in ended) / scenario.measured_s,
        "user_tokens_per_s": percentile(speeds, 0.5),
        "warm_p99_s": percentile(sorted(waits[False]), 0.99),
        "cold_p99_s": percentile(sorted(waits[True]), 0.99),
        "cold_share": len(waits[True]) / (len(counted) or 1),
        "again_share": sum(s.elsewhere_tokens + s.evicted_tokens for s in counted) / prompt,
        **_by_part(counted, measure),
    }


PARTS = 12


def _by_part(counted: list[Served], measure: Measure) -> Figures:
    """Hit rate in each twelfth of the time measured."""
    found: dict[str, float] = {}
    for part in range(PARTS):
        low = measure.start + part * (measure.end - measure.start) / PARTS
        high = measure.start + (part + 1) * (measure.end - measure.start) / PARTS
        these = [s for s in counted if low <= s.arrived < high and s.first_token is not None]
        prompt = sum(s.prompt_tokens for s in these)
        found[f"hit_{part}"] = sum(s.cached_tokens for s in these) / prompt if prompt else 1.0
    return found
