"""Scenarios as TOML: the packaged ones by name, others by path. Every fault is told with key, value and remedy.

A file may extend another (`extends = "r80"`, or a path beside it): its keys go over those of the other, table by
table. A table over an array of tables changes each of them (`[fleet] count = 8`); an array replaces the array.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from math import inf
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from policies import registry
from sim.events import MOST_S, Crash, Event, RestartRouter, ScaleIn, ScaleOut, SlowReplica, SwitchPolicy
from sim.machine import MACHINES
from sim.scenario import Scenario

Tree = dict[str, Any]

_EVENTS: dict[str | int, type] = {get_args(get_type_hints(event)["kind"])[0]: event for event in get_args(Event)}
_NOT_IN_FILES = {"name", "varied"}
KEYS = tuple(each.name for each in fields(Scenario) if each.name not in _NOT_IN_FILES)
"""Of a scenario, as a file has them."""
_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("probability", "shared", "human_share", "heavy_share"), (0.0, 1.0)),
    **dict.fromkeys(("first_sigma", "input_sigma", "output_sigma", "tool_gap_sigma", "human_gap_sigma"), (0.0, 10.0)),
    **dict.fromkeys(("first_tokens", "input_tokens", "output_tokens"), (1.0, 1e7)),
    **dict.fromkeys(("system_tokens", "first_most", "compact_tokens", "compacted_tokens", "fresh_tokens"), (0.0, 1e7)),
    **dict.fromkeys(("tool_gap_s", "human_gap_s"), (1e-3, MOST_S)),
    **dict.fromkeys(("fewest", "most"), (0.0, 1000.0)),
    "turns": (0.0, 1e9),
}
"""Of the workload's dataclasses, by key. Medians of log-normal distributions are above 0, and nothing is so large that
a run would never end."""

MOST_SESSIONS = 100_000
"""At a time. A run with so many takes some minutes."""


class ScenarioError(ValueError):
    """A scenario that cannot be used. One line for each fault."""


@cache
def names() -> tuple[str, ...]:
    """Of the packaged scenarios."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in _folder().iterdir() if _is_toml(path.name)))


def find(name: str, changes: Mapping[str, object] | None = None) -> Scenario:
    """A packaged scenario by name, or another by the path of its TOML file.

    `changes` go over it, by dotted key; those of `fleet.` concern every group of the fleet. Raises ScenarioError.
    """
    tree = _read(name, Path(), ())
    for key, value in (changes or {}).items():
        tree = _over(tree, _nested(key.split("."), value))
    scenario = _validated(tree, name)
    return replace(scenario, name=Path(name).stem if _is_toml(name) else name)


def value(text: str) -> object:
    """What a value on the command line stands for: TOML's number, truth value or array, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def nearest(name: str, known: tuple[str, ...]) -> str:
    """A hint for a name that is none of those known."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _folder() -> Traversable:
    return resources.files("sim").joinpath("scenarios")


def _is_toml(name: str) -> bool:
    return name.endswith(".toml")


def _read(name: str, beside: Path, seen: tuple[str, ...]) -> Tree:
    """The tree of a scenario over all that it extends."""
    if _is_toml(name):
        file: Path | Traversable = beside / name
    elif name in names():
        file = _folder().joinpath(f"{name}.toml")
    else:
        raise ScenarioError(f"no scenario {name!r}; {nearest(name, names())} (a file of your own ends in .toml)")
    # One file has many paths, as in ../here/mine.toml.
    place = str(file.resolve()) if isinstance(file, Path) else str(file)
    if place in seen:
        raise ScenarioError(f"{name}: extends itself by way of {' and '.join(seen)}: remove one `extends`")
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ScenarioError(f"{file}: {error.strerror}: give the path of a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{file}: not good TOML: {error}") from None
    trace = tree.get("trace")
    if isinstance(trace, dict) and isinstance(file, Path) and isinstance(trace.get("path"), str):
        trace["path"] = str(file.parent / trace["path"])
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ScenarioError(f"{file}: extends: expected the name or path of a scenario, got {base!r}")
    below = _read(base, file.parent if isinstance(file, Path) else Path(), (*seen, place))
    return _over(below, tree)


def _over(below: Tree, above: Mapping[str, Any]) -> Tree:
    out = dict(below)
    for key, given in above.items():
        under = out.get(key)
        if isinstance(given, dict) and isinstance(under, list):
            out[key] = [_over(each, given) if isinstance(each, dict) else each for each in under]
        elif isinstance(given, dict) and isinstance(under, dict):
            out[key] = _over(under, given)
        else:
            out[key] = given
    return out


def _nested(path: list[str], given: object) -> Tree:
    for key in reversed(path):
        given = {key: given}
    assert isinstance(given, dict)
    return given


def _validated(tree: Tree, name: str) -> Scenario:
    for key in _NOT_IN_FILES & tree.keys():
        raise ScenarioError(f"{name}: {key}: unknown key, set to {tree[key]!r}: leave it out")
    try:
        # By way of JSON, from which pydantic takes just what has the right type: no 1 for true, no "3" for 3.
        scenario: Scenario = _adapter().validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        told = [fault for fault in error.errors() if not _follows(fault)]
        raise ScenarioError("\n".join(f"{name}: {_explain(fault)}" for fault in told)) from None
    if scenario.sessions == "trace" and scenario.trace is None:
        raise ScenarioError(f'{name}: trace: missing; write [trace] with path = "FILE"')
    faults = [*_bad_numbers(scenario, ""), *_bad_load(scenario), *_bad_names(scenario), *_useless(scenario, tree)]
    if faults:
        raise ScenarioError("\n".join(f"{name}: {fault}" for fault in faults))
    try:
        scenario.equipment()
    except ValueError as error:
        raise ScenarioError(f"{name}: {error}") from None
    return scenario


