"""Writes docs/licences.md: what the image holds beside warmroute, and under which licences, as the packages say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/licences.md"

HEAD = """\
# Licences of what warmroute runs on

Made by `make licences` from `requirements/image.txt` and what the packages say of themselves: what an image of
warmroute holds beside it and beside Python and Debian, whose own licences are in `/usr/share/doc` of the image. Each
release has the same as a CycloneDX file. warmroute itself is under the [Apache License 2.0](../LICENSE); what it took
from others is in [NOTICE](../NOTICE).

| package | version | licence |
|---|---|---|
"""

_PYTHON = re.findall(r"^FROM python:((\d+\.\d+)\.\d+)-", (ROOT / "deploy/image/Dockerfile").read_text(), re.M)[0]

IMAGE = {
    "python_full_version": _PYTHON[0],
    "python_version": _PYTHON[1],
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
}
"""What an image has: not all that is pinned is needed everywhere."""

SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
"""What older packages write, by the name that newer ones have for it. BSD: they do not say which."""


def licence(package: str) -> str:
    """Of an installed package, as an SPDX expression where it has one. ValueError when it does not say in a line."""
    told = metadata.metadata(package)
    field = str((told.get_all("License") or [""])[0])
    classifiers = [each.rpartition(" :: ")[2] for each in told.get_all("Classifier") or () if "License ::" in each]
    if "License-Expression" in told:
        return str(told["License-Expression"])
    if re.fullmatch(r"[\w.+-]+( (AND|OR) [\w.+-]+)*", field):
        return field
    words = classifiers or [field]
    if not all(words) or any("\n" in each for each in words):
        raise ValueError(f"{package} does not say under which licence it is: look, and say so in {Path(__file__).name}")
    return " OR ".join(SPDX.get(each, each) for each in words)


def pins(name: str, where: Mapping[str, str] | None = None) -> dict[str, str]:
    """Versions by package, of a list in requirements/: those that are needed there, or else here."""
    lines = re.findall(r"^([a-z0-9].*?)(?: \\)?$", (ROOT / f"requirements/{name}.txt").read_text(), re.M)
    pinned = [Requirement(line) for line in lines]
    wanted = [each for each in pinned if each.marker is None or each.marker.evaluate(dict(where or {}))]
    return {each.name: str(each.specifier).removeprefix("==") for each in wanted}


def page() -> str:
    """The whole page."""
    rows = [f"| {name} | {version} | {licence(name)} |\n" for name, version in pins("image", IMAGE).items()]
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
