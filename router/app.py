"""The composition root: settings in, a running router out, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from policies import registry
from policies.balancer import Balancer
from policies.directory import Directory
from router.admin import Admin, Guard
from router.descriptors import within_open_files
from router.discovery.discovery import Discovery
from router.files import Files
from router.fleet import Fleet
from router.garbage import Garbage
from router.health import Health
from router.journal import Journal
from router.journaled import JournaledBalancer
from router.listening import Server, bind, server, server_tls, url
from router.logs import AccessLog
from router.metrics import Metrics
from router.orders import Orders
from router.proxy.proxy import Proxy
from router.reload import Reload, identity_rules
from router.reports import Reports
from router.settings import Settings, TracingSettings
from router.sharing import Sharing
from router.source import Source
from router.store import Store
from router.switching import Switching
from router.units import counted
from router.version import VERSION

if TYPE_CHECKING:
    from router.tracing import Tracing
    from router.workers.worker import Worker

log = logging.getLogger("warmroute")

FIRST_PROBES_S = 5.0
"""How long readiness waits for the first probe of every replica."""


class Router:
    """One process: data plane, core and control plane."""

    def __init__(
        self,
        settings: Settings,
        source: Source | None = None,
        store: Store | None = None,
        worker: Worker | None = None,
    ) -> None:
        """`source` is where the settings came from and are read anew. Without one SIGHUP stops the router.

        `store` is what it shares with other routers through. `worker` is what it is among several under a supervisor.
        """
        self.settings = settings
        """In force. Replaced as a whole when the configuration is reloaded."""
        self.worker = worker
        settings = self.part(settings)
        self.clock = time.monotonic
        self.journal = Journal(settings.journal) if settings.journal.path else None
        self.balancer = _balancer(settings, self.journal, self.clock())
        self.switching = Switching(self.balancer, settings.policy, self.clock)
        self.identity = identity_rules(settings.identity)
        self.metrics = Metrics(self.balancer, self.clock)
        self.metrics.journal = self.journal
        self.health = Health(self.balancer, settings.health, self.clock)
        self.reports = Reports(self.balancer, settings.reports, self.clock)
        self.fleet = Fleet(self.balancer, self.health, self.reports, settings, self.clock)
        form = settings.log.format
        if form == "auto":
            form = "text" if sys.stdout.isatty() else "json"
        self.access_log = AccessLog(form, sys.stdout.fileno(), settings.log.sample, shared=worker is not None)
        self.proxy = Proxy(
            balancer=self.balancer,
            identity=self.identity,
            settings=settings,
            metrics=self.metrics,
            access_log=self.access_log,
            health=self.health,
        )
        self.metrics.proxy = self.proxy
        self.orders = Orders(self.fleet, self.switching, lambda: self.settings.policy)
        self.fleet.joined = self.orders.joined
        self.discovery = Discovery(self.fleet, settings.discovery, self._discovered, self.fleet.pools.names)
        self.metrics.discovery = self.discovery
        self.sharing = None if store is None else self._sharing(store)
        self.proxy.sharing = self.sharing
        self.proxy.tracing = _tracing(settings.tracing)
        self.tls = server_tls(settings.tls)
        self.admin_tls = server_tls(settings.admin.tls)
        self.guard = Guard(settings.admin)
        self.files = Files()
        for what, tls in (("tls", self.tls), ("admin.tls", self.admin_tls), ("tls.replicas", self.fleet.tls)):
            if tls is not None:
                self.files.watch(what, tls.files, tls.reload)
        self.watch_secrets(settings)
        self.reload = Reload(self, source)
        self.started_at = self.clock()
        """When it was made, seconds of its clock."""
        self._fits = 0
        """Replicas for which there is room within the limit of open files."""
        self._stop = asyncio.Event()
        self._at_once = False

    def _sharing(self, store: Store) -> Sharing:
        given = self.settings.store
        name = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        sharing = Sharing(
            store,
            self.balancer,
            name=name,
            wait_s=given.wait_s,
            timeout_s=given.timeout_s,
            clock=self.clock,
            among_workers=not given.url,
        )
        sharing.orders = self.orders
        self.orders.share = sharing.order
        return sharing

    def part(self, settings: Settings) -> Settings:
        """What of these settings is for this process: all, or its share among several."""
        return settings if self.worker is None else self.worker.part(settings)

    def watch_secrets(self, settings: Settings) -> None:
        """Watch the files of tokens and keys that these settings, which are in force, name."""
        self.files.watch("admin.token_file", self.guard.files, self.guard.reload)
        file = settings.keys.file
        self.files.watch("keys.file", (file,) if file else (), lambda: self.proxy.prepare(settings)())

    def fit_open_files(self, settings: Settings) -> None:
        """Keep room for the replicas that there are, and for as many again where they are discovered."""
        self._fits = max(settings.replica_count, 2 * len(self.balancer.replicas) if settings.discovery.names else 0)
        self.proxy.limits = within_open_files(settings.limits, self._fits)

    def _discovered(self) -> None:
        if len(self.balancer.replicas) > self._fits:
            self.fit_open_files(self.part(self.settings))

    def not_ready(self) -> str | None:
        """Why no more traffic should come; None when it may."""
        starts = self.clock() - self.started_at < FIRST_PROBES_S
        if self.proxy.draining or self._stop.is_set():
            return "draining"
        if starts and self.discovery.missing:
            return "not all sources of replicas have answered yet"
        if starts and not self.health.probed:
            return "the first probes are not back yet"
        if not self.balancer.ready:
            return (
                "no replica is ready" if self.balancer.replicas or not self.discovery.feeds else "no replica is found"
            )
        return None

    async def run(self) -> int:
        """Serve until told to stop. Returns the exit code: 1 if streams were cut, else 0."""
        settings = self.settings
        _keep_freed_memory()
        self.fit_open_files(self.part(settings))
        data = server(_no_app, self.tls, http=self.proxy.protocol)
        if self.worker is None:
            admin = server(self.guard.before(Admin(self).app()), self.admin_tls)
            sockets = bind(settings.host, settings.port)
            admin_sockets = bind(settings.admin.host, settings.admin.port)
            self._obey_signals()
        else:
            admin = server(self.worker.before(Admin(self).app(), self), None)
            sockets, admin_sockets = self.worker.sockets, [self.worker.admin_socket()]
            self.worker.obey(self)
        self.proxy.start()
        for given in settings.replicas:
            self.fleet.join(given)
        self.discovery.start()
        if self.sharing is not None:
            await self.sharing.start()
        self.files.start()
        self.reload.watch()
        if self.worker is None:
            announce(settings, url(sockets[0], self.tls), url(admin_sockets[0], self.admin_tls))
        garbage = Garbage(lambda: any(r.in_flight for r in self.balancer.replicas.values()), self.clock)
        garbage.start()
        serving = [asyncio.create_task(data.serve(sockets)), asyncio.create_task(admin.serve(admin_sockets))]
        stopping = asyncio.create_task(self._stop.wait())
        if self.worker is not None:
            self.worker.serves(data, admin)
        ended, _ = await asyncio.wait([*serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        lost = stopping not in ended
        if lost:
            log.error("a listener has ended by itself: stopping")
            self._stop.set()
        cut = await self._drain(data, serving[0])
        admin.should_exit = True
        admin.force_exit = True
        for result in await asyncio.gather(*serving, return_exceptions=True):
            if isinstance(result, BaseException):
                log.error("a listener failed", exc_info=result)
        await self.reload.stop()
        await self.discovery.stop()
        if self.sharing is not None:
            await self.sharing.stop()
        await self.fleet.close()
        self.proxy.stop()
        garbage.stop()
        self.files.stop()
        self.access_log.close()
        if self.proxy.tracing is not None:
            self.proxy.tracing.close()
        if self.journal is not None:
            self.journal.close()
        return 1 if cut or lost else 0

    def _obey_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        loop.add_signal_handler(signal.SIGHUP, self._signalled if self.reload.source is None else self.reload.signal)

    def _signalled(self) -> None:
        if not self._stop.is_set():
            log.info("stopping: not ready from now on; again to stop at once")
        self.stop(at_once=self._stop.is_set())

    def stop(self, *, at_once: bool = False) -> None:
        """End in order, or cut off whatever is under way."""
        self._at_once |= at_once
        self._stop.set()

    async def _drain(self, server: Server, serving: asyncio.Task[None]) -> int:
        """Take nothing new, let streams end. Returns how many connections were cut."""
        drain = self.settings.drain
        if under_way := self.proxy.under_way:
            log.info(
                "under way: %s, with up to %g s to end", counted(under_way, "request"), drain.delay_s + drain.grace_s
            )
        self.proxy.draining = True  # what is answered from now on says that the connection ends with it
        await self._wait(drain.delay_s, lambda: False)
        self.proxy.begin_drain()
        server.should_exit = True
        # It ends when its port is closed and all connections are: some may come until it is closed.
        if await self._wait(drain.grace_s, serving.done):
            return 0
        cut = self.proxy.cut()
        server.force_exit = True
        if cut:
            log.warning("cut off: %s", counted(cut, "request"))
        return cut

    async def _wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Wait for so long, or until `done()`, or until all is to stop at once. Whether it was done."""
        end = self.clock() + seconds
        while not done():
            if self.clock() >= end or self._at_once:
                return False
            await asyncio.sleep(0.05)
        return True


