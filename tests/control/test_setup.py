"""`scripts/setup`: when it builds `.venv` anew, when it leaves it alone, and what it says of a Python it cannot use.

On a copy, with a stand-in for Python: what it is asked to do is noted, and nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.process import ROOT

STAND_IN = f"""#!/bin/sh
case "$1 $2" in
"-m venv") echo venv >> calls; rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; [ ! -e no-venv ] ;;
"-m pip") echo pip >> calls; [ ! -e no-network ] ;;
*) exec '{sys.executable}' "$@" ;;
esac
"""
BUILT = ["venv", "pip", "pip"]


@dataclass
class Checkout:
    """A copy of what the script reads."""

    folder: Path

    def setup(self, python: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the script as make does."""
        environment = os.environ | {"PYTHON": python or str(self.folder / "python")}
        return subprocess.run(
            [str(self.folder / "scripts/setup")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(self) -> list[str]:
        """What the stand-in was asked to do since this was last called."""
        file = self.folder / "calls"
        calls = file.read_text().split() if file.exists() else []
        file.unlink(missing_ok=True)
        return calls

    def script(self, name: str, text: str) -> str:
        """An executable script; returns its path."""
        file = self.folder / name
        file.write_text(text)
        file.chmod(0o755)
        return str(file)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    folder = tmp_path / "checkout"
    for name in ("scripts/setup", "requirements/lock.txt", "pyproject.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    checkout = Checkout(folder)
    checkout.script("python", STAND_IN)
    return checkout


@pytest.fixture
def built(checkout: Checkout) -> Checkout:
    """With its `.venv`."""
    done = checkout.setup()
    assert (done.returncode, checkout.calls()) == (0, BUILT), done.stderr
    return checkout


def test_what_is_up_to_date_is_left_alone(built: Checkout) -> None:
    done = built.setup()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert built.calls() == []


def test_without_its_interpreter_it_is_built_anew(built: Checkout) -> None:
    """As after an upgrade of the system's Python, to which `.venv/bin/python` was a link."""
    python = built.folder / ".venv/bin/python"
    python.unlink()
    python.symlink_to(built.folder / "uninstalled")
    assert built.setup().returncode == 0
    assert built.calls() == BUILT
    assert built.setup().stdout == "", "and that was it"


@pytest.mark.parametrize("file", ["requirements/lock.txt", "pyproject.toml"])
def test_with_other_dependencies_it_is_built_anew(built: Checkout, file: str) -> None:
    with (built.folder / file).open("a") as text:
        text.write("# changed\n")
    assert built.setup().returncode == 0
    assert built.calls() == BUILT


def test_moved_it_is_built_anew(built: Checkout, tmp_path: Path) -> None:
    moved = Checkout(built.folder.rename(tmp_path / "elsewhere"))
    assert moved.setup().returncode == 0
    assert moved.calls() == BUILT


def test_a_link_to_anothers_is_not_followed_to_empty_that(built: Checkout, tmp_path: Path) -> None:
    other = Checkout(shutil.copytree(built.folder, tmp_path / "other"))
    shutil.rmtree(other.folder / ".venv")
    (other.folder / ".venv").symlink_to(built.folder / ".venv")
    done = other.setup()
    assert (done.returncode, other.calls()) == (1, [])
    assert "Remove the link, or empty that folder" in done.stderr
    assert built.setup().stdout == "", "it is as it was"
    assert built.calls() == []


def test_a_link_to_an_empty_folder_is_followed(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (checkout.folder / ".venv").symlink_to(tmp_path / "large disk")
    done = checkout.setup()
    assert (done.returncode, checkout.calls()) == (0, BUILT), done.stderr


def test_for_another_python_it_is_built_anew(built: Checkout) -> None:
    newer = STAND_IN.replace("*)", '"--version ") echo Python 3.99.0 ;;\n*)')
    assert built.setup(built.script("newer", newer)).returncode == 0
    assert built.calls() == BUILT


def test_half_built_it_is_not_taken_for_whole(checkout: Checkout) -> None:
    mark = checkout.folder / "no-network"
    mark.touch()
    assert checkout.setup().returncode != 0
    assert checkout.calls() == ["venv", "pip"]
    mark.unlink()
    assert checkout.setup().returncode == 0
    assert checkout.calls() == BUILT


def test_without_the_venv_module_the_remedy_is_told(checkout: Checkout) -> None:
    (checkout.folder / "no-venv").touch()
    done = checkout.setup()
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr
    assert not (checkout.folder / ".venv").exists()


# A Python that cannot be used


def test_no_python(checkout: Checkout) -> None:
    done = checkout.setup("nosuch-python")
    assert done.returncode == 1
    assert "'nosuch-python' is not on PATH. Install it, or set PYTHON=" in done.stderr


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exit 127", "nothing"),
        ("exit 0", "nothing"),
        ("echo 'pyenv: python3: command not found' >&2; exit 127", "pyenv: python3: command not found"),
        ('[ "$1" = --version ] && echo Python 3.9.2 || echo False', "Python 3.9.2"),
    ],
    ids=["silent failure", "silent success", "pyenv", "too old"],
)
def test_a_python_that_will_not_do_is_named_with_the_remedy(checkout: Checkout, script: str, says: str) -> None:
    python = checkout.script("shim", f"#!/bin/sh\n{script}\n")
    done = checkout.setup(python)
    assert (done.returncode, done.stdout) == (1, "")
    first, remedy = done.stderr.splitlines()
    assert first == f"warmroute needs Python 3.11 or newer: '{python} --version' says: {says}."
    assert remedy.startswith("Set PYTHON=/path/to/python3.11 or newer; with pyenv")
    assert not (checkout.folder / ".venv").exists()
