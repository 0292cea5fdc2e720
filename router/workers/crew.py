"""The workers' processes: started, told what to do, and started again when they end by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path

import httpx

from router.listening import CannotListen, bind
from router.workers.assignment import Assignment, encoded
from router.workers.worker import AT_ONCE, RELOAD, STOP, UP

log = logging.getLogger("warmroute.workers")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Before a worker is started for the second time in a row, and what that grows to. The first time there is none.

So long those who have connected can wait for it. When it grows, connections are left to the other workers meanwhile.
"""
SOUND_S = 60.0
"""A worker that has served for so long may fail afresh."""
LAST_S = 10.0
"""Between being told to end at once and being killed."""
ASK_TIMEOUT_S = 30.0
"""For a worker to answer on its admin socket."""


class Member:
    """One worker, and those that take its place after it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.up = False
        """Whether it serves."""
        self.process: Process | None = None
        self.client: httpx.AsyncClient | None = None
        """Asks its admin application."""
        self.sockets: list[socket.socket] = []
        """Of the data port: kept while it is replaced, so that those who wait for it are served by the next."""
        self._cord: socket.socket | None = None
        self._orders = b""
        """Given before it could be told anything."""
        self._starts = 0

    @property
    def name(self) -> str:
        """Of this very process, never used again."""
        return f"w{self.number}.{self._starts}"

    def tell(self, order: bytes) -> None:
        """Have it do that, as soon as it can."""
        if self._cord is None:
            self._orders += order
        else:
            with contextlib.suppress(OSError):
                self._cord.send(order)

    async def run(self, assignment: Callable[[Member, str], Assignment], folder: Path, up: Callable[[], None]) -> int:
        """Start it, and wait until it ends. Returns its exit code, that of a signal negative. Calls `up` meanwhile."""
        self._starts += 1
        self._orders = b""
        admin = str(folder / f"{self.name}.sock")
        given = assignment(self, admin)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                self.process = await _start(f"{given.number}/{given.count}", theirs, given.listeners)
            return await self._follow(ours, given, admin, up)
        finally:
            self.up = False
            self._cord = None
            ours.close()
            if self.client is not None:
                await self.client.aclose()
                self.client = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(admin)

    async def _follow(self, cord: socket.socket, given: Assignment, admin: str, up: Callable[[], None]) -> int:
        assert self.process is not None
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # it has ended already, which its exit code tells
            await loop.sock_sendall(cord, encoded(given))
            self._cord = cord
            self.tell(self._orders)
            if await loop.sock_recv(cord, len(UP)) == UP:
                self.client = httpx.AsyncClient(
                    transport=httpx.AsyncHTTPTransport(uds=admin), base_url="http://worker", timeout=ASK_TIMEOUT_S
                )
                self.up = True
                up()
        return await self.process.wait()


async def _start(title: str, cord: socket.socket, listeners: list[int]) -> Process:
    """A session of its own: what a terminal sends to all of a group reaches the supervisor alone."""
    # Modules are found as this process finds them: in the folder where it was started, or not there.
    options = [] if os.getcwd() in sys.path[:1] else ["-P"]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *options,
        "-m",
        "router.workers",
        title,
        str(cord.fileno()),
        str(os.getpid()),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(cord.fileno(), *listeners),
        start_new_session=True,
    )


class CannotStart(Exception):
    """A worker ended before it served. Holds the exit code; the worker itself has said why."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Crew:
    """All workers."""

    def __init__(
        self,
        host: str,
        sockets: list[list[socket.socket]],
        folder: Path,
        assignment: Callable[[Member, str], Assignment],
    ) -> None:
        """`sockets` of the data port, some for each worker; `assignment` of a worker, with its admin socket's path."""
        self._host = host
        self._port = sockets[0][0].getsockname()[1]
        self._folder = folder
        self._assignment = assignment
        self.members = [Member(number) for number in range(1, len(sockets) + 1)]
        for member, given in zip(self.members, sockets, strict=True):
            member.sockets = given
        self.ended: Callable[[str], None] = lambda name: None
        """Called with the name of a worker that has ended."""
        self.stopping = False
        self.failed = False
        """Whether one ended with another exit code than 0 while all were stopping."""
        self._keeping: list[asyncio.Task[None]] = []

    @property
    def living(self) -> list[Member]:
        """Those that serve."""
        return [member for member in self.members if member.up]

    async def start(self) -> None:
        """Start all, and return when all serve, or are to stop. Raises CannotStart.

        The first alone: what keeps it from starting would keep all of them.
        """
        for some in (self.members[:1], self.members[1:]):
            up = {member: asyncio.get_running_loop().create_future() for member in some}
            keeping = {member: asyncio.create_task(self._keep(member, up[member])) for member in some}
            self._keeping += keeping.values()
            await asyncio.gather(*up.values())
            if self.stopping:
                return
        log.info("%d workers serve", len(self.members))

    async def _keep(self, member: Member, first_up: asyncio.Future[None]) -> None:
        pause_s = 0.0
        while not self.stopping:
            began = time.monotonic()
            try:
                code = await member.run(self._assignment, self._folder, lambda: _set(first_up))
            except OSError as error:  # of descriptors, processes or memory there are too few
                log.error("worker %d cannot be started: %s", member.number, error)
                code = 1
            self.ended(member.name)
            if self.stopping:
                self.failed |= code != 0
                break
            if not first_up.done():
                first_up.set_exception(CannotStart(code))
                return
            pause_s = 0.0 if time.monotonic() - began > SOUND_S else pause_s
            if pause_s > FIRST_PAUSE_S:
                _close(member)  # those who waited there are reset, but nobody else comes to wait
            when = f" in {pause_s:g} s" if pause_s else ""
            log.error("worker %d %s: started again%s", member.number, _ending(code), when)
            await asyncio.sleep(pause_s)
            await self._listen(member)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s or FIRST_PAUSE_S)
        _set(first_up)

    async def _listen(self, member: Member) -> None:
        """See that it has sockets, unless all stop."""
        while not (self.stopping or member.sockets):
            try:
                member.sockets = bind(self._host, self._port, shared=True)
            except CannotListen as error:
                log.error("worker %d is not started yet: %s", member.number, error)
                await asyncio.sleep(LONGEST_PAUSE_S)

    def reload(self) -> None:
        """Have all read the configuration anew, as on SIGHUP."""
        for member in self.members:
            member.tell(RELOAD)

    def stop(self, *, at_once: bool = False) -> None:
        """Have all end, in order or at once."""
        self.stopping = True
        for member in self.members:
            _close(member)  # each has its own; ours would keep the port open
            member.tell(AT_ONCE if at_once else STOP)

    async def all_ended(self) -> None:
        """Wait until all have ended."""
        await asyncio.gather(*self._keeping, return_exceptions=True)

    def kill(self) -> None:
        """End what is left, and start nothing any more."""
        self.stopping = True
        for member in self.members:
            if member.process is not None and member.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    member.process.kill()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _close(member: Member) -> None:
    for sock in member.sockets:
        sock.close()
    member.sockets = []


def _ending(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"has ended with {code}"
