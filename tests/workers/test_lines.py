"""The log of several processes in one pipe: in whole lines."""

from __future__ import annotations

import os
import select
import threading

import pytest

from router.logs import AccessLog, _pieces

LINES = 2000
"""Of each writer: more than a pipe holds."""


def test_whole_lines_are_written_as_one() -> None:
    lines = [b"%d" % number + b"x" * (number * 37 % 900) + b"\n" for number in range(200)]
    lines.insert(50, b"y" * 3 * select.PIPE_BUF + b"\n")
    pieces = list(_pieces(b"".join(lines)))
    assert b"".join(pieces) == b"".join(lines)
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert all(len(piece) <= select.PIPE_BUF or piece.count(b"\n") == 1 for piece in pieces)
    assert len(pieces) < len(lines) / 4, "not each alone"


@pytest.mark.parametrize("seed", range(3))
def test_lines_of_several_who_write_there_are_never_torn(seed: int) -> None:
    """Threads of this process stand for processes: each has its own log, and only the pipe between them."""
    reader, writer = os.pipe()
    logs = [AccessLog("json", writer, shared=True) for _ in range(4)]
    lines = [
        [b"%d " % who + b"x" * (number * (who + seed) % 1000) + b"\n" for number in range(LINES)] for who in range(4)
    ]

    def write() -> None:
        for at in range(0, LINES, 500):
            for log, own in zip(logs, lines, strict=True):
                log._lines += own[at : at + 500]
                log.flush()
        for log in logs:
            log.close()
        os.close(writer)

    writing = threading.Thread(target=write)
    writing.start()
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        found = b"".join(iter(lambda: pipe.read(10_000), b""))
    writing.join()
    for who, own in enumerate(lines):
        assert [line for line in found.splitlines(keepends=True) if line.startswith(b"%d " % who)] == own
