"""`warmroute serve` before replicas that die, come back, or were never there; and with nobody to log to."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from router.line import Line
from sim.emulator import Emulator, EmulatorConfig
from tests.fakes.client import RawClient, get
from tests.fakes.process import ROOT, Process, Router, free_port
from tests.fakes.replica import FakeReplica
from tests.fakes.waiting import until

LIMIT_S = 60
WARMROUTE = ROOT / ".venv/bin/warmroute"

Start = Callable[..., Awaitable[Router]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts routers, stopped after the test."""
    started: list[Router] = []

    async def start(*urls: str, settings: str = "", wait_for: str = "/readyz") -> Router:
        config = tmp_path / "c.yaml"
        config.write_text(settings)
        router = Router(urls, tmp_path / f"router-{len(started)}.log", "--config", str(config))
        started.append(router)
        await asyncio.to_thread(router.wait_ok, router.admin_url + wait_for, LIMIT_S)
        return router

    yield start
    for router in started:
        await asyncio.to_thread(router.stop)


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    replica = await FakeReplica(ready=200, health=200).start()
    replica.say("/v1/models", {"data": []})
    yield replica
    await replica.stop()


async def ask(router: Router, session: str = "s") -> httpx.Response:
    """On a connection of its own."""
    async with httpx.AsyncClient(base_url=router.url, trust_env=False) as client:
        return await client.get("/v1/models", headers={"x-session-affinity": session})


async def states(router: Router) -> dict[str, str]:
    async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as client:
        return {each["id"]: each["state"] for each in (await client.get("/replicas")).json()["replicas"]}


async def becomes(router: Router, url: str, state: str) -> None:
    await until(lambda: states(router), lambda seen: seen[url] == state, LIMIT_S, f"{url} is {state}")


# Replicas that are not there


async def test_a_replica_dead_at_the_start_costs_no_request(start: Start, replica: FakeReplica) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    router = await start(dead, replica.url)
    for i in range(20):
        answer = await ask(router, f"session {i}")
        assert answer.status_code == 200
    await becomes(router, dead, "ejected")
    assert (await states(router))[replica.url] == "ready"
    answer = await ask(router, "one more")
    assert answer.status_code == 200
    line = await asyncio.to_thread(router.entry, answer.headers["x-request-id"])
    assert (line["replica"], line["tries"]) == (replica.url, 1), "the ejected one is not tried any more"


async def test_with_all_dead_clients_are_told_to_come_again(start: Start) -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    router = await start(*urls, wait_for="/livez")
    for url in urls:
        await becomes(router, url, "ejected")
    answer = await ask(router)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-warmroute-reason"] == "all_ejected"
    error = answer.json()["error"]
    assert error["code"] == "all_ejected"
    assert {"message", "type", "param", "code"} <= error.keys()
    line = await asyncio.to_thread(router.entry, answer.headers["x-request-id"])
    assert (line["status"], line["refusal"], line.get("replica")) == (503, "all_ejected", None)


async def test_a_replica_that_comes_back_is_used_again(start: Start, replica: FakeReplica) -> None:
    router = await start(replica.url)
    assert (await ask(router)).status_code == 200
    await replica.down()
    await becomes(router, replica.url, "ejected")
    assert (await ask(router)).status_code == 503
    await replica.up()
    await becomes(router, replica.url, "ready")
    assert (await ask(router)).status_code == 200


async def test_without_any_replica_it_serves_refusals(start: Start) -> None:
    """Discovery may bring them later; a router that ended would only be restarted."""
    router = await start(wait_for="/livez")
    answer = await ask(router)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replicas")
    router.signal(signal.SIGTERM)
    assert await asyncio.to_thread(router.wait_end, LIMIT_S) == 0


# The log


