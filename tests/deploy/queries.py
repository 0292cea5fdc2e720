"""The dashboards' and rules' queries, as a real Prometheus can be asked them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from tests.fakes.process import ROOT

ALERTS = sorted((ROOT / "deploy/alerts").glob("*.yaml"))
DASHBOARDS = sorted((ROOT / "deploy/dashboards").glob("*.json"))

VARIABLES = {
    "$__rate_interval": "10s",
    "$__range": "5m",
    "$job": ".*",
    "$instance": ".*",
    "$replica": ".*",
    "$engine": ".*",
    "$objective": "0.999",
    "$ttft": "10.0",
    "$gap": "0.1",
}
"""What Grafana puts in their places."""


@dataclass(frozen=True, slots=True)
class Target:
    """A query of a panel."""

    board: str
    panel: dict[str, Any]
    expr: str
    legend: str

    @property
    def name(self) -> str:
        return f"{self.board}: {self.panel['title']}: {self.legend}"


def filled(expr: str) -> str:
    """With values for the variables."""
    for name in sorted(VARIABLES, key=len, reverse=True):
        expr = expr.replace(name, VARIABLES[name])
    assert "$" not in expr, expr
    return expr


def targets() -> Iterator[Target]:
    """Every query of every dashboard."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield Target(path.stem, panel, filled(target["expr"]), target.get("legendFormat", ""))


def rules() -> Iterator[dict[str, Any]]:
    """Every alert."""
    for path in ALERTS:
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def unfiltered(expr: str) -> str:
    """The same comparisons, answered with 0 or 1 rather than with nothing: there is data unless an operand has none."""
    return re.sub(r"(?<=\s)(==|<|>)(?=\s)", r"\1 bool", expr)
