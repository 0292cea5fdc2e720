"""The wheel: what is in it, and that it works from an empty environment."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.fakes.process import ROOT


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, cwd=ROOT)
    (built,) = out.glob("*.whl")
    return built


def test_it_holds_exactly_the_three_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/", 1)[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"policies", "router", "sim"}
    assert any(name.startswith("sim/data/") and name.endswith(".csv.gz") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/NOTICE") for name in names)


def test_it_works_from_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    _run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    _run(python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", wheel, cwd=tmp_path)
    warmroute = tmp_path / "venv/bin/warmroute"
    assert _run(warmroute, "--version", cwd=tmp_path).startswith("warmroute ")
    assert "session_affinity" in _run(warmroute, "check-config", "--replica", "http://127.0.0.1:1", cwd=tmp_path)
    assert "session_affinity" in _run(warmroute, "policies", cwd=tmp_path)
    assert "a streamed request was answered" in _run(python, ROOT / "scripts/one_request.py", cwd=tmp_path)
