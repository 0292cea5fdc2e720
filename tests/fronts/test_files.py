"""The files of deploy/fronts hold what the code says: checked without any of the programs."""

from __future__ import annotations

import re

import pytest
import yaml

from router.identity import DEFAULT_RULES, HeaderRule
from tests.fakes.process import ROOT

FRONTS = ROOT / "deploy/fronts"
HEADERS = [rule.header for rule in DEFAULT_RULES if isinstance(rule, HeaderRule)]


@pytest.mark.parametrize(
    ("file", "names"),
    [("haproxy.cfg", r"req\.fhdr\(([^)]+)\)"), ("envoy.yaml", r"\{header_name: ([^}]+)\}")],
)
def test_the_headers_are_those_of_the_built_in_rules_in_their_order(file: str, names: str) -> None:
    assert re.findall(names, (FRONTS / file).read_text()) == HEADERS


def _variables(text: str) -> list[str]:
    """Headers as nginx calls them in a map of the session."""
    (key,) = re.findall(r'map "([^"]+)" \$\w+ \{', text)
    return re.findall(r"\$http_(\w+)", key)


@pytest.mark.parametrize("file", ["nginx.conf", "kubernetes.yaml"])
def test_so_are_nginxs_to_which_dash_and_underscore_are_one(file: str) -> None:
    assert _variables((FRONTS / file).read_text()) == list(dict.fromkeys(name.replace("-", "_") for name in HEADERS))


def test_kubernetes_yaml_is_a_list_of_objects() -> None:
    objects = list(yaml.safe_load_all((FRONTS / "kubernetes.yaml").read_text()))
    assert all({"apiVersion", "kind", "metadata"} <= set(each) for each in objects)
    assert len({(each["kind"], each["metadata"]["name"]) for each in objects}) == len(objects)
