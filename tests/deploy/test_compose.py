"""The Compose file and what it mounts: sound, and doing what they say with processes in place of containers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from router.configuration import load
from tests.deploy.dockerfile import DOCKERFILE
from tests.deploy.queries import ALERTS, DASHBOARDS, rules
from tests.fakes.process import ROOT, Process, free_port
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S
from tests.store.servers import NEEDED, Server, binaries

FOLDER = ROOT / "deploy/compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
GUIDE = (ROOT / "docs/deploy.md").read_text()
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
OURS = {name for name, service in SERVICES.items() if service["image"].startswith("warmroute:")}
each_service = pytest.mark.parametrize("name", SERVICES)

KEYS = {
    *("build", "cap_drop", "command", "depends_on", "entrypoint", "environment", "extra_hosts", "healthcheck", "image"),
    *(
        "ports",
        "pull_policy",
        "read_only",
        "restart",
        "security_opt",
        "stop_grace_period",
        "stop_signal",
        "tmpfs",
        "ulimits",
        "volumes",
    ),
}
"""Of the Compose specification, those that are used: a name that is written wrongly is none of them. For a new one ask
its schema: `check-jsonschema --builtin-schema vendor.compose-spec deploy/compose/compose.yaml`."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of the repository in a container."""

    source: Path
    target: str


def mounts(name: str) -> list[Mount]:
    parts = [volume.split(":") for volume in SERVICES[name].get("volumes", ())]
    assert all(part[2:] == ["ro"] for part in parts if part[0].startswith("."))
    return [Mount((FOLDER / part[0]).resolve(), part[1]) for part in parts if part[0].startswith(".")]


def mounted(name: str, path: str) -> Path:
    """Where a path inside a container comes from."""
    (found,) = [mount for mount in mounts(name) if path.startswith(f"{mount.target}/") or path == mount.target]
    return found.source / path[len(found.target) + 1 :]


def config(name: str, pattern: str) -> Path:
    """The file that the service's command names."""
    (found,) = re.findall(pattern, " ".join(SERVICES[name]["command"]))
    return mounted(name, found)


ROUTER = config("router", r"--config (\S+)")
PROMETHEUS = config("prometheus", r"--config\.file=(\S+)")


# The file


def test_only_what_compose_knows_is_in_it() -> None:
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"name", "services", "volumes"}
    assert {key for service in SERVICES.values() for key in service} == KEYS


@each_service
def test_images_are_of_one_version(name: str) -> None:
    image = SERVICES[name]["image"]
    assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+(-[a-z]+)?", image)
    if name in OURS:
        assert image == f"warmroute:{VERSION}"
        assert SERVICES[name]["pull_policy"] == ("build" if name == "router" else "never")


def test_the_image_is_built_by_the_dockerfile() -> None:
    (build,) = [service["build"] for service in SERVICES.values() if "build" in service]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert ROOT / build["dockerfile"] == DOCKERFILE


@each_service
def test_ports_are_of_this_machine_alone(name: str) -> None:
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in SERVICES[name].get("ports", ()))


@each_service
def test_what_it_mounts_and_waits_for_exists(name: str) -> None:
    service = SERVICES[name]
    assert all(mount.source.exists() for mount in mounts(name))
    named = {volume.split(":")[0] for volume in service.get("volumes", ()) if not volume.startswith(".")}
    assert named <= set(COMPOSE["volumes"])
    targets = [mount.target for mount in mounts(name)]
    assert not [one for one in targets for other in targets if one.startswith(f"{other}/")], (
        "a mount in a read-only one"
    )
    for other, how in service.get("depends_on", {}).items():
        assert how["condition"] in ("service_started", "service_healthy")
        assert SERVICES[other]["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", sorted(OURS))
