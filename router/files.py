"""Certificates, keys and tokens in files: read anew when a file has changed, without a restart."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

log = logging.getLogger("warmroute.files")

CHECK_S = 5.0
"""Between two looks at the files. Kubernetes itself takes a minute to bring a changed Secret to a pod."""

_Signature = tuple[tuple[int, int, int] | None, ...]


class Files:
    """Watches what was read from files. A half-changed set of files is an error that the next change mends."""

    def __init__(self) -> None:
        self._watched: dict[str, tuple[Sequence[str], Callable[[], None], _Signature]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, what: str, files: Sequence[str], reload: Callable[[], None]) -> None:
        """Watch what was just read from files, by what it is called in the log. Watched once, the last time counts.

        `reload` reads them again; it raises ValueError, and what was in force stays.
        """
        self._watched[what] = files, reload, _signature(files)

    def start(self) -> None:
        """Begin to look now and then, in the running loop."""
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._again)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        """Read anew what has changed since it was read."""
        for what, (files, reload, before) in list(self._watched.items()):
            signature = _signature(files)
            if signature == before:
                continue
            self._watched[what] = files, reload, signature
            try:
                reload()
            except ValueError as error:
                log.error("%s changed, and cannot be used, so what was read before stays in force: %s", what, error)
            else:
                log.info("%s changed, and was read anew", what)

    def _again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._again)
        self.check()


def text_of(file: str) -> str:
    """What is in a text file. Raises ValueError naming the file and the remedy."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{file!r}: {getattr(error, 'strerror', None) or error}: give a readable text file") from None


def bytes_of(file: str, most_bytes: int) -> bytes:
    """What is in a regular file of bounded size. Raises ValueError naming the file, what is wrong and the remedy.

    A pipe or a device is not waited for.
    """
    try:
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{file!r}: a pipe or a device: give a readable text file")
            data = stream.read(most_bytes + 1) if found.st_size <= most_bytes else b""
            size = max(found.st_size, len(data))  # it may have grown
    except OSError as error:
        raise ValueError(f"{file!r}: {error.strerror or error}: give a readable text file") from None
    if size > most_bytes:
        raise ValueError(f"{file!r} has {size} bytes, and {most_bytes} are the most that are read: give a shorter one")
    return data


def _signature(files: Sequence[str]) -> _Signature:
    """Changes when a file is written, or a link on its path leads elsewhere."""
    found: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            seen = os.stat(file)
        except OSError:
            found.append(None)
        else:
            found.append((seen.st_mtime_ns, seen.st_ino, seen.st_size))
    return tuple(found)
