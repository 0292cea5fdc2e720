"""API keys of the data port: who is let in, what a stranger is told, and what becomes of credentials."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.types import Reason, Replica
from router import keys
from router.admin import Admin
from router.app import Router
from router.identity import IdentityRules
from router.settings import KeysSettings, Settings
from tests.fakes.client import Ended, get, post
from tests.fakes.upstream import Peer, always, ok, serving, silent
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm

ALICE = "a" * 64
BOB = "sk-" + "b" * 40


def hashed(key: str) -> str:
    return f"sha256:{sha256(key.encode()).hexdigest()}"


ACCEPT = {
    "alice": hashed(ALICE),
    "bob": {"hash": [hashed(BOB), hashed("the bob of yesterday, too")], "max_in_flight": 1},
}


@pytest.mark.parametrize(
    "header",
    [
        f"Authorization: Bearer {ALICE}",
        f"authorization: bearer {ALICE}",
        f"X-Api-Key: {ALICE}",
        f"api-key: {ALICE}",
        f"x-api-key: {BOB}",
        "x-api-key: the bob of yesterday, too",
    ],
)
async def test_a_known_key_is_let_in_however_it_is_sent(warm: Warm, header: str) -> None:
    router = await warm(always(ok(b"served")), keys={"accept": ACCEPT})
    client = await router.client()
    for _ in range(2):
        assert (await client.ask(post("/v1/messages", b"{}", header))).body == b"served"
    lines = await router.lines(2)
    name = "alice" if ALICE in header else "bob"
    assert [line["key"] for line in lines] == [name, name]
    assert router.proxy.keys is not None
    assert {each.name: (each.requests, each.in_flight) for each in router.proxy.keys.holders.values()}[name] == (2, 0)


async def test_a_second_credential_does_not_hide_the_key(warm: Warm) -> None:
    """Claude Code sends a token and a key when it has both."""
    router = await warm(always(ok()), keys={"accept": ACCEPT})
    client = await router.client()
    both = ("Authorization: Bearer an OAuth token", f"x-api-key: {ALICE}")
    assert (await client.ask(post("/v1/messages", b"{}", *both))).status == 200


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ((), "missing_api_key"),
        (("Authorization: ",), "missing_api_key"),
        (("Authorization: Bearer ",), "invalid_api_key"),
        ((f"Authorization: Basic {ALICE}",), "invalid_api_key"),
        ((f"Authorization: {ALICE}",), "invalid_api_key"),
        ((f"Authorization: Bearer {ALICE[:-1]}",), "invalid_api_key"),
        ((f"Authorization: Bearer {ALICE}a",), "invalid_api_key"),
        ((f"x-api-key: {hashed(ALICE)}",), "invalid_api_key"),
        ((f"x-api-key: {'x' * 4000}",), "invalid_api_key"),
        (("x-api-key: short",), "invalid_api_key"),
    ],
)
async def test_a_stranger_is_refused_and_no_replica_hears_of_it(
    warm: Warm, headers: tuple[str, ...], code: str
) -> None:
    accept = {**ACCEPT, "careless": hashed("short")}
    router = await warm(always(ok()), keys={"accept": accept})
    client = await router.client()
    client.send(post("/v1/chat/completions", b"{}", *headers))
    answer, rest = await client.refused()
    assert (answer.status, rest) == (401, b"")
    assert answer.header("www-authenticate") == "Bearer"
    told = json.loads(answer.body)
    assert told["type"] == "error"  # Anthropic's form; OpenAI's clients look at `error`
    assert (told["error"]["type"], told["error"]["code"]) == ("authentication_error", code)
    assert not router.upstreams[0].connections
    line = (await router.lines())[0]
    assert (line["refusal"], line["cause"]) == (code, "client")
    assert "key" not in line


async def test_a_stranger_is_refused_before_the_body_is_received(warm: Warm) -> None:
    router = await warm(always(ok()), keys={"accept": ACCEPT})
    client = await router.client()
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 60000000\r\n\r\n" + b"x" * 100_000)
    answer = await client.answer()
    assert answer.status == 401
    assert router.proxy.body_bytes == 0
    waiting = await router.client()
    waiting.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
    answer = await waiting.answer()
    assert (answer.status, answer.interims) == (401, [])


async def test_every_path_needs_the_key(warm: Warm) -> None:
    router = await warm(always(ok()), keys={"accept": ACCEPT})
    for target in ("/health", "/v1/models", "/metrics", "/", "//v1/models", "/v1/../v1/models", "/flush_cache"):
        for method in ("GET", "HEAD", "OPTIONS", "DELETE"):
            client = await router.client()
            client.send(get(target, "Origin: https://a.test", "Access-Control-Request-Method: POST", method=method))
            answer = await client.answer(head_only=method == "HEAD")
            assert answer.status == 401, (method, target)
    assert not router.upstreams[0].connections


async def test_a_holder_has_so_many_requests_at_once_and_no_other_is_kept_from_its_own(warm: Warm) -> None:
    router = await warm(silent, keys={"accept": ACCEPT})
    assert router.proxy.keys is not None
    bob = router.proxy.keys.holders["bob"]
    first, second = await router.client(), await router.client()
    first.send(post("/v1/messages", b"{}", f"x-api-key: {BOB}"))
    await router.upstreams[0].request(0)
    assert bob.in_flight == 1
    second.send(post("/v1/messages", b"{}", f"x-api-key: {BOB}"))
    answer, _ = await second.refused()
    assert (answer.status, answer.header("retry-after")) == (429, "2")
    told = json.loads(answer.body)["error"]
    assert (told["type"], told["code"]) == ("rate_limit_error", "key_in_flight")
    assert (await router.lines())[0]["key"] == "bob", "the log tells whose limit it was"
    assert bob.in_flight == 1, "who was not let in gives no place back"
    alices = [await router.client() for _ in range(3)]
    for number, alice in enumerate(alices, 1):
        alice.send(post("/v1/messages", b"{}", f"x-api-key: {ALICE}"))
        await router.upstreams[0].request(number)
    first.close()  # who leaves gives its place to the next
    await eventually(lambda: bob.in_flight == 0, "the place is given back")
    third = await router.client()
    third.send(post("/v1/messages", b"{}", f"x-api-key: {BOB}"))
    await router.upstreams[0].request(4)


@pytest.mark.parametrize("how", ["answered", "left in the body", "left in the head", "replica gone", "malformed"])
async def test_every_end_of_a_request_gives_the_place_back(warm: Warm, how: str) -> None:
    async def dying(peer: Peer) -> None:
        await peer.request()

    router = await warm(dying if how == "replica gone" else always(ok()), keys={"accept": ACCEPT})
    assert router.proxy.keys is not None
    bob = router.proxy.keys.holders["bob"]
    head = f"POST /v1/messages HTTP/1.1\r\nHost: h\r\nx-api-key: {BOB}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    for round_ in range(3):
        client = await router.client()
        if how in ("answered", "replica gone"):
            answer = await client.ask(post("/v1/messages", b"{}", f"x-api-key: {BOB}"))
            assert answer.status == (200 if how == "answered" else 503)
        elif how == "left in the head":
            client.send(head[:-2])
            client.close()
        else:
            client.send(head + b"4\r\nbody\r\n")
            await eventually(lambda: bob.in_flight == 1, f"round {round_}: it is counted")
            if how == "malformed":
                client.send(b"no chunk\r\n")
                assert (await client.answer()).status == 400
            client.close()
        await eventually(lambda: bob.in_flight == 0, f"round {round_}: it is given back")


async def test_an_explained_session_is_that_of_the_holder_who_is_named() -> None:
    router = Router(Settings(keys=KeysSettings(accept=ACCEPT)))
    router.balancer.join(Replica("r1"), router.clock())
    transport = httpx.ASGITransport(Admin(router).app())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as admin:
        for holder in ("alice", "bob"):
            told = (await admin.get(f"/explain?session=s&key={holder}")).raise_for_status().json()
            assert told["session"] == router.identity.digest_of("s", holder.encode()).hex()
    router.access_log.close()


class TestCredentials:
    """What replicas get to see of clients' keys."""

    @pytest.mark.parametrize(
        ("settings", "seen"),
        [
            ({}, [("authorization", f"Bearer {ALICE}"), ("x-api-key", ALICE)]),
            ({"credential": "strip"}, []),
            ({"credential": "replace", "replica_key": "for-engines"}, [("authorization", "Bearer for-engines")]),
        ],
        ids=["pass", "strip", "replace"],
    )
    @pytest.mark.parametrize("asked", [True, False], ids=["keys", "no keys"])
    async def test_they_go_on_unless_told_otherwise(
        self, warm: Warm, settings: dict[str, Any], seen: list[tuple[str, str]], asked: bool
    ) -> None:
        router = await warm(always(ok()), keys={**settings, **({"accept": ACCEPT} if asked else {})})
        client = await router.client()
        await client.ask(post("/v1/messages", b"{}", f"Authorization: Bearer {ALICE}", f"x-api-key: {ALICE}"))
        (request,) = router.upstreams[0].requests
        assert [each for each in request.headers if each[0] in ("authorization", "x-api-key", "api-key")] == seen

    async def test_nor_through_a_list_of_allowed_headers(self, warm: Warm) -> None:
        router = await warm(
            always(ok()), keys={"credential": "strip"}, headers={"request": {"allow": ["accept", "x-a"]}}
        )
        client = await router.client()
        await client.ask(post("/v1/messages", b"{}", f"x-api-key: {ALICE}", "x-a: 1", "x-b: 2"))
        (request,) = router.upstreams[0].requests
        assert request.header("x-a") == "1"
        assert request.header("x-b") is None
        assert request.header("x-api-key") is None


