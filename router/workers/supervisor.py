"""The process that `serve --workers N` starts: it holds the admin port and the store, and keeps the workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from router.admin import Guard
from router.app import announce
from router.changes import kept
from router.configuration import ConfigError
from router.files import Files
from router.listening import bind, server, server_tls, url
from router.reload import RESTART
from router.settings import Settings
from router.source import Source
from router.store import MemoryStore
from router.store.served import Served
from router.workers.assignment import Assignment
from router.workers.crew import CannotStart, Crew
from router.workers.folder import sockets_folder
from router.workers.front import Front
from router.workers.member import Member

log = logging.getLogger("warmroute.workers")

SLACK_S = 30.0
"""A worker that answers may take so much longer to end than it is given."""
LAST_S = 10.0
"""Between being told to end at once and being killed."""


class Supervisor:
    """Of `settings.workers` routers."""

    def __init__(self, settings: Settings, source: Source | None, flags: dict[str, Any]) -> None:
        """`flags` are the settings of the command line, which `source` has in it already."""
        self.settings = settings
        """In force, of all workers together."""
        self._source = source
        self._flags = flags
        self._secret = secrets.token_hex(32)
        self._tls = server_tls(settings.tls)
        self._admin_tls = server_tls(settings.admin.tls)
        self._guard = Guard(settings.admin)
        self._files = Files()
        if self._admin_tls is not None:
            self._files.watch("admin.tls", self._admin_tls.files, self._admin_tls.reload)
        self._watch_token()
        self._told = asyncio.Event()
        """A signal came."""
        self._crew: Crew
        self._store_path = ""

    async def run(self) -> int:
        """Keep the workers until told to stop. Returns the exit code: 1 if one of them cut something, else 0.

        When they cannot even start, that of the first. Raises CannotListen.
        """
        with sockets_folder() as folder:
            return await self._run(folder)

    async def _run(self, folder: Path) -> int:
        settings = self.settings
        bounds = settings.directory
        served = Served(MemoryStore(time.monotonic, bounds.max_sessions, bounds.idle_s))
        self._store_path = str(folder / "store")
        await served.start(self._store_path)
        admin_sockets = bind(settings.admin.host, settings.admin.port)
        self._crew = Crew(settings.host, shared_sockets(settings), folder, self._assignment)
        data_url = url(self._crew.members[0].sockets[0], self._tls)
        front = Front(self._crew, self.reloaded)
        self._crew.ended = front.merged.end
        admin = server(self._guard.before(front.app()), self._admin_tls)
        serving = asyncio.create_task(admin.serve(admin_sockets))
        self._obey_signals()
        self._files.start()
        tasks = [] if self._source is None else [asyncio.create_task(self._watch(self._source))]
        try:
            code = await self._keep(lambda: announce(settings, data_url, url(admin_sockets[0], self._admin_tls)))
        finally:
            self._crew.kill()
            await self._crew.all_ended()
            admin.should_exit = admin.force_exit = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(serving, *tasks, return_exceptions=True)
            self._files.stop()
            await served.stop()
        return code

    async def _keep(self, up: Callable[[], None]) -> int:
        """Until told to stop. Calls `up` when all serve. Returns the exit code."""
        starting = asyncio.create_task(self._crew.start())
        told = asyncio.create_task(self._told.wait())
        await asyncio.wait([starting, told], return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and (error := starting.exception()) is not None:
            if not isinstance(error, CannotStart):
                raise error
            log.error("a worker could not start: stopping")
            return error.code if error.code > 0 else 1
        if not self._crew.stopping and not told.done():
            up()
        await told
        drain = self.settings.drain
        await self._end(drain.delay_s + drain.grace_s)
        await asyncio.gather(starting, return_exceptions=True)
        return 1 if self._crew.failed else 0

    async def _end(self, drain_s: float) -> None:
        """Let the workers end, at once when a second signal comes, and by force when they do not."""
        self._told.clear()
        log.info("stopping: not ready from now on; again to stop at once")
        self._crew.stop()
        ended = asyncio.create_task(self._crew.all_ended())
        told = asyncio.create_task(self._told.wait())
        for limit_s in (drain_s, SLACK_S):
            await asyncio.wait([ended, told], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            self._crew.kill_silent()
        told.cancel()
        if not ended.done():
            self._crew.stop(at_once=True)
            await asyncio.wait([ended], timeout=LAST_S)
        self._crew.kill()
        await ended

    def _assignment(self, member: Member, admin: str) -> Assignment:
        listeners = [sock.fileno() for sock in member.sockets]
        source = self._source
        return Assignment(
            number=member.number,
            count=len(self._crew.members),
            settings=self.settings,
            secret=self._secret,
            admin=admin,
            store=self._store_path,
            listeners=listeners,
            file=None if source is None else source.file,
            flags=self._flags,
            read=None if source is None else source.digest,
        )

    # Signals and the configuration

    def _obey_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told.set)
        loop.add_signal_handler(signal.SIGHUP, self._told.set if self._source is None else self._hang_up)

    def _hang_up(self) -> None:
        self._crew.reload()
        self.reloaded()

    def reloaded(self) -> None:
        """The workers have read the configuration anew, or are about to: what is the supervisor's follows."""
        if self._source is None:
            return
        with contextlib.suppress(ConfigError, ValueError):  # the workers say what is wrong with it
            settings = kept(self.settings, self._source.read(), RESTART)
            settings.admin.check_guarded()
            self._guard.prepare(settings.admin)()
            self.settings = settings
            self._watch_token()

    async def _watch(self, source: Source) -> None:
        """As each worker does for itself."""
        async for _ in source.changes(lambda: self.settings.reload):
            self.reloaded()

    def _watch_token(self) -> None:
        self._files.watch("admin.token_file", self._guard.files, self._guard.reload)


def shared_sockets(settings: Settings) -> list[list[socket.socket]]:
    """Sockets of the data port for each worker. Raises CannotListen, also when somebody else shares the port."""
    host, port = settings.host, settings.port
    if port:
        for sock in bind(host, port):
            sock.close()
    first = bind(host, port, shared=True)
    port = first[0].getsockname()[1]
    return [first, *(bind(host, port, shared=True) for _ in range(settings.workers - 1))]