async def test_the_log_of_two_turns_holds_what_is_documented_and_nothing_else(start: Start) -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    table = text.partition("## The log")[2].partition("## Traces")[0]
    documented = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.M))))
    assert documented == set(Line.__struct_fields__)
    said = [{"role": "user", "content": "secret words " * 50}]
    async with Emulator(EmulatorConfig(time_scale=0.01)) as one, Emulator(EmulatorConfig(time_scale=0.01)) as two:
        router = await start(one.url, two.url)
        async with httpx.AsyncClient(base_url=router.url, trust_env=False) as client:
            for identifier in ("turn-1", "turn-2"):
                headers = {"x-session-affinity": "raw-session-key", "x-request-id": identifier}
                body = {"model": "m", "stream": True, "messages": said, "stream_options": {"include_usage": True}}
                assert (await client.post("/v1/chat/completions?a=b", json=body, headers=headers)).status_code == 200
                said.append({"role": "user", "content": "and then"})
        first = await asyncio.to_thread(router.entry, "turn-1")
        second = await asyncio.to_thread(router.entry, "turn-2")
        raw = router.log.read_text()
    for line in (first, second):
        assert set(line) <= documented
        assert set(line) >= documented - {"refusal", "failed", "queued_s", "key", "pool"}
        assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
        assert (line["cause"], line["phase"], line["tries"]) == ("done", "body", 1)
        assert line["replica"] in (one.url, two.url)
    assert (first["reason"], second["reason"]) == ("new", "home")
    assert first["replica"] == second["replica"]
    assert first["session"] == second["session"]
    assert re.fullmatch("[0-9a-f]{32}", str(second["session"]))
    assert first["cached_tokens"] == 0
    assert int(str(second["cached_tokens"])) > 0
    for hidden in ("raw-session-key", "secret words", "a=b"):
        assert hidden not in raw


async def run(tmp_path: Path, url: str, stdout: int, stderr: int) -> tuple[subprocess.Popen[bytes], str, str]:
    """A router on the given descriptors, once it is ready, with its URL and its admin port's."""
    port, admin_port = free_port(), free_port()
    command = [WARMROUTE, "serve", "--port", str(port), "--admin-port", str(admin_port), "--replica", url]
    process = await asyncio.to_thread(
        subprocess.Popen, command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, cwd=tmp_path
    )
    base, admin = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"

    async def status() -> int:
        assert process.poll() is None, "it has ended"
        async with httpx.AsyncClient(trust_env=False) as client:
            with suppress(httpx.TransportError):
                return (await client.get(f"{admin}/readyz")).status_code
        return 0

    await until(status, lambda seen: seen == 200, LIMIT_S, "ready")
    return process, base, admin


async def end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return await asyncio.to_thread(process.wait, LIMIT_S)
    finally:
        process.kill()
        process.wait()


