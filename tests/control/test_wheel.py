"""The wheel, file by file and module by module; what it does for a stranger is in tests/test_packaging.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.process import ROOT

LIMIT_S = 240


def run(command: Sequence[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run to its end, without what would let the checkout be found. AssertionError with its output when it fails."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV")) and not name.upper().startswith("WARMROUTE_")
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT], out)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts' folder of an environment that holds the wheel and what it says it needs, in the pinned versions."""
    where = tmp_path_factory.mktemp("venv")
    venv.create(where, with_pip=False)
    pins = where / "pins.txt"
    lines = (ROOT / "requirements/lock.txt").read_text(encoding="utf-8").splitlines()
    pins.write_text("\n".join(line.split()[0] for line in lines if line[:1].isalpha()))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        where / "bin/python",
        "install",
        "--quiet",
        "--no-compile",
        "--constraint",
        pins,
    ]
    run([*pip, wheel], where)
    return where / "bin"


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_every_source_and_data_file_is_in_it(wheel: Path) -> None:
    """Data too: without it the emulator does not start."""
    here = {
        path.relative_to(ROOT).as_posix()
        for package in ("router", "policies", "sim")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in files(wheel) if ".dist-info/" not in name}
    assert packed == here


def test_the_installed_router_imports_nothing_that_it_does_not_declare(installed: Path, tmp_path: Path) -> None:
    """Every module, not only those that a command happens to load; but for those that need an extra."""
    code = (
        "import importlib, pkgutil\n"
        "for top in ('router', 'policies', 'sim'):\n"
        "    package = importlib.import_module(top)\n"
        "    print(package.__file__)\n"
        "    for module in pkgutil.walk_packages(package.__path__, top + '.'):\n"
        "        extra = module.name.startswith(('sim.report', 'router.tracing'))\n"
        "        if not extra and not module.name.endswith('__main__'):\n"
        "            importlib.import_module(module.name); print(module.name)\n"
    )
    imported = run([installed / "python", "-c", code], tmp_path).stdout.split()
    files = [Path(name) for name in imported if "/" in name]
    assert len(files) == 3
    assert all(file.is_relative_to(installed.parent) for file in files), "not the checkout's"
    assert {"router.cli", "router.proxy.exchange", "policies.balancer", "sim.emulator.server"} <= set(imported)


def test_the_installed_simulator_runs_a_scenario_and_says_what_pictures_need(installed: Path, tmp_path: Path) -> None:
    command = [installed / "warmroute", "sim", "run", "r30", "--set", "measured_s=30", "--set", "warm_up_s=10"]
    lines = run([*command, "--json"], tmp_path).stdout.splitlines()
    assert [json.loads(line)["policy"] for line in lines] == ["session_affinity"] * len(lines)
    failed = subprocess.run([*command, "--png", "pictures"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    assert "warmroute[plots]" in failed.stderr
