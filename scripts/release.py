"""What `make release` does: dist/ with wheel, sdist, the list of parts (SBOM) and checksums, once all of it was tried.

It refuses what is not committed, a version that CHANGELOG.md does not tell of, and one that is tagged otherwise. The
wheel is built from the sdist, installed where nothing else is, with the pinned dependencies, and does its main job
there (scripts/one_request.py). Nothing is published. Exit code 1, and why, when a step fails; dist/ is then as it was.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
INSTALL = ("install", "--quiet", "--disable-pip-version-check", "--no-compile")
LOCKED = ("--require-hashes", "--only-binary", ":all:")
"""Nothing but what was pinned, and no code of a package runs to install it: as in deploy/image/Dockerfile."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run to the end, without what would let the checkout be found, and return its output. A failure ends all."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "WARMROUTE_"))
    }
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"release: {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def faults(version: str, changes: str) -> Iterator[str]:
    """Why this commit cannot be released, each with the remedy. `changes` is the text of CHANGELOG.md."""
    if changed := run("git", "status", "--porcelain"):
        yield f"not everything is committed: commit it, or take it away\n{changed.rstrip()}"
    sections = dict(re.findall(r"^## (\S+).*\n((?:(?!## ).*\n?)*)", changes, re.M))
    if not sections.get(version, "").strip():
        yield f"CHANGELOG.md tells nothing of {version}: head what is under Unreleased with `## {version} - DATE`"
    if sections.get("Unreleased", "").strip():
        yield f"CHANGELOG.md has changes under Unreleased, which would be released: move them to {version}"
    here = [tag for tag in run("git", "tag", "--points-at", "HEAD").split() if tag.startswith("v")]
    if others := [tag for tag in here if tag != f"v{version}"]:
        yield f"pyproject.toml says {version} where the tag says {others[0]}: make them one"
    if f"v{version}" in run("git", "tag", "--list", "v*").split() and f"v{version}" not in here:
        yield f"v{version} is another commit already: raise the version in pyproject.toml"


def environment(folder: Path, *requirements: str) -> Path:
    """A new environment with what these files pin, and nothing else; its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin/python"
    files = [word for name in requirements for word in ("-r", ROOT / f"requirements/{name}.txt")]
    run(sys.executable, "-m", "pip", "--python", python, *INSTALL, *LOCKED, *files)
    return python


def made(version: str, work: Path) -> Path:
    """A folder with all that is released, tried."""
    out = work / "dist"
    told(f"building {version}")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out)
    (wheel,) = out.glob("*.whl")
    told("installing the wheel where nothing else is")
    python = environment(work / "installed", "image")
    run(sys.executable, "-m", "pip", "--python", python, *INSTALL, "--no-deps", "--no-index", wheel)
    run(sys.executable, "-m", "pip", "--python", python, "check")
    told(run(python, ROOT / "scripts/one_request.py", cwd=work).strip())
    told("listing its parts")
    lister = environment(work / "lister", "release").with_name("cyclonedx-py")
    parts = out / f"warmroute-{version}.cdx.json"
    described = ("--pyproject", ROOT / "pyproject.toml", "--mc-type", "application", "--output-reproducible")
    run(lister, "environment", *described, "--output-file", parts, python, cwd=work)
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("".join(sums))
    return out


def told(what: str) -> None:
    print(f"release: {what}", flush=True)


def main() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if why := list(faults(version, (ROOT / "CHANGELOG.md").read_text())):
        sys.exit("\n".join(f"release: {each}" for each in why))
    with tempfile.TemporaryDirectory(prefix="warmroute-release-") as work:
        out = made(version, Path(work))
        shutil.rmtree(DIST, ignore_errors=True)
        shutil.copytree(out, DIST)
    told(f"{DIST.name}/ has {', '.join(sorted(file.name for file in DIST.iterdir()))}. Next: git tag v{version}")


if __name__ == "__main__":
    main()