def announce(settings: Settings, data: str, admin: str) -> None:
    """Say in the log what is served where, and by which policy."""
    log.info("warmroute listens on %s, admin on %s", data, admin)
    for warning in settings.warnings:
        log.warning("%s", warning)
    names = ", ".join(id for replica in settings.replicas for id in replica.ids) or "none"
    if settings.discovery.names:
        names += f", and those that are found by {', '.join(settings.discovery.names)}"
    policy = settings.policy
    beside = f", {policy.shadow.name} in its shadow," if policy.shadow.name else ""
    log.info("policy %s%s over %s: %s", policy.name, beside, counted(settings.replica_count, "replica"), names)


def _balancer(settings: Settings, journal: Journal | None, now: float) -> Balancer:
    policy = registry.make(settings.policy.name, settings.policy.parameters)
    directory = Directory(settings.directory.max_sessions, settings.directory.idle_s)
    if journal is None:
        return Balancer(policy, directory)
    balancer = JournaledBalancer(policy, directory, journal, settings.identity.secret.get_secret_value().encode())
    balancer.start(now)
    return balancer


def _tracing(settings: TracingSettings) -> Tracing | None:
    """Loaded only when it is wanted: OpenTelemetry is an extra, and slow to import."""
    if not settings.endpoint:
        return None
    from router.tracing import Tracing

    return Tracing(settings, VERSION)


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    """uvicorn wants an application; the data plane's protocol never calls it."""


def _keep_freed_memory() -> None:
    """Have glibc keep what large request bodies leave, up to 64 MiB, for the next ones.

    By default a block of a few hundred KB is mapped and given back each time, and every page of it is a fault: 7,000
    of them in 4 s under the `agent` load of benchmarks/, a twelfth of the CPU. Other C libraries are left alone.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_threshold, 32 << 20)
        mallopt(m_trim_threshold, 64 << 20)
