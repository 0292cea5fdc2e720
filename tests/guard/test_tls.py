"""TLS towards clients and replicas: who is believed, what the end of an answer means, certificates that change."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path

import pytest

from router.settings import ReplicaTlsSettings, ServerTlsSettings, Settings
from tests.fakes.client import Ended, RawClient, get, post
from tests.fakes.upstream import (
    LAST_CHUNK,
    SSE_HEAD,
    Peer,
    ScriptedUpstream,
    always,
    chunk,
    chunked,
    ok,
)
from tests.fakes.wire import LIMIT_S, eventually
from tests.guard.conftest import Authority, copy
from tests.proxy.conftest import Warm


def files(authority: Authority, *, at: str = "") -> dict[str, str]:
    return dict(zip(("cert_file", "key_file"), authority.issue(at=at), strict=True))


def presented(client: RawClient) -> bytes:
    """The certificate that the router showed."""
    certificate = client.transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    assert isinstance(certificate, bytes)
    return certificate


def resumed(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
    """The status line that a client gets who goes on with a TLS session, and the session; nothing when it is refused.

    asyncio's transports cannot resume.
    """
    plain = socket.create_connection(("127.0.0.1", port), LIMIT_S)
    try:
        with context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as tls:
            tls.sendall(get())
            answer = tls.recv(4096).split(b"\r\n")[0]
            return answer, tls.session if answer else None
    except OSError:
        return b"", None
    finally:
        plain.close()


class TestClients:
    """The data port."""

    async def test_requests_and_streams_go_through(self, warm: Warm, authority: Authority) -> None:
        async def script(peer: Peer) -> None:
            while True:
                request = await peer.request()
                peer.send(chunked(request.body, b"!", head=SSE_HEAD))

        router = await warm(script, tls=files(authority))
        client = await router.client(authority.client())
        body = b"x" * 1_000_000
        for _ in range(2):
            assert (await client.ask(post(body=body))).body == body + b"!"
        assert router.upstreams[0].requests[0].header("x-forwarded-proto") == "https"
        assert client.transport.get_extra_info("ssl_object").selected_alpn_protocol() is None

    async def test_only_http_1_1_is_agreed_on(self, warm: Warm, authority: Authority) -> None:
        router = await warm(always(ok()), tls=files(authority))
        context = authority.client()
        context.set_alpn_protocols(["h2", "http/1.1"])
        client = await router.client(context)
        assert client.transport.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"

    @pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
    async def test_old_versions_are_refused(self, warm: Warm, authority: Authority) -> None:
        router = await warm(always(ok()), tls=files(authority))
        context = authority.client()
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await router.client(context)
        context = authority.client()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        assert (await (await router.client(context)).ask(get())).status == 200

    async def test_plain_http_is_not_answered(self, warm: Warm, authority: Authority) -> None:
        router = await warm(always(ok()), tls=files(authority))
        client = await router.client()
        client.send(get())
        assert await client.end()
        assert b"HTTP" not in client.buffer
        assert (await (await router.client(authority.client())).ask(get())).status == 200

    @pytest.mark.parametrize("whose", ["none", "another's", "ours"])
    async def test_clients_may_have_to_show_a_certificate(
        self, warm: Warm, authority: Authority, other: Authority, whose: str
    ) -> None:
        router = await warm(always(ok()), tls={**files(authority), "client_ca_file": authority.file})
        shown = () if whose == "none" else (authority if whose == "ours" else other).issue("client")
        try:  # in TLS 1.3 a client is refused only after its own handshake
            answer = await (await router.client(authority.client(*shown))).ask(get())
            assert answer.status == 200
        except (Ended, OSError):
            assert whose != "ours"
        else:
            assert whose == "ours"
        assert len(router.upstreams[0].connections) == (whose == "ours")

    async def test_a_refusal_reaches_a_client_that_still_sends(self, warm: Warm, authority: Authority) -> None:
        router = await warm(always(ok()), tls=files(authority), limits={"body_bytes": 1000})
        client = await router.client(authority.client())
        client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 20000000\r\n\r\n")
        for _ in range(200):
            if client.ended or client.transport.is_closing():
                break
            client.send(b"x" * 100_000)
            if client.full:
                break
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (413, "close")

    async def test_who_leaves_frees_the_replica(self, warm: Warm, authority: Authority) -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            peer.send(SSE_HEAD + chunk(b"data: 1\n\n"))
            await peer.end()

        router = await warm(script, tls=files(authority))
        client = await router.client(authority.client())
        client.send(post())
        await client.up_to(b"data: 1")
        client.transport.abort()
        await router.ended("client/body")
        assert await router.upstreams[0].connections[0].end()

    async def test_a_broken_stream_does_not_end_as_a_whole_one(self, warm: Warm, authority: Authority) -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            peer.send(SSE_HEAD + chunk(b"data: 1\n\n"))

        router = await warm(script, tls=files(authority))
        client = await router.client(authority.client())
        client.send(post())
        with pytest.raises(Ended):
            await client.answer()


class TestRenewal:
    """Certificates that change while the router runs."""

    async def test_new_connections_get_the_new_one_and_old_ones_go_on(self, warm: Warm, authority: Authority) -> None:
        router = await warm(always(ok()), tls=files(authority, at="shown"))
        assert router.tls is not None
        before = await router.client(authority.client())
        authority.issue(at="shown")
        router.tls.reload()
        after = await router.client(authority.client())
        assert presented(before) != presented(after)
        for client in (before, after):
            assert (await client.ask(get())).status == 200

    async def test_a_pair_that_does_not_fit_changes_nothing(self, warm: Warm, authority: Authority) -> None:
        given = files(authority, at="shown")
        router = await warm(always(ok()), tls=given)
        assert router.tls is not None
        before = presented(await router.client(authority.client()))
        cert_file, _ = authority.issue()
        copy(cert_file, given["cert_file"])
        with pytest.raises(
            ValueError, match=r"cert_file .* key_file .*mismatch.*: give a certificate chain and its own"
        ):
            router.tls.reload()
        assert presented(await router.client(authority.client())) == before

    async def test_an_authority_that_was_taken_out_is_not_believed_any_more(
        self, warm: Warm, authority: Authority, other: Authority, tmp_path: Path
    ) -> None:
        trusted = tmp_path / "clients.pem"
        copy(authority.file, trusted)
        router = await warm(always(ok()), tls={**files(authority), "client_ca_file": str(trusted)})
        assert router.tls is not None
        context = authority.client(*authority.issue("client"))
        answer, session = await asyncio.to_thread(resumed, router.port, context, None)
        assert answer == b"HTTP/1.1 200 OK"
        copy(other.file, trusted)
        router.tls.reload()
        for continued in (None, session):
            assert await asyncio.to_thread(resumed, router.port, context, continued) == (b"", None)
        ours = authority.client(*other.issue("client"))
        assert (await (await router.client(ours)).ask(get())).status == 200

    async def test_where_sessions_could_be_resumed_no_certificate_is_believed(
        self, warm: Warm, authority: Authority
    ) -> None:
        """TLS 1.2: without tickets, too, the server would go on with a session whose authority is gone."""
        router = await warm(always(ok()), tls={**files(authority), "client_ca_file": authority.file})
        context = authority.client(*authority.issue("client"))
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await asyncio.to_thread(resumed, router.port, context, None) == (b"", None)

    async def test_replicas_are_believed_by_the_newest_authorities(
        self, warm: Warm, authority: Authority, other: Authority, tmp_path: Path
    ) -> None:
        trusted = tmp_path / "replicas.pem"
        copy(other.file, trusted)
        upstream = await ScriptedUpstream(always(ok())).start(tls=authority.server())
        router = await warm(upstream, tls={"replicas": {"ca_file": str(trusted)}}, pool={"idle_s": 1})
        client = await router.client()
        assert (await client.ask(post())).status == 503
        copy(authority.file, trusted)
        router.replica_tls.reload()
        assert (await client.ask(post())).status == 200


class TestReplicas:
    """Replicas with an https URL."""

    async def test_by_an_authority_of_their_own(self, warm: Warm, authority: Authority, other: Authority) -> None:
        genuine = await ScriptedUpstream(always(ok(b"genuine"))).start(tls=authority.server())
        impostor = await ScriptedUpstream(always(ok(b"impostor"))).start(tls=other.server())
        named_otherwise = await ScriptedUpstream(always(ok(b"other"))).start(tls=authority.server("elsewhere.test"))
        tls = {"replicas": {"ca_file": authority.file}}
        router = await warm(impostor, named_otherwise, genuine, tls=tls)
        client = await router.client()
        for _ in range(3):
            assert (await client.ask(post())).body == b"genuine"
        assert set(router.health.bad) == {("a", "connect"), ("b", "connect")}
        assert not impostor.requests + named_otherwise.requests

    async def test_a_certificate_is_shown_to_those_that_ask(
        self, warm: Warm, authority: Authority, other: Authority
    ) -> None:
        upstream = await ScriptedUpstream(always(ok())).start(tls=authority.server(trusts=other))
        cert_file, key_file = other.issue("router")
        tls = {"replicas": {"ca_file": authority.file, "cert_file": cert_file, "key_file": key_file}}
        assert (await (await (await warm(upstream, tls=tls)).client()).ask(post())).status == 200
        bare = await warm(upstream.url, tls={"replicas": {"ca_file": authority.file}})
        assert (await (await bare.client()).ask(post())).status in (502, 503)

    async def test_anyone_is_believed_only_when_it_is_said_so(self, warm: Warm, authority: Authority) -> None:
        upstream = await ScriptedUpstream(always(ok())).start(tls=authority.server("elsewhere.test"))
        router = await warm(upstream, tls={"replicas": {"verify": False}})
        assert (await (await router.client()).ask(post())).status == 200

    @pytest.mark.parametrize("goodbye", [True, False], ids=["close_notify", "cut"])
    async def test_an_end_that_anyone_on_the_way_could_make_is_not_the_end_of_an_answer(
        self, warm: Warm, authority: Authority, goodbye: bool
    ) -> None:
        arrived = asyncio.Event()

        async def script(peer: Peer) -> None:
            await peer.request()
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nall that there is")
            await arrived.wait()
            if not goodbye:
                peer.transport.abort()  # the socket is closed, and nothing said

        upstream = await ScriptedUpstream(script).start(tls=authority.server())
        router = await warm(upstream, tls={"replicas": {"ca_file": authority.file}})
        client = await router.client()
        client.send(get("/file"))
        head = await client.head()
        assert (head.status, await client.chunk()) == (200, b"all that there is")
        arrived.set()
        if goodbye:
            assert await client.chunk() == b""
            assert router.outcomes() == {"done/body": 1}
        else:
            with pytest.raises(Ended):
                await client.chunk()
            assert router.outcomes() == {"upstream/body": 1}
            assert router.health.bad == [("a", "broken")]

    async def test_a_slow_reader_gets_all_of_an_answer_whose_replica_is_gone(
        self, warm: Warm, authority: Authority
    ) -> None:
        """A replica closes an idle connection after 5 s: what it had sent before must not be lost by that."""
        part = chunk(b"x" * 65_536)
        parts = 0

        async def script(peer: Peer) -> None:
            nonlocal parts
            await peer.request()
            peer.send(SSE_HEAD)
            (downstream,) = router.proxy.downstreams

            def taken() -> bool:
                connection = downstream._queue[0].connection
                assert connection is not None
                sent = len(SSE_HEAD) + parts * len(part)
                return downstream.paused_since is not None or connection.received + connection.relayed >= sent

            while downstream.paused_since is None:  # until the client is waited for
                parts += 1
                peer.send(part)
                await eventually(taken)
            parts += 1
            peer.send(part + LAST_CHUNK)
            await eventually(lambda: peer.transport.get_write_buffer_size() == 0)
            with socket.socket(fileno=os.dup(peer.transport.get_extra_info("socket").fileno())) as plain:
                plain.shutdown(socket.SHUT_WR)

        upstream = await ScriptedUpstream(script).start(tls=authority.server())
        router = await warm(upstream, tls={"replicas": {"ca_file": authority.file}})
        client = await router.client()
        client.stop_reading()
        client.send(post())
        peer = await upstream.connection()
        await eventually(lambda: peer.transport.is_closing(), "the replica has sent everything, and closes")
        await router.passed(0.3)
        client.read_on()
        assert (await client.answer()).body == b"x" * 65_536 * parts


class TestSettings:
    """Files that cannot be used are told of before anything is served."""

    @pytest.mark.parametrize(
        ("broken", "said"),
        [
            ({"key_file": ""}, "go together"),
            ({"cert_file": "", "client_ca_file": "x"}, "go together"),
            ({"cert_file": "/nowhere.pem"}, "cert_file '/nowhere.pem': No such file"),
            ({"key_file": "/nowhere.pem"}, "key_file '/nowhere.pem': No such file"),
            ({"client_ca_file": "/nowhere.pem"}, "client_ca_file '/nowhere.pem': No such file"),
        ],
    )
    def test_of_the_port(self, authority: Authority, broken: dict[str, str], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            ServerTlsSettings(**{**files(authority), **broken})
        with pytest.raises(ValueError, match=r"tls|admin"):
            Settings(admin={"tls": {**files(authority), **broken}})

    def test_of_the_wrong_kind(self, authority: Authority, other: Authority, tmp_path: Path) -> None:
        given = files(authority)
        empty = tmp_path / "empty"
        empty.touch()
        with pytest.raises(ValueError, match="give a certificate chain and its own private key"):
            ServerTlsSettings(cert_file=given["cert_file"], key_file=files(other)["key_file"])
        with pytest.raises(ValueError, match="give a certificate chain and its own private key"):
            ServerTlsSettings(cert_file=str(empty), key_file=given["key_file"])
        with pytest.raises(ValueError, match="give the authorities' certificates as PEM"):
            ServerTlsSettings(**given, client_ca_file=str(empty))
        with pytest.raises(ValueError, match="client_ca_file needs cert_file"):
            ServerTlsSettings(client_ca_file=authority.file)

    def test_an_encrypted_key_is_refused_and_not_asked_for(self, authority: Authority, tmp_path: Path) -> None:
        from cryptography.hazmat.primitives import serialization

        given = files(authority)
        key = serialization.load_pem_private_key(Path(given["key_file"]).read_bytes(), None)
        encrypted = tmp_path / "encrypted.pem"
        encrypted.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"passphrase"),
            )
        )
        with pytest.raises(ValueError, match="is encrypted: give the key without a passphrase"):
            ServerTlsSettings(cert_file=given["cert_file"], key_file=str(encrypted))

    def test_of_replicas(self, authority: Authority) -> None:
        with pytest.raises(ValueError, match="go together"):
            ReplicaTlsSettings(cert_file=files(authority)["cert_file"])
        with pytest.raises(ValueError, match="of no use with verify: false"):
            ReplicaTlsSettings(ca_file=authority.file, verify=False)
        with pytest.raises(ValueError, match=r"ca_file '/nowhere\.pem'"):
            ReplicaTlsSettings(ca_file="/nowhere.pem")
