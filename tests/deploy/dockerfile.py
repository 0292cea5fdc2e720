"""The Dockerfile as a list of instructions, and carried out in a folder without a container engine.

A stage's `COPY` and `RUN` are done as they stand, with the same commands in the same order; what differs is that paths
of the image lie below a folder, that the base image's Python is that of the tests, and that pip may use its cache.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.process import ROOT

DOCKERFILE = ROOT / "deploy/image/Dockerfile"
LIMIT_S = 600
"""For one `RUN`: the longest downloads 35 MB."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """As in `NAME --flag=value text`; the text is what it says to a shell or as JSON."""

    name: str
    flags: tuple[str, ...]
    text: str

    @property
    def words(self) -> list[str]:
        """Of the exec form. ValueError when it is in another."""
        return list(json.loads(self.text))


@dataclass
class Stage:
    """What follows a `FROM`, that of its parents before it."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, name: str) -> list[Instruction]:
        """All of one kind, in order."""
        return [each for each in self.instructions if each.name == name]


def stages(text: str) -> list[Stage]:
    """All stages in order. `base` is the image that the first of its line is from."""
    found: list[Stage] = []
    for instruction in _instructions(text):
        if instruction.name == "FROM":
            image, _, name = instruction.text.partition(" AS ")
            parent = next((stage for stage in found if stage.name == image), None)
            found.append(Stage(image, name) if parent is None else Stage(parent.base, name, list(parent.instructions)))
        else:
            found[-1].instructions.append(instruction)
    return found


def _instructions(text: str) -> Iterator[Instruction]:
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip():
            name, *words = line.split(" ")
            flags = [word for word in words if word.startswith("--")] if name in ("COPY", "FROM", "HEALTHCHECK") else []
            yield Instruction(name, tuple(flags), " ".join(word for word in words if word not in flags).strip())


def assigned(instruction: Instruction) -> dict[str, str]:
    """What an `ENV` or `LABEL` gives its names."""
    return {name: value.strip('"') for name, value in re.findall(r'([\w.]+)=("[^"]*"|\S+)', instruction.text)}


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a file of the repository from the build: its last pattern that matches says."""
    answer = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            parts = path.split("/")
            above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
            if any(fnmatch.fnmatchcase(f"/{each}", f"/{pattern}".replace("/**/", "*/")) for each in above):
                answer = not line.startswith("!")
    return answer


class Image:
    """What the Dockerfile makes, below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment: dict[str, str] = {}
        """Of the last stage, without that of the machine."""
        *others, last = stages(DOCKERFILE.read_text())
        subprocess.run([sys.executable, "-m", "venv", root / "python"], check=True, capture_output=True)
        for stage in (*others, last):
            self._carry_out(stage)
        self.command = [*last.of("ENTRYPOINT")[-1].words, *last.of("CMD")[-1].words]
        (health,) = last.of("HEALTHCHECK")
        self.healthcheck = Instruction("CMD", (), health.text.removeprefix("CMD ")).words

    def path(self, inside: str) -> Path:
        """Where a path of the image lies."""
        return self.root / inside.lstrip("/")

    def _carry_out(self, stage: Stage) -> None:
        folder = self.root
        self.environment = {"PATH": f"{self.root / 'python/bin'}:/usr/bin:/bin"}
        for instruction in stage.instructions:
            if instruction.name == "WORKDIR":
                folder = self.path(instruction.text)
                folder.mkdir(parents=True)
            elif instruction.name == "ENV":
                for name, value in assigned(instruction).items():
                    value = value.replace("/opt/", f"{self.root}/opt/")
                    self.environment[name] = value.replace("${PATH}", self.environment["PATH"])
            elif instruction.name == "COPY":
                *sources, to = instruction.text.split()
                if instruction.flags:
                    assert sources == [to], "from one stage to another: at the same place, so that scripts find theirs"
                    assert self.path(to).exists()
                else:
                    copy(sources, folder / to)
            elif instruction.name == "RUN":
                self._run(instruction.text.replace("/opt/", f"{self.root}/opt/"), folder)

    def _run(self, script: str, folder: Path) -> None:
        environment = {**os.environ, **self.environment}
        for name in list(environment):  # pip's ways to packages stay as they are here
            if name.startswith(("PYTHON", "VIRTUAL_ENV")) or name == "PIP_NO_CACHE_DIR":
                del environment[name]
        done = subprocess.run(
            ["/bin/sh", "-ec", script],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"RUN {script}\n{done.stdout}\n{done.stderr}"


def copy(sources: Sequence[str], to: Path) -> None:
    """As `COPY` from the repository: of a folder its content, and nothing that .dockerignore keeps out."""
    for name in sources:
        source = ROOT / name
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            path = file.relative_to(ROOT).as_posix()
            if file.is_file() and not ignored(path):
                target = to / file.relative_to(source) if source.is_dir() else to / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)
