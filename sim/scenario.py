"""What is tried: fleet, sessions and events, as values.

The packaged ones are the TOML files in `sim/scenarios`; see `sim.scenario_file` and docs/simulator.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from policies.admission import AdmissionConfig
from sim import traces
from sim.events import MOST_S, Event, Seconds, Share
from sim.fleet import Fleet
from sim.fleet import Group as FleetGroup
from sim.machine import NO_SPECULATION, find_machine, vary
from sim.measure import Measure
from sim.prefix_cache import HostWrite
from sim.routers import ONE, Routers
from sim.scenario_parts import Count, Group, Network, TraceFile
from sim.traces import Trace, TraceWorkload
from sim.traces.trace import count
from sim.work import Limits
from sim.workload import (
    GAP_CAP_S,
    NO_FORKS,
    PATIENT,
    Conversation,
    Forks,
    Patience,
    Population,
    Rate,
    Recorded,
    RecordedWorkload,
    Synthetic,
    SyntheticWorkload,
    Workload,
    arrivals,
    load_recorded,
    open_arrivals,
)
from sim.world import NO_ADMISSION, World

PAGE_TOKENS = 256
"""Of the KV pages. Coarser than an engine's (64 with SGLang's MLA kernels) for speed: a turn loses half a page."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Times in seconds of virtual time."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    fleet: Annotated[tuple[Group, ...], Field(min_length=1)]
    full: Annotated[float, Field(gt=0.0, le=1e6)]
    """Live sessions per replica that count as load 1."""
    name: str = ""
    about: str = ""
    routers: Routers = ONE
    admission: AdmissionConfig = NO_ADMISSION
    """Of each router. A table of it, even an empty one, has the live router's defaults, with the gate."""
    network: Network = field(default_factory=Network)
    cold_tokens: Count = 20_000
    """With warm and cold groups: prompts with more expected new tokens are computed on a cold replica."""
    load: Annotated[float, Field(gt=0.0, le=1e6)] = 0.8
    warm_up_s: Seconds = 600.0
    """Before anything is counted."""
    measured_s: Annotated[float, Field(gt=0.0, le=MOST_S)] = 1200.0
    spread_s: Seconds = 300.0
    """Over how long the sessions of the start begin."""
    burst_share: Share = 0.3
    """Of the sessions that come later, those that come nine at a time."""
    stay: bool = False
    """The sessions of the start go on to the end, and no others come."""
    rate: Rate | None = None
    """When given, sessions come at a rate, however many are there, and the load has no effect."""
    sessions: Literal["recorded", "synthetic", "trace"] = "recorded"
    synthetic: Synthetic = field(default_factory=Synthetic)
    """Of `sessions = "synthetic"`."""
    forks: Forks = NO_FORKS
    """Of recorded sessions; synthetic ones have their own."""
    trace: TraceFile | None = None
    """Of `sessions = "trace"`."""
    gap_cap_s: Annotated[float, Field(gt=0.0)] = GAP_CAP_S
    """A longer pause between two turns counts as so long."""
    patience: Patience = PATIENT
    """Of clients."""
    events: tuple[Annotated[Event, Field(discriminator="kind")], ...] = ()
    varied: tuple[tuple[str, object], ...] = ()
    """What a sweep has changed in it, by key."""

    @property
    def replicas(self) -> int:
        """At the start."""
        return sum(group.count for group in self.fleet)

    @property
    def live(self) -> int:
        """Sessions that are under way at a time, on average."""
        return round(self.load * self.full * self.replicas)

    @property
    def loaded(self) -> bool:
        """Whether the load says how many sessions there are."""
        return self.rate is None and (self.trace is None or self.trace.play == "again")

    @property
    def demand(self) -> str:
        """How much is asked of the fleet, in words."""
        if self.trace is not None and self.trace.play != "again":
            return f"{self.trace.play} loop at {self.trace.speed:g} times its speed"
        if self.rate is not None:
            return f"{self.rate.per_s:g} new sessions a second"
        return f"load {self.load:g}, {self.live} live sessions"

    @property
    def end(self) -> float:
        """When a run is over, in seconds."""
        return self.warm_up_s + self.measured_s

    def equipment(self) -> Fleet:
        """Its replicas, with their hardware. Raises ValueError when the groups do not go together."""
        network = self.network
        return Fleet(
            tuple(_group(group) for group in self.fleet),
            report_interval_s=network.report_interval_s,
            report_delay_s=network.report_delay_s,
            link_bytes_per_s=network.link_bytes_per_s,
            kv_bytes_per_token=network.kv_bytes_per_token,
            cold_tokens=self.cold_tokens,
        )


