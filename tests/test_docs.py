"""The documentation is true: links lead somewhere, commands exist, tables name what the code has."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from pydantic import BaseModel
from starlette.routing import Route

from policies.admission import ShedReason
from policies.types import Reason
from router import errors
from router.admin import Admin
from router.app import Router
from router.errors import Refusal
from router.identity import DEFAULT_RULES, BodyRule, HeaderRule, Rule, parse_rules
from router.identity.rules import NEVER_FIELDS, NEVER_HEADERS, PROMPT_FIELDS
from router.line import Line
from router.proxy import guard
from router.settings import Settings
from tests.fakes.process import ROOT, MakeRun, alive
from tests.fakes.wire import LIMIT_S

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
OPERATIONS = (ROOT / "docs/operations.md").read_text()
page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


@page
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@page
def test_every_make_target_named_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:`|^)(?:\w+=\S+ )*make ([a-z][a-z-]*)", path.read_text(), re.M))
    assert named <= targets


@page
def test_every_command_named_exists(path: Path) -> None:
    shown = subprocess.run([sys.executable, "-m", "router.cli", "--help"], capture_output=True, text=True, check=True)
    named = set(re.findall(r"`warmroute ([a-z-]+)", path.read_text()))
    assert all(re.search(rf"^ +{command}\b", shown.stdout, re.M) for command in named), named


def _rows(heading: str) -> list[list[str]]:
    """The cells of the table rows under a heading, without the table's own head."""
    section = OPERATIONS.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if not set("".join(row)) <= set("-: ")][1:]


def _names(cell: str) -> list[str]:
    """`a.b`, `.c` stand for a.b and a.c."""
    names: list[str] = []
    for name in re.findall(r"`([^`]+)`", cell):
        if name.startswith(".") and names:
            name = names[0].rsplit(".", 1)[0] + name
        names.append(name)
    return names


def _settings(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        below = field.annotation
        if isinstance(below, type) and issubclass(below, BaseModel) and name != "policy":
            found |= _settings(below, f"{prefix}{name}.")
        else:
            found[prefix + name] = field.default
    return found


def test_the_settings_table_names_every_setting() -> None:
    documented = {name for row in _rows("Settings") for name in _names(row[0])}
    known = set(_settings(Settings))
    whole = {name for name in documented if name.endswith(".*")}
    covered = {name for name in known if any(name.startswith(section[:-1]) for section in whole)}
    assert documented - whole == known - covered


def test_the_settings_table_has_the_right_numbers() -> None:
    known = _settings(Settings)
    checked = 0
    for row in _rows("Settings"):
        names = _names(row[0])
        numbers = [part.strip() for part in row[1].split(",")]
        if len(names) != len(numbers):
            continue
        for name, number in zip(names, numbers, strict=True):
            if re.fullmatch(r"\d+(\.\d+)?", number) and name in known:
                assert float(number) == known[name], name
                checked += 1
    assert checked >= 15


def test_the_tables_of_probes_and_reports_name_every_setting_with_its_default() -> None:
    known = {name: value for name, value in _settings(Settings).items() if name.startswith(("health.", "reports."))}
    rows = [row for heading in ("Health", "Load reports") for row in _rows(heading)]
    rows = [row for row in rows if row[0].startswith(("`health.", "`reports."))]
    assert {_names(row[0])[0]: float(row[1]) for row in rows} == known
    assert len(rows) == len(known), "none is told twice"


def test_the_admin_table_names_every_endpoint() -> None:
    router = Router(Settings())
    try:
        paths = {route.path.replace(":path", "") for route in Admin(router).app().routes if isinstance(route, Route)}
    finally:
        router.access_log.close()
    assert {name for row in _rows("The admin port") for name in _names(row[0])} == paths


# Sessions


def _table(heading: str, first: str) -> list[list[str]]:
    """The rows of the one table under a heading whose first column is called so."""
    section = OPERATIONS.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    (lines,) = re.findall(rf"^\| {first} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", section, re.M)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.splitlines()]


def test_the_built_in_rules_are_told_in_order() -> None:
    told: list[Rule] = []
    for rule, agent, parent, scope, _ in _table("Sessions", "rule"):
        name, agent, parent, scope = (cell.strip("`") for cell in (rule, agent, parent, scope))
        if name.startswith("body:"):
            assert not agent + parent
            told.append(BodyRule(name.removeprefix("body:"), "user" if scope == "user" else "session"))
        else:
            assert not scope
            told.append(HeaderRule(name, agent or None, parent or None))
    assert tuple(told) == DEFAULT_RULES


def test_the_keys_of_a_rule_are_told_and_the_example_is_understood() -> None:
    told = [_names(row[0])[0] for row in _table("Sessions", "key")]
    assert told == [field.name for kind in (HeaderRule, BodyRule) for field in fields(kind)]
    (example,) = re.findall(r"```yaml\n(identity:.*?)```", OPERATIONS, re.S)
    settings = Settings(**yaml.safe_load(example))
    assert len(parse_rules(settings.identity.rules or [])) == 4


