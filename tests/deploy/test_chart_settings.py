"""What the router refuses of its settings Helm refuses before anything is installed, or its README says not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from policies import registry
from router.configuration import ConfigError, load
from router.settings import (
    CorsSettings,
    DnsSettings,
    HeaderListSettings,
    KubernetesSettings,
    ReplicaSettings,
    Settings,
    StoreSettings,
    TracingSettings,
)
from tests.deploy.charts import CHART, Refused, render

chart = pytest.mark.chart
REPLICAS = ["http://10.0.0.1:30000"]
SCHEMA = json.loads((CHART / "values.schema.json").read_text())

MISSPELT: dict[str, tuple[dict[str, Any], str]] = {
    "a policy": ({"policy": "session-affinity"}, "at '/config/policy': value must be one of 'session_affinity', "),
    "a policy by name": (
        {"policy": {"name": "cache_aware"}},
        "at '/config/policy/name': value must be one of 'session_affinity', ",
    ),
    "a policy's parameter": (
        {"policy": {"parameters": {"hysteresis": 3}}},
        "at '/config/policy/parameters': additional properties 'hysteresis' not allowed",
    ),
    "a parameter of another policy": (
        {"policy": {"name": "sticky", "parameters": {"hysteresis_s": 3}}},
        "at '/config/policy/parameters': additional properties 'hysteresis_s' not allowed",
    ),
    "a parameter of another type": (
        {"policy": {"name": "prefix_aware", "parameters": {"cache_threshold": "half"}}},
        "at '/config/policy/parameters/cache_threshold': got string, want number",
    ),
    "a part for a whole number": (
        {"policy": {"name": "kv_cost", "parameters": {"block_size": 1.5}}},
        "at '/config/policy/parameters/block_size': got number, want integer",
    ),
    "a shadow": ({"policy": {"shadow": "cheapest"}}, "at '/config/policy/shadow': value must be one of "),
    "a shadow's parameter": (
        {"policy": {"shadow": {"name": "random", "parameters": {"sed": 1}}}},
        "at '/config/policy/shadow/parameters': additional properties 'sed' not allowed",
    ),
    "a replica without a scheme": ({"replicas": ["10.0.0.1:30000"]}, "at '/config/replicas/0': '10.0.0.1:30000' does"),
    "a replica's url": ({"replicas": [{"url": "tcp://a:30000"}]}, "at '/config/replicas/0/url': 'tcp://a:30000' does"),
    "two replicas in one": ({"replicas": ["http://a,http://b"]}, "at '/config/replicas/0': 'http://a,http://b' does"),
    "a replica's id": ({"replicas": [{"url": "http://a", "id": "a b"}]}, "at '/config/replicas/0/id': 'a b' does not"),
    "a rule": (
        {"identity": {"rules": [{"heder": "x-mine"}]}},
        "at '/config/identity/rules/0': additional properties 'heder' not allowed",
    ),
    "a rule's header": (
        {"identity": {"rules": [{"header": "x mine"}]}},
        "at '/config/identity/rules/0/header': 'x mine'",
    ),
    "a rule of both kinds": (
        {"identity": {"rules": [{"header": "x-mine", "body": "mine"}]}},
        "at '/config/identity/rules/0': additional properties 'body' not allowed",
    ),
    "a rule's field": (
        {"identity": {"rules": [{"body": "a.b.c"}]}},
        "at '/config/identity/rules/0/body': 'a.b.c' does",
    ),
    "a rule's scope": (
        {"identity": {"rules": [{"body": "mine", "scope": "agent"}]}},
        "at '/config/identity/rules/0/scope': value must be one of 'session', 'user'",
    ),
    "a cap": ({"admission": {"max_running": -1}}, "at '/config/admission/max_running': minimum: got -1, want 0"),
    "a wait": ({"admission": {"max_wait_s": 0}}, "at '/config/admission/max_wait_s': minimum: got 0, want 0.1"),
    "a hold": ({"admission": {"max_hold_s": 1}}, "at '/config/admission/max_hold_s': minimum: got 1, want 60"),
    "a priority": (
        {"admission": {"priority_header": "x-priority:"}},
        "at '/config/admission/priority_header': 'x-priority:' does not match",
    ),
    "a holder of keys": (
        {"keys": {"accept": {"alice b": f"sha256:{'0' * 64}"}}},
        "at '/config/keys/accept': additional properties 'alice b' not allowed",
    ),
    "what becomes of a credential": (
        {"keys": {"credential": "keep"}},
        "at '/config/keys/credential': value must be one of 'pass', 'strip', 'replace'",
    ),
    "a header": ({"headers": {"request": {"deny": ["x a"]}}}, "at '/config/headers/request/deny/0': 'x a' does not"),
    "an origin": (
        {"cors": {"origins": ["https://chat.example.com/"]}},
        "at '/config/cors/origins/0': 'https://chat.example.com/' does not match",
    ),
    "a level": ({"log": {"level": "warn"}}, "at '/config/log/level': value must be one of 'debug', 'info', "),
    "a collector": (
        {"tracing": {"endpoint": "collector:4318"}},
        "at '/config/tracing/endpoint': 'collector:4318' does",
    ),
    "a store": ({"store": {"url": "redis:6379"}}, "at '/config/store/url': 'redis:6379' does not match"),
    "a prefix": ({"store": {"prefix": "a b"}}, "at '/config/store/prefix': 'a b' does not match"),
    "a namespace": (
        {"discovery": {"kubernetes": [{"service": "s", "namespace": "LLM"}]}},
        "at '/config/discovery/kubernetes/0/namespace': 'LLM' does not match",
    ),
    "a service": (
        {"discovery": {"kubernetes": [{"service": "sglang.llm"}]}},
        "at '/config/discovery/kubernetes/0/service': 'sglang.llm' does not match",
    ),
    "a selector": (
        {"discovery": {"kubernetes": [{"selector": "app: sglang"}]}},
        "at '/config/discovery/kubernetes/0/selector': 'app: sglang' does not match",
    ),
    "a port": (
        {"discovery": {"kubernetes": [{"service": "s", "port": 70000}]}},
        "at '/config/discovery/kubernetes/0/port': maximum: got 70,000, want 65,535",
    ),
    "a port's name": (
        {"discovery": {"kubernetes": [{"service": "s", "port": "HTTP"}]}},
        "at '/config/discovery/kubernetes/0/port': 'HTTP' does not match",
    ),
    "an API server": (
        {"discovery": {"kubernetes": [{"service": "s", "namespace": "n", "url": "10.0.0.1:6443"}]}},
        "at '/config/discovery/kubernetes/0/url': '10.0.0.1:6443' does not match",
    ),
    "whose pods": (
        {"discovery": {"kubernetes": [{"port": "http"}]}},
        "config.discovery.kubernetes[0]: set service or selector, one of the two",
    ),
    "whose namespace": (
        {"discovery": {"kubernetes": [{"service": "s", "url": "https://10.0.0.1:6443"}]}},
        "config.discovery.kubernetes[0].namespace is to be set where url is",
    ),
    "a name in DNS": (
        {"discovery": {"dns": [{"name": "http://sglang.llm", "port": 1}]}},
        "at '/config/discovery/dns/0/name': 'http://sglang.llm' does not match",
    ),
    "a DNS server": (
        {"discovery": {"dns": [{"name": "sglang.llm", "port": 1, "server": "kube-dns:53"}]}},
        "at '/config/discovery/dns/0/server': 'kube-dns:53' does not match",
    ),
    "a certificate without a key": (
        {"tls": {"cert_file": "/mine/tls.crt"}},
        "config.tls.cert_file and config.tls.key_file go together: set both, or neither",
    ),
    "a key without a certificate": (
        {"store": {"url": "rediss://redis", "key_file": "/mine/tls.key"}},
        "config.store.cert_file and config.store.key_file go together: set both, or neither",
    ),
}

LEFT: dict[str, dict[str, Any]] = {
    "bounds of a policy's parameter": {"policy": {"parameters": {"hysteresis_s": -1}}},
    "a port in a URL": {"replicas": ["http://a:70000"]},
    "a replica twice": {"replicas": ["http://a:30000", "http://A:30000/"]},
    "a hash, which may be the key itself": {"keys": {"accept": {"alice": "hunter2"}}},
    "a path that is not refused anyway": {"admin_paths": {"allow": ["flushcache"]}},
    "a header that is a credential": {"headers": {"request": {"deny": ["authorization"]}}},
    "a header of another kind each time": {"identity": {"rules": [{"header": "x-request-id"}]}},
    "two limits": {"limits": {"body_bytes": 2, "body_memory_bytes": 1}},
    "two times": {"health": {"open_s": 9, "open_max_s": 8}},
    "two lists": {"headers": {"response": {"deny": ["a"], "allow": ["b"]}}},
    "a username without a password": {"store": {"username": "router"}},
    "a file that is not there": {"discovery": {"kubernetes": [{"service": "s", "ca_file": "/mine/ca.crt"}]}},
}
"""Kinds of them are named in the chart's README, under what only the router can tell."""


