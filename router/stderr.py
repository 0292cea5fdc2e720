"""The program's own log, on standard error: what it says of itself, not of requests."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from typing import Any

from router.floods import Floods
from router.settings import LogSettings


class _JsonLines(logging.Formatter):
    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = {"worker": worker} if worker else {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        } | self._worker
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Stderr(logging.Handler):
    """Writes from a thread: a reader of standard error that stops reading must not stop the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[bytes] = queue.Queue(1024)
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):  # dropped, never waited for
            self._lines.put_nowait(self.format(record).encode(errors="replace") + b"\n")

    def flush(self) -> None:
        """Wait a second at most: called at exit."""
        end = time.monotonic() + 1
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)

    def _write(self) -> None:
        while True:
            data = self._lines.get()
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(2, data) :]
            self._lines.task_done()


def set_level(level: str) -> None:
    """Say nothing below this level from now on."""
    logging.getLogger().setLevel(level.upper())


def begin(settings: LogSettings, worker: str = "") -> None:
    """Send the log of the program there, in the format and from the level that are set.

    `worker` says in each line which of several processes it is of.
    """
    handler = _Stderr()
    handler.addFilter(Floods(time.monotonic))
    as_json = settings.format == "json" or (settings.format == "auto" and not sys.stderr.isatty())
    who = f" {worker}" if worker else ""
    text = logging.Formatter(f"%(asctime)s %(levelname)s{who} %(name)s: %(message)s", "%H:%M:%S")
    text.converter = time.localtime
    handler.setFormatter(_JsonLines(worker) if as_json else text)
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
