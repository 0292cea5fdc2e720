"""The loop: draw what is new, hear keys, until told to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

from rich.console import Console
from rich.live import Live

from router.console import Access
from router.top.feed import Feed, Seen
from router.top.keyboard import key, keys_at_once
from router.top.screen import Screen

SORTS = {"t": "trouble", "n": "name", "l": "load", "w": "wait", "c": "cache"}
"""Keys, and the orders of replicas that they choose."""

KEYS = "q quits; order: " + ", ".join(f"{pressed} {sort}" for pressed, sort in SORTS.items())

LOOK_S = 0.1
"""Between looks whether there is something to draw."""

PIPE_WIDTH = 200
"""Columns where there is no terminal: a line that is cut is of no use to a program."""


def once(seen: Seen, sort: str) -> None:
    """Print it; without colours and escape codes where that is no terminal."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(Screen(seen, sort), end="")


def live(admin: Access, sort: str) -> None:
    """Draw until `q`, or a signal that ends the process; the terminal is left as it was."""
    feed, console = Feed(admin, sort), Console()
    with _ended_by_signals(), keys_at_once() as heard, Live(console=console, screen=True, auto_refresh=False) as drawn:
        size = console.size
        while True:
            if feed.changed.is_set() or console.size != size:
                feed.changed.clear()
                size = console.size
                drawn.update(Screen(feed.seen, feed.sort, size.height, KEYS if heard else ""), refresh=True)
            pressed = key(LOOK_S) if heard else _pause()
            if pressed == "q":
                return
            if pressed in SORTS:
                feed.sort = SORTS[pressed]
                feed.hurry()


def _pause() -> str:
    time.sleep(LOOK_S)
    return ""


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP unwind, so that the terminal is given back."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise _Ended

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with contextlib.suppress(_Ended):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ended(BaseException):
    """A signal came."""
