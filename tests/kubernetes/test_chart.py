"""The chart in a real API server: its objects are taken, its rights are what they should be, and a release has a life.

Kubernetes 1.20 is older than the chart allows, and knows less. Kinds and fields that it lacks are named here, and are
held against the schemas of newer ones in tests/deploy.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.charts import CASES, CHART, Manifest, Refused, Release, case, helm, render
from tests.deploy.test_chart_run import started
from tests.fakes.kubernetes import endpoint_slice, pod
from tests.fakes.replica import FakeReplica
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S
from tests.kubernetes.server import ADMIN, ControlPlane, path_of

pytestmark = pytest.mark.kubernetes

LACKING = {
    "policy/v1 PodDisruptionBudget",
    "autoscaling/v2 HorizontalPodAutoscaler",
    # Which others define.
    "monitoring.coreos.com/v1 ServiceMonitor",
    "monitoring.coreos.com/v1 PodMonitor",
    "monitoring.coreos.com/v1 PrometheusRule",
    "keda.sh/v1alpha1 ScaledObject",
    "gateway.networking.k8s.io/v1 HTTPRoute",
    "gateway.networking.k8s.io/v1 BackendTLSPolicy",
}
"""Kinds that 1.20 does not have."""
UNKNOWN = {"matchLabelKeys", "loadBalancerClass", "ipFamilyPolicy"}
"""Fields that 1.20 does not have; the last it takes and drops."""
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"


def held(plane: ControlPlane, release: Release) -> Iterator[Manifest]:
    """What the server can hold of it, without fields it does not know."""
    for each in release.manifests:
        if path_of(each).split("/")[-2] in plane.kinds(plane.others, each["apiVersion"]):
            yield _without(each, UNKNOWN)
        else:
            assert f"{each['apiVersion']} {each['kind']}" in LACKING


def _without(tree: Any, names: set[str]) -> Any:
    if isinstance(tree, dict):
        return {name: _without(value, names) for name, value in tree.items() if name not in names}
    return [_without(value, names) for value in tree] if isinstance(tree, list) else tree


def installed(plane: ControlPlane, values: Path | dict[str, Any], namespace: str) -> Release:
    """Rendered for a namespace, and applied."""
    release = render(values, namespace=namespace)
    for each in held(plane, release):
        plane.apply(_namespace(each["metadata"]["namespace"]))
        plane.apply(each)
    return release


def _namespace(name: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


@pytest.mark.parametrize("values", CASES, ids=[path.stem for path in CASES])
def test_every_object_is_taken_as_it_is_meant(values: Path, plane: ControlPlane) -> None:
    """By server-side apply, which refuses unknown fields. What was asked for is what is there."""
    release = installed(plane, values, plane.namespace())
    for each in held(plane, release):
        there = plane.told("GET", path_of(each))
        assert list(_lost(each, there)) == []
        again = plane.apply(each)
        assert again["metadata"]["resourceVersion"] == there["metadata"]["resourceVersion"], "the same changes nothing"


def _lost(wanted: Any, there: Any, at: str = "") -> Iterator[str]:
    """Where an object is not what was asked for; what the server adds to it is its own business."""
    if isinstance(wanted, dict) and isinstance(there, dict):
        for name, value in wanted.items():
            yield from _lost(value, there.get(name), f"{at}.{name}")
    elif isinstance(wanted, list) and isinstance(there, list) and len(wanted) <= len(there):
        for number, value in enumerate(wanted):
            yield from _lost(value, there[number], f"{at}[{number}]")
    elif wanted != there and (wanted or there):  # an empty list may be none
        yield f"{at}: {wanted!r} has become {there!r}"


# Rights


def test_the_role_gives_slices_and_nothing_else(plane: ControlPlane) -> None:
    """Acting as the service account, by a token like its pods'."""
    namespace, other = plane.namespace(), plane.namespace()
    values = yaml.safe_load(case("engines").read_text())
    release = render(values, namespace=namespace)
    bindings = release.of("RoleBinding")
    for each in held(plane, release):
        if each not in bindings:
            plane.apply(each)
    plane.apply(endpoint_slice("sglang-1", [pod("a", "10.0.0.1")], namespace=namespace))
    token = plane.token(namespace, release.pod["spec"]["serviceAccountName"])
    assert plane.slices(namespace, token).status_code == 403, "an account alone gives nothing"
    for each in bindings:
        plane.apply(each)
    plane.until(lambda: plane.slices(namespace, token).is_success, "the role is in force")

    (found,) = plane.slices(namespace, token).json()["items"]
    version = plane.slices(namespace, token).json()["metadata"]["resourceVersion"]
    assert found["metadata"]["name"] == "sglang-1"
    assert plane.slices(namespace, token, "/sglang-1").status_code == 200
    watch = f"?watch=1&timeoutSeconds=1&resourceVersion={version}"
    assert plane.slices(namespace, token, watch).status_code == 200

    def status(method: str, path: str, **given: Any) -> int:
        return plane.ask(method, path, token=token, server=plane.routers, **given).status_code

    own = f"/api/v1/namespaces/{namespace}"
    (secret,) = release.of("Secret")
    forbidden = [f"{own}/secrets", f"{own}/secrets/{secret['metadata']['name']}", f"{own}/configmaps", f"{own}/pods"]
    forbidden += [f"{own}/endpoints", f"{own}/services", "/api/v1/namespaces", "/api/v1/nodes"]
    forbidden += ["/apis/discovery.k8s.io/v1/endpointslices", SLICES.format(other)]
    assert {path: status("GET", path) for path in forbidden} == dict.fromkeys(forbidden, 403)
    slices = SLICES.format(namespace)
    assert status("POST", slices, json=endpoint_slice("mine", [], namespace=namespace)) == 403
    assert status("DELETE", f"{slices}/sglang-1") == 403

    # The server's own account of all that it may do there, less what anybody may: ask this.
    asked: Manifest = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview"}
    asked["spec"] = {"namespace": namespace}
    path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    rules = plane.ask("POST", path, token=token, server=plane.routers, json=asked).json()["status"]["resourceRules"]
    assert [each for each in rules if each["apiGroups"] != ["authorization.k8s.io"]] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]


