"""More of what the documentation says, as it is read by somebody who follows it; the rest is in tests/test_docs.py."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.configuration import masked
from router.settings import Settings
from tests.fakes.process import ROOT, MakeRun, Process, alive

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LIMIT_S = 60

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def blocks(text: str) -> str:
    """The lines of fenced code, continued lines joined and comments cut off."""
    code = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S))
    return re.sub(r"\s+# .*", "", code.replace("\\\n", " "))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# Links and commands


@pages
def test_links_stay_in_the_repository_and_their_anchors_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(linked), target


@pages
def test_paths_named_in_code_exist(page: Path) -> None:
    """Of this repository: `scripts/...`, `tests/...`, `policies/...` and the like."""
    tops = "policies|router|sim|tests|scripts|docs|benchmarks|requirements"
    for named in re.findall(rf"`((?:{tops})/[\w./-]*)`", page.read_text(encoding="utf-8")):
        assert (ROOT / named).exists(), named


def commands() -> list[tuple[str, str]]:
    """Every `warmroute ...` written in the pages as (page, command line without the program)."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        written = re.findall(r"`(?:\.venv/bin/)?warmroute ([a-z-][^`]*)`", text)
        written += re.findall(r"^(?:\$ )?(?:\.venv/bin/)?warmroute ([a-z-].*)$", blocks(text), re.M)
        found += [(page.relative_to(ROOT).as_posix(), line) for line in dict.fromkeys(written)]
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_are_understood(page: str, line: str) -> None:
    """A subcommand with its flags: `--help` after them ends it before it acts, once all before has been parsed."""
    words = shlex.split(line)
    command = [ROOT / ".venv/bin/warmroute", *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, ""), line
    assert done.stdout.startswith(f"usage: warmroute {words[0]} ")
    for flag in (word for word in words if word.startswith("--")):
        assert flag in done.stdout, flag


# The settings


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and prefix + key != "policy":
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


SETTINGS = leaves(masked(Settings()))
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")


def documented() -> dict[str, str]:
    """The table of settings: dotted key and what stands as its default. `a.b`, `.c` are two keys of one section."""
    table = OPERATIONS.partition("## Settings")[2].partition("SGLang flags")[0]
    found: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`.*?) \| *(.*?) *\|", table, re.M):
        keys: list[str] = []
        for name in re.findall(r"`([\w.*]+)`", names):
            section = keys[-1].rpartition(".")[0] if keys else ""
            keys.append(section + name if name.startswith(".") else name)
        values = [value.strip() for value in defaults.split(",")]
        if len(values) != len(keys):
            values = [defaults] * len(keys)
        assert not set(keys) & set(found), f"{keys} documented twice"
        found |= dict(zip(keys, values, strict=True))
    return found


def meant(text: str) -> object:
    """A default as the table writes it."""
    size = re.fullmatch(r"(\d+) (MiB|GiB)", text)
    if size is not None:
        return int(size[1]) << {"MiB": 20, "GiB": 30}[size[2]]
    if re.fullmatch(r"[\d.]+", text) and text.count(".") < 2:
        return float(text)
    return {"false": False, "true": True}.get(text, text)


@pytest.mark.parametrize("key", [key for key in documented() if not key.endswith(".*")])
def test_its_defaults_are_the_defaults(key: str) -> None:
    said, default = meant(documented()[key]), SETTINGS[key]
    if key == "policy":
        default = default["name"]
    elif key == "identity.secret":
        assert Settings().identity.secret.get_secret_value() == ""
        default = None
    if said == "none":
        assert default in (None, [], "")
    elif said == "built in":
        assert default is None
    else:
        assert said == default


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (r"asked `/ready` every second", "health.interval_s", 1),
        (r"every\s+(\d+) s with a\s+patient timeout", "health.deep_interval_s", 15),
        (r"after three the replica is ejected", "health.fail_after", 3),
        (r"two good answers\s+bring it back", "health.pass_after", 2),
        (r"three in a row without a success between eject at once", "health.passive_fail_after", 3),
        (r"`/v1/loads` every second", "reports.interval_s", 1),
    ],
)
def test_what_is_told_in_words_is_so(words: str, key: str, value: float) -> None:
    assert re.search(words, OPERATIONS), f"{words} is no longer there"
    assert SETTINGS[key] == value


# The first steps


def curl(text: str) -> list[str]:
    """The `curl` for a chat that a text tells to try."""
    (found,) = re.findall(r"^ *(curl -N .*?\}')$", text, re.M | re.S)
    return shlex.split(found.replace("\\\n", " "))


def test_the_session_stays_and_nothing_is_left_behind(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    with MakeRun(tmp_path / "log") as process:
        process.wait_ready()
        port, admin_port = process.port, process.admin_port
        printed = "\n".join(process.lines)
        assert f"admin on http://127.0.0.1:{admin_port}" in printed
        command = curl(readme)
        assert curl(printed) == [word.replace("8080", str(port)) for word in command], "both say the same"
        answers = []
        for _ in range(2):
            asked = [*curl(printed), "--silent", "--show-error", "--noproxy", "*", "--include"]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S, check=True)
            head, _, body = done.stdout.partition("\n\n")
            assert head.startswith("HTTP/1.1 200")
            assert body.rstrip().endswith("data: [DONE]")
            answers.append(json.loads(body.split("data: ")[1])["object"])
        assert answers == ["chat.completion.chunk"] * 2
        lines = [json.loads(line) for line in until_lines(process, 2)]
        assert lines[0]["replica"] == lines[1]["replica"], "the session stays"
        replicas = httpx.get(f"http://127.0.0.1:{admin_port}/replicas", trust_env=False).json()["replicas"]
        assert [replica["state"] for replica in replicas] == ["ready"] * 3
        family = process.family()
        assert len(family) >= 2, "the router and the emulator"
        process.signal(signal.SIGTERM)  # as a supervisor does; Ctrl-C is in tests/test_docs.py
        assert process.wait_end(LIMIT_S) == 0
        assert not [pid for pid in family if alive(pid)], "nothing is left behind"


def until_lines(process: Process, count: int) -> list[str]:
    """So many lines of the access log, waited for."""
    process.wait_line(lambda _: sum(line.startswith('{"time"') for line in process.lines) >= count, LIMIT_S)
    return [line for line in process.lines if line.startswith('{"time"')]
