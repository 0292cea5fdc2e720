"""One of several routers: what a `Router` has of its supervisor, and how the process begins."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router import stderr
from router.commands.common import EXIT_FAILED, EXIT_USAGE, fail
from router.configuration import ConfigError, load
from router.metrics.merged import Samples
from router.settings import Settings
from router.source import Source
from router.workers.assignment import Assignment, receive
from router.workers.figures import loads_of
from router.workers.part import part_of

if TYPE_CHECKING:
    from router.app import Router
    from router.listening import Server

log = logging.getLogger("warmroute.worker")

STOP, AT_ONCE, RELOAD = b"s", b"n", b"r"
"""What a supervisor tells a worker, a byte each."""
UP = b"u"
"""What a worker tells its supervisor: it serves."""

CLIENT = "x-warmroute-client"
"""Header by which the supervisor says who asks the admin port."""

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl(2): the signal a process gets when its parent dies."""


class Worker:
    """One process of several under a supervisor."""

    def __init__(self, assignment: Assignment, cord: socket.socket) -> None:
        self._assignment = assignment
        self._cord = cord
        self._announcing: asyncio.Task[None] | None = None
        self.sockets = [socket.socket(fileno=number) for number in assignment.listeners]
        """Of the data port, its own ones."""

    def part(self, settings: Settings) -> Settings:
        """Its part of settings for all."""
        given = self._assignment
        return part_of(settings, given.number, given.count, given.secret)

    def admin_socket(self) -> socket.socket:
        """Where the supervisor asks what an operator asks."""
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(self._assignment.admin)
        sock.setblocking(False)
        return sock

    def before(self, app: ASGIApp, router: Router) -> ASGIApp:
        """The admin application with what only the supervisor asks. No guard: only it can reach the socket."""
        samples = Samples(router.metrics)

        async def told(_: Request) -> Response:
            return Response(await samples.told(), media_type="application/msgpack")

        async def loads(_: Request) -> Response:
            return JSONResponse(loads_of(router))

        return _asked_by(Starlette(routes=[Route("/samples", told), Route("/loads", loads), Mount("/", app)]))

    def obey(self, router: Router) -> None:
        """Do what the supervisor says from now on. It alone minds SIGHUP; SIGTERM ends this worker in order."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # Once and again the same: a service manager sends it to all processes, and so does the supervisor.
            loop.add_signal_handler(number, router.stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        self._cord.setblocking(False)
        loop.add_reader(self._cord, self._told, router)

    def serves(self, *servers: Server) -> None:
        """Tell the supervisor as soon as they do."""
        self._announcing = asyncio.create_task(self._announce(servers))

    async def _announce(self, servers: tuple[Server, ...]) -> None:
        for each in servers:
            await each.listening.wait()
        with contextlib.suppress(OSError):
            self._cord.send(UP)

    def _told(self, router: Router) -> None:
        try:
            told = self._cord.recv(64)
        except BlockingIOError:
            return
        if not told:
            asyncio.get_running_loop().remove_reader(self._cord)
            log.error("the supervisor has gone: stopping at once")
        if RELOAD in told:
            router.reload.signal()
        if not told or STOP in told or AT_ONCE in told:
            router.stop(at_once=not told or AT_ONCE in told)


def _asked_by(app: ASGIApp) -> ASGIApp:
    """Puts who asked the supervisor in the place of the supervisor."""

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == CLIENT.encode():
                    host, _, port = value.decode("latin-1").rpartition(":")
                    scope["client"] = (host, int(port))
        await app(scope, receive, send)

    return asked


def _die_with(supervisor: int) -> None:
    """Be killed when the supervisor is gone, however busy this process is then."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(EXIT_FAILED)


def work(cord: socket.socket, supervisor: int) -> int:
    """Be a worker until told to stop. Returns the exit code, as `warmroute serve` has it."""
    _die_with(supervisor)
    given = receive(cord)
    stderr.begin(given.settings.log, f"w{given.number}")

    import uvloop  # as in `warmroute serve`

    from router.app import Router
    from router.store.opening import store_of
    from router.store.remote import RemoteStore

    file, flags = given.file, given.flags
    source = None if file is None else Source(file, lambda: load(file, flags), given.read)

    async def run() -> int:
        store = store_of(given.settings) or RemoteStore(given.store)
        try:
            router = Router(given.settings, source, store, Worker(given, cord))
        except ValueError as error:  # a file of keys, a token or certificates was good when the supervisor read it
            raise ConfigError(f"worker {given.number} cannot use the settings in force: {error}") from None
        return await router.run()

    try:
        return uvloop.run(run())
    except ConfigError as error:
        return fail(str(error), EXIT_USAGE)
