"""The workers' processes: started, told what to do, and started again when they end by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

from router.listening import CannotListen, bind
from router.units import counted
from router.workers.assignment import Assignment
from router.workers.member import Member
from router.workers.worker import AT_ONCE, RELOAD, STOP

log = logging.getLogger("warmroute.workers")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Before a worker is started for the second time in a row, and what that grows to. The first time there is none.

So long those who have connected can wait for it. When it grows, connections are left to the other workers meanwhile.
"""
SOUND_S = 60.0
"""A worker that has served for so long may fail afresh."""


class CannotStart(Exception):
    """A worker ended before any had served. Holds the exit code; the worker itself has said why."""

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
        self.failed = False
        """Whether one that had served ended with another exit code than 0 while all were stopping."""
        self._served = False
        """Whether any has."""
        self._stopping = asyncio.Event()
        self._keeping: list[asyncio.Task[None]] = []

    @property
    def stopping(self) -> bool:
        """Whether all are to end, and none is started any more."""
        return self._stopping.is_set()

    @property
    def living(self) -> list[Member]:
        """Those that serve."""
        return [member for member in self.members if member.up]

    async def start(self) -> None:
        """Start all, and return when all serve, or are to stop. Raises CannotStart.

        The first alone: what keeps it from starting would keep all of them. Once that serves, whatever happens to
        others must not cut it off.
        """
        log.info("%s start", counted(len(self.members), "worker"))
        for some in (self.members[:1], self.members[1:]):
            up = {member: asyncio.get_running_loop().create_future() for member in some}
            keeping = {member: asyncio.create_task(self._keep(member, up[member])) for member in some}
            self._keeping += keeping.values()
            await asyncio.gather(*up.values())
            if self.stopping:
                return
        log.info("%s serve", counted(len(self.members), "worker"))

    async def _keep(self, member: Member, first_up: asyncio.Future[None]) -> None:
        pause_s = 0.0
        while not self.stopping:
            began = time.monotonic()
            try:
                code = await member.run(self._assignment, self._folder, lambda: self._up(first_up))
            except OSError as error:  # of descriptors, processes or memory there are too few
                log.error("worker %d cannot be started: %s", member.number, error)
                code = 1
            self.ended(member.name)
            if self.stopping:
                self.failed |= code != 0 and member.has_served
                break
            if not self._served:
                first_up.set_exception(CannotStart(code))
                return
            pause_s = 0.0 if time.monotonic() - began > SOUND_S else pause_s
            if pause_s > FIRST_PAUSE_S:
                member.close()  # those who waited there are reset, but nobody else comes to wait
            when = f" in {pause_s:g} s" if pause_s else ""
            log.error("worker %d %s: started again%s", member.number, _ending(code), when)
            await self._pause(pause_s)
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
                await self._pause(LONGEST_PAUSE_S)

    def _up(self, first_up: asyncio.Future[None]) -> None:
        self._served = True
        _set(first_up)

    async def _pause(self, seconds: float) -> None:
        """Unless all are to end before it is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def reload(self) -> None:
        """Have all read the configuration anew, as on SIGHUP."""
        for member in self.members:
            member.tell(RELOAD)

    def stop(self, *, at_once: bool = False) -> None:
        """Have all end, in order or at once."""
        self._stopping.set()
        for member in self.members:
            member.close()  # each has its own; ours would keep the port open
            member.tell(AT_ONCE if at_once else STOP)

    async def all_ended(self) -> None:
        """Wait until all have ended."""
        await asyncio.gather(*self._keeping, return_exceptions=True)

    def kill(self) -> None:
        """End what is left, and start nothing any more."""
        self._stopping.set()
        for member in self.members:
            member.kill()

    def kill_silent(self) -> None:
        """End those that do not answer, and so do not end by themselves."""
        for member in self.living:
            if member.silent:
                log.error("worker %d does not answer: killed", member.number)
                member.kill()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _ending(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"has ended with {code}"
