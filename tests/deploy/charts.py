"""The chart as the real Helm renders it, and what Kubernetes' own schemas say of that."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.process import ROOT

CHART = ROOT / "deploy/helm/warmroute"
CASES = sorted((ROOT / "tests/deploy/chart").glob("*.yaml"))
"""Values that somebody has."""
OLDEST, NEWEST = "1.25", "1.37"
"""Versions of Kubernetes: the oldest that Chart.yaml allows, and the newest of which there are schemas."""

_HELM = ROOT / ".helm/helm"

Manifest = dict[str, Any]


class Refused(Exception):
    """Helm renders nothing. The message is what it said."""


class _Strict(yaml.CSafeLoader):
    """Takes no key twice, of which Kubernetes would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        assert len(made) == len(node.value), f"a key is there twice: {node.start_mark}"
        return made


class Release:
    """What one release puts into a cluster."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self.manifests = manifests

    def all(self, kind: str, component: str = "router") -> list[Manifest]:
        return [each for each in self.of(kind) if labels(each)["app.kubernetes.io/component"] == component]

    def of(self, kind: str) -> list[Manifest]:
        return [each for each in self.manifests if each["kind"] == kind]

    def one(self, kind: str, component: str = "router") -> Manifest:
        (found,) = self.all(kind, component)
        return found

    @property
    def pod(self) -> Manifest:
        """The routers', as its Deployment has it."""
        return dict(self.one("Deployment")["spec"]["template"])

    @property
    def container(self) -> Manifest:
        (found,) = self.pod["spec"]["containers"]
        return dict(found)

    @property
    def settings(self) -> dict[str, Any]:
        """What the routers read."""
        return dict(yaml.safe_load(self.one("ConfigMap")["data"]["warmroute.yaml"]))


def labels(manifest: Manifest) -> dict[str, str]:
    return dict(manifest["metadata"]["labels"])


def helm(*arguments: str | Path, given: str = "") -> str:
    """What Helm prints. Raises Refused."""
    assert _HELM.exists(), f"{_HELM} is missing: run these tests by make test-chart, which installs it"
    done = subprocess.run([_HELM, *arguments], input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout


def render(
    values: Path | Mapping[str, Any], *flags: str, release: str = "router", namespace: str = "llm", kube: str = NEWEST
) -> Release:
    """Of a file of values, or of values themselves. Raises Refused."""
    file, given = (values, "") if isinstance(values, Path) else ("-", json.dumps(values))
    text = helm(
        *("template", release, CHART, "--values", file, "--namespace", namespace, "--kube-version", kube, *flags),
        given=given,
    )
    return Release([each for each in yaml.load_all(text, _Strict) if each])


def case(name: str) -> Path:
    return ROOT / f"tests/deploy/chart/{name}.yaml"


def notes(values: Path | Mapping[str, Any]) -> str:
    """What Helm tells whoever has installed it."""
    file, given = (values, "") if isinstance(values, Path) else ("-", json.dumps(values))
    flags = ("--dry-run=client", "--namespace", "llm")
    return helm("install", "router", CHART, "--values", file, *flags, given=given).partition("\nNOTES:\n")[2]


@cache
def _schemas() -> Any:
    """The package that carries them."""
    home = ROOT / ".helm"
    sys.path += [str(home / "python"), str(home / "schemas.whl")]
    return importlib.import_module("kubernetes_validate.utils")


@cache
def _definitions(version: str) -> Any:
    """What the schemas of one version refer to. Made once: the package itself does so for each object, in a second."""
    named = {"$id": "_definitions.json", **_schemas().schema_contents(_file(version, "_definitions"), version)}
    resource = importlib.import_module("referencing").Resource.from_contents(
        named, default_specification=importlib.import_module("referencing.jsonschema").DRAFT202012
    )
    return importlib.import_module("referencing").Registry().with_resource("_definitions.json", resource).crawl()


@cache
def _validator(version: str, kind: str, api: str) -> Any:
    """For one kind of object, unknown fields being faults. Raises FileNotFoundError where there is no schema."""
    schema = _schemas().schema_contents(_file(version, f"{kind.lower()}-{api}"), version)
    return importlib.import_module("jsonschema").Draft202012Validator(schema, registry=_definitions(version))


def _file(version: str, name: str) -> str:
    return f"kubernetes-json-schema/v{version}.0-local-strict/{name}.json"


def faults(manifests: list[Manifest], kube: str) -> Iterator[str]:
    """What Kubernetes would refuse, unknown fields included. Of kinds that others define there is no schema here."""
    for each in manifests:
        group, _, version = each["apiVersion"].rpartition("/")
        api = "-".join(filter(None, (group.partition(".")[0], version)))
        try:
            validator = _validator(kube, each["kind"], api)
        except FileNotFoundError:
            yield f"{each['apiVersion']} {each['kind']}: no schema"
            continue
        for error in validator.iter_errors(each):
            yield f"{each['kind']} {each['metadata']['name']}: {'.'.join(map(str, error.path))}: {error.message}"
