"""The dashboards as they are committed: whole, told in words, and made by the code beside them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.dashboards.written import written
from router.metrics.table import FAMILIES
from sim.emulator import Emulator, EmulatorConfig
from tests.deploy.queries import DASHBOARDS, Target, rules, targets
from tests.fakes.process import ROOT

BOARDS = {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in board["panels"] if panel["type"] != "row"]
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
"""Families of prometheus-client that we look at."""
each_panel = pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS], ids=[f"{name}: {panel['title']}" for name, panel in PANELS]
)


def test_they_are_what_the_code_makes() -> None:
    """`make dashboards` writes them."""
    assert written() == {path.stem: path.read_text() for path in DASHBOARDS}


@pytest.mark.parametrize("name", BOARDS)
def test_nothing_in_them_is_unknown_to_grafana(name: str) -> None:
    """The SDK's own reader drops what it does not know, as Grafana does."""
    known = json.loads(json.dumps(Dashboard.from_json(BOARDS[name]), default=lambda each: each.to_json()))
    assert _keys(known) == _keys(BOARDS[name])


def _keys(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return {path, *(key for name, each in value.items() for key in _keys(each, f"{path}.{name}"))}
    if isinstance(value, list):
        return {path, *(key for each in value for key in _keys(each, f"{path}[]"))}
    return {path}


@each_panel
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert len(panel["description"]) > 10
    assert panel["description"].endswith(".")
    assert defaults["unit"]
    assert defaults["thresholds"]["steps"][0]["value"] is None
    assert panel["targets"]
    assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("name", BOARDS)
def test_panels_neither_overlap_nor_leave_the_grid(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[name]["panels"]:
        grid = panel["gridPos"]
        cells = {(grid["x"] + dx, grid["y"] + dy) for dx in range(grid["w"]) for dy in range(grid["h"])}
        assert not cells & taken, panel["title"]
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", BOARDS)
def test_variables_are_used_and_what_is_used_is_one(name: str) -> None:
    board = BOARDS[name]
    defined = {variable["name"] for variable in board["templating"]["list"]}
    assert {"datasource", "job", "instance", "replica", "engine"} <= defined
    used = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(board)))
    assert used <= defined
    assert defined - used <= {"replica", "engine"}, "those are the same on all, so that links keep them"


async def test_queries_ask_only_for_what_there_is() -> None:
    """Names of ours are of the table, those of engines what an emulated one tells, which is held against a real one."""
    async with Emulator(EmulatorConfig()) as engine:
        names = await _exposed(engine.url)
    known = {f"{family.name}{suffix}" for family in FAMILIES for suffix in _suffixes(family.kind)} | PROCESS | {"up"}
    # Neither exists before it is first counted.
    known |= names | {"sglang:num_aborted_requests_total", "sglang:cached_tokens_total"}
    exprs = [target.expr for target in targets()] + [rule["expr"] for rule in rules()]
    asked = {
        name for expr in exprs for name in re.findall(r"\b(?:warmroute_|sglang:|process_|up\b)[\w:]*", _bare(expr))
    }
    assert asked
    assert asked <= known, asked - known


async def _exposed(url: str) -> set[str]:
    import httpx

    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{url}/metrics")).text
    return set(re.findall(r"^# TYPE (\S+)", text, re.M))


def _suffixes(kind: str) -> tuple[str, ...]:
    return ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)


def _bare(expr: str) -> str:
    """Without the values of labels."""
    return re.sub(r'"[^"]*"', '""', expr)


def test_every_bound_that_can_be_chosen_is_one_of_its_histogram() -> None:
    """Else the share within it would be of nothing."""
    from router.metrics.histogram import GAPS, SECONDS

    choices = {each["name"]: each["query"].split(", ") for each in BOARDS["slo"]["templating"]["list"]}
    assert set(choices["ttft"]) <= set(map(str, SECONDS))
    assert set(choices["gap"]) <= set(map(str, GAPS))


def test_the_operations_page_shows_every_dashboard() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    section = text.split("\n## Dashboards\n", 1)[1].split("\n## ", 1)[0]
    for name in BOARDS:
        assert f"(images/dashboard-{name}.png)" in section
        assert f"deploy/dashboards/{name}.json" in section


def test_the_replicas_chosen_do_not_hide_a_router_that_knows_none() -> None:
    """A query of a family without the label would have no data if it asked for it."""
    with_replica = {family.name for family in FAMILIES if any(label.name == "replica" for label in family.labels)}
    for target in targets():
        for name, matchers in re.findall(r"(warmroute_\w+)\{(.*?)\}", target.expr):
            assert ("replica=" in matchers) <= (name in with_replica), _where(target)


def _where(target: Target) -> str:
    return f"{target.name}: {target.expr}"