def test_what_cannot_name_a_session_is_told() -> None:
    told = {name for row in _table("Sessions", "refused") for name in _names(row[0])}
    assert told == NEVER_HEADERS | NEVER_FIELDS | PROMPT_FIELDS


# Engine administration


def test_the_paths_of_engine_administration_are_told() -> None:
    section = OPERATIONS.split("\n## Engine administration\n", 1)[1].split("\n## ", 1)[0]
    (block,) = re.findall(r"```text\n(.*?)```", section, re.S)
    assert block.split() == sorted(guard.ADMIN_PATHS)
    (example,) = re.findall(r"`(admin_paths: .*?)`", section)
    (assigned,) = re.findall(r"`WARMROUTE_ADMIN_PATHS__ALLOW='(.*?)'`", section)
    allowed = Settings(**yaml.safe_load(example)).admin_paths.allow
    assert set(json.loads(assigned)) < set(allowed)
    for path in allowed:
        assert guard.route(b"/" + path.strip("/").encode()).admin


# Reasons and refusals


def test_the_reasons_of_choices_are_told() -> None:
    assert [_names(row[0])[0] for row in _rows("Why a replica was chosen")] == list(Reason)


def _refusals() -> dict[str, Refusal]:
    made = [value for value in vars(errors).values() if isinstance(value, Refusal)]
    made += [errors.shed(reason, errors.RETRY_AFTER_S) for reason in ShedReason]
    made += [*errors.NO_REPLICA.values(), errors.malformed("")]
    return {refusal.reason: refusal for refusal in made}


def test_the_refusals_are_told_with_their_status_and_what_to_do() -> None:
    rows = _rows("Refusals")
    assert {_names(code)[0]: int(status) for code, status, *_ in rows} == {
        reason: int(refusal.status) for reason, refusal in _refusals().items()
    }
    assert all(meaning and remedy for _, _, meaning, remedy in rows)
    for name in {name for row in rows for cell in row[2:] for name in _names(cell) if "." in name}:
        assert name in _settings(Settings) or name == "HTTP/1.1", name


def test_where_the_code_of_a_refusal_stands() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", OPERATIONS, re.S)
    told = json.loads(example)
    refusal = _refusals()[told["error"]["code"]]
    head, body = errors.render(refusal, close=False, head_only=False, request_id=b"").split(b"\r\n\r\n")
    assert json.loads(body) == {**told, "error": {**told["error"], "message": refusal.message}}
    assert f"x-warmroute-reason: {refusal.reason}".encode() in head.split(b"\r\n")
    assert f"`retry-after: {errors.RETRY_AFTER_S}`" in OPERATIONS
    for each in _refusals().values():
        assert each.retry_after_s == (errors.RETRY_AFTER_S if each.status in (429, 503) else None)


def test_the_log_table_names_every_field() -> None:
    assert {name for row in _rows("The log") for name in _names(row[0])} == set(Line.__struct_fields__)


def _send(curl: str, port: int) -> str:
    """Send what a `curl` of the README would, without needing curl."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-N", action="store_true")
    parser.add_argument("-H", action="append")
    parser.add_argument("-d")
    given = parser.parse_args(shlex.split(curl.replace("\\\n", " "))[1:])
    headers = dict(header.split(": ", 1) for header in given.H)
    url = given.url.replace(":8080", f":{port}")
    return httpx.post(url, headers=headers, content=given.d, timeout=60, trust_env=False).text


def test_the_readme_and_the_metrics_table_hold_for_what_make_run_starts(tmp_path: Path) -> None:
    with MakeRun(tmp_path / "log") as runner:
        runner.wait_ready()
        shown = re.search(r"```sh\n(curl .*?)```", (ROOT / "README.md").read_text(), re.S)
        assert shown is not None
        assert _send(shown[1], runner.port).rstrip().endswith("data: [DONE]")
        exposed = httpx.get(f"http://127.0.0.1:{runner.admin_port}/metrics", trust_env=False).text
        started = runner.family()
        runner.signal(signal.SIGINT)
        assert runner.wait_end(LIMIT_S) == 0, runner.tail()
    assert any("curl" in line for line in runner.lines)
    assert len(started) >= 2, "the router and the emulator"
    assert not [process for process in started if alive(process)], "nothing is left running"
    documented = {name for row in _rows("Metrics") for name in _names(row[0]) if name.startswith("warmroute_")}
    documented |= {"warmroute_cached_tokens_total", "warmroute_completion_tokens_total"}  # `_cached_`, `_completion_`
    assert documented == set(re.findall(r"^# TYPE (warmroute_\w+)", exposed, re.M))
