"""The composition root: settings in, a running router out, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from policies import registry
from policies.balancer import Balancer
from policies.directory import Directory
from router.admin import Admin
from router.configuration import ConfigError
from router.fleet import Fleet
from router.garbage import Garbage
from router.health import Health
from router.identity import DEFAULT_RULES, IdentityRules, parse_rules
from router.logs import AccessLog
from router.metrics import Metrics
from router.proxy.proxy import Proxy
from router.reports import Reports
from router.settings import LimitSettings, Settings
from router.switching import Switching

log = logging.getLogger("warmroute")

FIRST_PROBES_S = 5.0
"""How long readiness waits for the first probe of every replica."""
BACKLOG = 4096


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the router."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Router:
    """One process: data plane, core and control plane."""

    def __init__(self, settings: Settings, read: Callable[[], Settings] | None = None) -> None:
        """`read` reads the configuration anew, for SIGHUP; raises ConfigError. Without it SIGHUP stops the router."""
        self.settings = settings
        self._read = read
        self.clock = time.monotonic
        directory = Directory(settings.directory.max_sessions, settings.directory.idle_s)
        self.balancer = Balancer(registry.make(settings.policy.name, settings.policy.parameters), directory)
        self.switching = Switching(self.balancer, settings.policy, self.clock)
        rules = DEFAULT_RULES if settings.identity.rules is None else parse_rules(settings.identity.rules)
        self.identity = IdentityRules(rules, settings.identity.secret.get_secret_value().encode())
        self.metrics = Metrics(self.balancer, self.clock)
        self.health = Health(self.balancer, settings.health, self.clock)
        self.reports = Reports(self.balancer, settings.reports, self.clock)
        self.fleet = Fleet(self.balancer, self.health, self.reports, settings, self.clock)
        form = settings.log.format
        if form == "auto":
            form = "text" if sys.stdout.isatty() else "json"
        self.access_log = AccessLog(form, sys.stdout.fileno())
        self.proxy = Proxy(
            balancer=self.balancer,
            identity=self.identity,
            settings=settings,
            metrics=self.metrics,
            access_log=self.access_log,
            health=self.health,
        )
        self.metrics.proxy = self.proxy
        self._started_at = self.clock()
        self._stop = asyncio.Event()
        self._signals = 0

    def not_ready(self) -> str | None:
        """Why no more traffic should come; None when it may."""
        if self.proxy.draining or self._stop.is_set():
            return "draining"
        if not self.health.probed and self.clock() - self._started_at < FIRST_PROBES_S:
            return "the first probes are not back yet"
        if not self.balancer.ready:
            return "no replica is ready"
        return None

    async def run(self) -> int:
        """Serve until told to stop. Returns the exit code: 1 if streams were cut, else 0."""
        settings = self.settings
        _keep_freed_memory()
        self.proxy.limits = _within_open_files(settings.limits, len(settings.replicas))
        sockets = _bind(settings.host, settings.port)
        admin_sockets = _bind(settings.admin.host, settings.admin.port)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        loop.add_signal_handler(signal.SIGHUP, self._reload if self._read is not None else self._signalled)
        self.proxy.start()
        for given in settings.replicas:
            self.fleet.join(given)
        data = _Server(_config(_no_app, http=self.proxy.protocol))
        admin = _Server(_config(Admin(self).app()))
        self._announce(sockets[0], admin_sockets[0])
        garbage = Garbage(lambda: any(r.in_flight for r in self.balancer.replicas.values()), self.clock)
        garbage.start()
        serving = [asyncio.create_task(data.serve(sockets)), asyncio.create_task(admin.serve(admin_sockets))]
        stopping = asyncio.create_task(self._stop.wait())
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
        await self.fleet.close()
        self.proxy.stop()
        garbage.stop()
        self.access_log.close()
        return 1 if cut or lost else 0

    def _reload(self) -> None:
        """Read the configuration anew and put its policies in force; all or nothing."""
        assert self._read is not None
        try:
            settings = self._read()
            self.switching.reload(settings.policy, "SIGHUP")
        except (ConfigError, ValueError) as error:
            log.error("the configuration was not reloaded, nothing is changed: %s", error)
            return
        others = [name for name in type(settings).model_fields if name != "policy"]
        if waiting := [name for name in others if getattr(settings, name) != getattr(self.settings, name)]:
            log.warning("reloaded the policies; takes a restart: %s", ", ".join(waiting))
        else:
            log.info("reloaded the configuration")

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals == 1:
            log.info("stopping: not ready from now on; again to stop at once")
        self._stop.set()

    async def _drain(self, server: _Server, serving: asyncio.Task[None]) -> int:
        """Take nothing new, let streams end. Returns how many connections were cut."""
        drain = self.settings.drain
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
            log.warning("%d requests were cut off", cut)
        return cut

    async def _wait(self, seconds: float, done: Callable[[], bool]) -> bool:
        """Wait for so long, or until `done()`, or until a second signal. Whether it was done."""
        end = self.clock() + seconds
        while not done():
            if self.clock() >= end or self._signals > 1:
                return False
            await asyncio.sleep(0.05)
        return True

    def _announce(self, data: socket.socket, admin: socket.socket) -> None:
        log.info("warmroute listens on http://%s, admin on http://%s", _authority(data), _authority(admin))
        names = ", ".join(replica.id for replica in self.settings.replicas) or "none: every request will be refused"
        policy = self.settings.policy
        beside = f", {policy.shadow.name} in its shadow," if policy.shadow.name else ""
        log.info("policy %s%s over %d replicas: %s", policy.name, beside, len(self.settings.replicas), names)


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    """uvicorn wants an application; the data plane's protocol never calls it."""


def _config(app: Any, **given: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, proxy_headers=False, backlog=BACKLOG, **given
    )


class CannotListen(Exception):
    """A port that cannot be had. The message names host, port and remedy."""


def _bind(host: str, port: int) -> list[socket.socket]:
    """A bound socket for each address of the host (`localhost` may have two). Raises CannotListen."""
    sockets: list[socket.socket] = []
    try:
        for family, kind, proto, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        ):
            sock = socket.socket(family, kind, proto)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family is socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if sockets[1:]:  # the same port, also where 0 asks for any
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            sock.bind(address)
            sock.setblocking(False)
    except (OSError, UnicodeError) as error:
        for sock in sockets:
            sock.close()
        raise CannotListen(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}: choose another host or port"
        ) from None
    return sockets


def _authority(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _within_open_files(limits: LimitSettings, replicas: int) -> LimitSettings:
    """The limits, with no more connections than there are descriptors for: every stream takes two.

    Beyond that, clients would be reset without a word, and replicas blamed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # the usual soft limit of 1,024 is soon reached
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = max(1, (allowed - 32 - 4 * replicas) // 2)
    if allowed == resource.RLIM_INFINITY or room >= limits.connections:
        return limits
    if "connections" in limits.model_fields_set:
        log.warning(
            "limits.connections is %d, but the %d open files that the system allows have room for %d: "
            "raise its limit (ulimit -Hn) or lower the setting",
            limits.connections,
            allowed,
            room,
        )
    else:
        log.info("room for %d client connections, with %d open files allowed (ulimit -Hn)", room, allowed)
    return limits.model_copy(update={"connections": room})


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
