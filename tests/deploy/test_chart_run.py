"""What the chart renders, run: the router with the files and the environment that its pod would have."""

from __future__ import annotations

import asyncio
import base64
import os
import runpy
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import httpx
import pytest
import redis
import trustme

from router.configuration import load
from tests.deploy.charts import CASES, CHART, Release, case, render
from tests.deploy.cluster import Cluster
from tests.deploy.pods import Pod, pod
from tests.fakes.process import ROOT, Process, free_port
from tests.fakes.replica import FakeReplica
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S
from tests.store.servers import binaries

pytestmark = pytest.mark.chart
ASK = CHART / "files/ask.py"


@pytest.fixture(scope="module")
def secrets() -> dict[str, Mapping[str, str]]:
    """Those that the cases name and the chart does not make."""
    authority = trustme.CA()
    own = authority.issue_cert("router.example.com")
    ca = authority.cert_pem.bytes().decode()
    chain = "".join(each.bytes().decode() for each in own.cert_chain_pems)
    return {
        "router-tls": {"tls.crt": chain, "tls.key": own.private_key_pem.bytes().decode(), "ca.crt": ca},
        "engines-ca": {"ca.crt": ca},
        "redis-ca": {"ca.crt": ca},
        "router-secrets": {"admin": "a" * 32, "identity": "i" * 32},
        "redis": {"redis-password": "p" * 32, "sentinel-password": "s" * 32},
        "client-keys": {"keys.txt": f"alice:sha256:{'0' * 64}\n"},
        "engines": {"api-key": "k" * 32},
        "far": {"token": "t" * 32},
    }


