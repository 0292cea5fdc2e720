"""What is tried: sessions, fleet and events, under a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from pathlib import Path
from random import Random

from sim import hardware
from sim.hardware import Decode, Hardware, Prefill
from sim.measure import Measure
from sim.replica import Limits
from sim.workload import (
    NO_FORKS,
    Conversation,
    Forks,
    Population,
    Recorded,
    RecordedWorkload,
    Synthetic,
    SyntheticWorkload,
    Workload,
    arrivals,
    load_recorded,
)
from sim.world import Fleet, World

PAGE_TOKENS = 256
"""Of the KV pages. Coarser than an engine's (64 with SGLang's MLA kernels) for speed: a turn loses half a page."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A replica's hardware, and what it holds in tokens."""

    hardware: Hardware
    kv_tokens: int
    host_tokens: int
    load_back_tokens_per_s: float


def _preset(name: str) -> Machine:
    preset = hardware.PRESETS[name]
    return Machine(hardware.load(name), preset.kv_tokens, preset.host_tokens, preset.load_back_tokens_per_s)


def _study(kv_tokens: int) -> Machine:
    """The replica of the first design study (placement.md, section 3), by whose figures its bars are set.

    Prefill 0.03 s + n / 15,000 * (1 + position / 150,000), decode 12 ms + 0.4 ms * batch + 10 ns * contexts: the table
    of four values is that very formula. Its decoding went on, slower, beside a prefill; here it rests.
    """
    attention = 1 / 15_000 / 150_000
    contexts, batches = (0.0, 1e6), (0.0, 1e3)
    seconds = [[0.012 + 4e-4 * batch + 1e-8 * batch * context for batch in batches] for context in contexts]
    times = Hardware(Prefill(0.03, 1 / 15_000, attention, attention), Decode(contexts, batches, seconds), 1.0)
    return Machine(times, kv_tokens, 4 * kv_tokens, 150_000.0)


MACHINES: dict[str, Callable[[], Machine]] = {
    **{name: partial(_preset, name) for name in hardware.PRESETS},
    "study-bf16": partial(_study, 450_000),
    "study-fp8": partial(_study, 900_000),
}

