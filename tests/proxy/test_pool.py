"""Connections kept for replicas, and what ends them."""

from __future__ import annotations

import asyncio
import ssl

import pytest
import trustme

from router.proxy.upstream import Upstream
from tests.fakes.client import get, post
from tests.fakes.upstream import Peer, ScriptedUpstream, always, chunked, ok, serving
from tests.fakes.wire import eventually
from tests.proxy.conftest import Warm


async def test_idle_connections_are_dropped_before_the_engine_would(warm: Warm) -> None:
    router = await warm(always(ok()), pool={"idle_s": 0.2})
    client = await router.client()
    await client.ask(get())
    peer = router.upstreams[0].connections[0]
    assert await peer.end() == "eof"
    assert router.idle() == 0
    assert (await client.ask(get())).status == 200
    assert len(router.upstreams[0].connections) == 2


async def test_an_old_connection_is_not_used_even_before_it_is_swept_away(warm: Warm) -> None:
    router = await warm(always(ok()), pool={"idle_s": 0.1}, sweep_s=3600)
    client = await router.client()
    await client.ask(get())
    answered = router.proxy.clock()
    await eventually(lambda: router.proxy.clock() > answered + 0.1)
    assert (await client.ask(get())).status == 200
    assert len(router.upstreams[0].connections) == 2
    await router.upstreams[0].connections[0].end()


async def test_a_connection_in_use_does_not_age(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await router.passed(0.7)
            peer.send(ok())

    router = await warm(script, pool={"idle_s": 0.6})
    client = await router.client()
    for _ in range(2):
        assert (await client.ask(get())).status == 200
    assert len(router.upstreams[0].connections) == 1


async def test_the_connection_used_last_is_used_first(warm: Warm) -> None:
    """So that those a peak left behind grow old and go."""
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await release.wait()
            peer.send(ok(b"%d" % peer.upstream.connections.index(peer)))

    router = await warm(script)
    clients = [await router.client() for _ in range(3)]
    for client in clients:
        client.send(get())
    await router.upstreams[0].request(2)
    release.set()
    for client in clients:
        last = (await client.answer()).body
    for _ in range(5):
        assert (await clients[0].ask(get())).body == last


async def test_connections_that_the_replica_closed_are_not_used(warm: Warm) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.send(ok())

    router = await warm(script)
    client = await router.client()
    for number in range(1, 4):
        assert (await client.ask(post("/unknown"))).status == 200
        assert len(router.upstreams[0].connections) == number
        await eventually(lambda: not router.living())
    assert router.health.bad == []


async def test_closing_a_pool_ends_what_is_idle_and_keeps_nothing_more(warm: Warm) -> None:
    release = asyncio.Event()

    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if request.target == "/slow":
                await release.wait()
            peer.send(ok())

    router = await warm(script)
    slow, quick = await router.client(), await router.client()
    slow.send(get("/slow"))
    await router.upstreams[0].request()
    await quick.ask(get())
    upstream = router.replica("a").address
    assert isinstance(upstream, Upstream)
    upstream.close()
    await router.upstreams[0].connections[1].end()
    release.set()
    assert (await slow.answer()).status == 200
    await router.upstreams[0].connections[0].end()


async def given_up_just_as_it_is_made(upstream: Upstream) -> None:
    """As by a client that leaves in that very turn of the loop."""
    connecting = asyncio.create_task(upstream.connect())
    for _ in range(10_000):
        if upstream.open:
            break
        await asyncio.sleep(0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await eventually(lambda: not upstream.open, f"none is open; {upstream.open} are counted")


async def test_a_connection_given_up_just_as_it_is_made_is_counted_no_more(warm: Warm) -> None:
    router = await warm(always(ok()))
    address = router.replica("a").address
    assert isinstance(address, Upstream)
    await given_up_just_as_it_is_made(address)
    assert (await (await router.client()).ask(get())).status == 200
    assert address.open == 1


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a",
        "a:80",
        "http://",
        "http://a:port",
        "http://a:70000",
        "http://a/?q",
        "http://a/#f",
        "http://u@a",
        "//a",
    ],
)
def test_a_bad_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValueError, match="replica URL"):
        Upstream(url, connect_s=1, idle_s=1)


class TestTls:
    @pytest.fixture
    def ca(self, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
        """An authority that the process trusts, as an operator would make it: through the environment."""
        ca = trustme.CA()
        path = f"{tmp_path}/ca.pem"
        ca.cert_pem.write_to_path(path)
        monkeypatch.setenv("SSL_CERT_FILE", path)
        return ca

    @staticmethod
    def server(ca: trustme.CA, name: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ca.issue_cert(name).configure_cert(context)
        return context

    async def test_https_replicas_are_spoken_to(self, warm: Warm, ca: trustme.CA) -> None:
        upstream = await ScriptedUpstream(serving(lambda request: chunked(request.body, b"!"))).start(
            tls=self.server(ca, "127.0.0.1")
        )
        router = await warm(upstream)
        client = await router.client()
        body = b"x" * 1_000_000
        for _ in range(2):
            assert (await client.ask(post(body=body))).body == body + b"!"
        assert len(upstream.connections) == 1

    async def test_one_given_up_just_as_it_is_made_is_counted_no_more(self, warm: Warm, ca: trustme.CA) -> None:
        upstream = await ScriptedUpstream(always(ok())).start(tls=self.server(ca, "127.0.0.1"))
        router = await warm(upstream)
        address = router.replica("a").address
        assert isinstance(address, Upstream)
        await given_up_just_as_it_is_made(address)
        assert (await (await router.client()).ask(get())).status == 200
        assert address.open == 1

    @pytest.mark.parametrize("trusted", [True, False], ids=["wrong name", "unknown authority"])
    async def test_a_certificate_that_does_not_fit_is_no_replica(
        self, warm: Warm, ca: trustme.CA, trusted: bool
    ) -> None:
        issuer = ca if trusted else trustme.CA()
        context = self.server(issuer, "elsewhere.test" if trusted else "127.0.0.1")
        upstream = await ScriptedUpstream(always(ok(b"wrong"))).start(tls=context)
        router = await warm(upstream, always(ok(b"right")))
        client = await router.client()
        assert (await client.ask(post())).body == b"right"
        assert router.health.bad == [("a", "connect")]
        assert not upstream.requests

    async def test_a_plain_replica_behind_https_is_no_replica(self, warm: Warm, ca: trustme.CA) -> None:
        plain = await ScriptedUpstream(always(ok(b"wrong"))).start()
        try:
            router = await warm(plain.url.replace("http", "https"), always(ok(b"right")), timeouts={"connect_s": 0.3})
            client = await router.client()
            assert (await client.ask(post())).body == b"right"
        finally:
            await plain.stop()