def test_rights_are_where_the_engines_are(plane: ControlPlane) -> None:
    """With engines in two namespaces, of which one is not the routers' own."""
    here, there, nowhere = (plane.namespace() for _ in range(3))
    engines = [{"service": "sglang"}, {"service": "sglang", "namespace": there}]
    release = installed(plane, {"engines": engines}, here)
    token = plane.token(here, release.pod["spec"]["serviceAccountName"])
    for namespace in (here, there):
        plane.until(lambda at=namespace: plane.slices(at, token).is_success, f"the role of {namespace} is in force")
    assert plane.slices(nowhere, token).status_code == 403
    secrets = plane.ask("GET", f"/api/v1/namespaces/{there}/secrets", token=token, server=plane.routers)
    assert secrets.status_code == 403


async def test_the_router_of_the_chart_finds_engines_with_the_rights_of_the_chart(
    plane: ControlPlane, tmp_path: Path
) -> None:
    """Its settings as rendered, but for where the API server is: that is told to pods by where they run."""
    namespace = plane.namespace()
    release = installed(plane, case("engines"), namespace)
    token = tmp_path / "token"
    token.write_text(plane.token(namespace, release.pod["spec"]["serviceAccountName"]))
    settings = release.settings
    (engines,) = settings["discovery"]["kubernetes"]
    assert engines["namespace"] == namespace
    engines |= {"url": plane.routers.url, "ca_file": str(plane.ca_file), "token_file": str(token)}
    release.one("ConfigMap")["data"]["warmroute.yaml"] = yaml.safe_dump(settings)
    replica = await FakeReplica(ready=200, health=200).start()
    router, _, port, admin = started(release, tmp_path / "pod")
    try:
        engine = pod("sglang-0", "127.0.0.1")
        number = int(replica.url.rpartition(":")[2])
        plane.apply(endpoint_slice("sglang-1", [engine], port=number, namespace=namespace), "controller")
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:

            async def ready() -> int:
                try:
                    return (await client.get(f"http://127.0.0.1:{admin}/readyz")).status_code
                except httpx.TransportError:
                    assert router.alive, router.tail()
                    return 0

            await until(ready, lambda status: status == 200, LIMIT_S, "it is ready")
            replica.say("/v1/models", {"data": []})
            assert (await client.get(f"http://127.0.0.1:{port}/v1/models")).json() == {"data": []}
    finally:
        router.signal(signal.SIGKILL)  # it would drain for as long as the chart has it
        router.stop()
        await replica.stop()


