"""Objects of kinds that Kubernetes does not know by itself, and what stands before the Services.

There is no schema of these kinds to be had here, and no operator that reads them: what is looked at is the structure
that their documents ask for, and that names and figures are those that are meant.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from router.metrics.table import FAMILIES
from router.settings import Settings
from tests.deploy.charts import case, labels, render
from tests.deploy.queries import ALERTS, DASHBOARDS

pytestmark = pytest.mark.chart
ENGINES = {"engines": [{"service": "sglang", "port": "http"}]}
HEADERS = {"apiVersion", "kind", "metadata", "spec"}


def test_routers_are_scraped_with_their_token() -> None:
    release = render(case("watched"))
    monitor = release.one("ServiceMonitor")
    assert set(monitor) == HEADERS
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert labels(monitor)["release"] == "kube-prometheus-stack"
    assert set(monitor["spec"]) == {"jobLabel", "selector", "endpoints"}
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = [each for each in release.of("Service") if wanted <= labels(each).items()]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert labels(service)[monitor["spec"]["jobLabel"]] == "warmroute"  # as the alerts have it
    credentials = endpoint.pop("authorization")["credentials"]
    (secret,) = release.of("Secret")
    assert credentials["name"] == secret["metadata"]["name"]
    assert credentials["key"] in secret["data"]
    assert endpoint == {"port": "admin", "path": "/metrics", "interval": "30s"}


@pytest.mark.parametrize("config", [{"admin": {"open": True}}, {"admin": {"open_metrics": True}}])
def test_no_token_is_shown_where_none_is_asked_for(config: dict[str, Any]) -> None:
    values = {**ENGINES, "config": config, "metrics": {"serviceMonitor": {"enabled": True}}}
    (endpoint,) = render(values).one("ServiceMonitor")["spec"]["endpoints"]
    assert "authorization" not in endpoint


def test_an_admin_port_with_tls_is_scraped_by_tls() -> None:
    (endpoint,) = render(case("tls")).one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {"insecureSkipVerify": True}


def test_engines_are_scraped_as_the_alerts_have_it() -> None:
    monitor = render(case("watched")).one("PodMonitor", "engines")
    assert set(monitor) == HEADERS
    assert monitor["spec"]["selector"] == {"matchLabels": {"app": "sglang"}}
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["llm", "big"]}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "sglang"}]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")


def test_the_alerts_are_those_of_the_repository() -> None:
    rule = render(case("watched")).one("PrometheusRule")
    assert set(rule) == HEADERS
    groups = [group for path in ALERTS for group in yaml.safe_load(path.read_text())["groups"]]
    for group in groups:
        for alert in group["rules"]:
            url = alert["annotations"]["runbook_url"]
            alert["annotations"]["runbook_url"] = f"https://git.example.com/warmroute/{url}"
    assert rule["spec"] == {"groups": groups}


def test_the_dashboards_are_those_of_the_repository() -> None:
    found = render(case("watched")).all("ConfigMap", "dashboards")
    for each in found:
        assert labels(each)["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"] == {"grafana_folder": "Inference"}
    texts = {name: json.loads(text) for each in found for name, text in each["data"].items()}
    assert texts == {f"warmroute-{path.name}": json.loads(path.read_text()) for path in DASHBOARDS}


def test_engines_are_scaled_by_what_routers_tell() -> None:
    scaled = render(case("scaled")).one("ScaledObject", "engines")
    assert set(scaled) == HEADERS
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    assert scaled["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "sglang"}
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (1, 4)
    assert set(scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]) == {"scaleDown"}
    known = {family.name for family in FAMILIES}
    live, requests = scaled["spec"]["triggers"]
    assert (live["metadata"]["threshold"], requests["metadata"]["threshold"]) == ("0.7", "32")
    for trigger in (live, requests):
        assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
        assert trigger["metadata"]["serverAddress"] == "http://prometheus.monitoring:9090"
        asked = re.findall(r'(warmroute_\w+)\{job="warmroute"\}', trigger["metadata"]["query"])
        assert len(asked) == trigger["metadata"]["query"].count("warmroute_") == 2
        assert set(asked) <= known


def test_a_scaled_engine_is_all_of_its_ranks() -> None:
    """Capacity is told for each rank, and pods are what is scaled."""
    scaling = {
        "enabled": True,
        "target": {"name": "sglang"},
        "prometheus": "http://p",
        "requests": 0,
        "matchers": "a=b",
    }
    release = render({"engines": [{"service": "sglang", "ranks": 4}], "engineScaling": scaling})
    assert release.settings["discovery"]["kubernetes"][0]["ranks"] == 4
    (trigger,) = release.one("ScaledObject", "engines")["spec"]["triggers"]
    assert trigger["metadata"]["query"] == (
        "sum(max by (replica) (warmroute_live_tokens{a=b}))"
        " / (4 * avg(max by (replica) (warmroute_capacity_tokens{a=b}) > 0))"
    )


def test_the_routers_of_this_release_are_asked_unless_told_otherwise() -> None:
    scaling = {"enabled": True, "target": {"name": "sglang"}, "prometheus": "http://p", "liveTokens": 0}
    release = render({**ENGINES, "engineScaling": scaling, "metrics": {"serviceMonitor": {"enabled": True}}})
    (trigger,) = release.one("ScaledObject", "engines")["spec"]["triggers"]
    (service,) = release.all("Service", "admin")
    # Labels that the Prometheus operator gives to what it scrapes by a ServiceMonitor.
    assert f'{{namespace="llm",service="{service["metadata"]["name"]}"}}' in trigger["metadata"]["query"]


def test_routers_are_scaled_by_both() -> None:
    metrics = render(case("scaled")).one("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert [each["type"] for each in metrics] == ["Resource", "Pods"]
    assert metrics[1]["pods"]["metric"]["name"] in {family.name for family in FAMILIES}


def test_an_ingress_waits_longer_and_takes_more_than_the_router() -> None:
    ingress = render(case("reached")).one("Ingress")
    told = {name.rpartition("/")[2]: value for name, value in ingress["metadata"]["annotations"].items()}
    assert int(told["proxy-read-timeout"]) > 1800
    assert int(told["proxy-body-size"]) == 33554432
    assert told["proxy-connect-timeout"] == "5"  # as in the values
    assert told["proxy-buffering"] == told["proxy-request-buffering"] == "off"
    hosts = [rule.get("host") for rule in ingress["spec"]["rules"]]
    assert hosts == ["llm.example.com", None]
    for rule in ingress["spec"]["rules"]:
        (path,) = rule["http"]["paths"]
        assert path["backend"]["service"] == {"name": "router-warmroute", "port": {"name": "http"}}


def test_an_ingress_without_further_words_outwaits_the_routers_own_times() -> None:
    release = render({**ENGINES, "ingress": {"enabled": True, "hosts": ["a.example.com"]}})
    told = release.one("Ingress")["metadata"]["annotations"]
    own = Settings()
    longest = max(own.timeouts.first_byte_s, own.timeouts.idle_s, own.timeouts.body_s)
    assert float(told["nginx.ingress.kubernetes.io/proxy-read-timeout"]) > longest
    assert int(told["nginx.ingress.kubernetes.io/proxy-body-size"]) == own.limits.body_bytes


def test_a_router_with_tls_is_spoken_to_by_tls() -> None:
    told = render(case("tls")).one("Ingress")["metadata"]["annotations"]
    assert told["nginx.ingress.kubernetes.io/backend-protocol"] == "HTTPS"


def test_a_route_has_no_limit_of_time() -> None:
    release = render(case("reached"))
    route = release.one("HTTPRoute")
    assert set(route) == HEADERS
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["spec"]["parentRefs"] == [{"name": "agents", "namespace": "gateways"}]
    assert route["spec"]["hostnames"] == ["llm.example.com"]
    (rule,) = route["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    service = release.one("Service")
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}]


def test_a_gateway_is_told_by_what_to_know_routers_with_tls() -> None:
    release = render(case("tls"))
    policy, service = release.one("BackendTLSPolicy"), release.one("Service")
    assert set(policy) == HEADERS
    assert policy["apiVersion"] == "gateway.networking.k8s.io/v1"
    authority = {"group": "", "kind": "ConfigMap", "name": "llm-ca"}
    assert policy["spec"] == {
        "targetRefs": [{"group": "", "kind": "Service", "name": service["metadata"]["name"]}],
        "validation": {"hostname": "llm.example.com", "caCertificateRefs": [authority]},
    }
    (rule,) = release.one("HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": service["metadata"]["name"], "port": 443}]
    assert render(case("reached")).of("BackendTLSPolicy") == []


@pytest.mark.parametrize(("port", "wanted"), [({}, 443), ({"port": 8443}, 8443)])
def test_clients_find_tls_where_it_usually_is(port: dict[str, int], wanted: int) -> None:
    release = render(case("tls"), *(f"--set=service.{name}={value}" for name, value in port.items()))
    assert release.one("Service")["spec"]["ports"][0]["port"] == wanted
    assert render(ENGINES).one("Service")["spec"]["ports"][0]["port"] == 80


def test_who_may_reach_which_port() -> None:
    policy = render(case("reached")).one("NetworkPolicy")["spec"]
    data, admin = policy["ingress"]
    assert data["ports"] == [{"protocol": "TCP", "port": 8080}]
    assert data["from"] == [{"namespaceSelector": {"matchLabels": {"team": "agents"}}}]
    assert admin["ports"] == [{"protocol": "TCP", "port": 8081}]
    assert admin["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert len(policy["egress"]) == 2


def test_the_bundled_store_is_reached_by_routers_alone() -> None:
    release = render(case("bundled"))
    policy = release.one("NetworkPolicy", "store")["spec"]
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"].items() <= labels(release.pod).items()
    (open_to_all, admin) = release.one("NetworkPolicy")["spec"]["ingress"]
    assert "from" not in open_to_all
    assert admin["from"] == [{"podSelector": {}}]
    assert release.one("NetworkPolicy")["spec"]["policyTypes"] == ["Ingress"]
