"""The documentation is true: links lead somewhere, commands exist, tables name what the code has."""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from router.logs import Line
from router.settings import Settings
from tests.fakes.process import ROOT, Process, free_port

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


def test_the_log_table_names_every_field() -> None:
    assert {name for row in _rows("The log") for name in _names(row[0])} == set(Line.__struct_fields__)


def _group(pgid: int) -> list[Path]:
    """The processes of a process group, where the system has /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if stat.read_text().rsplit(")", 1)[1].split()[2] == str(pgid):
                found.append(stat.parent)
    return found


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
    return httpx.post(url, headers=headers, content=given.d, timeout=30, trust_env=False).text


def test_the_readme_and_the_metrics_table_hold_for_what_make_run_starts(tmp_path: Path) -> None:
    port, admin = free_port(), free_port()
    command = ["env", f"PORT={port}", f"ADMIN_PORT={admin}", sys.executable, "scripts/run.py"]
    with Process(command, tmp_path / "log") as runner:
        runner.wait_ok(f"http://127.0.0.1:{admin}/readyz", 20)
        shown = re.search(r"```sh\n(curl .*?)```", (ROOT / "README.md").read_text(), re.S)
        assert shown is not None
        assert _send(shown[1], port).rstrip().endswith("data: [DONE]")
        exposed = httpx.get(f"http://127.0.0.1:{admin}/metrics", trust_env=False).text
        started = _group(runner.pid)
        runner.signal(signal.SIGINT)
        assert runner.wait_end(20) == 0, runner.tail()
    assert any("curl" in line for line in runner.lines)
    assert not [process for process in started if process.exists()], "nothing is left running"
    documented = {name for row in _rows("Metrics") for name in _names(row[0]) if name.startswith("warmroute_")}
    documented |= {"warmroute_cached_tokens_total", "warmroute_completion_tokens_total"}  # `_cached_`, `_completion_`
    assert documented == set(re.findall(r"^# TYPE (warmroute_\w+)", exposed, re.M))