Event = tuple[float, Callable[[World], None]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Times in seconds."""

    preset: str = "kimi-int4-tp4-bf16"
    """Of `MACHINES`."""
    host_tier: bool = True
    replicas: int = 16
    full: float = 24.0
    """Live sessions per replica that count as load 1."""
    load: float = 0.8
    warm_up_s: float = 600.0
    measured_s: float = 1200.0
    spread_s: float = 300.0
    burst_share: float = 0.3
    stay: bool = False
    """The sessions of the start go on to the end, and no others come."""
    synthetic: Synthetic | None = None
    """None: the recorded sessions."""
    forks: Forks = NO_FORKS
    """Of recorded sessions."""
    events: tuple[Event, ...] = field(default=())


_RECORDED_SPAWN = Forks(probability=0.019, fewest=1, most=3, shared=0.0, turns=11.0)
_RECORDED_FORK = Forks(probability=0.01, fewest=1, most=3, shared=1.0, turns=7.0)

_RECORDED = {
    # Live sessions per replica at which the best policy begins to fail: placement-on-real-sessions.md, section 2.
    "int4": Scenario(),
    "fp8": Scenario("kimi-nvfp4-tp4-fp8", full=48.0),
    "int4-nohost": Scenario(host_tier=False, full=7.0),
    "fp8-nohost": Scenario("kimi-nvfp4-tp4-fp8", host_tier=False, full=13.0),
}

_STUDY = Scenario(
    # placement.md, section 3: five live sessions per replica.
    "study-bf16",
    full=5.0,
    warm_up_s=180.0,
    measured_s=540.0,
    spread_s=60.0,
    burst_share=0.0,
    synthetic=Synthetic(),
)


def _scale_out(share: float) -> Callable[[World], None]:
    return lambda world: world.scale_out(round(share * world.fleet.replicas))


def _scale_in(share: float) -> Callable[[World], None]:
    return lambda world: world.scale_in(round(share * world.fleet.replicas))


SCENARIOS: dict[str, Scenario] = {
    **_RECORDED,
    **{f"{name}-spawn": replace(scenario, forks=_RECORDED_SPAWN) for name, scenario in _RECORDED.items()},
    **{f"{name}-fork": replace(scenario, forks=_RECORDED_FORK) for name, scenario in _RECORDED.items()},
    **{
        f"{name}-scaleout": replace(scenario, events=((900.0, _scale_out(0.25)),))
        for name, scenario in _RECORDED.items()
    },
    "int4-crash": replace(_RECORDED["int4"], events=((900.0, lambda world: world.crash(60.0)),)),
    "int4-lost": replace(_RECORDED["int4"], events=((900.0, lambda world: world.restart_router()),)),
    "int4-slow": replace(_RECORDED["int4"], events=((0.0, lambda world: world.slow_down(1.5)),)),
    "r30": replace(_STUDY, load=0.3),
    "r60": replace(_STUDY, load=0.6),
    "r80": _STUDY,
    "r95": replace(_STUDY, load=0.95),
    "nohost80": replace(_STUDY, host_tier=False),
    "forkheavy": replace(_STUDY, load=0.6, synthetic=Synthetic(forks=Forks(probability=0.15))),
    "nofork80": replace(_STUDY, synthetic=Synthetic(forks=NO_FORKS)),
    "burst80": replace(_STUDY, burst_share=1.0),
    "skew80": replace(_STUDY, synthetic=Synthetic(heavy_share=0.2)),
    "fp8_r80": replace(_STUDY, preset="study-fp8", full=10.0),
    "N8": replace(_STUDY, replicas=8),
    "N64": replace(_STUDY, replicas=64),
    "N50x250": replace(_STUDY, replicas=50, load=1.0),
    "scaleout": replace(_STUDY, load=0.95, events=((400.0, _scale_out(0.25)),)),
    "scalein": replace(_STUDY, replicas=20, load=0.76, events=((400.0, _scale_in(0.2)),)),
    "crash": replace(_STUDY, events=((400.0, lambda world: world.crash(60.0)),)),
    "lost": replace(_STUDY, events=((400.0, lambda world: world.restart_router()),)),
    # claims.md, rows 9a to 10: about five running on each replica. FP8 KV, as five contexts must fit.
    "claims": replace(
        _STUDY,
        preset="kimi-nvfp4-tp4-fp8",
        full=3.6,
        load=1.0,
        synthetic=Synthetic(tool_gap_s=1.0, human_share=0.0, output_tokens=800.0),
    ),
    # Equal sessions that all stay: only where they are put.
    "static": replace(
        _STUDY,
        replicas=50,
        load=1.0,
        spread_s=160.0,
        stay=True,
        synthetic=Synthetic(
            turns=1e9,
            first_sigma=0.0,
            input_sigma=0.0,
            output_sigma=0.0,
            tool_gap_s=100.0,
            tool_gap_sigma=0.3,
            human_share=0.0,
            forks=NO_FORKS,
        ),
    ),
}


def find(name: str) -> Scenario:
    """By name. Raises ValueError that names those there are."""
    try:
        return SCENARIOS[name]
    except KeyError:
        raise ValueError(f"no scenario {name!r}; known: {', '.join(SCENARIOS)}") from None


def build(
    scenario: Scenario, seed: int, policy: str, parameters: Mapping[str, object], recorded: Path | None = None
) -> World:
    """A world in which everything is set up and nothing has happened yet."""
    machine = MACHINES[scenario.preset]()
    limits = Limits(
        machine.kv_tokens,
        PAGE_TOKENS,
        host_tokens=machine.host_tokens if scenario.host_tier else 0,
        load_back_tokens_per_s=machine.load_back_tokens_per_s,
    )
    fleet = Fleet(scenario.replicas, machine.hardware, limits)
    workload: Workload
    if scenario.synthetic is not None:
        workload = SyntheticWorkload(scenario.synthetic, PAGE_TOKENS, seed)
    else:
        workload = RecordedWorkload(_recorded(recorded), PAGE_TOKENS, seed, forks=scenario.forks)
    population = Population(
        live=round(scenario.load * scenario.full * scenario.replicas),
        # Of no seed's sessions in particular, so that every run of a scenario has the same rate of arrivals.
        session_seconds=inf if scenario.stay else _mean_seconds(scenario.preset, scenario.synthetic, recorded),
        spread_s=scenario.spread_s,
        burst_share=scenario.burst_share,
    )
    end = scenario.warm_up_s + scenario.measured_s
    measure = Measure(scenario.warm_up_s, end)
    world = World(policy, parameters, fleet, _sessions(workload, population, end), workload.random("reports"), measure)
    for time, event in scenario.events:
        world.engine.at(time, event, world)
    return world


def run(
    scenario: Scenario, seed: int, policy: str, parameters: Mapping[str, object], recorded: Path | None = None
) -> dict[str, object]:
    """A whole run and its figures."""
    world = build(scenario, seed, policy, parameters, recorded)
    world.run(scenario.warm_up_s + scenario.measured_s)
    world.close()
    return {**world.measure.result(), "sessions": world.live}


def _sessions(workload: Workload, population: Population, until: float) -> Iterator[tuple[float, Conversation]]:
    random: Random = workload.random("arrivals")
    for time, index, initial in arrivals(population, random, until):
        yield time, workload.session(index, initial=initial)


@cache
def _recorded(path: Path | None) -> tuple[Recorded, ...]:
    return tuple(load_recorded(path))


@cache
def _mean_seconds(preset: str, synthetic: Synthetic | None, recorded: Path | None) -> float:
    times = MACHINES[preset]().hardware
    if synthetic is None:
        return RecordedWorkload(_recorded(recorded), PAGE_TOKENS, 0).session_seconds(times)
    return SyntheticWorkload(synthetic, PAGE_TOKENS, 0).session_seconds(times)
