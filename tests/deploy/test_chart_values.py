"""Values that would not work are refused before anything is installed, with the key and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from router.settings import Settings
from tests.deploy.charts import NEWEST, OLDEST, Refused, faults, render

pytestmark = pytest.mark.chart
ENGINES = {"engines": [{"service": "sglang", "port": "http"}]}


def refusal(values: dict[str, Any]) -> str:
    """What Helm says to them, on one line. AssertionError when it takes them."""
    with pytest.raises(Refused) as refused:
        render(values)
    return " ".join(str(refused.value).split())


def _secrets(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        if field.annotation is SecretStr:
            yield (*prefix, name)
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _secrets(field.annotation, (*prefix, name))


@pytest.mark.parametrize("path", list(_secrets(Settings)), ids=".".join)
def test_no_secret_goes_into_the_config_map(path: tuple[str, ...]) -> None:
    config: Any = "hunter2-hunter2-hunter2"
    for key in reversed(path):
        config = {key: config}
    said = refusal({**ENGINES, "config": config})
    name = ".".join(path)
    assert f"config.{name} (not shown here): a ConfigMap is no place for a secret" in said
    assert f"name that in secrets.{name}" in said
    assert "hunter2" not in said
    # And there is such a place.
    given_secret: Any = {"name": "mine", "key": "k"}
    for key in reversed(path):
        given_secret = {key: given_secret}
    needs: dict[str, Any] = {
        "store": {"config": {"store": {"url": "redis+sentinel://redis:26379/main"}}},
        "keys": {"config": {"keys": {"credential": "replace"}}},
    }
    release = render({**ENGINES, **needs.get(path[0], {}), "secrets": given_secret})
    assert "'mine'" in str(release.one("Deployment"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing to route to": (
        {},
        "engines: there is nothing to route to: name the Service of your engines, as in engines: [{service: sglang, "
        "port: http}], or set config.replicas",
    ),
    "two discoveries": (
        {**ENGINES, "config": {"discovery": {"kubernetes": [{"service": "other"}]}}},
        "engines and config.discovery.kubernetes are both set: leave one of them out",
    ),
    "grace too short": (
        {**ENGINES, "terminationGracePeriodSeconds": 585},
        "terminationGracePeriodSeconds: 585 s are not longer than the 585 s that a drain takes",
    ),
    "grace too short for a hook": (
        {**ENGINES, "terminationGracePeriodSeconds": 600, "lifecycle": {"preStop": {"sleep": {"seconds": 15}}}},
        "terminationGracePeriodSeconds: 600 s are not longer than the 600 s that a drain takes",
    ),
    "only the pod itself": (
        {**ENGINES, "config": {"host": "127.0.0.1"}},
        "config.host: 127.0.0.1 is reached from inside the pod only: set 0.0.0.0, or ::",
    ),
    "probes cannot come": ({**ENGINES, "config": {"admin": {"host": "localhost"}}}, "config.admin.host: localhost is"),
    "any port": ({**ENGINES, "config": {"port": 0}}, "config.port: 0 is any port, which no Service finds: choose one"),
    "one port twice": (
        {**ENGINES, "config": {"admin": {"port": 8080}}},
        "config.admin.port: 8080 is the data port as well: choose another",
    ),
    "probes have no certificate": (
        {
            **ENGINES,
            "config": {"admin": {"tls": {"cert_file": "/a", "key_file": "/b", "client_ca_file": "/c"}}},
        },
        "config.admin.tls.client_ca_file: the kubelet has no certificate to show, so all probes would fail: leave it",
    ),
    "password in the URL": (
        {**ENGINES, "config": {"store": {"url": "redis://:hunter2@redis:6379"}}},
        "config.store.url (not shown here) holds a user or a password, or an @: leave it out",
    ),
    "password of a collector": (
        {**ENGINES, "config": {"tracing": {"endpoint": "http://me:hunter2@collector:4318/v1/traces"}}},
        "config.tracing.endpoint (not shown here) holds a user or a password: leave it out, and set "
        "WARMROUTE_TRACING__ENDPOINT from a Secret with extraEnv",
    ),
    "password of an API server": (
        {"engines": [{"service": "s", "namespace": "n", "url": "https://me:hunter2@10.0.0.1:6443"}]},
        "engines[0].url (not shown here) holds a user or a password: leave them out, and mount a token for token_file",
    ),
    "two stores": (
        {**ENGINES, "bundledStore": {"enabled": True}, "config": {"store": {"url": "redis://redis:6379"}}},
        "bundledStore.enabled and config.store.url are both set: leave one of them out",
    ),
    "a password for nothing": (
        {**ENGINES, "secrets": {"store": {"password": {"name": "mine"}}}},
        "secrets.store.password.name is set, and neither config.store.url nor bundledStore.enabled is",
    ),
    "Sentinels that there are not": (
        {
            **ENGINES,
            "config": {"store": {"url": "redis://redis:6379"}},
            "secrets": {"store": {"sentinel_password": {"name": "mine"}}},
        },
        "secrets.store.sentinel_password.name is set, and config.store.url names no Sentinels: leave it out",
    ),
    "token and open": (
        {**ENGINES, "config": {"admin": {"open": True}}, "secrets": {"admin": {"token": {"name": "mine"}}}},
        "secrets.admin.token.name, and config.admin.open or config.admin.token_file are set: leave one of them out",
    ),
    "two files of keys": (
        {**ENGINES, "config": {"keys": {"file": "/x"}}, "secrets": {"keys": {"file": {"name": "mine"}}}},
        "secrets.keys.file.name and config.keys.file are both set: leave one of them out",
    ),
    "nothing to replace by": (
        {**ENGINES, "config": {"keys": {"credential": "replace"}}},
        "config.keys.credential: replace and secrets.keys.replica_key.name go together: set both, or neither",
    ),
    "a journal nowhere": (
        {**ENGINES, "config": {"journal": {"path": "/var/j"}}},
        "config.journal.path: /var/j cannot be written, the root file system is read-only: mount a volume there",
    ),
    "a journal beside its volume": (
        {
            **ENGINES,
            "config": {"journal": {"path": "/var/logs/j"}},
            "extraVolumes": [{"name": "log", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "log", "mountPath": "/var/log"}],
        },
        "config.journal.path: /var/logs/j cannot be written",
    ),
    "a certificate that nobody mounts": (
        {
            **ENGINES,
            "certificates": {"wep": "mine"},
            "config": {"tls": {name: f"/etc/warmroute/certificates/web/{name}" for name in ("cert_file", "key_file")}},
        },
        "config.tls.cert_file: /etc/warmroute/certificates/web/cert_file will not be there: name the Secret that has "
        "it, as in certificates: {web: my-secret}",
    ),
    "engines' authority that nobody mounts": (
        {"engines": [{"service": "s", "ca_file": "/etc/warmroute/certificates/far/ca.crt"}]},
        "engines[0].ca_file: /etc/warmroute/certificates/far/ca.crt will not be there",
    ),
    "a secret that nobody mounts": (
        {**ENGINES, "config": {"keys": {"file": "/etc/warmroute/secrets/keys.txt"}}},
        "config.keys.file: /etc/warmroute/secrets/keys.txt will not be there: name the Secret that has it, as in "
        "certificates: {mine: my-secret}, and write /etc/warmroute/certificates/mine/keys.txt",
    ),
    "a Gateway that knows no routers": (
        {
            **ENGINES,
            "certificates": {"web": "mine"},
            "config": {"tls": {name: f"/etc/warmroute/certificates/web/{name}" for name in ("cert_file", "key_file")}},
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "agents"}]},
        },
        "httpRoute.validation: the routers speak TLS (config.tls), and a Gateway does so only where it is told by what "
        "to know them: set it, as in {hostname: llm.example.com, wellKnownCACertificates: System}, or leave out",
    ),
    "fewer than least": (
        {**ENGINES, "autoscaling": {"enabled": True, "minReplicas": 7}},
        "autoscaling.minReplicas: 7 is more than autoscaling.maxReplicas 6: lower it",
    ),
    "scaled by nothing": (
        {**ENGINES, "autoscaling": {"enabled": True, "cpu": 0}},
        "autoscaling.cpu and autoscaling.inFlight are both 0: set one of them",
    ),
    "a share of nothing": (
        {**ENGINES, "autoscaling": {"enabled": True}, "resources": None},
        "autoscaling.cpu is a share of resources.requests.cpu, which is not set",
    ),
    "engines without a name": (
        {**ENGINES, "engineScaling": {"enabled": True, "prometheus": "http://p"}},
        "engineScaling.target.name: name the Deployment or StatefulSet of the engines",
    ),
    "engines without Prometheus": (
        {**ENGINES, "engineScaling": {"enabled": True, "target": {"name": "sglang"}}},
        "engineScaling.prometheus: say where Prometheus is",
    ),
    "engines by nothing": (
        {
            **ENGINES,
            "engineScaling": {
                "enabled": True,
                "prometheus": "http://p",
                "target": {"name": "sglang"},
                "liveTokens": 0,
                "requests": 0,
            },
        },
        "engineScaling.liveTokens and engineScaling.requests are both 0: set one of them",
    ),
    "fewer engines than least": (
        {
            **ENGINES,
            "engineScaling": {"enabled": True, "prometheus": "http://p", "target": {"name": "s"}, "minReplicas": 9},
        },
        "engineScaling.minReplicas: 9 is more than engineScaling.maxReplicas 4: lower it",
    ),
    "all pods scraped": (
        {**ENGINES, "metrics": {"engines": {"enabled": True}}},
        "metrics.engines.selector: give the labels of the engines' pods",
    ),
    "a route of no Gateway": ({**ENGINES, "httpRoute": {"enabled": True}}, "httpRoute.parentRefs: name the Gateway"),
    "an Ingress of no host": ({**ENGINES, "ingress": {"enabled": True}}, "ingress.hosts: name the hosts"),
    "labels that routers are found by": (
        {**ENGINES, "commonLabels": {"app.kubernetes.io/name": "x"}},
        "commonLabels: app.kubernetes.io/name is the chart's own, what belongs together is found by it: leave it out",
    ),
    "pods of another release": (
        {**ENGINES, "podLabels": {"app.kubernetes.io/instance": "x"}},
        "podLabels: app.kubernetes.io/instance is the chart's own",
    ),
    "monitors of another manager": (
        {**ENGINES, "metrics": {"labels": {"app.kubernetes.io/managed-by": "x"}}},
        "metrics.labels: app.kubernetes.io/managed-by is the chart's own",
    ),
    "dashboards of another chart": (
        {**ENGINES, "metrics": {"dashboards": {"labels": {"helm.sh/chart": "x"}}}},
        "metrics.dashboards.labels: helm.sh/chart is the chart's own",
    ),
    "rolled by something else": (
        {**ENGINES, "podAnnotations": {"warmroute/rolled-by": "x"}},
        "podAnnotations: warmroute/rolled-by is the chart's own",
    ),
    "others' pods spread": (
        {**ENGINES, "topologySpreadConstraints": [{"topologyKey": "zone", "labelSelector": {"matchLabels": {}}}]},
        "topologySpreadConstraints[0].labelSelector: the chart adds the routers' own: leave it out",
    ),
    "others' rollouts spread": (
        {**ENGINES, "topologySpreadConstraints": [{"topologyKey": "zone"}, {"matchLabelKeys": []}]},
        "topologySpreadConstraints[1].matchLabelKeys: the chart adds the routers' own: leave it out",
    ),
    "a Service of other pods": (
        {**ENGINES, "service": {"extraSpec": {"selector": {"a": "b"}}}},
        "service.extraSpec.selector: the chart gives it by itself: leave it out, it is to find the routers",
    ),
    "two types of a Service": (
        {**ENGINES, "service": {"extraSpec": {"type": "LoadBalancer"}}},
        "service.extraSpec.type: the chart gives it by itself: set service.type",
    ),
    # By the schema.
    "a key that is none": ({**ENGINES, "replicas": 3}, "additional properties 'replicas' not allowed"),
    "a setting that is none": (
        {**ENGINES, "config": {"drain": {"grace": 3}}},
        "at '/config/drain': additional properties 'grace' not allowed",
    ),
    "a setting out of bounds": (
        {**ENGINES, "config": {"health": {"deep_timeout_s": 1}}},
        "at '/config/health/deep_timeout_s': exclusiveMinimum: got 1, want 1",
    ),
    "a setting of another type": (
        {**ENGINES, "config": {"limits": {"body_bytes": "64 MiB"}}},
        "at '/config/limits/body_bytes': got string, want integer",
    ),
    "a word for another": (
        {**ENGINES, "configChange": "restart"},
        "at '/configChange': value must be one of 'reload', 'roll'",
    ),
    "a folder's name": ({**ENGINES, "certificates": {"My": "x"}}, "at '/certificates': additional properties 'My' not"),
    "a number for a name": ({**ENGINES, "fullnameOverride": "123"}, "at '/fullnameOverride': '123' does not match"),
    "no name": ({**ENGINES, "fullnameOverride": "My_Name: x"}, "at '/fullnameOverride': 'My_Name: x' does not match"),
    "too long a name": ({**ENGINES, "fullnameOverride": "n" * 54}, "at '/fullnameOverride': 'nnnn"),
    "no digest": ({**ENGINES, "image": {"digest": "latest"}}, "at '/image/digest': 'latest' does not match pattern"),
    "engines by another name": (
        {"engines": [{"svc": "sglang"}]},
        "at '/engines/0': additional properties 'svc' not allowed",
    ),
}


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_not_work_is_refused(values: dict[str, Any], message: str) -> None:
    said = refusal(values)
    assert message in said
    assert "hunter2" not in said


def test_files_may_come_from_volumes_of_ones_own() -> None:
    mounted = "/etc/warmroute/certificates/web"
    values = {
        **ENGINES,
        "config": {"tls": {"cert_file": f"{mounted}/a", "key_file": "/elsewhere/b"}},
        "extraVolumes": [{"name": "web", "csi": {"driver": "csi.cert-manager.io", "readOnly": True}}],
        "extraVolumeMounts": [{"name": "web", "mountPath": f"{mounted}/"}],
    }
    assert render(values).settings["tls"]["cert_file"] == f"{mounted}/a"


def test_short_forms_of_settings_are_taken_as_the_router_takes_them() -> None:
    config = {
        "replicas": ["http://a:30000", {"url": "http://b:30000", "weight": 2}],
        "policy": "rendezvous",
        "keys": {"accept": {"ci": "sha256:" + "0" * 64, "bob": {"hash": "sha256:" + "1" * 64, "max_in_flight": 3}}},
        "identity": {"rules": [{"header": "x-mine"}]},
    }
    taken = render({"config": config}).settings
    assert {key: taken[key] for key in config} == config
    assert render({"config": {**config, "policy": {"name": "rendezvous", "shadow": "random"}}})


FLAG = st.booleans()


def _seconds(most: int) -> st.SearchStrategy[float]:
    """In whole milliseconds: of smaller ones, as 5e-324, Helm writes what the YAML of these tests takes for a word."""
    return st.integers(0, most * 1000).map(lambda ms: ms / 1000)


TOGGLES = st.fixed_dictionaries(
    {
        "engines": st.just([{"service": "sglang", "port": "http"}]),
        "config": st.fixed_dictionaries(
            {},
            optional={
                "workers": st.integers(1, 8),
                "port": st.sampled_from([8080, 9000]),
                "admin": st.fixed_dictionaries({}, optional={"open": FLAG, "open_metrics": FLAG}),
                "drain": st.fixed_dictionaries({}, optional={"delay_s": _seconds(60), "grace_s": _seconds(9000)}),
            },
        ),
        "replicaCount": st.integers(0, 9),
    },
    optional={
        "configChange": st.sampled_from(["reload", "roll"]),
        "bundledStore": st.fixed_dictionaries({"enabled": FLAG}),
        "networkPolicy": st.fixed_dictionaries({"enabled": FLAG}),
        "autoscaling": st.fixed_dictionaries({"enabled": FLAG, "cpu": st.just(0), "inFlight": st.just(9)}),
        "podDisruptionBudget": st.fixed_dictionaries({"enabled": FLAG}),
        "serviceAccount": st.fixed_dictionaries({"create": FLAG}),
        "rbac": st.fixed_dictionaries({"create": FLAG}),
        "antiAffinity": st.sampled_from(["soft", "hard", "none"]),
        "ingress": st.fixed_dictionaries({"enabled": FLAG, "hosts": st.just(["llm.example.com"])}),
        "certificates": st.dictionaries(st.sampled_from(["a", "b-1"]), st.just("mine")),
        **{
            name: st.none()
            for name in ("podSecurityContext", "securityContext", "resources", "strategy", "lifecycle", "affinity")
        },
        **{name: st.none() for name in ("topologySpreadConstraints", "tolerations", "extraEnv", "commonLabels")},
    },
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TOGGLES, st.sampled_from([OLDEST, NEWEST]))
def test_whatever_is_switched_on_kubernetes_would_take_it(values: dict[str, Any], kube: str) -> None:
    release = render(values, kube=kube)
    assert list(faults(release.manifests, kube)) == []
    drain = release.settings["drain"]
    assert release.pod["spec"]["terminationGracePeriodSeconds"] > drain["delay_s"] + drain["grace_s"]
