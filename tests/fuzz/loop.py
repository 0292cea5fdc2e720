"""An event loop without sockets or waiting: callbacks run in order, time passes when told to."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

MAX_CALLBACKS = 20_000
"""In one settling; more means that something goes round for ever."""


class Hang(AssertionError):
    """Callbacks beget callbacks without end."""


class FuzzLoop(asyncio.AbstractEventLoop):
    """What the data path asks of a loop. Everything that reaches the exception handler is in `errors`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.errors: list[object] = []
        self.connecting: deque[tuple[asyncio.Future[Any], Callable[[], asyncio.Protocol], str]] = deque()
        """Connections asked for: what is waited for, the protocol's factory, the host."""
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()

    # What is called by asyncio and the router

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """asyncio's handles report it; a cancelled timer is skipped when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **_: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        return asyncio.Task(coro, loop=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or context)

    async def create_connection(self, factory: Any, host: str, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Waits for whoever drives the loop to say how it went."""
        waiter = self.create_future()
        self.connecting.append((waiter, factory, host))
        try:
            return await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result()[0].abort()  # as uvloop: given up just as it was made
            raise

    # What is called by the case

    def guarded(self, call: Callable[..., object], *args: object) -> None:
        """Call a protocol as a loop would: what it raises is noted."""
        try:
            call(*args)
        except Exception as error:
            self.errors.append(error)

    def settle(self) -> None:
        """Run what is ready until nothing is. Raises Hang."""
        ready = self._ready
        for _ in range(MAX_CALLBACKS):
            if not ready:
                return
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()
        raise Hang(f"still busy after {MAX_CALLBACKS} callbacks")

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and what is due happen in order."""
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, handle = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            if not handle.cancelled():
                handle._run()
            self.settle()
        self.now = end