@pytest.mark.parametrize("values", CASES, ids=[path.stem for path in CASES])
def test_the_router_takes_the_settings(
    values: Path, secrets: dict[str, Mapping[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = render(values)
    made = pod(release, tmp_path, secrets)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    settings = load(str(made.config))
    assert settings.replicas or settings.discovery.names
    assert settings.identity.secret.get_secret_value()
    assert settings.admin.open or settings.admin.token_file
    assert settings.store.url == "" or settings.store.credentials() is not None or values.stem == "scaled"
    named = {"tls": settings.keys.file, "store": settings.store.sentinel_password}
    assert named.get(values.stem, True)


def started(release: Release, root: Path, *flags: str) -> tuple[Process, Pod, int, int]:
    """The router of a release, its pod, and its two ports."""
    made, port, admin = pod(release, root), free_port(), free_port()
    environment = [f"{name}={value}" for name, value in made.env.items()]
    here = ["--host", "127.0.0.1", "--admin-host", "127.0.0.1", "--port", str(port), "--admin-port", str(admin)]
    command: list[str | Path] = ["env", *environment, ROOT / ".venv/bin/warmroute", *made.args, *here, *flags]
    return Process(command, root / "router.log"), made, port, admin


async def test_its_ports_are_asked_as_the_chart_has_it(tmp_path: Path) -> None:
    replica = await FakeReplica(ready=200, health=200).start()
    replica.say("/v1/models", {"data": []})
    values = {"config": {"replicas": [replica.url]}, "metrics": {"serviceMonitor": {"enabled": True}}}
    release = render(values)
    router, made, port, admin = started(release, tmp_path)
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:

            async def status(path: str, **headers: str) -> int:
                try:
                    return (await client.get(f"http://127.0.0.1:{admin}{path}", headers=headers)).status_code
                except httpx.ConnectError:
                    assert router.alive, router.tail()
                    return 0

            # The kubelet has no token, and Prometheus the one that the ServiceMonitor names.
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                ask = partial(status, release.container[probe]["httpGet"]["path"])
                await until(ask, lambda found: found == 200, LIMIT_S, probe)
            (endpoint,) = release.one("ServiceMonitor")["spec"]["endpoints"]
            named = endpoint["authorization"]["credentials"]
            (secret,) = release.of("Secret")
            assert secret["metadata"]["name"] == named["name"]
            token = base64.b64decode(secret["data"][named["key"]]).decode()
            assert await status(endpoint["path"]) == 401
            assert await status(endpoint["path"], authorization=f"Bearer {token}") == 200

        # What `helm test` runs, at this router's ports.
        (container,) = release.of("Pod")[0]["spec"]["containers"]
        _, ready, models = container["args"]
        assert ready == "http://router-warmroute-admin:8081/readyz"
        assert models == "http://router-warmroute:80/v1/models"
        urls = [f"http://127.0.0.1:{admin}/readyz", f"http://127.0.0.1:{port}/v1/models"]
        asked = await _said(sys.executable, "-c", container["args"][0], *urls)
        assert asked == f"{urls[0]}: answers\n{urls[1]}: answers\n"

        # What the notes name, in the pod: the command finds the token by itself.
        environment = {**os.environ, **made.env}
        command: list[str | Path] = [ROOT / ".venv/bin/warmroute", "replicas", "--admin", f"http://127.0.0.1:{admin}"]
        assert replica.url in await _said(*command, env=environment)
    finally:
        router.stop()
        await replica.stop()


async def _said(*command: str | Path, env: Mapping[str, str] | None = None) -> str:
    process = await asyncio.create_subprocess_exec(*command, env=env, stdout=PIPE, stderr=STDOUT)
    said, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0, said
    return said.decode()


def test_helm_test_fails_where_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}/readyz"
    assert runpy.run_path(str(ASK))["main"]([url], 0.0) == 1
    assert "Connection refused" in capsys.readouterr().out


def bundled_store(release: Release, root: Path, port: int, given: Mapping[str, Mapping[str, str]]) -> Process:
    """The release's Valkey, at a port of 127.0.0.1."""
    made = pod(release, root, given, "store")
    # What its image has of that name, told where to listen beside what it is told by the chart.
    binary = next(iter(reversed(binaries().values())))
    wrapped = root / "bin/valkey-server"
    wrapped.parent.mkdir()
    wrapped.write_text(f'#!/bin/sh\nexec {binary} "$@" --port {port} --bind 127.0.0.1\n')
    wrapped.chmod(0o755)
    return Process(
        ["env", f"PATH={wrapped.parent}:{os.environ['PATH']}", *made.command, *made.args], root / "store.log"
    )


@pytest.mark.parametrize(
    ("values", "own"),
    [("bundled", ""), ("rendered-elsewhere", "p" * 32), ("rendered-elsewhere", " two\\t \"$(word)s' #%s * é \n")],
)
def test_the_bundled_store_lets_its_own_routers_in_and_nobody_else(
    values: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, port = render(case(values)), free_port()
    given = {"redis": {"redis-password": own}, "router-secrets": {"admin": "a" * 32, "identity": "i" * 32}}
    made = pod(release, tmp_path / "router", given)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    router = load(str(made.config))
    with bundled_store(release, tmp_path / "store", port, given) as store:
        store.wait_line(lambda line: "eady to accept connections" in line, LIMIT_S)
        with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        user, password = router.store.credentials() or ("", "")
        with redis.Redis(port=port, username=user, password=password, decode_responses=True) as client:
            assert client.ping()
            told = {"maxmemory-policy": "volatile-lru", "maxmemory": str(256 << 20), "save": "", "appendonly": "no"}
            assert client.config_get(*told) == told


def test_a_bundled_store_with_an_empty_password_does_not_start(tmp_path: Path) -> None:
    given = {"redis": {"redis-password": "\n"}}
    with bundled_store(render(case("rendered-elsewhere")), tmp_path, free_port(), given) as store:
        store.wait_end(LIMIT_S)
        assert "secrets.store.password names is empty" in store.tail()


# Secrets that the chart makes


def test_secrets_that_are_made_cannot_be_guessed() -> None:
    made = [render(case("bundled")).of("Secret")[0]["data"] for _ in range(2)]
    for key in ("admin-token", "identity-secret", "store-password"):
        one, other = (base64.b64decode(each[key]).decode() for each in made)
        assert one != other
        assert len(one) >= 43  # 256 bits in letters and digits


def test_secrets_that_were_made_are_kept_over_upgrades() -> None:
    before = {key: base64.b64encode(f"{key} of before".encode()).decode() for key in ("admin-token", "store-password")}
    secret: dict[str, Any] = {"apiVersion": "v1", "kind": "Secret", "data": before}
    secret["metadata"] = {
        "name": "router-warmroute",
        "namespace": "llm",
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {"meta.helm.sh/release-name": "router", "meta.helm.sh/release-namespace": "llm"},
    }
    with Cluster({"/api/v1/namespaces/llm/secrets/router-warmroute": secret}) as cluster:
        server = ("--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", cluster.url)
        release = render(case("bundled"), *server, "--set", "networkPolicy.enabled=false,replicaCount=1")
    (kept,) = release.of("Secret")
    assert {key: kept["data"][key] for key in before} == before
    assert len(base64.b64decode(kept["data"]["identity-secret"])) >= 43  # which was missing
