"""The `warmroute` command as a user runs it: what it prints, its exit codes, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from policies.registry import POLICIES, parameters
from tests.fakes.client import RawClient, get, post
from tests.fakes.gated import Gated
from tests.fakes.process import ROOT, Router, start_router
from tests.fakes.replica import FakeReplica
from tests.fakes.waiting import until
from tests.fakes.wire import Ended, eventually

END_S = 60

COMMANDS = ["serve", "check-config", "replicas", "sessions", "drain", "undrain", "policy", "policies", "explain"]
COMMANDS += ["reload", "top", "completion", "sim"]


def warmroute(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    clean = {name: value for name, value in os.environ.items() if not name.upper().startswith("WARMROUTE_")}
    command = [str(ROOT / ".venv/bin/warmroute"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean | environment, check=False)


# Commands that end by themselves


def test_version() -> None:
    done = warmroute("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("warmroute ")


def test_help_names_the_commands() -> None:
    done = warmroute("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"\n    {command}" in done.stdout


@pytest.mark.parametrize("command", [*COMMANDS[:-1], "policy set", "policy shadow", "sim run", "sim replay"])
def test_help_shows_examples(command: str) -> None:
    done = warmroute(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    _, examples = done.stdout.split("\nexamples:\n")
    assert all(f"warmroute {command}" in line for line in examples.splitlines() if line.strip())


# Completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_completed(shell: str) -> None:
    done = warmroute("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(command in done.stdout for command in COMMANDS)
    assert "--homes" in done.stdout


def complete(script: Path, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    ask = (
        f'source {script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        f"$(complete -p warmroute | sed 's/.*-F \\([^ ]*\\).*/\\1/'); printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    command = ["bash", "--norc", "-c", ask, "bash", "warmroute", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_bash_completes_commands_options_values_and_files(tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(warmroute("completion", "bash").stdout)
    (tmp_path / "fleet.yaml").touch()
    assert complete(script, tmp_path, "dr") == ["drain"]
    assert complete(script, tmp_path, "drain", "r1", "--ho") == ["--homes"]
    assert complete(script, tmp_path, "drain", "r1", "--homes", "f") == ["finish"]
    assert complete(script, tmp_path, "serve", "--config", "fl") == ["fleet.yaml"]
    assert "compare" in complete(script, tmp_path, "sim", ""), "of plug-ins, too"
    for words in (
        ["serve", "--policy"],
        ["check-config", "--shadow-policy"],
        ["policy", "set"],
        ["policy", "shadow"],
        ["sim", "run", "r80", "--policy"],
        ["sim", "compare", "r80", "--policies"],
    ):
        assert complete(script, tmp_path, *words, "session_") == ["session_affinity"], words
    assert complete(script, tmp_path, "policy", "shadow", "no") == ["none"]
    for command in ("run", "compare", "sweep"):
        assert complete(script, tmp_path, "sim", command, "r8") == ["r80"]


@pytest.mark.parametrize(
    ("command", "usage", "told"),
    [
        ("sesions", "warmroute", "invalid choice: 'sesions': did you mean sessions?"),
        ("serve --replcia http://a:1", "warmroute serve", "--replcia http://a:1: did you mean --replica?"),
        ("check-config --plicy=x --wrokers 2", "warmroute check-config", "did you mean --policy and --workers?"),
        ("drain a --homes finsh", "warmroute drain", "invalid choice: 'finsh': did you mean finish?"),
        ("policy st x", "warmroute policy", "invalid choice: 'st': did you mean set?"),
        ("sim comprae r80", "warmroute sim", "invalid choice: 'comprae': did you mean compare?"),
        ("sim run r80 --polcy sticky", "warmroute sim run", "did you mean --policy?"),
        ("serve --zzz", "warmroute serve", "unrecognized arguments: --zzz\n"),
    ],
)
def test_what_is_misspelt_is_told_with_what_was_meant(command: str, usage: str, told: str) -> None:
    done = warmroute(*command.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"usage: {usage} [-h]")
    assert told in done.stderr


def test_help_of_the_simulator_lists_the_scenarios() -> None:
    for command in ("sim", "sim run", "sim compare", "sim sweep"):
        text = warmroute(*command.split(), "--help").stdout
        assert {"r80", "int4-nohost-fork"} <= set(text.replace(",", " ").split()), command


def test_no_command_is_a_usage_error() -> None:
    done = warmroute()
    assert done.returncode == 2
    assert "usage: warmroute" in done.stderr


def test_policies() -> None:
    text = warmroute("policies")
    as_json = warmroute("policies", "--json")
    assert (text.returncode, as_json.returncode) == (0, 0)
    listed = json.loads(as_json.stdout)
    assert [each["policy"] for each in listed] == list(POLICIES)
    for each in listed:
        assert each["summary"], each["policy"]
        assert each["parameters"] == parameters(each["policy"])
        assert set(each["meanings"]) == set(each["parameters"]), "every parameter is explained"
    assert "hysteresis_s = 1.0" in text.stdout
    for name in POLICIES:
        assert f"{name}: " in text.stdout


def test_check_config_prints_what_would_be_in_force(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nhost: 0.0.0.0\nidentity: {secret: hush}")
    flags = ["--config", str(file), "--port", "3", "--admin-host", "::1", "--admin-port", "4", "--policy", "random"]
    flags += ["--replica", "http://a:1", "--replica", "http://b:2"]
    done = warmroute("check-config", *flags, WARMROUTE_PORT="2", WARMROUTE_LOG__LEVEL="debug")
    assert (done.returncode, done.stderr) == (0, "")
    tree = yaml.safe_load(done.stdout)
    assert (tree["host"], tree["port"]) == ("0.0.0.0", 3)
    assert (tree["admin"]["host"], tree["admin"]["port"]) == ("::1", 4)
    assert [replica["url"] for replica in tree["replicas"]] == ["http://a:1", "http://b:2"]
    assert tree["policy"] == {"name": "random", "parameters": {"seed": 0}}, "with the defaults"
    assert tree["log"]["level"] == "debug"
    assert "hush" not in done.stdout


NO_REPLICAS = "there are neither replicas nor discovery: every request will be refused"


def test_check_config_warns_of_a_fleet_of_none(tmp_path: Path) -> None:
    done = warmroute("check-config")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert done.stderr.startswith(f"warmroute: warning: {NO_REPLICAS}")
    assert yaml.safe_load(done.stdout)["replicas"] == []
    found = warmroute("check-config", WARMROUTE_DISCOVERY__FILE=str(tmp_path / "replicas.yaml"))
    assert (found.returncode, found.stderr) == (0, "")


async def test_a_router_of_no_replicas_warns_of_it(tmp_path: Path) -> None:
    with Router([], tmp_path / "router.log", "--log-format", "json") as router:
        await asyncio.to_thread(router.wait_ok, f"{router.admin_url}/livez", END_S)
        router.signal(signal.SIGTERM)
        assert await ended(router) == 0
        (line,) = (line for line in router.log.read_text().splitlines() if NO_REPLICAS in line)
        assert json.loads(line)["level"] == "warning"


@pytest.mark.parametrize("command", ["serve", "check-config"])
@pytest.mark.parametrize(
    ("flags", "environment", "told"),
    [
        (["--policy", "nosuch"], {}, "warmroute: policy: unknown policy 'nosuch'; known policies: "),
        (["--replica", "a:1"], {}, "warmroute: replicas.0: 'a:1' is not a replica's URL: write it as in http://"),
        (["--port", "70000"], {}, "warmroute: port: "),
        (["--config", "/nosuch/file"], {}, "warmroute: --config /nosuch/file: No such file or directory"),
        ([], {"WARMROUTE_PROT": "1"}, "warmroute: environment variable WARMROUTE_PROT='1': unknown key 'prot'"),
    ],
)
def test_a_bad_configuration_is_told_in_a_line(
    command: str, flags: list[str], environment: dict[str, str], told: str
) -> None:
    done = warmroute(command, *flags, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(told)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("taken", ["--port", "--admin-port"])
def test_a_port_in_use_is_told_in_a_line(taken: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = {"--port": "0", "--admin-port": "0"} | {taken: str(port)}
        done = warmroute("serve", *[word for flag in flags.items() for word in flag], WARMROUTE_LOG__LEVEL="error")
    assert done.returncode == 1
    assert done.stderr == (
        f"warmroute: cannot listen on 127.0.0.1:{port}: Address already in use: choose another host or port\n"
    )


# Serving


@pytest.fixture
async def streaming() -> AsyncIterator[Gated]:
    """A replica whose streams do not end yet."""
    streaming = Gated()
    streaming.finish.clear()
    await streaming.upstream.start()
    yield streaming
    streaming.finish.set()
    await streaming.upstream.stop()


class Started:
    """Starts routers and ends those that are left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.routers: list[Router] = []
        self.clients: list[RawClient] = []

    async def __call__(self, url: str, settings: str = "") -> Router:
        file = self.folder / "c.yaml"
        file.write_text(settings)
        log = self.folder / "router.log"
        router = await asyncio.to_thread(start_router, [url], log, "--config", str(file))
        self.routers.append(router)
        return router

    async def client(self, router: Router) -> RawClient:
        """A connection to it."""
        client = await RawClient.connect(router.port)
        self.clients.append(client)
        return client

    async def stream(self, router: Router) -> RawClient:
        """A client in the middle of a stream."""
        client = await self.client(router)
        client.send(post())
        assert (await client.head()).status == 200
        assert await client.chunk() == b'data: {"id":"1"}\n\n'
        return client

    async def end(self) -> None:
        for client in self.clients:
            client.transport.abort()
        await eventually(lambda: all(client.ended for client in self.clients))
        for router in self.routers:
            await asyncio.to_thread(router.stop)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Started]:
    started = Started(tmp_path)
    yield started
    await started.end()