class TestTenants:
    """Two holders never share a session, whatever they call it."""

    async def test_the_same_name_is_another_session_for_another_holder(self, warm: Warm) -> None:
        accept = {"alice": hashed(ALICE), "bob": hashed(BOB)}
        router = await warm(always(ok()), always(ok()), policy="session_affinity", keys={"accept": accept})
        client = await router.client()
        body = b'{"messages": [{"role": "user", "content": "hello"}]}'
        reasons = []
        for key in (ALICE, BOB, ALICE, BOB):
            answer = await client.ask(post("/v1/messages", body, f"x-api-key: {key}", "x-session-affinity: default"))
            reasons.append(answer.header("x-warmroute-reason"))
        assert reasons == [Reason.NEW, Reason.NEW, Reason.HOME, Reason.HOME]
        sessions = {line["key"]: line["session"] for line in await router.lines(4)}
        assert sessions["alice"] != sessions["bob"]

    def test_a_holders_new_key_keeps_its_sessions(self) -> None:
        rules = IdentityRules(secret=b"s")
        body = b'{"messages": [{"role": "user", "content": "hello"}]}'

        def key(credential: bytes, tenant: bytes, headers: dict[bytes, bytes]) -> bytes | None:
            identity = rules.from_headers({b"x-api-key": credential, **headers}, tenant)
            return rules.from_body(identity, body, b"application/json").key

        for headers in ({}, {b"session-id": b"s"}):
            assert key(b"old", b"alice", headers) == key(b"new", b"alice", headers)
            assert key(b"old", b"alice", headers) != key(b"old", b"bob", headers)
            assert key(b"old", b"alice", headers) != key(b"old", b"", headers)

    @given(st.lists(st.tuples(st.from_regex(r"[A-Za-z0-9._-]{1,8}", fullmatch=True), st.text("ab\x01", min_size=1))))
    def test_no_two_of_tenant_and_session_are_one(self, pairs: list[tuple[str, str]]) -> None:
        rules = IdentityRules()
        digests = {rules.digest_of(session, tenant.encode()) for tenant, session in pairs}
        assert len(digests) == len(set(pairs))


