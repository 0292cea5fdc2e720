"""The flags that docs/deploy.md tells to set are the engine's."""

from __future__ import annotations

import re

import pytest

from tests.fakes.process import ROOT

pytestmark = pytest.mark.engine


def test_they_exist() -> None:
    text = (ROOT / "docs/deploy.md").read_text().split("\n## The engines\n")[1].split("\n## ")[0]
    named = {
        flag.replace("-", "_")
        for flag in re.findall(r"^\| .*", text, re.M)
        for flag in re.findall(r"`--([a-z-]+)", flag)
    }
    (file,) = ROOT.glob(".engine/venv/lib/python3*/site-packages/sglang/srt/arg_groups/field_order.py")
    known = set(re.findall(r'"(\w+)"', file.read_text()))
    assert len(named) > 10
    assert named <= known