def test_ours_may_do_next_to_nothing(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_router_has_time_to_end_its_streams() -> None:
    drain = load(str(ROUTER)).drain
    assert float(SERVICES["router"]["stop_grace_period"].removesuffix("s")) > drain.delay_s + drain.grace_s + 5


# What it mounts


def _addresses(text: str) -> set[str]:
    """`service:port` of the Compose network."""
    return {found for found in re.findall(r"\b([a-z]+(?:-\d)?:\d+)\b", text) if found.partition(":")[0] in SERVICES}


def test_the_router_has_the_replicas_and_the_store() -> None:
    settings = load(str(ROUTER))
    port = SERVICES["replica-1"]["command"][SERVICES["replica-1"]["command"].index("--port") + 1]
    replicas = [name for name in SERVICES if name.startswith("replica-")]
    assert {each.id: each.url for each in settings.replicas} == {name: f"http://{name}:{port}" for name in replicas}
    assert settings.store.url == "redis://store:6379/0"
    assert {f"{port}:{port}" for port in (settings.port, settings.admin.port)} == {
        port.removeprefix("127.0.0.1:") for port in SERVICES["router"]["ports"]
    }


def test_prometheus_watches_them_by_the_names_that_the_alerts_have() -> None:
    told = yaml.safe_load(PROMETHEUS.read_text())
    jobs = {each["job_name"]: each["static_configs"][0]["targets"] for each in told["scrape_configs"]}
    settings = load(str(ROUTER))
    assert jobs == {
        "warmroute": [f"router:{settings.admin.port}"],
        "sglang": [each.url.removeprefix("http://") for each in settings.replicas],
    }
    asked = {job for rule in rules() for job in re.findall(r'job="(\w+)"', rule["expr"])}
    assert asked == set(jobs)
    (pattern,) = told["rule_files"]
    folder, _, name = pattern.rpartition("/")
    assert sorted(mounted("prometheus", folder).glob(name)) == ALERTS


def test_grafana_finds_the_dashboards_and_where_their_data_is() -> None:
    provisioning = mounted("grafana", "/etc/grafana/provisioning")
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    assert source["url"].removeprefix("http://") in {
        f"{name}:{port.rpartition(':')[2]}" for name, service in SERVICES.items() for port in service.get("ports", ())
    }
    (provider,) = yaml.safe_load((provisioning / "dashboards/warmroute.yaml").read_text())["providers"]
    assert sorted(mounted("grafana", provider["options"]["path"]).glob("*.json")) == DASHBOARDS
    environment = SERVICES["grafana"]["environment"]
    assert mounted("grafana", environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]) in DASHBOARDS
    assert all(name.startswith("GF_") and isinstance(value, str) for name, value in environment.items())


def test_engines_on_the_same_machine_have_a_name() -> None:
    """For the router, and for Prometheus, which scrapes them."""
    for name in ("router", "prometheus"):
        assert SERVICES[name]["extra_hosts"] == ["host.docker.internal:host-gateway"]
    assert "http://host.docker.internal:30000" in GUIDE


def test_a_token_is_where_the_guide_has_it() -> None:
    for name, file in (("router", "warmroute/token"), ("prometheus", "prometheus/token")):
        (path,) = re.findall(rf"_file: (/etc/{name.replace('router', 'warmroute')}/token)", GUIDE)
        assert mounted(name, path) == FOLDER / file
        assert f"`deploy/compose/{file}`" in GUIDE


# What it does, with processes


class Composed:
    """Replicas, store and router as the file starts them, on ports that are free here."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        addresses = sorted(_addresses(ROUTER.read_text()) | {"router:8080", "router:8081"})
        self.ports = {address: str(free_port()) for address in addresses}
        found = list(binaries().values())
        assert found, NEEDED
        store = Server(found[0], port=int(self.ports["store:6379"]))
        stack.callback(store.remove)
        store.start()
        python: list[str | Path] = [sys.executable, *SERVICES["replica-1"]["entrypoint"][1:]]
        for name in sorted(OURS - {"router"}):
            command = [word.replace("30000", self.ports[f"{name}:30000"]) for word in SERVICES[name]["command"]]
            replica = stack.enter_context(Process([*python, *command], folder / f"{name}.log"))
            stack.callback(replica.signal, signal.Signals[SERVICES[name]["stop_signal"]])
            replica.wait_line(lambda line: line.startswith("ready"), LIMIT_S)
        file = folder / ROUTER.name
        file.write_text(self.here(ROUTER.read_text()))
        command = [str(file) if word.startswith("/") else word for word in SERVICES["router"]["command"]]
        command += ["--port", self.ports["router:8080"], "--admin-port", self.ports["router:8081"]]
        router = stack.enter_context(Process([ROOT / ".venv/bin/warmroute", *command], folder / "router.log"))
        self.url, self.admin_url = (f"http://127.0.0.1:{self.ports[f'router:{port}']}" for port in (8080, 8081))
        router.wait_ok(f"{self.admin_url}/readyz", LIMIT_S)

    def here(self, text: str) -> str:
        """With the addresses of these processes in place of the services'."""
        for address, port in self.ports.items():
            text = text.replace(address, f"127.0.0.1:{port}")
        return text


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    with ExitStack() as stack:
        yield Composed(stack, tmp_path_factory.mktemp("composed"))


