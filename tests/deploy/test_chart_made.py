"""What of the chart is made from elsewhere is as it would be made now."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from deploy.chart.table import values
from deploy.chart.values import Probe, Values
from deploy.chart.written import CHART, written
from router.settings import Settings
from tests.fakes.process import ROOT

WRITTEN = written()
GIVEN = (CHART / "values.yaml").read_text()


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_it_is_as_it_would_be_made_now(name: str) -> None:
    assert (CHART / name).read_text() == WRITTEN[name], "make chart writes it anew"


def test_no_copy_is_left_of_what_is_gone() -> None:
    copies = {str(path.relative_to(CHART)) for path in CHART.glob("files/*/*")}
    assert copies == {name for name in WRITTEN if name.count("/") == 2}


def test_it_is_of_the_packages_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["version"] == chart["appVersion"] == version


def test_every_value_has_a_type_and_every_type_a_value() -> None:
    given = yaml.safe_load(GIVEN)
    left: list[tuple[type[BaseModel], Any]] = [(Values, given)]
    for model, tree in left:
        assert set(tree) == {name for name, field in model.model_fields.items() if field.alias is None}
        fields = [(name, field.annotation) for name, field in model.model_fields.items() if name in tree]
        parts = [(each, tree[name]) for name, each in fields if isinstance(each, type) and issubclass(each, BaseModel)]
        left += [(each, part) for each, part in parts if each not in (Settings, Probe)]
    assert len(left) > 20


def test_every_value_is_told_or_a_part_of_what_is() -> None:
    rows = list(values(GIVEN))
    paths = {row.path for row in rows}
    told = {row.path for row in rows if row.comment}
    # Names that say all there is to say, as Kubernetes has them.
    plain = {"nodeSelector", "tolerations", "priorityClassName", "runtimeClassName", "podAnnotations", "podLabels"}
    plain |= {"extraEnv", "extraEnvFrom", "extraVolumeMounts", "image", "serviceAccount"}
    untold = {path for path in paths if not any(path[:depth] in told for depth in range(1, len(path) + 1))}
    assert {path[0] for path in untold} <= plain


def test_the_table_reads_comments_keys_and_defaults() -> None:
    text = "# A file.\n\n# One\n# thing.\na:\n  b: 1\n  # Two.\n  c: {d: [x]}\n\n# Lost.\n\ne:\n  - 1\n"
    rows = [(".".join(row.path), row.default, row.comment) for row in values(text)]
    assert rows == [
        ("a", "", "One thing."),
        ("a.b", "1", ""),
        ("a.c", '{"d": ["x"]}', "Two."),
        ("e", "[1]", ""),
    ]


def test_templates_name_only_values_that_there_are() -> None:
    tree = yaml.safe_load(GIVEN)
    for path in (CHART / "templates").rglob("*.*"):
        for name in re.findall(r"\.Values((?:\.[A-Za-z_]+)+)", path.read_text()):
            node = tree
            for key in name.strip(".").split("."):
                assert isinstance(node, dict), (path.name, name)
                if not node:  # free to be filled, as `config`'s sections
                    break
                assert key in node, (path.name, name)
                node = node[key]
