"""One worker's process: started, told what to do, asked, and killed when it stands still."""

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

from router.workers.assignment import Assignment, encoded
from router.workers.worker import UP

log = logging.getLogger("warmroute.workers")

ALIVE_S = 2.0
"""Between two looks whether a worker answers, and how long each waits for it."""
HUNG_LOOKS = 15
"""Unanswered in a row, half a minute, until it is killed. Looks and not seconds: a machine that slept, or a supervisor
that was stopped, has not looked."""


class Member:
    """One worker, and those that take its place after it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.up = False
        """Whether it serves."""
        self.has_served = False
        """Whether this very process has ever served."""
        self.silent = False
        """Whether it serves and did not answer when it was last looked after."""
        self.process: Process | None = None
        self.sockets: list[socket.socket] = []
        """Of the data port: kept while it is replaced, so that those who wait for it are served by the next."""
        self._client: httpx.AsyncClient | None = None
        """Asks its admin application."""
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

    def kill(self) -> None:
        """End its process, whatever that is at."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    def close(self) -> None:
        """Its sockets of the data port: what waits there is reset, unless it has them, too."""
        for sock in self.sockets:
            sock.close()
        self.sockets = []

    async def ask(self, request: httpx.Request, limit_s: float) -> httpx.Response | None:
        """What its admin application answers; None when that does not come in time, or it ends."""
        try:
            return await self._answer(request, limit_s)
        except (TimeoutError, httpx.TransportError):
            return None

    async def run(self, assignment: Callable[[Member, str], Assignment], folder: Path, up: Callable[[], None]) -> int:
        """Start it, and wait until it ends. Returns its exit code, that of a signal negative. Calls `up` meanwhile."""
        self._starts += 1
        self._orders = b""
        self.has_served = False
        admin = str(folder / f"{self.name}.sock")
        given = assignment(self, admin)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                self.process = await _start(f"{given.number}/{given.count}", theirs, given.listeners)
            return await self._follow(ours, given, admin, up)
        finally:
            self.up = self.silent = False
            self._cord = None
            ours.close()
            if self._client is not None:
                await self._client.aclose()
                self._client = None
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
                transport = httpx.AsyncHTTPTransport(uds=admin)
                self._client = httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=None)
                self.up = self.has_served = True
                up()
        looking = asyncio.create_task(self._look_after()) if self.up else None
        try:
            return await self.process.wait()
        finally:
            if looking is not None:
                looking.cancel()

    async def _look_after(self) -> None:
        """See whether its loop goes on, and kill it when that has stood still for long: it serves nobody then."""
        unanswered = 0
        while unanswered < HUNG_LOOKS:
            began = time.monotonic()
            try:
                await self._answer(httpx.Request("GET", "http://worker/livez"), ALIVE_S)
            except TimeoutError:
                unanswered += 1
            except httpx.TransportError:  # it ends, and closes that port first
                self.silent = False
            else:
                if self.silent:
                    log.warning("worker %d answers again", self.number)
                self.silent, unanswered = False, 0
            if unanswered and not self.silent:
                self.silent = True
                log.warning("worker %d does not answer: left out of what is told until it does", self.number)
            await asyncio.sleep(began + ALIVE_S - time.monotonic())
        log.error("worker %d has not answered for %g s: killed", self.number, HUNG_LOOKS * ALIVE_S)
        self.kill()

    async def _answer(self, request: httpx.Request, limit_s: float) -> httpx.Response:
        """Raises TimeoutError, or TransportError when it ends."""
        client = self._client
        if client is None or client.is_closed:
            raise httpx.TransportError("it does not serve")
        async with asyncio.timeout(limit_s):
            try:
                return await client.send(request)
            except RuntimeError as error:  # of a client that was closed meanwhile, as its worker ended
                raise httpx.TransportError(str(error)) from None


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