def test_two_turns_as_the_guide_has_them_meet_one_cache(composed: Composed) -> None:
    (shown,) = re.findall(r"^ *```sh\n( *turn\(\) .*?)```", GUIDE, re.M | re.S)
    script = composed.here(shown.replace("127.0.0.1:8080", "router:8080"))
    environment = {**os.environ, "no_proxy": "*"}
    command = ["sh", "-ec", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    first, second = (json.loads(line)["usage"] for line in done.stdout.splitlines())
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    # More than a page of any engine.
    assert 256 < first["prompt_tokens"] <= second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]
    home = httpx.get(f"{composed.admin_url}/sessions/try-1", headers={"host": "router:8081"}, trust_env=False)
    assert home.status_code == 200


async def test_a_session_has_its_replica_and_the_store_is_told(composed: Composed) -> None:
    asked = {"model": "emulated", "messages": [{"role": "user", "content": "hello"}]}
    async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
        headers = {"x-session-affinity": "composed"}
        answer = await client.post(f"{composed.url}/v1/chat/completions", json=asked, headers=headers)
        assert answer.status_code == 200
        # By the name that Prometheus has for it.
        session = await client.get(f"{composed.admin_url}/sessions/composed", headers={"host": "router:8081"})
        assert session.status_code == 200

        async def store() -> dict[str, Any]:
            return dict((await client.get(f"{composed.admin_url}/overview")).json()["store"])

        await until(store, lambda told: bool(told["up"]) and told["untold"] == 0, LIMIT_S, "the store has been told")


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_health_check_tells_whether_it_is_there(composed: Composed, name: str) -> None:
    port = "8081" if name == "router" else "30000"
    first, program, *words = SERVICES[name]["healthcheck"]["test"]
    assert (first, program) == ("CMD", "python"), "which the image has, and no curl"

    def code(other: str) -> int:
        command = [sys.executable, *(word.replace(port, other) for word in words)]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert code(composed.ports[f"{name}:{port}"]) == 0
    assert code(str(free_port())) != 0


@pytest.mark.prometheus
def test_prometheus_takes_its_file_and_scrapes_all(composed: Composed, tmp_path: Path) -> None:
    file = tmp_path / "prometheus.yaml"
    told = composed.here(PROMETHEUS.read_text()).replace("/etc/alerts", str(ROOT / "deploy/alerts"))
    file.write_text(re.sub(r"(scrape|evaluation)_interval: \d+s", r"\1_interval: 1s", told))
    checked = subprocess.run(["promtool", "check", "config", file], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    listen = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    with Process([*command, f"--web.listen-address={listen}"], tmp_path / "prometheus.log") as process:
        process.wait_ok(f"http://{listen}/-/ready", LIMIT_S)
        jobs = asyncio.run(_scraped(f"http://{listen}/api/v1/query", len(OURS)))
        groups = httpx.get(f"http://{listen}/api/v1/rules", trust_env=False).json()["data"]["groups"]
    assert sorted(jobs) == ["sglang"] * 3 + ["warmroute"]
    assert sum(len(group["rules"]) for group in groups) == len(list(rules()))


async def _scraped(url: str, count: int) -> list[str]:
    """The jobs of so many targets, once they are up."""

    async def up() -> list[str]:
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = (await client.get(url, params={"query": "up == 1"})).json()
        return [each["metric"]["job"] for each in answer["data"]["result"]]

    return await until(up, lambda jobs: len(jobs) == count, LIMIT_S, "all are scraped")