def _group(group: Group) -> FleetGroup:
    machine = vary(find_machine(group.machine), host_tier=group.host_tier, accept_length=group.accept_length)
    if group.mixed_chunk and machine.hardware.accept_length != NO_SPECULATION:
        raise ValueError(
            f"fleet: group {group.name!r}: mixed_chunk is not with speculative decoding: set accept_length = 1"
        )
    kv_tokens = group.kv_tokens or machine.kv_tokens
    if 0 < machine.host_tokens < kv_tokens and group.host_write is HostWrite.WRITE_THROUGH:
        raise ValueError(
            f"fleet: group {group.name!r}: kv_tokens of {kv_tokens} are more than the host tier's "
            f"{machine.host_tokens}: choose fewer, another host_write, or host_tier = false"
        )
    limits = Limits(
        kv_tokens,
        PAGE_TOKENS,
        host_tokens=machine.host_tokens,
        load_back_tokens_per_s=machine.load_back_tokens_per_s,
        host_write=group.host_write,
        mixed_chunk=group.mixed_chunk,
    )
    return FleetGroup(group.count, machine.hardware, limits, group.name, group.role)


def build(scenario: Scenario, seed: int, policy: str, parameters: Mapping[str, object]) -> World:
    """A world in which everything is set up and nothing has happened yet.

    Raises ValueError for a trace that is none.
    """
    workload = _workload(scenario, seed)
    world = World(
        policy,
        parameters,
        scenario.equipment(),
        _sessions(scenario, workload),
        workload.random("reports"),
        Measure(scenario.warm_up_s, scenario.end),
        routers=scenario.routers,
        admission=scenario.admission,
    )
    for event in scenario.events:
        world.engine.at(event.at_s, event.apply, world)
    return world


def run(scenario: Scenario, seed: int, policy: str, parameters: Mapping[str, object]) -> World:
    """A whole run."""
    world = build(scenario, seed, policy, parameters)
    world.run(scenario.end)
    world.close()
    return world


def _workload(scenario: Scenario, seed: int) -> Workload:
    cap_s, patience = scenario.gap_cap_s, scenario.patience
    if scenario.sessions == "synthetic":
        return SyntheticWorkload(scenario.synthetic, PAGE_TOKENS, seed, gap_cap_s=cap_s, patience=patience)
    if scenario.sessions == "recorded":
        return RecordedWorkload(
            _recorded(), PAGE_TOKENS, seed, forks=scenario.forks, gap_cap_s=cap_s, patience=patience
        )
    assert scenario.trace is not None
    trace = load_trace(scenario.trace)
    pages = min(group.limits.kv_tokens // PAGE_TOKENS for group in scenario.equipment().groups)
    kv_tokens = pages * PAGE_TOKENS
    return TraceWorkload(trace, PAGE_TOKENS, seed, gap_cap_s=cap_s, patience=patience, kv_tokens=kv_tokens)


def requests_left_out(scenario: Scenario) -> int:
    """Of its trace, those of sessions that are not played."""
    workload = _workload(scenario, 0)
    assert isinstance(workload, TraceWorkload)
    return workload.trace.requests - sum(map(count, workload.sessions))


def _sessions(scenario: Scenario, workload: Workload) -> Iterator[tuple[float, Conversation]]:
    file = scenario.trace
    if isinstance(workload, TraceWorkload) and file is not None and file.play != "again":
        yield from workload.replay(file.play, speed=file.speed)
        return
    random = workload.random("arrivals")
    if scenario.rate is not None:
        coming = open_arrivals(scenario.rate, random, scenario.end)
    else:
        population = Population(
            live=scenario.live,
            session_seconds=inf if scenario.stay else _session_seconds(_typical(scenario)),
            spread_s=scenario.spread_s,
            burst_share=scenario.burst_share,
        )
        coming = arrivals(population, random, scenario.end)
    for time, index, initial in coming:
        yield time, workload.session(index, initial=initial)


def _typical(scenario: Scenario) -> Scenario:
    """What the mean length of a session depends on, and nothing else: not the seed, so that all have one rate."""
    fleet = (Group(scenario.fleet[0].machine, 1),)
    kind, synthetic, trace = scenario.sessions, scenario.synthetic, scenario.trace
    return Scenario(fleet, 1.0, sessions=kind, synthetic=synthetic, trace=trace, gap_cap_s=scenario.gap_cap_s)


@cache
def _session_seconds(typical: Scenario) -> float:
    """On the machine of the first group."""
    return _workload(typical, 0).session_seconds(find_machine(typical.fleet[0].machine).hardware)


@cache
def _recorded() -> tuple[Recorded, ...]:
    return tuple(load_recorded())


@cache
def load_trace(file: TraceFile) -> Trace:
    """Its sessions. Raises ValueError that names file, line and remedy."""
    return traces.load(Path(file.path), file.format)