class TestFile:
    """Keys in a file of their own."""

    @pytest.fixture
    def write(self, tmp_path: Path) -> Callable[[str], str]:
        def write(text: str) -> str:
            path = tmp_path / "keys"
            path.write_text(text)
            return str(path)

        return write

    def test_a_line_each(self, write: Callable[[str], str]) -> None:
        file = write(f"# ours\n\nalice:{hashed(ALICE)}\nbob:{hashed(BOB)}\nbob:{hashed('another of bob, also')}\n")
        assert keys.read(file) == {"alice": [hashed(ALICE)], "bob": [hashed(BOB), hashed("another of bob, also")]}

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (f"alice:{ALICE}\n", "line 1: expected `sha256:`"),
            (f"a:{hashed(ALICE)}\n{BOB}\n", "line 2: expected NAME:sha256"),
            (f"al ice:{hashed(ALICE)}", "line 1: 'al ice' cannot name a key"),
            (f"alice:{hashed(ALICE).upper()}", "line 1"),
            ("# none\n", "holds no key"),
            ("\udcff", "readable text file"),
        ],
    )
    def test_a_fault_is_told_with_its_line_and_without_what_may_be_a_key(
        self, write: Callable[[str], str], text: str, said: str
    ) -> None:
        file = write("")
        Path(file).write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match="keys") as raised:
            KeysSettings(file=file)
        assert said in str(raised.value).split("[type=")[0]
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            keys.read(file)
        assert said in str(raised.value)
        assert ALICE not in str(raised.value)
        assert BOB not in str(raised.value)

    def test_one_key_is_of_one_holder(self, write: Callable[[str], str]) -> None:
        file = write(f"mallory:{hashed(ALICE)}")
        with pytest.raises(ValueError, match=r"alice and mallory|mallory and alice"):
            KeysSettings(accept=ACCEPT, file=file)

    def test_counts_stay_when_keys_are_read_anew(self, write: Callable[[str], str]) -> None:
        settings = KeysSettings(accept=ACCEPT, file=write(f"carol:{hashed('carol has a key, too')}"))
        before = keys.made(settings)
        assert before is not None
        before.holders["bob"].in_flight = 1
        write(f"dave:{hashed('dave has a key, as well')}")
        after = keys.made(settings, before)
        assert after is not None
        assert sorted(after.holders) == ["alice", "bob", "dave"]
        assert after.holders["bob"] is before.holders["bob"]


async def test_a_pipelined_request_needs_its_own_key(warm: Warm) -> None:
    router = await warm(serving(lambda request: ok(request.target.encode())), keys={"accept": ACCEPT})
    client = await router.client()
    client.send(get("/v1/a", f"x-api-key: {ALICE}") + get("/v1/b") + get("/v1/c", f"x-api-key: {ALICE}"))
    assert (await client.answer()).body == b"/v1/a"
    assert (await client.answer()).status == 401
    with pytest.raises(Ended):
        await client.answer()
