"""The commands that ask a running router, and what they say when there is none."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from policies.registry import parameters
from sim.emulator import Emulator, EmulatorConfig
from tests.fakes.process import Router, free_port, start_router
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S


def console(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


async def test_replicas_and_sessions_of_a_running_router(tmp_path: Path) -> None:
    async with Emulator(EmulatorConfig(default_include_usage=True)) as replica:
        router = await asyncio.to_thread(start_router, [replica.url], tmp_path / "log")
        at = ["--admin", router.admin_url]
        try:
            table = await asyncio.to_thread(console, "replicas", *at)
            listed = await asyncio.to_thread(console, "replicas", *at, "--json")
            new = await asyncio.to_thread(console, "explain", "--session", "s", "--prompt-tokens", "1000", *at)
            async with httpx.AsyncClient(trust_env=False, headers={"x-session-affinity": "s"}) as client:
                body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "word " * 2000}]}
                (await client.post(f"{router.url}/v1/chat/completions", json=body)).raise_for_status()

                async def in_flight() -> int:
                    replicas = (await client.get(f"{router.admin_url}/replicas")).json()["replicas"]
                    return int(replicas[0]["in_flight"])

                await until(in_flight, lambda count: count == 0, LIMIT_S, "the request's end is counted")
            known = await asyncio.to_thread(console, "explain", "--session", "s", *at)
            as_json = await asyncio.to_thread(console, "explain", "--session", "s", *at, "--json")
        finally:
            await asyncio.to_thread(router.stop)
    for done in (table, listed, new, known, as_json):
        assert (done.returncode, done.stderr) == (0, "")
    assert table.stdout.splitlines()[1].split()[:3] == [replica.url, "ready", "0"]
    assert [found["url"] for found in json.loads(listed.stdout)] == [replica.url]
    head, row, blank, summary, sentence = new.stdout.splitlines()
    assert head.split()[:5] == ["REPLICA", "COST", "QUEUE", "ROOM", "PREFILL"]
    assert row.split()[:2] == ["*", replica.url]
    assert (blank, summary) == ("", "session_affinity, new: 1000 prompt tokens")
    assert sentence.startswith(f"goes to {replica.url}: nothing is known of it; ")
    assert known.stdout.splitlines()[-1] == f"stays on {replica.url}: no other was weighed"
    told = json.loads(as_json.stdout)
    assert told["sentence"] == known.stdout.splitlines()[-1]
    assert told["resident_tokens"] > 2000


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    """A router without a replica."""
    with Router([], tmp_path / "log") as router:
        router.wait_ok(f"{router.admin_url}/livez", LIMIT_S)
        yield router


def test_policies_are_shown_and_switched(router: Router) -> None:
    at = ["--admin", router.admin_url]
    shown = console("policy", *at)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[0] == "policy session_affinity"
    assert f"    beta = {parameters('session_affinity')['beta']}" in shown.stdout.splitlines()
    switched = console("policy", "set", "session_affinity", "hysteresis_s=2", "spread_s=0.5", *at)
    assert (switched.returncode, switched.stderr) == (0, "")
    old, new = switched.stdout.split(" -> ")
    assert "hysteresis_s=1.0" in old
    assert "hysteresis_s=2.0" in new
    assert "spread_s=0.5" in new
    before = json.loads(console("policy", *at, "--json", "set", "random").stdout)
    assert (before["old"]["name"], before["new"]) == ("session_affinity", {"name": "random", "parameters": {"seed": 0}})
    shadow = console("policy", "shadow", "random", "seed=3", *at)
    assert (shadow.returncode, shadow.stdout) == (0, "none -> random seed=3\n")
    beside = console("policy", *at)
    assert "in its shadow random" in beside.stdout
    assert "the same replica in 0 of 0 choices" in beside.stdout
    assert console("policy", "shadow", "none", *at).stdout == "random seed=3 -> none\n"
    assert json.loads(console("policy", "--json", *at).stdout)["shadow"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["policy", "set", "nosuch"], "Nothing was changed: unknown policy 'nosuch'; known policies: "),
        (["policy", "set", "none"], "unknown policy 'none'"),
        (["policy", "set", "random", "sed=1"], "unknown parameter 'sed'; known parameters: seed"),
        (["policy", "set", "random", "seed=x"], "parameter 'seed' must be int, got 'x'"),
        (["policy", "set", "session_affinity", "beta=NaN"], "beta must be a finite number"),
        (["policy", "set", "random", "seed"], "'seed' is not a parameter: write it as KEY=VALUE, as in seed=7"),
        (["policy", "set", "random", "=7"], "'=7' is not a parameter"),
        (["policy", "set", "random", "seed=1", "seed=2"], "the parameter 'seed' is given twice: leave one out"),
        (["policy", "shadow", "random", "seed=x"], "parameter 'seed' must be int"),
        (
            ["explain", "--session", "s", "--prompt-tokens", "many"],
            "must be a number from 0 to 1000000000000, got",
        ),
    ],
)
def test_what_cannot_be_is_told_in_a_line(arguments: list[str], told: str, router: Router) -> None:
    done = console(*arguments, "--admin", router.admin_url)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert done.stderr.startswith("warmroute: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["replicas", "--admin", "localhost:8081"], "--admin 'localhost:8081' is not a URL: write it as in http://"),
        (["replicas", "--cert-file", "c.pem"], "--cert-file and --key-file go together: give both, or neither"),
        (["drain", "a", "--wait", "--timeout", "-1"], "--timeout must be 0 seconds or more, got -1"),
        (["policy", "set"], "the following arguments are required: NAME\n"),
    ],
)
def test_a_command_line_that_cannot_be_is_told(arguments: list[str], told: str) -> None:
    done = console(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr


def test_another_server_in_its_place_is_told_in_a_line() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever).start()
        try:
            done = console("replicas", "--admin", f"http://127.0.0.1:{other.server_port}")
        finally:
            other.shutdown()
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "/replicas: 501 Unsupported method" in done.stderr
    assert done.stderr.endswith("is --admin its admin port?\n")


def test_without_a_replica_there_is_nothing_to_explain(router: Router) -> None:
    done = console("explain", "--session", "s", "--admin", router.admin_url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "warmroute: No replica that could serve this is configured. Add one with --replica URL"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["replicas"],
        ["policy"],
        ["policy", "set", "random"],
        ["explain", "--session", "s"],
        ["sessions"],
        ["drain", "a", "--wait"],
        ["undrain", "a"],
        ["reload"],
    ],
)
def test_without_a_router_it_says_so_and_fails(arguments: list[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    found = console(*arguments, "--admin", url)
    assert found.returncode == 1
    assert url in found.stderr
    assert "--admin" in found.stderr
    assert "Traceback" not in found.stderr