async def ended(router: Router) -> int:
    return await asyncio.to_thread(router.wait_end, END_S)


async def refuses(router: Router) -> None:
    """Wait until its port is closed."""

    async def connects() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", router.port)
        except ConnectionRefusedError:
            return False
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        return True

    await until(connects, lambda connected: not connected, END_S, "the port is closed")


async def readyz(router: Router) -> tuple[int, str]:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"{router.admin_url}/readyz")
    return answer.status_code, answer.json().get("reason", "")


async def test_it_routes_and_says_where_it_listens(start: Started) -> None:
    replica = await FakeReplica(ready=200, health=200).start()
    replica.say("/v1/models", {"data": []})
    router = await start(replica.url)
    client = await start.client(router)
    answer = await client.ask(get("/v1/models", "x-request-id: first"))
    assert (answer.status, json.loads(answer.body)) == (200, {"data": []})
    line = await asyncio.to_thread(router.entry, "first")
    assert (line["status"], line["replica"]) == (200, replica.url)
    router.signal(signal.SIGTERM)
    assert await client.end() == "eof", "an idle connection is closed"
    assert await ended(router) == 0
    log = router.log.read_text()
    assert f"warmroute listens on {router.url}, admin on {router.admin_url}" in log
    assert f"policy session_affinity over 1 replica: {replica.url}" in log
    assert "Traceback" not in log
    await replica.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_streams_end(number: signal.Signals, start: Started, streaming: Gated) -> None:
    router = await start(streaming.upstream.url)
    client = await start.stream(router)
    router.signal(number)
    await refuses(router)
    assert await readyz(router) == (503, "draining")
    assert router.alive
    streaming.finish.set()
    assert b'"usage"' in await client.chunk()
    assert await client.chunk() == b"data: [DONE]\n\n"
    assert await client.chunk() == b""
    assert await ended(router) == 0
    log = router.log.read_text()
    assert "cut off" not in log
    assert json.loads(next(line for line in log.splitlines() if '"cause"' in line))["cause"] == "done"


