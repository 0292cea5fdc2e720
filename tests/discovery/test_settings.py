"""What can be written under `discovery`, and what is said of what cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.changes import changes
from router.configuration import ConfigError, load
from router.settings import Settings


def loaded(tmp_path: Path, text: str) -> Settings:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return load(str(file))


GOOD = {
    "discovery: {file: /etc/warmroute/replicas.yaml}": ["file:/etc/warmroute/replicas.yaml"],
    "discovery: {kubernetes: [{service: sglang}]}": ["kubernetes:sglang"],
    "discovery: {kubernetes: [{namespace: big, service: sglang, port: '30000', scheme: https}]}": [
        "kubernetes:big/sglang:30000"
    ],
    "discovery: {kubernetes: [{selector: 'app=sglang,tier in (gpu, big),!old', port: http}]}": [
        "kubernetes:app=sglang,tier in (gpu, big),!old:http"
    ],
    "discovery: {kubernetes: [{service: s, namespace: n, url: 'https://10.0.0.1:6443', token_file: t}]}": [
        "kubernetes:https://10.0.0.1:6443/n/s"
    ],
    "discovery: {dns: [{name: sglang.default.svc.cluster.local, port: 30000}]}": [
        "dns:sglang.default.svc.cluster.local:30000"
    ],
    "discovery: {dns: [{name: sglang.}, {name: _api._tcp.x, server: '10.0.0.10:53'}, {name: y, server: '[::1]:53'}]}": [
        "dns:_http._tcp.sglang.",
        "dns:_api._tcp.x",
        "dns:_http._tcp.y",
    ],
}


@pytest.mark.parametrize("text", GOOD)
def test_what_can_be_written(tmp_path: Path, text: str) -> None:
    assert loaded(tmp_path, text).discovery.names == GOOD[text]


def test_nothing_is_discovered_by_default() -> None:
    assert Settings().discovery.names == []


BAD = {
    "discovery: {kubernetes: [{}]}": "discovery.kubernetes.0: set service or selector",
    "discovery: {kubernetes: [{service: a, selector: b=c}]}": "discovery.kubernetes.0: set service or selector",
    "discovery: {kubernetes: [{service: A_b}]}": "discovery.kubernetes.0.service: 'A_b' is no name in Kubernetes",
    "discovery: {kubernetes: [{service: a, namespace: a/b}]}": "discovery.kubernetes.0.namespace: 'a/b' is no name",
    "discovery: {kubernetes: [{service: a, port: 0}]}": "discovery.kubernetes.0.port: 0 is no port",
    "discovery: {kubernetes: [{service: a, port: a b}]}": "'a b' is no port: write its number or its name",
    "discovery: {kubernetes: [{service: a, port: yes}]}": "discovery.kubernetes.0.port: true is neither",
    "discovery: {kubernetes: [{selector: 'a in (b'}]}": "selector 'a in (b' is none: write it as in",
    "discovery: {kubernetes: [{service: a, scheme: grpc}]}": "discovery.kubernetes.0.scheme",
    "discovery: {kubernetes: [{service: a, servise: b}]}": "discovery.kubernetes.0.servise: unknown key, set to 'b'",
    "discovery: {kubernetes: [{service: a, url: 'http://x'}]}": "namespace is to be set where url is",
    "discovery: {kubernetes: [{service: a, namespace: n, url: x}]}": "url 'x' is not an API server's",
    "discovery: {kubernetes: [{service: a, ca_file: /nosuch}]}": "ca_file '/nosuch': No such file or directory",
    "discovery: {kubernetes: [{service: a}, {service: a}]}": "discovery: kubernetes:a is given twice: remove one",
    "discovery: {dns: [{}]}": "discovery.dns.0.name: is missing: set it",
    "discovery: {dns: [{name: a b}]}": "discovery.dns.0.name: 'a b' is no name in DNS",
    "discovery: {dns: [{name: a, port: 70000}]}": "discovery.dns.0.port",
    "discovery: {dns: [{name: a, server: 10.0.0.10}]}": "'10.0.0.10' is not an address and a port",
    "discovery: {dns: [{name: a, server: 'dns:53'}]}": "'dns:53' is not an address and a port",
    "discovery: {dns: [{name: a, ranks: 0}]}": "discovery.dns.0.ranks: must be greater than or equal to 1",
    "discovery: {kubernetes: [{service: a, ranks: 65}]}": "discovery.kubernetes.0.ranks: must be less than or",
    "replicas: [{url: 'http://a:1', ranks: 2.5}]": "replicas.0.ranks",
    "replicas: [{url: 'http://a:1', id: a, ranks: 2}, {url: 'http://b:1', id: a@1}]": "the id 'a@1' is given twice",
    "discovery: {fiel: x}": "discovery.fiel: unknown key, set to 'x': did you mean 'discovery.file'?",
    "replicas: [http://a:1, HTTP://A:1]": "replicas: http://a:1 is given twice",
}


@pytest.mark.parametrize("text", BAD)
def test_what_cannot_be_written_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as told:
        loaded(tmp_path, text)
    assert BAD[text] in str(told.value)


def test_in_the_environment_lists_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMROUTE_DISCOVERY__KUBERNETES", '[{"service": "sglang"}]')
    monkeypatch.setenv("WARMROUTE_DISCOVERY__FILE", "r.yaml")
    assert load().discovery.names == ["file:r.yaml", "kubernetes:sglang"]


def test_a_change_is_told_source_by_source() -> None:
    before = Settings(discovery={"kubernetes": [{"service": "a"}]})
    after = Settings(discovery={"file": "r.yaml", "kubernetes": [{"service": "b", "port": 80}]})
    told = [(each.key, each.old, each.new) for each in changes(before, after)]
    assert told == [
        ("discovery.file", "", "r.yaml"),
        ("discovery.kubernetes.0", {"service": "a"}, {"service": "b", "port": 80}),
    ]
    assert json.dumps(told), "as the admin port answers"
