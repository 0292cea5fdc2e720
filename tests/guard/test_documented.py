"""What is told of keys, TLS and threats is so."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from router import keys
from router.files import CHECK_S
from router.keys import MIN_KEY_CHARS
from router.settings import KeysSettings, Settings
from router.token import MIN_TOKEN_CHARS
from tests.fakes.process import ROOT

OPERATIONS = (ROOT / "docs/operations.md").read_text()
THREATS = (ROOT / "docs/threat-model.md").read_text()
SECTION = OPERATIONS.partition("\n## Keys and TLS\n")[2].partition("\n## ")[0]
SHOWN_BY = sorted(set(re.findall(r"`(\w+/\w+\.py)::(\w+)`", THREATS)))


def defaults(model: BaseModel, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            found |= defaults(value, f"{prefix}.{name}")
        else:
            found[f"{prefix}.{name}"] = value
    return found


@pytest.mark.parametrize(("file", "name"), SHOWN_BY, ids=[name for _, name in SHOWN_BY])
def test_what_shows_that_a_threat_is_stopped_exists(file: str, name: str) -> None:
    path = ROOT / "tests" / file
    assert path.exists(), file
    assert re.search(rf"^ *(async )?def {name}\(", path.read_text(), re.M), f"{file} has no {name}"


def test_every_threat_says_what_shows_it() -> None:
    rows = [line for line in THREATS.splitlines() if line.startswith("|")]
    claims = [line for line in rows if line.count("|") == 4 and not set(line) <= set("|-: ")]
    told = [line for line in claims if "shown by" not in line and not line.startswith("| party")]
    proven = [line for line in told if re.search(r"::\w+`|by construction", line)]
    parties = THREATS.partition("## Who may do what")[2].partition("\n## ")[0]
    assert len(proven) > 30
    assert [line for line in told if line not in proven and line not in parties] == []


def test_the_table_names_every_setting_with_its_default() -> None:
    settings = Settings()
    known: dict[str, Any] = {}
    for name in ("keys", "tls", "headers", "cors"):
        known |= defaults(getattr(settings, name), name)
    known |= defaults(settings.admin.tls, "admin.tls")
    known["keys.replica_key"] = settings.keys.replica_key.get_secret_value()
    told: dict[str, str] = {}
    for names, default in re.findall(r"^\| (`.+?) \| (\S+) \|", SECTION, re.M):
        first, *others = re.findall(r"`([^`]+)`", names)
        for name in (first, *(first.rpartition(".")[0] + other for other in others)):
            told[name] = default
    assert set(told) == set(known)
    for name, default in told.items():
        if default == "none":
            assert not known[name], name
        else:
            assert known[name] == {"true": True, "0": 0}.get(default, default), name


def test_the_shell_makes_a_key_that_is_let_in(tmp_path: Path) -> None:
    (script,) = re.findall(r"```sh\n(key=.*?)```", SECTION, re.S)
    done = subprocess.run(
        ["sh", "-ec", f"{script}\necho $key"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    key = done.stdout.strip()
    assert len(key) >= MIN_KEY_CHARS
    made = keys.made(KeysSettings(file=str(tmp_path / "keys.txt")))
    assert made is not None
    known = made._known(key.encode())
    assert known is not None
    assert known[1].name == "alice"


def test_the_example_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```yaml\n(keys:.*?)```", SECTION, re.S)
    monkeypatch.chdir(tmp_path)
    Path("keys.txt").write_text(f"alice:sha256:{'0' * 64}\n")
    settings = Settings(**yaml.safe_load(example)).keys
    assert (settings.accept["ci"].max_in_flight, settings.max_in_flight) == (8, 64)


def test_the_numbers_in_the_text() -> None:
    assert f"fewer than {MIN_KEY_CHARS} characters is never accepted" in SECTION
    assert f"one of fewer than {MIN_TOKEN_CHARS} characters is refused" in OPERATIONS
    assert f"looked at every {CHECK_S:.0f} s" in SECTION
