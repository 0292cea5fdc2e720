"""The whole data plane in the test's own loop, hosted by uvicorn as in production."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn

from policies.balancer import Balancer
from policies.registry import make
from policies.types import Replica
from router.breaker import Breaker
from router.identity import IdentityRules
from router.keys import credential_line
from router.logs import AccessLog
from router.metrics import Metrics
from router.proxy.exchange import Exchange
from router.proxy.proxy import Proxy
from router.proxy.upstream import Upstream
from router.settings import Settings
from router.tls import ReplicaTls, ServerTls
from tests.fakes.client import RawClient
from tests.fakes.upstream import ScriptedUpstream
from tests.fakes.wire import eventually


class RecordingHealth:
    """Remembers what the data path said of replicas."""

    panic = False

    def __init__(self) -> None:
        self.good: list[str] = []
        """Replica ids, in order."""
        self.bad: list[tuple[str, str]] = []
        """Replica ids and why, in order."""
        self.whole: list[tuple[str, int]] = []
        """Replica ids and the status of each answer that was passed on whole, in order."""
        self.silent: set[str] = set()
        """Replicas whose probes are to count as unanswered."""

    def succeeded(self, replica: Replica) -> None:
        self.good.append(replica.id)

    def breaker(self, _: Replica) -> Breaker | None:
        return None

    def answered(self, replica: Replica, status: int) -> None:
        self.whole.append((replica.id, status))

    def gone(self, replica: Replica) -> bool:
        return replica.id in self.silent

    def failed(self, replica: Replica, why: str) -> None:
        self.bad.append((replica.id, why))


async def _no_app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("the ASGI application is never called")


class Proxied:
    """A Proxy with its Balancer, on an ephemeral port. Replicas are called a, b, c in the order given."""

    def __init__(self, settings: Settings, identity: IdentityRules, log: Path, *, sweep_s: float) -> None:
        self._settings = settings
        self.balancer = Balancer(make(settings.policy.name, settings.policy.parameters))
        self.metrics = Metrics(self.balancer)
        self.health = RecordingHealth()
        self._log = log
        self._log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.access_log = AccessLog("json", self._log_fd)
        self.proxy = Proxy(
            balancer=self.balancer,
            identity=identity,
            settings=settings,
            metrics=self.metrics,
            access_log=self.access_log,
            health=self.health,
            sweep_s=sweep_s,
        )
        self.metrics.proxy = self.proxy
        given = settings.tls.replicas
        self.replica_tls = ReplicaTls(given.ca_file, given.cert_file, given.key_file, verify=given.verify)
        shown = settings.tls
        self.tls = ServerTls(shown.cert_file, shown.key_file, shown.client_ca_file) if shown.cert_file else None
        self.port = 0
        self.clients: list[RawClient] = []
        self.upstreams: list[ScriptedUpstream] = []
        """The scripted replicas behind it, for the test's convenience."""
        self.errors: list[dict[str, Any]] = []
        """What reached the loop's exception handler: must stay empty."""
        self._server: uvicorn.Server
        self._replicas: list[Replica] = []

    async def start(self, urls: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.errors.append(context))
        for name, url in zip("abcdefgh", urls, strict=False):
            address = Upstream(
                url,
                connect_s=self._settings.timeouts.connect_s,
                idle_s=self._settings.pool.idle_s,
                tls=self.replica_tls,
                credential=credential_line(self._settings.keys),
            )
            replica = Replica(name, address=address)
            self._replicas.append(replica)
            self.balancer.join(replica, loop.time())
        self.proxy.start()
        config = uvicorn.Config(
            _no_app,
            http=self.proxy.protocol,  # type: ignore[arg-type]
            host="127.0.0.1",
            port=0,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        config.load()
        config.ssl = self.tls.context if self.tls is not None else None
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup()
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def client(self, tls: ssl.SSLContext | None = None) -> RawClient:
        """A new connection."""
        client = await RawClient.connect(self.port, tls=tls)
        self.clients.append(client)
        return client

    def replica(self, name: str) -> Replica:
        return next(replica for replica in self._replicas if replica.id == name)

    def idle(self, name: str = "a") -> int:
        """Connections kept for a replica."""
        address = self.replica(name).address
        assert isinstance(address, Upstream)
        return len(address._idle)

    def living(self, name: str = "a") -> int:
        """Kept connections that have not been lost."""
        address = self.replica(name).address
        assert isinstance(address, Upstream)
        return sum(connection.alive for connection in address._idle)

    async def passed(self, seconds: float) -> None:
        """Wait until the sweeper, which enforces the timeouts, has seen so many seconds pass."""
        started = self.proxy.now
        await eventually(lambda: self.proxy.now > started + seconds, f"{seconds} s pass")

    def outcomes(self) -> dict[str, int]:
        """How requests ended, as `cause/phase`."""
        return {f"{outcome.cause}/{outcome.phase}": count for outcome, count in self.metrics.outcomes.items()}

    async def ended(self, how: str, count: int = 1) -> None:
        """Wait until so many requests have ended as `cause/phase`."""
        await eventually(lambda: self.outcomes().get(how, 0) >= count, f"{count} of {how}; seen: {self.outcomes()}")

    async def lines(self, count: int = 1) -> list[dict[str, Any]]:
        """The access log once it has so many lines."""
        await eventually(lambda: self._flushed() >= count, f"{count} lines in the log")
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def _flushed(self) -> int:
        self.access_log.flush()
        return self._log.read_bytes().count(b"\n")

    async def stop(self) -> None:
        """End everything, and check what must hold after any traffic whatsoever."""
        for client in self.clients:
            client.transport.abort()
        try:
            await eventually(lambda: not self.proxy.downstreams, "every client connection is gone")
            for replica in self._replicas:
                assert replica.in_flight == 0, f"{replica.id} has open leases"
                assert replica.prefill_tokens == 0, f"{replica.id} has pending tokens"
            assert self.proxy.body_bytes == 0, "request bodies are still held"
            open_exchanges = [
                each
                for each in gc.get_objects()
                if type(each) is Exchange and each.proxy is self.proxy and not each.finished
            ]
            assert not open_exchanges
            assert not self.errors, self.errors
        finally:
            self.proxy.stop()
            for replica in self._replicas:
                assert isinstance(replica.address, Upstream)
                replica.address.close()
            for server in self._server.servers:
                server.close()
            self.access_log.close()
            os.close(self._log_fd)
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        assert len(lines) == sum(self.metrics.outcomes.values()), "one line for each request"
