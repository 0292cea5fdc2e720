"""Scenarios as files."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.types import State
from sim import scenario as scenarios
from sim.events import Crash, Event, RestartRouter, ScaleIn, ScaleOut, SlowReplica, StoreLost, SwitchPolicy
from sim.scenario import Scenario
from sim.scenario_file import ScenarioError, find, names
from sim.scenario_parts import Group
from sim.world import World
from tests.fakes.process import ROOT

BASE = {"int4", "fp8", "int4-nohost", "fp8-nohost"}
KNOWN = {
    *BASE,
    *(f"{name}-{more}" for name in BASE for more in ("spawn", "fork", "scaleout")),
    *("int4-crash", "int4-lost", "int4-slow"),
    *("r30", "r60", "r80", "r95", "nohost80", "forkheavy", "nofork80", "burst80", "skew80", "fp8_r80"),
    *("routers4", "routers4-alone", "routers4-lost", "int4-cpd", "int4-pd", "int4-impatient", "int4-switch"),
    *("N8", "N64", "N50x250", "scaleout", "scalein", "crash", "lost", "claims", "static"),
}


def test_the_packaged_ones_can_be_used_and_say_what_they_are() -> None:
    assert set(names()) >= KNOWN
    for name in names():
        scenario = find(name)
        assert scenario.name == name
        assert scenario.about.endswith("."), name
        assert scenario.live > 0


def test_the_documentation_names_every_scenario_and_no_other() -> None:
    section = (ROOT / "docs/simulator.md").read_text().split("\n## Scenarios\n", 1)[1].split("\n### ", 1)[0]
    told = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", section, re.M)
    assert {name: about.strip() for name, about in told} == {name: find(name).about for name in names()}


def test_the_documentation_names_every_key_and_event() -> None:
    section = (ROOT / "docs/simulator.md").read_text().split("\n### Your own\n", 1)[1].split("\n## ", 1)[0]
    keys, events = section.split("| event |", 1)
    told = {key for row in re.findall(r"^\| (`[^|]+) \|", keys, re.M) for key in re.findall(r"`(\w+)`", row)}
    assert told == {field.name for field in fields(Scenario)} - {"name", "varied"}
    told = {kind for row in re.findall(r"^\| (`[^|]+) \|", events, re.M) for kind in re.findall(r"`(\w+)`", row)}
    assert told == {get_type_hints(event)["kind"].__args__[0] for event in get_args(Event)}
    assert all(f"`{field.name}`" in keys for field in fields(Group))


def write(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return str(path)


def test_a_file_goes_over_what_it_extends(tmp_path: Path) -> None:
    base = "full = 3\nload = 0.5\n[[fleet]]\nmachine = 'study-bf16'\ncount = 2\n[[events]]\nkind = 'crash'\nat_s = 1\n"
    write(tmp_path, "base", base)
    (tmp_path / "below").mkdir()
    path = write(tmp_path / "below", "mine", "extends = '../base.toml'\nload = 0.7\n[fleet]\ncount = 5\n")
    scenario = find(path)
    assert (scenario.name, scenario.full, scenario.load) == ("mine", 3.0, 0.7)
    assert [(group.machine, group.count) for group in scenario.fleet] == [("study-bf16", 5)]
    assert scenario.events == (Crash(1.0),)
    path = write(tmp_path / "below", "calm", "extends = '../base.toml'\nevents = []\n")
    assert find(path).events == ()


def test_changes_go_over_the_file() -> None:
    scenario = find("r80", {"fleet.count": 3, "synthetic.tool_gap_s": 7, "synthetic.forks.probability": 0.5})
    assert scenario.replicas == 3
    assert scenario.synthetic.tool_gap_s == 7.0
    assert scenario.synthetic.forks.probability == 0.5
    assert scenario.synthetic.turns == find("r80").synthetic.turns


FAULTS = [
    ({"lod": 1}, "r80: lod: unknown key, set to 1; did you mean 'load'?"),
    ({"fleet.cont": 3}, "r80: fleet.0.cont: unknown key, set to 3; did you mean 'count'?"),
    ({"synthetic.tool_gap": 2}, "r80: synthetic.tool_gap: unknown key, set to 2; did you mean 'tool_gap_s'?"),
    ({"synthetic.forks.share": 2}, "r80: synthetic.forks.share: unknown key, set to 2; did you mean 'shared'?"),
    ({"name": "x"}, "r80: name: unknown key"),
    ({"load": -1}, "r80: load: Input should be greater than 0, got -1"),
    ({"load": "much"}, "r80: load: Input should be a valid number"),
    ({"load": float("inf")}, "r80: load: Input should be a finite number"),
    ({"load": True}, "r80: load: Input should be a valid number, got True"),
    ({"load": "0.9"}, "r80: load: Input should be a valid number, got '0.9'"),
    ({"stay": "yes"}, "r80: stay: Input should be a valid boolean, got 'yes'"),
    ({"fleet.count": "8"}, "r80: fleet.0.count: Input should be a valid integer, got '8'"),
    ({"trace.path": 5}, "r80: trace.path: Input should be a valid string, got 5"),
    (
        {"fleet.kv_tokens": 2_000_000},
        "r80: fleet: group 'r': kv_tokens of 2000000 are more than the host tier's 1800000",
    ),
    ({"routers.publish_s": 1e-300}, "r80: routers: publish_s must be 0.01 or more, got 1e-300"),
    ({"fleet.count": 0}, "r80: fleet.0.count: Input should be greater than or equal to 1, got 0"),
    ({"fleet.count": 2.5}, "r80: fleet.0.count: Input should be a valid integer"),
    ({"fleet.machine": "study-fp"}, "r80: fleet.0.machine: no machine 'study-fp'; did you mean 'study-fp8'?"),
    ({"synthetic.turns": -1}, "r80: synthetic.turns: expected from 0 to 1e+09, got -1.0"),
    ({"synthetic.human_share": 2}, "r80: synthetic.human_share: expected from 0 to 1, got 2.0"),
    ({"forks.probability": 0.1}, "r80: forks: has no effect with sessions = 'synthetic': write [synthetic.forks]"),
    ({"sessions": "trace"}, 'r80: trace: missing; write [trace] with path = "FILE"'),
    ({"rate.cv": -1, "rate.per_s": 1}, "r80: rate: cv must be from 0.01 to 100, got -1"),
    ({"patience.abandon_share": 2}, "r80: patience: abandon_share must be from 0 to 1, got 2"),
    ({"events": {"kind": "crash", "at_s": 3}}, "r80: events: expected an array of tables: write [[events]]"),
    ({"events": [{"kind": "quake", "at_s": 3}]}, "r80: events.0.kind: expected one of scale_out, "),
    ({"events": [{"at_s": 3}]}, "r80: events.0.kind: expected one of scale_out, "),
    ({"events": [{"kind": "crash"}]}, "r80: events.0.at_s: missing; give it a value"),
    ({"events": [{"kind": "crash", "at": 3, "at_s": 3}]}, "r80: events.0.at: unknown key, set to 3; did you mean"),
    ({"events": [{"kind": "crash", "at_s": 3000}]}, "r80: events.0.at_s: 3000 is after the end (720)"),
    ({"events": [{"kind": "crash", "at_s": 3, "group": "x"}]}, "r80: events.0.group: no group 'x'; known: r"),
    (
        {"fleet.role": "warm"},
        "r80: fleet: roles warm; must be unified alone, or prefill with decode, or warm with cold, "
        "with decode or without",
    ),
    ({"fleet.role": "tepid"}, "r80: fleet.0.role: Input should be 'unified', 'prefill', 'decode', 'warm' or 'cold'"),
    ({"fleet.accept_length": 0.5}, "r80: fleet.0.accept_length: Input should be greater than or equal to 1"),
    ({"fleet.mixed_chunk": True, "fleet.accept_length": 2}, "mixed_chunk is not with speculative decoding: set"),
    ({"routers.count": 0}, "r80: routers: count must be from 1 to 1000, got 0"),
    ({"routers.sharing": "all"}, "r80: routers.sharing: Input should be 'directory' or 'none', got 'all'"),
    ({"events": [{"kind": "switch_policy", "at_s": 3, "policy": "moon"}]}, "r80: events.0: unknown policy 'moon'"),
    ({"events": [{"kind": "restart_router", "at_s": 3, "index": 1}]}, "r80: events.0.index: no router 1: choose one"),
    ({"load": 1e-9}, "r80: load: 1e-09 times full = 5 on 16 replicas are 0 live sessions: choose"),
    ({"load": 1e300}, "r80: load: Input should be less than or equal to 1000000, got 1e+300"),
    ({"full": 1e5}, "are 1280000 live sessions: choose load, full or count so that they are 1 to 100,000"),
    ({"measured_s": 1e9}, "r80: measured_s: Input should be less than or equal to 20000000"),
    ({"fleet.count": 10**6}, "r80: fleet.0.count: Input should be less than or equal to 10000"),
    ({"routers.count": 10**9}, "r80: routers: count must be from 1 to 1000, got 1000000000"),
    ({"rate.per_s": 1e9}, "r80: rate: per_s must be more than 0 and at most 1000, got 1000000000.0"),
    ({"network.report_interval_s": 1e-9}, "r80: network.report_interval_s: Input should be greater than or equal to"),
    ({"synthetic.first_tokens": 0}, "r80: synthetic.first_tokens: expected from 1 to 1e+07, got 0.0"),
    ({"synthetic.tool_gap_s": 0}, "r80: synthetic.tool_gap_s: expected from 0.001 to 2e+07, got 0.0"),
    ({"synthetic.first_sigma": 1e9}, "r80: synthetic.first_sigma: expected from 0 to 10, got 1000000000.0"),
    ({"synthetic.forks.turns": 1e300}, "r80: synthetic.forks.turns: expected from 0 to 1e+09, got 1e+300"),
    ({"synthetic.forks.fewest": 9}, "r80: synthetic.forks: fewest must be at most `most` (6), got 9"),
]


@pytest.mark.parametrize(("changes", "said"), FAULTS)
def test_a_fault_is_told_with_key_value_and_remedy(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        find("r80", changes)
    assert said in str(raised.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ScenarioError) as raised:
        find("r80", {"load": -1, "lod": 1})
    assert len(str(raised.value).splitlines()) == 2


def test_a_fault_in_an_array_is_told_once() -> None:
    with pytest.raises(ScenarioError) as raised:
        find("r80", {"fleet.count": 0})
    assert len(str(raised.value).splitlines()) == 1


def test_sessions_of_any_size_that_may_be_written_come_to_an_end() -> None:
    """Sigmas and medians at their bounds: an answer of more tokens than there are atoms is cut, and told not to fit."""
    wild = {
        "synthetic.output_tokens": 1e7,
        "synthetic.output_sigma": 10,
        "fleet.count": 1,
        "measured_s": 60,
        "synthetic.turns": 2,
    }
    with pytest.raises(ValueError, match="tokens does not fit kv_tokens"):
        scenarios.run(find("r80", wild), 1, "random", {})


@given(st.from_regex(r"[a-z][a-z_]{0,20}", fullmatch=True))
def test_no_key_is_ignored(key: str) -> None:
    known = set(Scenario.__dataclass_fields__) - {"name", "varied"}
    if key in known:
        return
    with pytest.raises(ScenarioError, match=rf"r80: {key}: unknown key"):
        find("r80", {key: 1})


def test_synthetic_keys_of_recorded_sessions_are_refused() -> None:
    with pytest.raises(ScenarioError, match="synthetic: has no effect with sessions = 'recorded'"):
        find("int4", {"synthetic.turns": 3})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("load = moon", "mine.toml: not good TOML: Invalid value (at line 1, column 8)"),
        ("extends = 'r8O'", "no scenario 'r8O'; did you mean 'r80'?"),
        ("extends = 'gone.toml'", "gone.toml: No such file or directory: give the path"),
        ("extends = 3", "mine.toml: extends: expected the name or path of a scenario, got 3"),
        ("extends = 'mine.toml'", "extends itself"),
        ("load = 1", "mine.toml: fleet: missing; give it a value"),
    ],
)
def test_a_file_that_cannot_be_used_is_told(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as raised:
        find(write(tmp_path, "mine", text))
    assert said in str(raised.value)


def test_files_that_extend_each_other_by_other_paths_are_told(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    path = write(tmp_path / "here", "a", "extends = '../here/b.toml'")
    write(tmp_path / "here", "b", "extends = '../here/a.toml'")
    with pytest.raises(ScenarioError, match="extends itself by way of") as raised:
        find(path)
    assert str(raised.value).count(" and ") == 1


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    assert find(write(tmp_path, "mine", "\ufeffextends = 'r80'\nload = 0.7\n")).load == 0.7


def test_a_trace_lies_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "requests.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0.0,5000,10\n1.5,7000,10\n")
    text = (
        "full = 1\nwarm_up_s = 0\nmeasured_s = 60\nsessions = 'trace'\n"
        "[trace]\npath = 'requests.csv'\n[[fleet]]\nmachine = 'study-bf16'\ncount = 1\n"
    )
    world = scenarios.run(find(write(tmp_path, "mine", text)), 1, "random", {})
    assert world.measure.result()["requests"] == 2


def test_a_request_of_a_trace_that_needs_a_part_of_a_page_too_much_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "requests.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,4800,64\n1,4870,10\n")
    text = (
        "full = 1\nwarm_up_s = 0\nmeasured_s = 60\nsessions = 'trace'\n[trace]\npath = 'requests.csv'\n"
        "[[fleet]]\nmachine = 'study-bf16'\ncount = 1\nkv_tokens = 5000\nhost_tier = false\n"
    )
    scenario = find(write(tmp_path, "mine", text))
    assert scenarios.requests_left_out(scenario) == 1
    assert scenarios.run(scenario, 1, "random", {}).measure.result()["requests"] == 1


# Events


_GROUP = {"machine": "study-bf16"}


def after(seconds: float, *events: Event, **changes: object) -> World:
    """A small fleet some time after its events at 50 seconds."""
    small = {"load": 0.5, "warm_up_s": 10, "measured_s": 190}
    scenario = replace(find("r80", small | (changes or {"fleet.count": 4})), events=events)
    world = scenarios.build(scenario, 1, "rendezvous", {})
    world.run(seconds)
    return world


def states(world: World) -> list[State]:
    return [replica.state for replica in world.balancer.replicas.values()]


def test_a_scale_out_adds_a_share_of_the_fleet() -> None:
    event = ScaleOut(50.0, 0.5)
    assert len(after(49.0, event).servers) == 4
    assert len(after(51.0, event).servers) == 6


def test_a_scale_in_takes_the_oldest_away() -> None:
    world = after(199.0, ScaleIn(50.0, 0.25))
    assert [server.id for server in world.servers] == ["r001", "r002", "r003"]


def test_an_event_concerns_the_group_that_it_names() -> None:
    changes = {"fleet": [_GROUP | {"name": "a", "count": 4}, _GROUP | {"name": "b", "count": 2}]}
    world = after(51.0, ScaleOut(50.0, 0.5, group="b"), **changes)
    assert Counter(server.group.name for server in world.servers) == {"a": 4, "b": 3}


def test_a_crashed_replica_comes_back() -> None:
    event = Crash(50.0, down_s=20.0)
    assert State.EJECTED in states(after(60.0, event))
    assert State.EJECTED not in states(after(71.0, event))


def test_a_slow_replica_is_slow() -> None:
    world = after(60.0, SlowReplica(50.0, 3.0))
    first, last = (server.replica.hardware for server in (world.servers[0], world.servers[-1]))
    assert last.prefill_seconds(1000, 0) == pytest.approx(3 * first.prefill_seconds(1000, 0))


GONE = {
    "all drained": [ScaleIn(50.0, 1.0)],
    "the only one dies and others are told of": [Crash(50.0, 1e4), SlowReplica(55.0, 2.0), ScaleIn(56.0, 1.0)],
    "all die": [Crash(50.0, 1e4), Crash(50.0, 1e4), RestartRouter(60.0)],
}


@pytest.mark.parametrize(("events", "count"), [*zip(GONE.values(), (4, 1, 2), strict=True)], ids=[*GONE])
def test_without_a_replica_requests_wait_and_are_counted(events: list[Event], count: int) -> None:
    world = after(200.0, *events, **{"fleet.count": count})
    figures = world.measure.result()
    assert int(str(figures["refused"])) > 100
    assert 0 < int(str(figures["unserved"])) <= int(str(figures["requests"]))


def test_a_fleet_that_was_gone_serves_again() -> None:
    world = after(400.0, ScaleIn(50.0, 1.0), ScaleOut(70.0, 1.0), **{"fleet.count": 2, "measured_s": 390})
    sent = [served for served in world.measure._open if served.arrived < 100.0]
    assert world.measure.refused
    assert not sent


def test_a_restarted_router_has_forgotten_the_sessions() -> None:
    before, restarted = after(50.0), after(50.001, RestartRouter(50.0))
    assert len(before.balancer.directory) > len(restarted.balancer.directory)


def test_a_lost_store_takes_the_homes_of_all_routers_with_it() -> None:
    routers = {"fleet.count": 4, "routers.count": 2}

    def known(seconds: float) -> list[int]:
        world = after(seconds, StoreLost(50.0), **routers)
        return [len(router.balancer.directory) for router in world.front.routers]

    assert min(known(49.9)) > max(known(50.1))


def test_a_policy_is_switched() -> None:
    world = after(60.0, SwitchPolicy(50.0, "least_loaded"))
    assert type(world.balancer.policy).__name__ == "LeastLoaded"
