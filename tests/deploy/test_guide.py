"""docs/deploy.md: its examples are taken by what they are for, and its figures are those of their sources."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.cli import main
from router.configuration import load
from router.pools import Pools
from router.settings import Settings
from tests.fakes.process import ROOT

GUIDE = (ROOT / "docs/deploy.md").read_text()
FREE_FORM = {"labels", "selector"}
"""Values of the chart whose keys are the user's."""


def _section(heading: str) -> str:
    return GUIDE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def _block(language: str, heading: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", _section(heading), re.S)
    return str(found)


def _unknown(given: dict[str, Any], known: dict[str, Any], path: str = "") -> list[str]:
    """Dotted keys that the chart's values do not have."""
    found = []
    for key, value in given.items():
        if key not in known:
            found.append(path + key)
        elif isinstance(value, dict) and key not in FREE_FORM:
            found += _unknown(value, known[key], f"{path}{key}.")
    return found


def test_the_values_are_the_charts() -> None:
    known = yaml.safe_load((ROOT / "deploy/helm/warmroute/values.yaml").read_text())
    given = yaml.safe_load(_block("yaml", "On Kubernetes"))
    assert _unknown(given, known) == []
    assert [key for engine in given["engines"] for key in engine] == ["service", "port"]


def test_two_models_are_two_pools_of_the_chart(tmp_path: Path) -> None:
    given = yaml.safe_load(_block("yaml", "Two models"))
    file = tmp_path / "warmroute.yaml"
    file.write_text(yaml.safe_dump(given["config"] | {"discovery": {"kubernetes": given["engines"]}}))
    settings = load(str(file))
    pools = Pools(settings.pools)
    assert [pools.shown(pools.core(each.pool)) for each in settings.discovery.kubernetes] == ["large", "small"]
    assert pools.of_model("claude-haiku-4-5") == pools.core("small")


def test_the_configuration_is_taken(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text(f"alice:sha256:{'0' * 64}\n")
    file = tmp_path / "warmroute.yaml"
    file.write_text(_block("yaml", "As a plain process").replace("/etc/warmroute/keys.txt", str(keys)))
    assert len(load(str(file)).replicas) == 2


def test_systemd_waits_for_the_streams_and_tells_the_supervisor_alone(capsys: pytest.CaptureFixture[str]) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign] # names as they are written
    unit.read_string(_block("ini", "As a plain process"))
    service = unit["Service"]
    drain = Settings().drain
    assert float(service["TimeoutStopSec"]) > drain.delay_s + drain.grace_s
    assert service["KillMode"] == "mixed"
    program, *words = shlex.split(service["ExecStart"])
    assert Path(program).is_absolute()
    assert Path(program).name == "warmroute"
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    assert "--config FILE" in capsys.readouterr().out


def test_the_figures_of_a_router_are_those_of_the_results() -> None:
    results = (ROOT / "benchmarks/results.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| .* \|$", _section("Size").split("**Engines.**")[0], re.M)[1:]
    figures = [number for _, figure in rows for number in re.findall(r"\d+\.\d+", figure)]
    assert len(figures) == 9
    for number in figures:
        assert re.search(rf"\b{re.escape(number)}\b", results), number


def test_the_figures_of_engines_are_those_of_the_simulators_page() -> None:
    names = {"INT4": "int4", "TP4": "tp4", "TP8": "tp8", "BF16": "bf16", "FP8": "fp8"}
    page = (ROOT / "docs/simulator.md").read_text()
    rows = re.findall(r"^\| (INT4) weights, (TP\d), (\w+) KV \| (\d+)(?: replicas)? \| (\d+) \|$", GUIDE, re.M)
    assert len(rows) == 4
    for weights, parallel, kv, without, tiered in rows:
        machine = f"kimi-{names[weights]}-{names[parallel]}-{names[kv]}"
        told = dict(re.findall(rf"^\| {machine} +\| (yes|no) +\|(?:[^|]*\|){{5}} (\d+) ", page, re.M))
        assert told == {"yes": tiered, "no": without}, machine


@pytest.mark.parametrize("flag", re.findall(r"`(WARMROUTE_\w+|[a-z_]+\.[a-z_]+)`", GUIDE))
def test_settings_that_are_named_exist(flag: str) -> None:
    """And files of `deploy/` are no settings."""
    section, _, name = flag.partition(".")
    fields = Settings.model_fields
    if section in fields:
        assert name in fields[section].annotation.model_fields  # type: ignore[union-attr]
    else:
        assert flag.endswith((".yaml", ".enabled", ".url"))
