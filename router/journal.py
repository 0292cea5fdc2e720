"""The decision journal's file: lines written off the event loop, rotated by size.

What is in the lines is for `router.journaled` to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from enum import Enum
from itertools import pairwise
from pathlib import Path

import msgspec

from router.configuration import ConfigError
from router.settings import JournalSettings

log = logging.getLogger("warmroute.journal")

FLUSH_S = 0.1
"""How long a line may wait for others before it is written."""
BATCH_BYTES = 1 << 18
"""A batch this long is handed over at once."""
MAX_BATCHES = 256
"""Batches waiting for a slow disk; past it lines are dropped and counted, never waited for."""


class _Goes(Enum):
    """Where a batch goes."""

    ON = "behind the one before"
    AFRESH = "behind a gap; it begins with a header"
    ELSEWHERE = "into a new file; it begins with a header"


class Journal:
    """Collects lines and hands them in batches to a thread that writes them.

    A line that is lost would falsify all that follow, so that behind every gap stands a header as at a file's
    beginning: it says that lines are missing, and what the fleet is by then.
    """

    def __init__(self, settings: JournalSettings) -> None:
        """Raises ConfigError when the file cannot be written."""
        self._path = Path(settings.path)
        self._max_bytes = settings.max_bytes
        self._files = settings.files
        try:
            os.close(_open(self._path))
        except OSError as error:
            raise ConfigError(
                f"journal.path: cannot write {settings.path}: {error.strerror}: name a file that can be written"
            ) from None
        self._encode = msgspec.json.Encoder().encode
        self._header: Callable[[int, int], msgspec.Struct]
        self._lines: list[bytes] = []
        self._size = 0
        """Of those lines, bytes."""
        self._goes = _Goes.ELSEWHERE
        self._part = 0
        self._part_bytes = 0
        """Handed over for the file being written."""
        self._flush_due = False
        self._unqueued = 0
        self._unwritten = 0
        """Lines that the thread could not write. Only the thread changes it."""
        self._seen_unwritten = 0
        self._batches: queue.Queue[tuple[_Goes, bytes] | None] = queue.Queue(MAX_BATCHES)
        self._thread = threading.Thread(target=self._drain, name="journal", daemon=True)

    @property
    def dropped(self) -> int:
        """Lines lost since the start."""
        return self._unqueued + self._unwritten

    def start(self, header: Callable[[int, int], msgspec.Struct]) -> None:
        """Begin to write. `header` makes one of the number of files and of lines lost since the start."""
        self._header = header
        self._begin(_Goes.ELSEWHERE)
        self._thread.start()

    def write(self, line: msgspec.Struct) -> None:
        """Add a line. To be called in the event loop."""
        self._add(line)
        if self._size >= BATCH_BYTES:
            self.flush()
        elif not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_later(FLUSH_S, self._flush_now)

    def flush(self) -> None:
        """Hand over what there is."""
        if not self._lines:
            return
        unwritten = self._unwritten
        if self._goes is _Goes.ON and unwritten != self._seen_unwritten:
            self._seen_unwritten = unwritten
            self._lose()
            return
        batch = b"".join(self._lines)
        try:
            self._batches.put_nowait((self._goes, batch))
        except queue.Full:
            self._lose()
            return
        self._part_bytes += len(batch)
        self._lines.clear()
        self._size = 0
        self._goes = _Goes.ON
        if self._part_bytes >= self._max_bytes:
            self._part += 1
            self._part_bytes = 0
            self._begin(_Goes.ELSEWHERE)

    def _lose(self) -> None:
        """What is collected cannot follow what was written."""
        self._unqueued += len(self._lines) - (self._goes is not _Goes.ON)  # a header is made anew
        self._begin(_Goes.AFRESH if self._goes is _Goes.ON else self._goes)

    def close(self) -> None:
        """Write what is left, waiting at most 2 seconds for a slow disk."""
        self.flush()
        try:
            self._batches.put(None, timeout=2)
        except queue.Full:
            return
        self._thread.join(2)

    def _add(self, line: msgspec.Struct) -> None:
        data = self._encode(line) + b"\n"
        self._lines.append(data)
        self._size += len(data)

    def _flush_now(self) -> None:
        self._flush_due = False
        self.flush()

    def _begin(self, goes: _Goes) -> None:
        """Start a batch with a header. Only right behind a line: the header tells the fleet as that line left it."""
        self._goes = goes
        self._lines.clear()
        self._size = 0
        self._add(self._header(self._part, self.dropped))

    # In the thread

    def _drain(self) -> None:
        fd = -1
        whole = True
        """Whether what was written last is: behind a gap, only a batch with a header can follow."""
        while (batch := self._batches.get()) is not None:
            goes, data = batch
            lines = data.count(b"\n") - (goes is not _Goes.ON)
            if not whole and goes is _Goes.ON:
                self._unwritten += lines
                continue
            if not whole and goes is _Goes.AFRESH:
                data = b"\n" + data  # what was cut off must not swallow the header
            try:
                if goes is _Goes.ELSEWHERE or fd < 0:
                    if fd >= 0:
                        os.close(fd)
                        fd = -1
                    _rotate(self._path, self._files)
                    fd = _open(self._path)
                while data:
                    data = data[os.write(fd, data) :]
                whole = True
            except OSError as error:
                self._unwritten += lines
                if whole:
                    log.error("cannot write %s: %s: lines are dropped until it can be", self._path, error.strerror)
                whole = False
        if fd >= 0:
            os.close(fd)


def _open(path: Path) -> int:
    """For appending, and for its owner alone: the sizes and times of all sessions are in it."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _rotate(path: Path, files: int) -> None:
    """Make room for a new file: `path` becomes `path.1`, that `path.2`, and the last of `files` goes."""
    with contextlib.suppress(FileNotFoundError):
        if not path.stat().st_size:
            return
    older = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, files))]
    with contextlib.suppress(FileNotFoundError):
        older[-1].unlink()
    for source, target in reversed(list(pairwise(older))):
        with contextlib.suppress(FileNotFoundError):
            source.rename(target)
