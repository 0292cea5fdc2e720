"""Which headers go on, and which web pages may use the data port."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ask import Asker
from router.configuration import ConfigError, load
from router.proxy.headers import KEPT, Drop
from router.proxy.upstream import Upstream
from tests.fakes.client import RawClient, get, post
from tests.fakes.upstream import Peer, ScriptedUpstream, always, ok, serving
from tests.guard.test_keys import ALICE, hashed
from tests.proxy.conftest import Warm

PAGE = "https://chat.example.com"


class TestLists:
    SENT = ("Cookie: secret=1", "X-Keep: 1", "Accept: */*", "x-session-affinity: s")

    @pytest.mark.parametrize(
        ("lists", "gone"),
        [
            ({}, set()),
            ({"deny": ["cookie", "X-Session-Affinity"]}, {"cookie", "x-session-affinity"}),
            ({"allow": ["x-KEEP", "accept"]}, {"cookie", "x-session-affinity"}),
        ],
        ids=["none", "deny", "allow"],
    )
    async def test_requests(self, warm: Warm, lists: dict[str, Any], gone: set[str]) -> None:
        router = await warm(serving(lambda request: ok(request.body)), headers={"request": lists})
        client = await router.client()
        assert (await client.ask(post("/v1/chat/completions", b"{}", *self.SENT))).body == b"{}"
        (request,) = router.upstreams[0].requests
        names = {name for name, _ in request.headers}
        assert names.isdisjoint(gone)
        assert {"cookie", "x-keep", "accept", "x-session-affinity"} - gone <= names
        assert {"host", "content-type", "content-length", "x-request-id", "x-forwarded-for", "via"} <= names
        assert (await router.lines())[0]["rule"] == "x-session-affinity", "it has been read all the same"

    @pytest.mark.parametrize(
        ("lists", "gone"),
        [
            ({}, set()),
            ({"deny": ["Server", "x-powered-by"]}, {"server", "x-powered-by"}),
            ({"allow": ["date"]}, {"server", "x-powered-by"}),
        ],
        ids=["none", "deny", "allow"],
    )
    async def test_answers(self, warm: Warm, lists: dict[str, Any], gone: set[str]) -> None:
        async def script(peer: Peer) -> None:
            for _ in range(2):
                await peer.request()
                hints = b"HTTP/1.1 103 Early Hints\r\nServer: uvicorn\r\n\r\n"
                extra = ("Server: uvicorn", "X-Powered-By: sglang", "Date: today", "Content-Type: text/plain")
                peer.send(hints + ok(b"body", *extra))

        router = await warm(script, headers={"response": lists})
        client = await router.client()
        for _ in range(2):
            answer = await client.ask(get())
            names = {name for name, _ in answer.headers}
            assert names.isdisjoint(gone)
            assert {"server", "x-powered-by", "date"} - gone <= names
            assert {"content-type", "content-length", "x-request-id"} <= names
            assert answer.body == b"body"
            (hints,) = answer.interims
            assert {name for name, _ in hints.headers}.isdisjoint(gone)

    @pytest.mark.parametrize(
        ("lists", "said"),
        [
            ({"request": {"deny": ["content-type"]}}, "headers.request: 'content-type' cannot be dropped"),
            ({"response": {"deny": ["Transfer-Encoding"]}}, "headers.response: 'Transfer-Encoding' cannot be dropped"),
            ({"request": {"deny": ["Authorization"]}}, "keys.credential tells what becomes of it"),
            ({"request": {"allow": ["x-api-key"]}}, "keys.credential tells what becomes of it"),
            ({"request": {"deny": ["no name"]}}, "'no name' is not the name of a header"),
            ({"request": {"deny": [""]}}, "'' is not the name of a header"),
            ({"response": {"deny": ["a\r\nb: c"]}}, "is not the name of a header"),
            ({"request": {"deny": ["a"], "allow": ["b"]}}, "leave one of them out"),
            ({"requests": {}}, "did you mean 'headers.request'?"),
        ],
    )
    def test_a_list_that_cannot_be_one_is_refused(self, lists: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError) as raised:
            load(None, {"headers": lists})
        assert said in str(raised.value)

    @given(st.lists(st.from_regex(r"[a-z-]{1,6}", fullmatch=True), min_size=1), st.lists(st.text("abc-", max_size=6)))
    def test_an_allow_list_and_what_it_drops_are_all_there_is(self, allow: list[str], sent: list[str]) -> None:
        headers = [(name.encode(), name.encode(), b"") for name in (*sent, "content-type")]
        dropped = Drop(deny=[], allow=allow).among(headers)
        assert dropped == {name.encode() for name in sent} - {name.encode() for name in allow} - KEPT


class TestCors:
    """Off, a browser keeps every answer from every page; on, from all pages but those listed."""

    PREFLIGHT = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,content-type")

    @staticmethod
    def told(answer: Any) -> dict[str, str]:
        return {name: value for name, value in answer.headers if name.startswith("access-control-")}

    async def test_off_no_replica_can_switch_it_on(self, warm: Warm) -> None:
        """SGLang's server lets all pages in, with credentials."""
        liberal = (
            "Access-Control-Allow-Origin: *",
            "Access-Control-Allow-Credentials: true",
            "access-control-allow-methods: *",
            "ACCESS-CONTROL-EXPOSE-HEADERS: *",
        )
        router = await warm(always(ok(b"ok", *liberal)))
        client = await router.client()
        for request in (get("/", f"Origin: {PAGE}"), get("/", f"Origin: {PAGE}", *self.PREFLIGHT, method="OPTIONS")):
            answer = await client.ask(request)
            assert (answer.status, self.told(answer)) == (200, {})
        assert len(router.upstreams[0].requests) == 2

    async def test_a_listed_page_may_ask_and_read(self, warm: Warm) -> None:
        router = await warm(always(ok(b"ok", "Access-Control-Allow-Origin: *")), cors={"origins": [PAGE]})
        client = await router.client()
        preflight = await client.ask(get("/v1/messages", f"Origin: {PAGE}", *self.PREFLIGHT, method="OPTIONS"))
        assert (preflight.status, preflight.body, preflight.values("vary")) == (204, b"", ["origin"])
        assert self.told(preflight) == {
            "access-control-allow-origin": PAGE,
            "access-control-allow-methods": "GET, HEAD, POST, PUT, PATCH, DELETE",
            "access-control-allow-headers": "authorization,content-type",
            "access-control-max-age": "600",
        }
        assert not router.upstreams[0].connections
        answer = await client.ask(post("/v1/messages", b"{}", f"Origin: {PAGE}"))
        assert (answer.body, answer.header("access-control-allow-origin")) == (b"ok", PAGE)
        assert "retry-after" in (answer.header("access-control-expose-headers") or "")
        refused = await client.ask(get("/flush_cache", f"Origin: {PAGE}"))
        assert (refused.status, refused.header("access-control-allow-origin")) == (403, PAGE), "a page sees why"
        outcomes = router.outcomes()
        assert outcomes == {"done/request": 1, "done/body": 1, "client/queue": 1}

    @pytest.mark.parametrize("origin", ["https://evil.test", f"{PAGE}.evil.test", PAGE.upper(), "null", "*", ""])
    async def test_others_may_not(self, warm: Warm, origin: str) -> None:
        router = await warm(always(ok(b"ok")), cors={"origins": [PAGE]})
        client = await router.client()
        for request in (
            get("/", f"Origin: {origin}"),
            get("/", f"Origin: {origin}", *self.PREFLIGHT, method="OPTIONS"),
            get("/", f"Origin: {PAGE}", f"Origin: {origin}"),
        ):
            answer = await client.ask(request)
            assert (self.told(answer), answer.values("vary")) == ({}, ["origin"])

    async def test_a_preflight_needs_no_key_and_what_follows_it_does(self, warm: Warm) -> None:
        router = await warm(always(ok()), cors={"origins": [PAGE]}, keys={"accept": {"page": hashed(ALICE)}})
        client = await router.client()
        preflight = get("/v1/messages", f"Origin: {PAGE}", *self.PREFLIGHT, method="OPTIONS")
        assert (await client.ask(preflight)).status == 204
        answer = await client.ask(post("/v1/messages", b"{}", f"Origin: {PAGE}", f"x-api-key: {ALICE}"))
        assert answer.status == 200
        refused = await client.ask(post("/v1/messages", b"{}", f"Origin: {PAGE}"))
        assert (refused.status, refused.header("access-control-allow-origin")) == (401, PAGE)
        stranger = await router.client()
        assert (await stranger.ask(preflight.replace(PAGE.encode(), b"https://evil.test"))).status == 204

    @pytest.mark.parametrize("framing", ["Content-Length: 5", "Transfer-Encoding: chunked"])
    async def test_nothing_is_a_preflight_that_brings_a_body(self, warm: Warm, framing: str) -> None:
        """Without a key, a stranger could have bodies held here."""
        router = await warm(always(ok()), cors={"origins": [PAGE]}, keys={"accept": {"page": hashed(ALICE)}})
        client = await router.client()
        client.send(get("/", f"Origin: {PAGE}", *self.PREFLIGHT, framing, method="OPTIONS"))
        assert (await client.answer()).status == 401

    async def test_header_names_that_are_none_are_not_repeated(self, warm: Warm) -> None:
        router = await warm(always(ok()), cors={"origins": [PAGE]})
        client: RawClient = await router.client()
        names = 'Access-Control-Request-Headers: a"b\x80;c'
        answer = await client.ask(get("/", f"Origin: {PAGE}", self.PREFLIGHT[0], names, method="OPTIONS"))
        assert "access-control-allow-headers" not in self.told(answer)

    @pytest.mark.parametrize(
        "origin", ["*", "null", "chat.example.com", f"{PAGE}/", f"{PAGE}/path", "https://Chat.example.com", ""]
    )
    def test_only_origins_can_be_listed(self, origin: str) -> None:
        with pytest.raises(ConfigError, match=r"cors\.origins: .* is not an origin: write each as in https://"):
            load(None, {"cors": {"origins": [origin]}})


async def test_probes_show_the_replicas_key() -> None:
    upstream = await ScriptedUpstream(always(ok(b"{}"))).start()
    try:
        address = Upstream(upstream.url, connect_s=1, idle_s=1, credential=b"authorization: Bearer for-engines\r\n")
        assert (await Asker(address).get("/v1/loads", 5)).status == 200
        assert upstream.requests[0].header("authorization") == "Bearer for-engines"
        address.close()
    finally:
        await upstream.stop()