def _follows(fault: Any) -> bool:
    """Whether it says only that an array is too short, as what is in it has faults of its own."""
    return fault["type"] == "too_short" and bool(fault["input"])


@cache
def _adapter() -> TypeAdapter[Scenario]:
    return TypeAdapter(Scenario)


def _explain(fault: Any) -> str:
    """One fault as a line: key, what is wrong, value, remedy."""
    loc, given = fault["loc"], fault["input"]
    where = ".".join(str(part) for part in loc if part not in _EVENTS)
    if fault["type"] == "unexpected_keyword_argument":
        return f"{where}: unknown key, set to {given!r}; {nearest(str(loc[-1]), _keys(loc[:-1]))}"
    if fault["type"] == "missing":
        return f"{where}: missing; give it a value"
    if fault["type"] in ("union_tag_invalid", "union_tag_not_found"):
        kind = given.get("kind") if isinstance(given, dict) else given
        return f"{where}.kind: expected one of {', '.join(map(str, _EVENTS))}, got {kind!r}"
    if fault["type"] == "tuple_type" and isinstance(given, dict):
        return f"{where}: expected an array of tables: write [[{where}]] instead of [{where}]"
    message = fault["msg"].removeprefix("Value error, ").removeprefix(f"{where}: ")
    return f"{where}: {message}" if fault["type"] == "value_error" else f"{where}: {message}, got {given!r}"


def _keys(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Of the table at that place."""
    table: Any = Scenario
    for part in loc:
        if part in _EVENTS:
            table = _EVENTS[str(part)]
        elif isinstance(part, str):
            table = next((each for each in _inside(get_type_hints(table)[part])), table)
    return KEYS if table is Scenario else tuple(each.name for each in fields(table))


def _inside(hint: Any) -> Iterator[Any]:
    """The dataclasses in a type."""
    if is_dataclass(hint):
        yield hint
    for part in get_args(hint):
        yield from _inside(part)


def _bad_numbers(table: Any, path: str) -> Iterator[str]:
    """What pydantic cannot know of the workload's dataclasses: their bounds, and that nothing is negative."""
    for each in fields(table):
        given, where = getattr(table, each.name), f"{path}{each.name}"
        least, most = _BOUNDS.get(each.name, (0.0, inf))
        if is_dataclass(given):
            yield from _bad_numbers(given, f"{where}.")
        elif isinstance(given, int | float) and not least <= given <= most:
            expected = f"from {least:g} to {most:g}" if most < inf else "0 or more"
            yield f"{where}: expected {expected}, got {given!r}"


def _bad_load(scenario: Scenario) -> Iterator[str]:
    if scenario.loaded and not 1 <= scenario.live <= MOST_SESSIONS:
        yield (
            f"load: {scenario.load:g} times full = {scenario.full:g} on {scenario.replicas} replicas are "
            f"{scenario.live} live sessions: choose load, full or count so that they are 1 to {MOST_SESSIONS:,}"
        )


def _bad_names(scenario: Scenario) -> Iterator[str]:
    for number, group in enumerate(scenario.fleet):
        if group.machine not in MACHINES:
            yield f"fleet.{number}.machine: no machine {group.machine!r}; {nearest(group.machine, tuple(MACHINES))}"
    groups = tuple(group.name for group in scenario.fleet)
    for number, event in enumerate(scenario.events):
        if isinstance(event, SwitchPolicy):
            try:
                registry.make(event.policy, event.parameters)
            except ValueError as error:
                yield f"events.{number}: {error}"
        elif isinstance(event, ScaleOut | ScaleIn | Crash | SlowReplica) and event.group not in (None, *groups):
            yield f"events.{number}.group: no group {event.group!r}; {nearest(str(event.group), groups)}"
        elif isinstance(event, RestartRouter) and (event.index or 0) >= scenario.routers.count:
            most = scenario.routers.count - 1
            yield f"events.{number}.index: no router {event.index}: choose one from 0 to {most}, or leave it out"


def _useless(scenario: Scenario, tree: Tree) -> Iterator[str]:
    """What is given and would have no effect."""
    if "synthetic" in tree and scenario.sessions != "synthetic":
        yield f"synthetic: has no effect with sessions = {scenario.sessions!r}: leave it out, or set it to 'synthetic'"
    if "forks" in tree and scenario.sessions != "recorded":
        yield f"forks: has no effect with sessions = {scenario.sessions!r}: write [synthetic.forks]"
    if "trace" in tree and scenario.sessions != "trace":
        yield f"trace: has no effect with sessions = {scenario.sessions!r}: leave it out, or set it to 'trace'"
    if "rate" in tree and scenario.stay:
        yield "stay: cannot be with a rate: leave one out"
    for number, event in enumerate(scenario.events):
        if event.at_s >= scenario.end:
            yield f"events.{number}.at_s: {event.at_s:g} is after the end ({scenario.end:g}): choose an earlier time"
