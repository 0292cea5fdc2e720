"""`make release`: what it refuses, and what is in dist/ in the end; on a copy with a history of its own."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from scripts.licences import PAGE, page, pins
from tests.fakes.process import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
RELEASED = f"# Changelog\n\n## {VERSION} - 2026-12-24\n\n### Added\n- All of it.\n"
LIMIT_S = 900


@dataclass
class Checkout:
    """A copy of the repository, or of a part of it, with one commit."""

    folder: Path

    def git(self, *arguments: str) -> str:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.com", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *who, *arguments], cwd=self.folder, capture_output=True, text=True, check=True)
        return done.stdout

    def commit(self) -> None:
        """All that is there."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "A change")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def release(self) -> subprocess.CompletedProcess[str]:
        """Run the script as make does."""
        command = [sys.executable, str(self.folder / "scripts/release.py")]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def _begun(folder: Path) -> Checkout:
    checkout = Checkout(folder)
    checkout.write("CHANGELOG.md", RELEASED)
    checkout.git("init", "--quiet")
    checkout.commit()
    return checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """What is looked at before anything is built; the build fails, as there is nobody to do it."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/release.py", folder / "scripts")
    build = '[build-system]\nrequires = []\nbuild-backend = "nobody"\n'
    (folder / "pyproject.toml").write_text(f'{build}[project]\nname = "warmroute"\nversion = "{VERSION}"\n')
    return _begun(folder)


BUILDING = f"release: building {VERSION}\n"
"""What is said when nothing is refused."""


def test_what_can_be_released_is_built(checkout: Checkout) -> None:
    assert checkout.release().stdout == BUILDING
    checkout.git("tag", f"v{VERSION}")
    checkout.git("tag", "nightly")
    assert checkout.release().stdout == BUILDING, "with its tag, too"


def test_what_is_not_committed_is_refused(checkout: Checkout) -> None:
    for name in ("CHANGELOG.md", "new.txt"):
        checkout.write(name, f"{RELEASED}- More.\n")
        done = checkout.release()
        assert (done.returncode, done.stdout) == (1, "")
        assert "not everything is committed" in done.stderr
        assert name in done.stderr
        checkout.commit()


@pytest.mark.parametrize(
    "changes",
    [
        "# Changelog\n\n## Unreleased\n\n- All of it.\n",
        f"# Changelog\n\n## {VERSION} - 2026-12-24\n\n## 0.0.9\n\n- The last one's.\n",
        f"# Changelog\n\n## {VERSION}0 - 2026-12-24\n\n- Another's.\n",
    ],
    ids=["unreleased", "empty", "another"],
)
def test_a_version_without_its_changes_is_refused(checkout: Checkout, changes: str) -> None:
    checkout.write("CHANGELOG.md", changes)
    checkout.commit()
    done = checkout.release()
    assert (done.returncode, done.stdout) == (1, "")
    assert f"CHANGELOG.md tells nothing of {VERSION}" in done.stderr


def test_changes_under_unreleased_are_refused(checkout: Checkout) -> None:
    checkout.write("CHANGELOG.md", RELEASED.replace("## ", "## Unreleased\n\n- Too late.\n\n## ", 1))
    checkout.commit()
    done = checkout.release()
    assert done.returncode == 1
    assert "under Unreleased" in done.stderr
    checkout.write("CHANGELOG.md", RELEASED.replace("## ", "## Unreleased\n\n## ", 1))
    checkout.commit()
    assert checkout.release().stdout == BUILDING, "the heading alone is none"


def test_another_tag_is_refused(checkout: Checkout) -> None:
    checkout.git("tag", "v9.9.9")
    done = checkout.release()
    assert (done.returncode, done.stdout) == (1, "")
    assert f"pyproject.toml says {VERSION} where the tag says v9.9.9" in done.stderr


def test_a_version_that_another_commit_is_is_refused(checkout: Checkout) -> None:
    checkout.git("tag", f"v{VERSION}")
    checkout.commit()
    done = checkout.release()
    assert (done.returncode, done.stdout) == (1, "")
    assert "is another commit already: raise the version" in done.stderr


# A whole release


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("release") / "checkout"
    kept_out = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    kept_out.remove("benchmarks/*.jsonl")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", *kept_out))
    done = _begun(folder).release()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"release: warmroute {VERSION}, installed in" in done.stdout
    assert "a streamed request was answered" in done.stdout
    yield folder / "dist"
    shutil.rmtree(folder)


def test_it_has_these_files_and_their_checksums(dist: Path) -> None:
    names = {f"warmroute-{VERSION}-py3-none-any.whl", f"warmroute-{VERSION}.tar.gz", f"warmroute-{VERSION}.cdx.json"}
    assert {file.name for file in dist.iterdir()} == names | {"SHA256SUMS"}
    sums = dict(line.split()[::-1] for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert sums == {name: hashlib.sha256((dist / name).read_bytes()).hexdigest() for name in names}


def test_the_list_of_parts_has_what_is_pinned_with_its_licence(dist: Path) -> None:
    parts = json.loads((dist / f"warmroute-{VERSION}.cdx.json").read_text())
    assert parts["bomFormat"] == "CycloneDX"
    whole = parts["metadata"]["component"]
    assert (whole["name"], whole["version"], whole["type"]) == ("warmroute", VERSION, "application")
    found = {part["purl"]: part for part in parts["components"] if part["name"] != "warmroute"}
    assert set(found) == {f"pkg:pypi/{name}@{version}" for name, version in pins("image").items()}
    for part in found.values():
        told = metadata.metadata(part["name"])
        if "License-Expression" in told or "License ::" in str(told.get_all("Classifier")):
            assert part["licenses"], part["name"]


def test_from_the_sdist_everything_can_be_made_again(dist: Path) -> None:
    with tarfile.open(dist / f"warmroute-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = ("Makefile", "scripts/setup", "requirements/lock.txt", "requirements/image.txt", ".dockerignore")
    assert not set(needed) - names
    assert "deploy/image/Dockerfile" in names
    assert "docs/deploy.md" in names
    with zipfile.ZipFile(dist / f"warmroute-{VERSION}-py3-none-any.whl") as wheel:
        assert {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" not in name} == {
            "policies",
            "router",
            "sim",
        }


# Licences


def test_the_page_of_licences_is_that_of_the_packages() -> None:
    """`make licences` writes it."""
    assert PAGE.read_text() == page()


def test_no_licence_asks_for_more_than_to_be_named() -> None:
    """One that is new here is for a person to look at."""
    known = {
        "0BSD",
        "Apache-2.0",
        "BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "CC0-1.0",
        "ISC",
        "MIT",
        "MPL-2.0",
        "PSF-2.0",
        "Zlib",
    }
    told = re.findall(r"^\| \S+ \| \d\S* \| (.*) \|$", page(), re.M)
    assert len(told) > 40
    assert {each for line in told for each in re.split(" AND | OR ", line)} <= known
