"""Work that may hang, as reading a file may, done in a thread that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def aside(work: Callable[[], T]) -> asyncio.Future[T]:
    """What `work` returns or raises, once it has. Unlike with `asyncio.to_thread`, a process may end meanwhile."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    # Whoever has given up waiting need not be told of a fault.
    done.add_done_callback(lambda done: done.cancelled() or done.exception())

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def run() -> None:
        result: T | None = None
        fault: BaseException | None = None
        try:
            result = work()
        except Exception as error:
            fault = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, result, fault)

    Thread(target=run, name="aside", daemon=True).start()
    return done