def merged(config: dict[str, Any]) -> dict[str, Any]:
    return {"replicas": REPLICAS, **config}


@pytest.mark.parametrize(
    "config", [*(config for config, _ in MISSPELT.values()), *LEFT.values()], ids=[*MISSPELT, *LEFT]
)
def test_the_router_refuses_it(config: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "warmroute.yaml"
    file.write_text(yaml.safe_dump(merged(config)))
    with pytest.raises(ConfigError):
        load(str(file))


@chart
@pytest.mark.parametrize(("config", "message"), MISSPELT.values(), ids=MISSPELT)
def test_helm_refuses_it_as_well(config: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refused:
        render({"config": merged(config)})
    assert message in " ".join(str(refused.value).split())


@chart
@pytest.mark.parametrize("config", LEFT.values(), ids=LEFT)
def test_helm_leaves_it_to_the_router(config: dict[str, Any]) -> None:
    """Otherwise it belongs among the others, and the README says too little."""
    assert render({"config": merged(config)})


# The schema alone


FREE = {
    *("config.host", "config.admin.host"),  # any name that the pod's system knows
    *("config.tracing.service", "config.store.username"),  # whatever others call it
    "config.admin_paths.allow[]",  # as the engine has them
    *("config.keys.accept", "config.keys.accept.hash", "config.keys.accept.hash[]"),  # may be the key, by mistake
}
"""Texts of which the schema says nothing, beside files' paths and what the chart refuses to have at all."""


def _texts(part: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every text that a part of the schema allows."""
    if isinstance(part, list):
        for each in part:
            yield from _texts(each, path)
    if not isinstance(part, dict):
        return
    if "$ref" in part:
        yield from _texts(SCHEMA["$defs"][part["$ref"].rpartition("/")[2]], path)
    if part.get("type") == "string":
        yield path, part
    for name, each in part.get("properties", {}).items():
        yield from _texts(each, f"{path}.{name}")
    for each in part.get("patternProperties", {}).values():
        yield from _texts(each, path)
    yield from _texts(part.get("items"), f"{path}[]")
    for key in ("anyOf", "then", "else", "additionalProperties"):
        yield from _texts(part.get(key), path)


def test_every_text_has_a_form_or_is_free() -> None:
    texts = list(_texts(SCHEMA["properties"]["config"], "config"))
    assert len(texts) > 50
    plain = {path for path, text in texts if not text.keys() & {"pattern", "enum", "format"}}
    files = {path for path in plain if path.endswith(("_file", ".file", "journal.path"))}
    assert plain - files == FREE


def test_every_policy_has_its_parameters() -> None:
    _, full = SCHEMA["$defs"]["PolicySettings"]["then"], SCHEMA["$defs"]["PolicySettings"]["else"]
    told = {
        each["if"]["properties"]["name"]["const"]: set(each["then"]["properties"]["parameters"]["properties"])
        for each in full["allOf"]
    }
    assert told == {name: set(registry.parameters(name)) for name in registry.POLICIES}


def _pattern(model: type[BaseModel], field: str) -> str:
    told = model.model_json_schema()["properties"][field]
    return str((told.get("items") or told)["pattern"])


EDITED: dict[str, tuple[str, Callable[[str], object], list[str]]] = {
    "a replica's URL": (
        _pattern(ReplicaSettings, "url"),
        lambda text: ReplicaSettings(url=text),
        ["http://10.0.0.1:30000", "HTTPS://a.b-c_d/x/y", "http://[fe80::1%eth0]:8/", " http://a:?#"],
    ),
    "a store's URL": (
        _pattern(StoreSettings, "url"),
        lambda text: StoreSettings(url=text),
        [
            *("redis://10.0.0.1:6379/0", "rediss://redis", "unix:///run/redis.sock?db=1"),
            "redis+sentinel://a:1,[::1]:2/my.master/0",
            "rediss+cluster://a:1,b/",
        ],
    ),
    "a selector": (
        _pattern(KubernetesSettings, "selector"),
        lambda text: KubernetesSettings(selector=text),
        ["app=sglang", "a.b/c != d, e in (f,g), !h", "a notin ( b )", "a==,b"],
    ),
    "a service": (
        _pattern(KubernetesSettings, "service"),
        lambda text: KubernetesSettings(service=text),
        ["sglang-0", "a"],
    ),
    "an API server's URL": (
        _pattern(KubernetesSettings, "url"),
        lambda text: KubernetesSettings(url=text, service="s", namespace="n"),
        ["https://10.0.0.1:6443"],
    ),
    "a name in DNS": (
        _pattern(DnsSettings, "name"),
        lambda text: DnsSettings(name=text),
        ["_http._tcp.sglang.llm.", "a"],
    ),
    "a DNS server": (
        _pattern(DnsSettings, "server"),
        lambda text: DnsSettings(name="a", server=text),
        ["10.0.0.10:53", "[fd00::1]:53", "fe80::1%eth0:53"],
    ),
    "a collector": (
        _pattern(TracingSettings, "endpoint"),
        lambda text: TracingSettings(endpoint=text),
        ["http://collector:4318/v1/traces"],
    ),
    "an origin": (
        _pattern(CorsSettings, "origins"),
        lambda text: CorsSettings(origins=[text]),
        ["https://chat.example.com:8443", "http://[::1]"],
    ),
    "a header": (
        _pattern(HeaderListSettings, "deny"),
        lambda text: HeaderListSettings(deny=[text]),
        ["X-Internal-Id", "a_b"],
    ),
}


@given(
    st.sampled_from(sorted(EDITED)),
    st.data(),
    st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.sampled_from("aZ0:/.,@?#[]% =-_!()+")), max_size=3),
)
def test_nothing_that_the_router_takes_is_refused(
    what: str, data: st.DataObject, edits: list[tuple[float, bool, str]]
) -> None:
    pattern, taken, examples = EDITED[what]
    text = data.draw(st.sampled_from(examples))
    for where, instead, sign in edits:
        at = int(where * len(text))
        text = text[:at] + sign + text[at + instead :]
    try:
        taken(text)
    except ValidationError:
        return
    assert re.search(pattern, text)


@pytest.mark.parametrize("what", EDITED)
def test_examples_are_taken_by_both(what: str) -> None:
    """Without them the test above would hold of patterns that nothing is as."""
    pattern, taken, examples = EDITED[what]
    for text in examples:
        taken(text)
        assert re.search(pattern, text)
        assert not re.search(pattern, "a b:\n")


def test_the_settings_are_taken_by_their_own_defaults() -> None:
    texts = dict(_texts(SCHEMA["properties"]["config"], "config"))
    left: list[tuple[str, Any]] = [("config", Settings().model_dump(mode="json"))]
    checked = 0
    for path, value in left:
        if isinstance(value, dict):
            left += [(f"{path}.{name}", each) for name, each in value.items()]
        elif "pattern" in texts.get(path, {}):
            assert re.search(texts[path]["pattern"], value), path
            checked += 1
    assert checked >= 4
