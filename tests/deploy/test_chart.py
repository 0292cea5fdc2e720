"""The chart: whatever values somebody has, what it renders is sound, safe and holds together."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.settings import Settings
from tests.deploy.charts import CASES, CHART, NEWEST, OLDEST, case, faults, helm, labels, render
from tests.fakes.process import ROOT

pytestmark = pytest.mark.chart
each_case = pytest.mark.parametrize("values", CASES, ids=[path.stem for path in CASES])

OF_OTHERS = {
    "monitoring.coreos.com/v1 ServiceMonitor",
    "monitoring.coreos.com/v1 PodMonitor",
    "monitoring.coreos.com/v1 PrometheusRule",
    "keda.sh/v1alpha1 ScaledObject",
    "gateway.networking.k8s.io/v1 HTTPRoute",
    "gateway.networking.k8s.io/v1 BackendTLSPolicy",
}
"""Kinds that Kubernetes does not know by itself: there is no schema here, and test_chart_others.py looks at them."""


@each_case
def test_helm_finds_nothing_to_say_of_it(values: Path) -> None:
    said = helm("lint", "--strict", CHART, "--values", values)
    assert "[ERROR]" not in said, said
    assert "[WARNING]" not in said, said


def test_helm_lints_it_without_values_as_well() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART)


@each_case
@pytest.mark.parametrize("kube", [OLDEST, NEWEST])
def test_kubernetes_would_take_every_object(values: Path, kube: str) -> None:
    found = set(faults(render(values, kube=kube).manifests, kube))
    assert found <= {f"{kind}: no schema" for kind in OF_OTHERS}, found


def test_every_kind_is_rendered_by_some_case() -> None:
    kinds = {kind["kind"] for values in CASES for kind in render(values).manifests}
    assert kinds == {kind.split()[1] for kind in OF_OTHERS} | {
        *("Deployment", "Service", "ConfigMap", "Secret", "ServiceAccount", "Role", "RoleBinding", "Pod"),
        *("PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy", "Ingress"),
    }


@each_case
def test_names_are_told_apart_and_all_objects_are_of_the_release(values: Path) -> None:
    release = render(values)
    names = [(each["kind"], each["metadata"]["namespace"], each["metadata"]["name"]) for each in release.manifests]
    assert len(names) == len(set(names))
    for each in release.manifests:
        assert labels(each)["app.kubernetes.io/instance"] == "router"
        assert each["metadata"]["namespace"] == "llm" or each["kind"] in ("Role", "RoleBinding")
        assert len(each["metadata"]["name"]) <= 63 or each["kind"] in ("Role", "RoleBinding")


def test_names_fit_for_a_release_with_the_longest_name() -> None:
    release = render(case("bundled"), release="r" * 53)
    assert list(faults(release.manifests, NEWEST)) == []
    assert max(len(each["metadata"]["name"]) for each in release.of("Service")) <= 63
    (budget,) = release.of("PodDisruptionBudget")
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels(release.pod).items()


@each_case
def test_names_that_look_like_numbers_are_names(values: Path) -> None:
    mine = [*("secrets.admin.token.name=1", "certificates.a=2", "priorityClassName=3", "runtimeClassName=4")]
    mine += ["serviceAccount.name=5", "ingress.className=6"]
    flags = [part for each in mine for part in ("--set-string", each)]
    if values.stem == "open":
        flags = flags[2:]
    found = set(faults(render(values, *flags, release="12", namespace="34").manifests, NEWEST))
    assert found <= {f"{kind}: no schema" for kind in OF_OTHERS}, found


@pytest.mark.parametrize("name", ["true", "null", "y", "off", "e1", "n" * 53])
def test_words_that_mean_something_in_yaml_are_names(name: str) -> None:
    release = render(case("bundled"), f"--set-string=fullnameOverride={name}")
    assert {each["metadata"]["name"] for each in release.of("Deployment")} == {name, f"{name}-store"}
    assert list(faults(release.manifests, NEWEST)) == []


@each_case
def test_selectors_find_the_pods_that_are_meant_and_no_others(values: Path) -> None:
    release = render(values)
    pods = {labels(each)["app.kubernetes.io/component"]: each for each in release.of("Pod")}
    for deployment in release.of("Deployment"):
        template = deployment["spec"]["template"]
        pods[labels(template)["app.kubernetes.io/component"]] = template
    meant = [(each, each["spec"]["selector"]["matchLabels"]) for each in release.of("Deployment")]
    meant += [(each, each["spec"]["selector"]) for each in release.of("Service")]
    meant += [(each, each["spec"]["selector"]["matchLabels"]) for each in release.of("PodDisruptionBudget")]
    meant += [(each, each["spec"]["podSelector"]["matchLabels"]) for each in release.of("NetworkPolicy")]
    for each, selector in meant:
        found = {name for name, pod in pods.items() if selector.items() <= labels(pod).items()}
        wanted = labels(each)["app.kubernetes.io/component"]
        assert found == {"router" if wanted == "admin" else wanted}, each
    spec = release.pod["spec"]
    own = [each["labelSelector"] for each in spec.get("topologySpreadConstraints", ())]
    affinity = spec.get("affinity", {}).get("podAntiAffinity", {})
    own += [
        each["podAffinityTerm"]["labelSelector"]
        for each in affinity.get("preferredDuringSchedulingIgnoredDuringExecution", ())
    ]
    own += [each["labelSelector"] for each in affinity.get("requiredDuringSchedulingIgnoredDuringExecution", ())]
    assert all(each["matchLabels"].items() <= labels(release.pod).items() for each in own)


def test_of_labels_that_are_given_twice_the_nearer_counts() -> None:
    given = {"commonLabels": {"owner": "all", "team": "llm"}, "podLabels": {"owner": "pods"}}
    metrics = {
        "labels": {"owner": "monitors"},
        "serviceMonitor": {"enabled": True},
        "engines": {"enabled": True, "selector": {"app": "sglang"}},
        "rules": {"enabled": True},
        "dashboards": {"enabled": True, "labels": {"owner": "dashboards"}},
    }
    release = render({"engines": [{"service": "sglang"}], "metrics": metrics, **given})
    owners = {"ServiceMonitor": "monitors", "PodMonitor": "monitors", "PrometheusRule": "monitors"}
    for each in release.manifests:
        of_dashboards = labels(each)["app.kubernetes.io/component"] == "dashboards"
        assert labels(each)["owner"] == ("dashboards" if of_dashboards else owners.get(each["kind"], "all"))
        assert labels(each)["team"] == "llm"
    assert labels(release.pod)["owner"] == "pods"


@each_case
def test_ports_that_are_named_are_there(values: Path) -> None:
    release = render(values)
    ports = {port["name"]: port["containerPort"] for port in release.container["ports"]}
    settings = Settings().model_dump(mode="json") | release.settings
    assert ports == {"http": settings["port"], "admin": settings["admin"]["port"]}
    for name, path in (("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        asked = release.container[name]["httpGet"]
        encrypted = bool(settings["admin"].get("tls", {}).get("cert_file"))
        assert asked == {"path": path, "port": "admin", "scheme": "HTTPS" if encrypted else "HTTP"}
    for service in release.all("Service"):
        (port,) = service["spec"]["ports"]
        assert port["targetPort"] == "http"
        assert port["appProtocol"] == ("https" if settings["tls"]["cert_file"] else "http")
    for service in release.all("Service", "admin"):
        assert service["spec"]["type"] == "ClusterIP"
        assert {port["targetPort"] for port in service["spec"]["ports"]} == {"admin"}


@each_case
def test_nothing_runs_with_more_rights_than_it_needs(values: Path) -> None:
    release = render(values)
    for spec in [each["spec"]["template"]["spec"] for each in release.of("Deployment")] + [
        release.of("Pod")[0]["spec"]
    ]:
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec["enableServiceLinks"]
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]
            assert "cpu" not in container["resources"]["limits"]


@pytest.mark.parametrize(
    ("values", "cores"),
    [
        ({}, "1"),
        ({"config": {"workers": 3}}, "3"),
        ({"config": {"workers": 3}, "resources": {"requests": {"cpu": "500m"}}}, "500m"),
        ({"config": {"workers": 3}, "resources": {"requests": {"cpu": 2}}}, 2),
    ],
)
def test_a_core_is_asked_for_each_worker_unless_told_otherwise(values: dict[str, Any], cores: object) -> None:
    release = render({"engines": [{"service": "sglang"}], **values})
    assert release.container["resources"]["requests"] == {"cpu": cores, "memory": "512Mi"}


@each_case
def test_secrets_are_in_secrets_alone(values: Path) -> None:
    release = render(values)
    hidden = {value for secret in release.of("Secret") for value in _decoded(secret)}
    assert hidden or values.stem in ("store", "rendered-elsewhere")  # whose secrets are all somebody's own
    shown = json.dumps([each for each in release.manifests if each["kind"] != "Secret"])
    assert not [value for value in hidden if value in shown]
    for manifest in release.of("Deployment"):
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        for variable in container.get("env", ()):
            named = any(word in variable["name"] for word in ("SECRET", "PASSWORD", "KEY", "TOKEN"))
            assert not named or "valueFrom" in variable or variable["name"].endswith("_FILE")


def _decoded(secret: dict[str, Any]) -> list[str]:
    return [base64.b64decode(value).decode() for value in secret["data"].values()]


EXAMPLES = [
    yaml.safe_load(block)
    for page in ("docs/deploy.md", "deploy/helm/warmroute/README.md")
    for block in re.findall(r"^```yaml\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    if block.startswith(("engines:", "image:"))
]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("values", EXAMPLES)
def test_examples_in_documents_can_be_installed(values: dict[str, Any]) -> None:
    found = set(faults(render(values).manifests, NEWEST))
    assert found <= {f"{kind}: no schema" for kind in OF_OTHERS}, found


# Rights in Kubernetes


@each_case
def test_who_watches_may_watch_and_no_more(values: Path) -> None:
    release = render(values)
    for role in release.of("Role"):
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        ]
    roles = {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in release.of("Role")}
    for binding in release.of("RoleBinding"):
        assert (binding["metadata"]["namespace"], binding["roleRef"]["name"]) in roles
        assert binding["roleRef"]["kind"] == "Role"
        (subject,) = binding["subjects"]
        assert subject["namespace"] == "llm"
        assert subject["name"] == release.pod["spec"]["serviceAccountName"]
    assert len(release.of("RoleBinding")) == len(roles)
    for account in release.of("ServiceAccount"):
        assert account["metadata"]["name"] == release.pod["spec"]["serviceAccountName"]
        assert account["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("values", "namespaces"),
    [
        ("engines", {"llm"}),
        ("namespaces", {"llm", "big"}),
        ("overridden", {"llm", "elsewhere"}),
        ("static", set()),
        ("dns", set()),
    ],
)
def test_it_may_watch_where_engines_are(values: str, namespaces: set[str]) -> None:
    release = render(case(values))
    assert {each["metadata"]["namespace"] for each in release.of("Role")} == namespaces
    assert release.pod["spec"]["automountServiceAccountToken"] is bool(namespaces)


def _access(release: str, namespace: str) -> str:
    """Name of what it has in the engines' namespace."""
    made = render({"engines": [{"service": "sglang", "namespace": "big"}]}, release=release, namespace=namespace)
    (role,), (binding,) = made.of("Role"), made.of("RoleBinding")
    assert role["metadata"]["name"] == binding["metadata"]["name"] == binding["roleRef"]["name"]
    assert list(faults(made.manifests, NEWEST)) == []
    return str(role["metadata"]["name"])


LONG = "warmroute-for-the-agents-of-team-blue-in-production-1"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("warmroute-a", "b"), ("warmroute", "a-b")),
        ((LONG, "team-alpha-production"), (LONG, "team-alpha-development")),
        ((LONG, "n" * 63), (LONG, "n" * 62)),
    ],
)
def test_releases_that_watch_one_namespace_do_not_meet(one: tuple[str, str], other: tuple[str, str]) -> None:
    names = {_access(*one), _access(*other)}
    assert len(names) == 2
    assert max(map(len, names)) <= 253
