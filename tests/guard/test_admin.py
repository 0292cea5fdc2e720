"""The admin port: who may ask it what, from where; and that the command can, whatever guards it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from router.configuration import ConfigError, load
from router.settings import AdminSettings
from router.token import Token
from tests.fakes.process import Router
from tests.fakes.replica import FakeReplica
from tests.fakes.waiting import until
from tests.guard.conftest import Authority
from tests.guard.test_keys import ALICE, BOB, hashed

LIMIT_S = 60
TOKEN = "t" * 43
BEARER = {"authorization": f"Bearer {TOKEN}"}

Start = Callable[..., Awaitable[Router]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a router with these settings before a replica, and waits until it is ready. Stopped after the test."""
    replica = await FakeReplica(ready=200, health=200).start()
    replica.say("/v1/models", {"data": []})
    started: list[Router] = []

    async def start(*, verify: Any = True, scheme: str = "http", **settings: Any) -> Router:
        config = tmp_path / "config.yaml"
        await asyncio.to_thread(config.write_text, yaml.safe_dump(settings))
        router = Router([replica.url], tmp_path / f"router-{len(started)}.log", "--config", str(config))
        router.admin_url = router.admin_url.replace("http", scheme, 1)
        started.append(router)
        async with httpx.AsyncClient(verify=verify, trust_env=False) as client:

            async def status() -> int:
                assert router.alive, router.tail()
                try:
                    return (await client.get(f"{router.admin_url}/readyz")).status_code
                except httpx.TransportError:
                    return 0

            await until(status, lambda code: code == 200, LIMIT_S, "the router is ready")
        return router

    yield start
    for router in started:
        await asyncio.to_thread(router.stop)
    await replica.stop()


