"""The alert rules: whole, each with its runbook, and each shown to fire and to keep quiet."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy.queries import ALERTS, rules
from tests.fakes.process import ROOT

RULES = list(rules())
OPERATIONS = (ROOT / "docs/operations.md").read_text()
TESTS = sorted((ROOT / "deploy/alerts/tests").glob("*.yaml"))
each_rule = pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])


@each_rule
def test_a_rule_says_whom_it_calls_and_why(rule: dict[str, Any]) -> None:
    assert rule["labels"] in ({"severity": "page"}, {"severity": "ticket"})
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
    assert rule["annotations"]["description"].endswith(".")


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    section = OPERATIONS.split("\n## Alerts\n", 1)[1].split("\n## ", 1)[0]
    headings = re.findall(r"^### (\w+)\n\n(\S.*)", section, re.M)
    assert [name for name, _ in headings] == [rule["alert"] for path in ALERTS[::-1] for rule in _of(path)]
    assert len(headings) == len(RULES)


def _of(path: Any) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def test_every_alert_is_shown_to_fire_and_to_keep_quiet() -> None:
    told = [test["name"] for path in TESTS for test in yaml.safe_load(path.read_text())["tests"]]
    assert sorted(told) == sorted(f"{rule['alert']} {end}" for rule in RULES for end in ("fires", "stays quiet"))
    for path in TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            (asked,) = test["promql_expr_test"]
            alert, end = test["name"].split(" ", 1)
            assert f'alertname="{alert}", alertstate="firing"' in asked["expr"]
            assert asked["exp_samples"][0]["value"] == (1 if end == "fires" else 0)


@pytest.mark.prometheus
def test_the_rules_are_sound() -> None:
    _promtool("check", "rules", *map(str, ALERTS))


@pytest.mark.prometheus
def test_the_rules_fire_when_they_should() -> None:
    _promtool("test", "rules", *map(str, TESTS))


def _promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