# A release and its life


def acting(plane: ControlPlane, namespace: str) -> tuple[str | Path, ...]:
    """Flags of Helm: where, and as whom."""
    server = ("--kube-apiserver", plane.others.url, "--kube-token", ADMIN, "--kube-ca-file", plane.ca_file)
    return (*server, "--namespace", namespace)


KINDS = ("v1/secrets", "v1/configmaps", "v1/services", "v1/serviceaccounts", "apps/v1/deployments")
RBAC = ("rbac.authorization.k8s.io/v1/roles", "rbac.authorization.k8s.io/v1/rolebindings")


def there(plane: ControlPlane, namespace: str) -> dict[tuple[str, str], Manifest]:
    """What the namespace has of a release called router, by kind and name."""
    found = {}
    for each in (*KINDS, *RBAC):
        version, _, plural = each.rpartition("/")
        path = f"/{'apis' if '/' in version else 'api'}/{version}/namespaces/{namespace}/{plural}"
        for item in plane.told("GET", f"{path}?labelSelector=app.kubernetes.io/instance%3Drouter")["items"]:
            found[plural, item["metadata"]["name"]] = item
    return found


def test_a_release_is_installed_upgraded_rolled_back_and_removed(plane: ControlPlane, tmp_path: Path) -> None:
    """With the chart as it is, but for its word on versions, and for the field that 1.20 does not have."""
    chart, namespace = tmp_path / "warmroute", plane.namespace()
    shutil.copytree(CHART, chart)
    lines = (chart / "Chart.yaml").read_text().splitlines(keepends=True)
    (chart / "Chart.yaml").write_text("".join(line for line in lines if not line.startswith("kubeVersion:")))
    flags = acting(plane, namespace)
    values = ("router", chart, "--values", case("engines"), "--set", "topologySpreadConstraints=null", *flags)
    assert "STATUS: deployed" in helm("install", *values)
    first = there(plane, namespace)
    release = render(case("engines"), namespace=namespace)
    wanted = {(path_of(each).split("/")[-2], each["metadata"]["name"]) for each in release.manifests}
    assert set(first) == {each for each in wanted if each[0] != "pods"}, "all but the pod of helm test"
    deployment = ("deployments", release.one("Deployment")["metadata"]["name"])
    (config,) = (each for each in first if each[0] == "configmaps")
    (secret,) = (each for each in first if each[0] == "secrets")

    helm("upgrade", *values, "--set", "config.limits.body_bytes=1000000")
    second = there(plane, namespace)
    assert set(second) == set(first)
    assert second[secret]["data"] == first[secret]["data"], "secrets that were made stay"
    assert "body_bytes: 1000000" in second[config]["data"]["warmroute.yaml"]
    assert _pod(second[deployment]) == _pod(first[deployment]), "it is reloaded"

    helm("upgrade", *values, "--set", "config.workers=2")
    third = there(plane, namespace)
    assert third[secret]["data"] == first[secret]["data"]
    assert _pod(third[deployment]) != _pod(first[deployment]), "that takes a restart"

    helm("rollback", "router", "1", *flags)
    back = there(plane, namespace)
    assert (_pod(back[deployment]), back[config]["data"]) == (_pod(first[deployment]), first[config]["data"])
    assert back[secret]["data"] == first[secret]["data"]

    helm("uninstall", "router", *flags)
    assert there(plane, namespace) == {}


def _pod(deployment: Manifest) -> dict[str, Any]:
    return dict(deployment["spec"]["template"])


def test_the_chart_tells_a_server_that_is_too_old(plane: ControlPlane) -> None:
    namespace = plane.namespace()
    with pytest.raises(
        Refused, match=r"requires kubeVersion: >=1\.25\.0-0 which is incompatible with Kubernetes v1\.20"
    ):
        helm("install", "router", CHART, "--values", case("engines"), *acting(plane, namespace))
    assert there(plane, namespace) == {}