async def test_the_delay_comes_before_the_port_is_closed(start: Started, streaming: Gated) -> None:
    router = await start(streaming.upstream.url, "drain: {delay_s: 3600}")
    client = await start.client(router)
    router.signal(signal.SIGTERM)
    await until(lambda: readyz(router), lambda seen: seen == (503, "draining"), END_S, "not ready")
    assert (await client.ask(get("/nosuch"))).status == 404, "still served"
    router.signal(signal.SIGTERM)
    assert await ended(router) == 0, "nothing was under way"


async def test_the_end_of_the_grace_cuts_streams_and_says_so(start: Started, streaming: Gated) -> None:
    router = await start(streaming.upstream.url, "drain: {grace_s: 0.3}")
    clients = [await start.stream(router) for _ in range(2)]
    router.signal(signal.SIGTERM)
    for client in clients:
        with pytest.raises(Ended):
            await client.chunk()
    assert await ended(router) == 1
    log = router.log.read_text()
    assert "cut off: 2 requests" in log
    assert log.count('"cause":"router","phase":"body"') == 2
    assert '"cause":"client"' not in log
    await eventually(lambda: all(peer.ended for peer in streaming.upstream.connections), "the engine is free")


async def test_a_second_signal_stops_at_once(start: Started, streaming: Gated) -> None:
    router = await start(streaming.upstream.url)
    client = await start.stream(router)
    router.signal(signal.SIGTERM)
    await refuses(router)
    router.signal(signal.SIGINT)
    with pytest.raises(Ended):
        await client.chunk()
    assert await ended(router) == 1
    log = router.log.read_text()
    assert "under way: 1 request, with up to 600 s to end" in log, "what looks like a hang is none"
    assert "cut off: 1 request\n" in log or 'cut off: 1 request"' in log


async def test_a_client_that_comes_while_it_stops_does_not_keep_it(start: Started, streaming: Gated) -> None:
    router = await start(streaming.upstream.url)
    running = await start.stream(router)
    silent = await start.client(router)
    router.signal(signal.SIGTERM)
    assert await silent.end() in ("eof", "reset")
    streaming.finish.set()
    while await running.chunk():
        pass
    assert await ended(router) == 0


def test_readiness_waits_for_the_first_probes(tmp_path: Path) -> None:
    """Of a replica that accepts and says nothing, readiness is not known before its probe has timed out."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        config = tmp_path / "c.yaml"
        config.write_text("health: {timeout_s: 3600}")
        with Router([url], tmp_path / "router.log", "--config", str(config)) as router:
            router.wait_ok(f"{router.admin_url}/livez", END_S)
            answer = httpx.get(f"{router.admin_url}/readyz", trust_env=False)
            assert answer.status_code == 503
            assert answer.json()["reason"] == "the first probes are not back yet"
            router.wait_ok(f"{router.admin_url}/readyz", END_S)  # but that wait has its limit, too