def full_pipe() -> tuple[int, int]:
    """A pipe with no room for one byte more: its ends for reading and writing."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")
    os.set_blocking(writer, True)
    return reader, writer


async def test_nobody_reads_what_it_logs(tmp_path: Path, replica: FakeReplica) -> None:
    """Both outputs stand full from the first byte on: it serves, and ends when told to."""
    out, err = full_pipe(), full_pipe()
    process, base, _ = await run(tmp_path, replica.url, out[1], err[1])
    try:
        async with httpx.AsyncClient(base_url=base, trust_env=False) as client:
            for _ in range(50):
                assert (await client.get("/v1/models")).status_code == 200
    finally:
        code = await end(process)
        for descriptor in (*out, *err):
            os.close(descriptor)
    assert code == 0


async def test_whoever_read_its_log_has_gone(tmp_path: Path, replica: FakeReplica) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process, base, admin = await run(tmp_path, replica.url, writer, subprocess.DEVNULL)
    os.close(writer)
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            for _ in range(10):
                assert (await client.get(f"{base}/v1/models")).status_code == 200

            async def dropped() -> bool:
                text = (await client.get(f"{admin}/metrics")).text
                return "\nwarmroute_log_lines_dropped_total 10.0\n" in text

            await until(dropped, bool, LIMIT_S, "ten lines counted as dropped")
    finally:
        code = await end(process)
    assert code == 0


# Stopping; more of it in tests/router/test_cli.py, and of reloading in tests/router/test_reload.py


async def test_sighup_stops_it_too_when_there_is_no_file_to_read(tmp_path: Path, replica: FakeReplica) -> None:
    """A terminal that closes must not cut streams."""
    router = Router([replica.url], tmp_path / "router.log")
    try:
        await asyncio.to_thread(router.wait_ok, router.admin_url + "/readyz", LIMIT_S)
        router.signal(signal.SIGHUP)
        assert await asyncio.to_thread(router.wait_end, LIMIT_S) == 0
    finally:
        await asyncio.to_thread(router.stop)


async def test_during_the_delay_new_clients_are_served_and_told_to_close(start: Start, replica: FakeReplica) -> None:
    router = await start(replica.url, settings="drain: {delay_s: 3600}")
    kept = await RawClient.connect(router.port)
    before = await kept.ask(get())
    assert before.header("connection") is None
    router.signal(signal.SIGTERM)

    async def readyz() -> int:
        async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as client:
            return (await client.get("/readyz")).status_code

    await until(readyz, lambda status: status == 503, LIMIT_S, "not ready")
    for client in (kept, await RawClient.connect(router.port)):
        answer = await client.ask(get())
        assert answer.status == 200
        assert answer.header("connection") == "close"
        assert await client.end() == "eof"
        client.close()
    router.signal(signal.SIGTERM)
    assert await asyncio.to_thread(router.wait_end, LIMIT_S) == 0


# Open files


@pytest.mark.parametrize(
    ("settings", "level", "told"),
    [
        ("", "info", "room for 110 client connections, with 256 open files allowed (ulimit -Hn)"),
        (
            "limits: {connections: 5000}",
            "warning",
            "limits.connections is 5000, but the 256 open files that the system allows have room for 110: "
            "raise its limit (ulimit -Hn) or lower the setting",
        ),
        ("limits: {connections: 110}", None, ""),
    ],
    ids=["by default", "as set", "enough"],
)
def test_few_open_files_alarm_only_those_who_asked_for_more(
    settings: str, level: str | None, told: str, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(settings)
    flags = ["serve", "--port", "0", "--admin-port", "0", "--replica", "http://127.0.0.1:9", "--config", str(config)]
    limited = ["sh", "-c", 'ulimit -n 256 && exec "$@" 2>&1', "sh", str(WARMROUTE)]
    with Process([*limited, *flags], tmp_path / "log") as process:
        process.wait_line(lambda line: "warmroute listens on" in line, LIMIT_S)
        lines = [json.loads(line) for line in process.lines]
    about = [line for line in lines if "open files" in line["message"]]
    assert [(line["level"], line["message"]) for line in about] == ([(level, told)] if level else [])


# Commands that end by themselves; more of it in tests/router/test_cli.py


def warmroute(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """With its output buffered as it is by default, whatever the environment of the tests says."""
    ours = ("WARMROUTE_", "PYTHONUNBUFFERED")
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith(ours)}
    command = [WARMROUTE, *arguments]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, env=environment, check=False
    )


def test_what_check_config_prints_is_a_configuration(tmp_path: Path) -> None:
    flags = ["--replica", "http://a:1", "--policy", "random", "--admin-host", "::1", "--log-format", "text"]
    printed = warmroute("check-config", *flags).stdout
    file = tmp_path / "printed.yaml"
    file.write_text(printed)
    again = warmroute("check-config", "--config", str(file))
    assert (again.returncode, again.stdout) == (0, printed)
    assert yaml.safe_load(printed)["admin"]["host"] == "::1"
    as_json = warmroute("check-config", *flags, "--json").stdout
    assert json.loads(as_json) == yaml.safe_load(printed)


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_each_fault_is_a_line(command: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: x\nreplicas: ['http://a', 'ftp://b']\nnosuch: 1\nretries: {tries: 0}")
    done = warmroute(command, "--config", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    keys = [line.split(": ")[1] for line in done.stderr.splitlines()]
    assert sorted(keys) == ["nosuch", "port", "replicas.1", "retries.tries"]
    assert all(line.startswith("warmroute: ") for line in done.stderr.splitlines())


GONE = [
    ["check-config", "--replica", "http://a:1"],
    ["policies"],
    ["policies", "--json"],
    ["completion", "bash"],
    ["--help"],
    ["--version"],
]


@pytest.mark.parametrize("command", [*GONE, ["drain", "--help"], ["sim", "--help"]])
def test_a_reader_that_has_gone_is_no_fault(command: list[str]) -> None:
    """As with `warmroute check-config | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = warmroute(*command, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_so_it_is_of_the_tables_for_the_documents() -> None:
    """As with `python -m router.metrics | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as output:
        done = subprocess.run(
            [sys.executable, "-m", "router.metrics"], stdout=output, stderr=subprocess.PIPE, cwd=ROOT, check=False
        )
    assert done.stderr == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device here")
@pytest.mark.parametrize("command", [["policies"], ["policies", "--json"], ["check-config", "--replica", "http://a:1"]])
def test_a_full_disk_is_told_in_a_line(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = warmroute(*command, stdout=full.fileno())
    assert (done.returncode, done.stderr) == (1, "warmroute: the output cannot be written: No space left on device\n")


def test_the_list_of_policies_is_json_with_defaults() -> None:
    listed = {each["policy"]: each["parameters"] for each in json.loads(warmroute("policies", "--json").stdout)}
    assert listed["session_affinity"]["hysteresis_s"] == 1.0
    assert listed["round_robin"] == {}