async def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command."""
    command = [sys.executable, "-m", "router.cli", *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith("WARMROUTE_")} | environment
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env
    )


class TestSettings:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST"])
    def test_this_machine_may_ask_without_a_token(self, host: str) -> None:
        assert not AdminSettings(host=host).guarded

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "router.example", "localhost.example"])
    def test_others_may_not(self, host: str, authority: Authority) -> None:
        with pytest.raises(ValueError, match=r"can be reached by others.* set admin\.token_file or admin\.token"):
            AdminSettings(host=host)
        cert_file, key_file = authority.issue()
        for remedy in (
            {"token": TOKEN},
            {"open": True},
            {"tls": {"cert_file": cert_file, "key_file": key_file, "client_ca_file": authority.file}},
        ):
            assert AdminSettings(host=host, **remedy).host == host
        with pytest.raises(ValueError, match="can be reached by others"):
            AdminSettings(host=host, tls={"cert_file": cert_file, "key_file": key_file})

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"token": "short"}, "has 5 characters, fewer than 22"),
            ({"token": "**********"}, "fewer than 22"),
            ({"token": "a token with spaces in its middle"}, "or spaces"),
            ({"token": TOKEN, "open": True}, "leave one of them out"),
            ({"token": TOKEN, "token_file": "x"}, "leave one of them out"),
            ({"token_file": "/nowhere"}, "'/nowhere': No such file"),
        ],
    )
    def test_a_token_that_cannot_be_one_is_refused_and_not_shown(self, given: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError) as raised:
            load(None, {"admin": given})
        assert said in str(raised.value)
        assert str(given.get("token", "?")) not in str(raised.value)

    async def test_the_command_says_so_and_serves_nothing(self) -> None:
        done = await run("serve", "--admin-host", "0.0.0.0", "--port", "0", "--admin-port", "0")
        assert done.returncode == 2
        assert done.stderr.startswith("warmroute: admin: host '0.0.0.0' can be reached by others")
        shown = await run("check-config", "--admin-host", "0.0.0.0", WARMROUTE_ADMIN__TOKEN=TOKEN)
        assert (shown.returncode, TOKEN in shown.stdout) == (0, False)
        misspelt = await run("check-config", WARMROUTE_ADMIN__TOKNE=TOKEN)
        assert misspelt.returncode == 2
        assert TOKEN not in misspelt.stderr
        assert "did you mean 'admin.token'" in misspelt.stderr

    def test_a_token_matches_itself_alone(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text(f"  {TOKEN}\n")
        for token in (Token(TOKEN), Token("", str(file))):
            assert token.matches(TOKEN.encode())
            for other in (b"", TOKEN[:-1].encode(), f"{TOKEN}t".encode(), TOKEN.upper().encode()):
                assert not token.matches(other)
        before = Token("", str(file))
        file.write_text("n" * 43)
        before.reload()
        assert before.matches(b"n" * 43)
        assert not before.matches(TOKEN.encode())
        file.write_text("short")
        with pytest.raises(ValueError, match="fewer than 22"):
            before.reload()
        assert before.matches(b"n" * 43)


READS = ("/metrics", "/replicas", "/sessions/x", "/policy", "/explain", "/nowhere", "/", "/livez/", "//livez", "/ui")
CHANGES = (("PUT", "/policy"), ("PUT", "/policy/shadow"), ("DELETE", "/policy/shadow"), ("POST", "/reload"))


async def test_with_a_token_everything_needs_it_but_what_probes_ask(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "token"
    await asyncio.to_thread(file.write_text, TOKEN)
    router = await start(admin={"token_file": str(file)})
    async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as admin:
        for path in ("/livez", "/readyz"):
            assert (await admin.get(path)).status_code == 200
        for method, path in (*(("GET", path) for path in READS), *CHANGES):
            for headers in (
                {},
                {"authorization": TOKEN},
                {"authorization": "Bearer x"},
                {"authorization": f"Bearer {TOKEN}t"},
                {"authorization": "Basic \xff"},
                {"x-api-key": TOKEN},
            ):
                answer = await admin.request(
                    method, path, headers=[(k, v.encode("latin-1")) for k, v in headers.items()]
                )
                assert answer.status_code == 401, (method, path, headers)
                assert answer.json()["error"]["code"] == "token"
                wrong = "This is not the admin token" if "Bearer x" in headers.values() else ""
                assert answer.json()["error"]["message"].startswith(wrong)
                assert answer.headers.get_list("www-authenticate")[0].startswith("Bearer")
        assert (await admin.get("/replicas", headers=BEARER)).status_code == 200
        assert (await admin.get("/metrics", headers=BEARER)).status_code == 200
        assert (await admin.get("/replicas", auth=("anyone", TOKEN))).status_code == 200, "as a browser sends it"
        assert (await admin.get("/replicas", auth=(TOKEN, "x"))).status_code == 401
    for arguments, environment in (
        (("--token-file", str(file)), {}),
        ((), {"WARMROUTE_ADMIN__TOKEN": TOKEN}),
        ((), {"WARMROUTE_ADMIN__TOKEN_FILE": str(file)}),
    ):
        done = await run("replicas", "--admin", router.admin_url, *arguments, **environment)
        assert (done.returncode, done.stderr) == (0, "")
    refused = await run("replicas", "--admin", router.admin_url)
    assert refused.returncode == 2
    assert "--token-file" in refused.stderr
    await asyncio.to_thread(router.stop)
    assert TOKEN not in "\n".join(router.lines)
    assert TOKEN not in await asyncio.to_thread(router.log.read_text)


async def test_metrics_may_be_left_open_by_choice(start: Start) -> None:
    router = await start(admin={"token": TOKEN, "open_metrics": True})
    async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as admin:
        assert (await admin.get("/metrics")).status_code == 200
        assert (await admin.get("/replicas")).status_code == 401


async def test_a_page_in_the_operators_browser_reads_and_changes_nothing(start: Start) -> None:
    """What a browser adds to a page's requests gives it away: its name (rebinding), its origin (forgery)."""
    router = await start()
    async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as admin:
        for host in ("evil.test", "evil.test:8081", "127.0.0.1.evil.test", "localhost.evil.test", "[2001:db8::1]", ""):
            for path in ("/replicas", "/livez", "/metrics"):
                answer = await admin.get(path, headers={"host": host})
                assert (answer.status_code, answer.json()["error"]["code"]) == (421, "foreign_host"), host
        port = router.admin_url.rpartition(":")[2]
        for host in (f"127.0.0.1:{port}", "localhost", f"LocalHost:{port}", "[::1]:1", "127.0.0.9", "a.localhost:9000"):
            assert (await admin.get("/replicas", headers={"host": host})).status_code == 200, host
        before = (await admin.get("/policy")).json()["policy"]
        for marks in (
            {"origin": "https://evil.test"},
            {"origin": "null"},
            {"origin": "http://127.0.0.1:1"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ):
            for method, path in CHANGES:
                headers = {**marks, "content-type": "text/plain"}
                answer = await admin.request(method, path, headers=headers, content='{"name": "random"}')
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")
        assert (await admin.get("/policy")).json()["policy"] == before
        for origin in ("https://evil.test", f"http://127.0.0.1:{port}"):  # a page may ask, but is not let read
            answer = await admin.get("/policy", headers={"origin": origin})
            assert not [name for name in answer.headers if name.startswith("access-control-")]
            preflight = {"origin": origin, "access-control-request-method": "PUT"}
            answer = await admin.options("/policy", headers=preflight)
            assert not [name for name in answer.headers if name.startswith("access-control-")]
        own = {"origin": f"http://127.0.0.1:{port}", "sec-fetch-site": "same-origin"}
        assert (await admin.put("/policy", headers=own, content='{"name": "random"}')).status_code == 200


async def test_over_tls_the_command_trusts_whom_it_is_told_to(
    start: Start, authority: Authority, other: Authority
) -> None:
    cert_file, key_file = authority.issue()
    guarded = {"cert_file": cert_file, "key_file": key_file, "client_ca_file": other.file}
    shown = other.issue("operator")
    router = await start(scheme="https", verify=authority.client(*shown), admin={"tls": guarded})
    show = ("--cert-file", shown[0], "--key-file", shown[1])
    at = ("--admin", router.admin_url)
    assert (await run("replicas", *at, "--ca-file", authority.file, *show)).returncode == 0
    for arguments in (("--ca-file", authority.file), ("--ca-file", other.file, *show), show):
        done = await run("replicas", *at, *arguments)
        assert done.returncode == 1, arguments
        assert len(done.stderr.splitlines()) == 1
    wrong = await run("replicas", *at, "--ca-file", "/nowhere.pem")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("warmroute: ca_file '/nowhere.pem': No such file")


async def test_on_sighup_certificates_and_keys_are_read_anew_and_streams_go_on(
    start: Start, authority: Authority, tmp_path: Path
) -> None:
    cert_file, key_file = authority.issue(at="shown")
    keys_file = tmp_path / "keys"
    await asyncio.to_thread(keys_file.write_text, f"alice:{hashed(ALICE)}\n")
    router = await start(tls={"cert_file": cert_file, "key_file": key_file}, keys={"file": str(keys_file)})
    url = router.url.replace("http", "https", 1)
    context = authority.client()

    async def shown() -> bytes:
        _, writer = await asyncio.open_connection("127.0.0.1", router.port, ssl=context)
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return bytes(certificate)

    async def status(key: str) -> int:
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            return (await client.get(f"{url}/v1/models", headers={"x-api-key": key})).status_code

    before = await shown()
    assert (await status(ALICE), await status(BOB)) == (200, 401)
    async with httpx.AsyncClient(verify=context, trust_env=False) as kept:
        assert (await kept.get(f"{url}/v1/models", headers={"x-api-key": ALICE})).status_code == 200
        await asyncio.to_thread(keys_file.write_text, f"bob:{hashed(BOB)}\n")
        authority.issue(at="shown")
        router.signal(signal.SIGHUP)
        await until(shown, lambda seen: seen != before, LIMIT_S, "the new certificate is shown")
        await until(lambda: status(BOB), lambda code: code == 200, LIMIT_S, "the new key is let in")
        assert await status(ALICE) == 401
        assert (await kept.get(f"{url}/v1/models", headers={"x-api-key": BOB})).status_code == 200
    await asyncio.to_thread(keys_file.write_text, "a mistake\n")
    router.signal(signal.SIGHUP)

    async def log() -> str:
        return await asyncio.to_thread(router.tail)

    await until(log, lambda text: "line 1: expected NAME:sha256" in text, LIMIT_S, "the fault is told")
    assert await status(BOB) == 200


async def test_a_reload_never_leaves_an_open_address_unguarded(start: Start, tmp_path: Path) -> None:
    """Another host takes a restart, another token does not: together they could mean neither."""
    router = await start(admin={"host": "0.0.0.0", "token": TOKEN})
    config = tmp_path / "config.yaml"

    async def log() -> str:
        return await asyncio.to_thread(router.tail)

    await asyncio.to_thread(config.write_text, yaml.safe_dump({"admin": {"host": "127.0.0.1"}}))
    router.signal(signal.SIGHUP)
    await until(log, lambda text: "host '0.0.0.0' can be reached by others" in text, LIMIT_S, "the fault is told")
    async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False) as admin:
        assert (await admin.get("/replicas")).status_code == 401
        await asyncio.to_thread(config.write_text, yaml.safe_dump({"admin": {"host": "0.0.0.0", "token": "n" * 43}}))
        router.signal(signal.SIGHUP)

        async def status() -> int:
            return (await admin.get("/replicas", headers={"authorization": f"Bearer {'n' * 43}"})).status_code

        await until(status, lambda code: code == 200, LIMIT_S, "the new token is in force")
        assert (await admin.get("/replicas", headers=BEARER)).status_code == 401
