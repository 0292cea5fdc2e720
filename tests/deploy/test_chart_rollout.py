"""The chart over time: rollouts, drains, several routers, and what a change of the configuration does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from router import reload
from router.settings import Settings
from tests.deploy.charts import CASES, CHART, case, notes, render

pytestmark = pytest.mark.chart
each_case = pytest.mark.parametrize("values", CASES, ids=[path.stem for path in CASES])

# Drains


@each_case
def test_the_pod_outlives_its_drain(values: Path) -> None:
    release = render(values)
    drain = Settings().drain.model_dump() | release.settings.get("drain", {})
    assert release.pod["spec"]["terminationGracePeriodSeconds"] > drain["delay_s"] + drain["grace_s"]


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ({}, 15 + 570 + 45),
        ({"config": {"drain": {"delay_s": 0.5, "grace_s": 1800}}}, 1801 + 45),
        ({"config": {"drain": {"delay_s": 0, "grace_s": 0}}}, 45),
        ({"lifecycle": {"preStop": {"sleep": {"seconds": 20}}}}, 20 + 15 + 570 + 45),
        ({"terminationGracePeriodSeconds": 586}, 586),
        ({"config": {"drain": None}}, 0 + 600 + 45),
    ],
)
def test_how_long_it_may_take(values: dict[str, Any], seconds: int) -> None:
    release = render({"engines": [{"service": "sglang"}], **values})
    assert release.pod["spec"]["terminationGracePeriodSeconds"] == seconds


def test_a_rollout_takes_no_router_before_another_is_ready() -> None:
    strategy = render(case("engines")).one("Deployment")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}


# Several routers


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, False),
        ({"replicaCount": 2}, True),
        ({"replicaCount": 2, "podDisruptionBudget": {"enabled": False}}, False),
        ({"autoscaling": {"enabled": True, "minReplicas": 1}}, False),
        ({"autoscaling": {"enabled": True, "minReplicas": 2}}, True),
    ],
)
def test_drains_of_nodes_leave_routers_where_there_are_several(values: dict[str, Any], kept: bool) -> None:
    budgets = render({"engines": [{"service": "sglang"}], **values}).of("PodDisruptionBudget")
    assert [each["spec"]["maxUnavailable"] for each in budgets] == ([1] if kept else [])


def test_a_scaled_deployment_does_not_say_how_many_there_are() -> None:
    assert "replicas" not in render(case("scaled")).one("Deployment")["spec"]
    assert render(case("bundled")).one("Deployment")["spec"]["replicas"] == 2


WARNING = "WARNING: several routers share nothing"


@pytest.mark.parametrize(
    ("values", "warned"),
    [("engines", False), ("bundled", False), ("shared-nothing", False), ("scaled", False)],
)
def test_who_shares_is_not_warned(values: str, warned: bool) -> None:
    assert (WARNING in notes(case(values))) is warned


@pytest.mark.parametrize("values", [{"replicaCount": 2}, {"autoscaling": {"enabled": True}}])
def test_several_routers_that_share_nothing_are_warned_of(values: dict[str, Any]) -> None:
    assert WARNING in notes({"engines": [{"service": "sglang"}], **values})


@each_case
def test_the_notes_name_what_is_there(values: Path) -> None:
    said, release = notes(values), render(values)
    name = release.one("Deployment")["metadata"]["name"]
    port = release.settings["admin"]["port"]
    assert f"rollout status deployment/{name}" in said
    settings, port_of_clients = release.settings, release.one("Service")["spec"]["ports"][0]["port"]
    encrypted = bool(settings.get("tls"))
    assert port_of_clients == (443 if encrypted else 80)
    assert f"Clients use http{'s' if encrypted else ''}://{name}.llm/v1 " in said
    assert f"port-forward service/{name}-admin {port} " in said
    assert ("get secret" in said) is ("token_file" in json.dumps(release.pod).lower())


FAR = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


@pytest.mark.parametrize(
    ("policy", "cut_off"),
    [
        ({"enabled": True}, True),
        ({"enabled": True, "admin": []}, True),
        ({"enabled": True, "admin": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]}, True),
        ({"enabled": True, "admin": [{"podSelector": {}}, FAR]}, False),
        ({"enabled": True, "admin": [{"namespaceSelector": {}}]}, False),
        ({"enabled": True, "admin": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}, False),
        ({"enabled": False}, False),
    ],
)
def test_the_notes_warn_of_a_prometheus_that_is_cut_off(policy: dict[str, Any], cut_off: bool) -> None:
    values = {"engines": [{"service": "sglang"}], "networkPolicy": policy}
    said = notes({**values, "metrics": {"serviceMonitor": {"enabled": True}}})
    assert ("a Prometheus there cannot scrape the routers" in said) is cut_off
    assert "cannot scrape" not in notes(values)
    if cut_off:
        # What it names as the remedy is one.
        remedy = yaml.safe_load(said.partition("in place of monitoring:\n\n")[2].partition("\n\n")[0])
        assert remedy["networkPolicy"]["admin"][1] == FAR
        values["networkPolicy"] = {**policy, **remedy["networkPolicy"]}
        assert "cannot scrape" not in notes({**values, "metrics": {"serviceMonitor": {"enabled": True}}})


# What a change of the configuration does


def _rolled_by(config: dict[str, Any], **values: Any) -> str:
    release = render({"engines": [{"service": "sglang"}], "config": config, **values})
    return str(release.pod["metadata"]["annotations"]["warmroute/rolled-by"])


CHANGES: dict[str, Any] = {
    "host": {"host": "::"},
    "port": {"port": 9000},
    "workers": {"workers": 2},
    "admin.host": {"admin": {"host": "::"}},
    "admin.port": {"admin": {"port": 9001}},
    "admin.tls": {"admin": {"tls": {"cert_file": "/a", "key_file": "/b"}}},
    "tls": {"tls": {"cert_file": "/a", "key_file": "/b"}},
    "directory": {"directory": {"idle_s": 60}},
    "log.format": {"log": {"format": "text"}},
    "tracing": {"tracing": {"endpoint": "http://collector:4318/v1/traces"}},
    "journal": {"journal": {"files": 2}},
    "store": {"store": {"url": "redis://redis:6379"}},
}


def test_each_change_that_takes_a_restart_is_tried() -> None:
    assert set(CHANGES) == reload.RESTART - {"identity.secret"}  # which is in no ConfigMap


@pytest.mark.parametrize("config", CHANGES.values(), ids=CHANGES)
def test_what_takes_a_restart_replaces_pods(config: dict[str, Any]) -> None:
    assert _rolled_by(config) != _rolled_by({})


@pytest.mark.parametrize(
    "config",
    [
        {"limits": {"body_bytes": 1000}},
        {"policy": "rendezvous"},
        {"log": {"level": "debug"}},
        {"health": {"fail_after": 5}},
    ],
)
def test_all_else_is_read_by_running_routers(config: dict[str, Any]) -> None:
    assert _rolled_by(config) == _rolled_by({})
    assert _rolled_by(config, configChange="roll") != _rolled_by({}, configChange="roll")


def _rolled(values: Path | dict[str, Any]) -> tuple[str, str]:
    """What replaces routers, and the bundled store."""
    found = [render(values).one("Deployment", component) for component in ("router", "store")]
    router, store = (each["spec"]["template"]["metadata"]["annotations"]["warmroute/rolled-by"] for each in found)
    return router, store


def test_a_new_password_replaces_routers_and_the_bundled_store() -> None:
    """Where Helm sees no cluster, each rendering makes one."""
    before, after = _rolled(case("bundled")), _rolled(case("bundled"))
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_the_notes_tell_of_the_bundled_stores_password() -> None:
    assert "name a Secret of your own in\nsecrets.store.password" in notes(case("bundled"))
    own = notes(case("rendered-elsewhere"))
    assert "secrets.store.password" not in own
    assert "kubectl -n llm rollout restart deployment/router-warmroute-store" in own


def test_with_a_password_of_ones_own_renderings_are_alike() -> None:
    assert render(case("rendered-elsewhere")).manifests == render(case("rendered-elsewhere")).manifests


def test_who_rolls_does_not_reload_as_well() -> None:
    engines = [{"service": "sglang"}]
    assert render({"engines": engines, "configChange": "roll"}).settings["reload"] == {"watch": False}
    assert "reload" not in render({"engines": engines}).settings
    watched = {"config": {"reload": {"watch": True}}, "configChange": "roll"}
    assert render({"engines": engines, **watched}).settings["reload"] == {"watch": True}


def test_a_chart_of_another_version_replaces_no_pods_by_that_alone() -> None:
    pod = json.dumps(render(case("engines")).pod["metadata"])
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["version"] not in pod


def test_it_is_a_good_part_of_another_chart() -> None:
    release = render(case("everything-else"))
    assert release.container["image"].startswith("registry.example.com/llm/warmroute@sha256:0123")
    assert release.of("ServiceAccount") == []
    assert release.pod["spec"]["serviceAccountName"] == "routers"
