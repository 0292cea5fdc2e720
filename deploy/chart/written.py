"""The files of the chart that are made: `make chart` writes them, and a test compares them with what is committed."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from deploy.chart.schema import schema
from deploy.chart.table import table
from router.reload import RESTART
from router.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/warmroute"
_TABLE = re.compile(r"(?<=<!-- values -->\n).*(?=<!-- end of values -->)", re.DOTALL)


def written() -> dict[str, str]:
    """Text by path below the chart's folder."""
    out = {
        "Chart.yaml": _versioned((CHART / "Chart.yaml").read_text()),
        "values.schema.json": _json(schema()),
        "README.md": _TABLE.sub(
            lambda _: table((CHART / "values.yaml").read_text()), (CHART / "README.md").read_text()
        ),
        "files/router.json": _json(
            {
                "defaults": Settings().model_dump(mode="json"),
                "files": sorted(path for path, _ in _fields(Settings) if path.endswith((".file", "_file"))),
                "restart": sorted(RESTART),
                "secrets": sorted(path for path, kind in _fields(Settings) if kind is SecretStr),
            }
        ),
    }
    for folder, pattern in (("alerts", "*.yaml"), ("dashboards", "*.json")):
        for path in (ROOT / "deploy" / folder).glob(pattern):
            out[f"files/{folder}/{path.name}"] = path.read_text()
    return out


def _json(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=1, sort_keys=True) + "\n"


def _versioned(text: str) -> str:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    text = re.sub(r"^version: .*$", f"version: {version}", text, flags=re.M)
    return re.sub(r"^appVersion: .*$", f'appVersion: "{version}"', text, flags=re.M)


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys, as paths with dots, and the types of their values."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field.annotation
