"""Single keys from a terminal, which is left as it was found."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keys_at_once() -> Iterator[bool]:
    """Keys are read as they are pressed and are not shown. Says whether there is a terminal to press them on."""
    if not sys.stdin.isatty():
        yield False
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield True
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def key(limit_s: float) -> str:
    """The next key, or nothing when none comes in time. At the terminal's end: `q`."""
    ready, _, _ = select.select([sys.stdin.fileno()], [], [], limit_s)
    if not ready:
        return ""
    return os.read(sys.stdin.fileno(), 1).decode("latin-1") or "q"
