"""The access log: one canonical line per request, written off the event loop."""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from policies.types import Cause, Outcome, Usage
from router.line import Line, text
from router.proxy.guard import shown

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange

FLUSH_S = 0.1
"""How long a line may wait for others before it is written."""
MAX_BATCHES = 256
"""Batches waiting for a slow reader of the log; past it lines are dropped and counted, never waited for."""
MAX_LINES = 4096
"""Lines in one batch."""


def line(exchange: Exchange, outcome: Outcome, usage: Usage | None, now: float) -> Line:
    """What is logged of a finished request."""
    out = Line(
        _rounded(time.time()),
        exchange.identifier.decode("latin-1"),
        exchange.method.decode("latin-1"),
        shown(exchange.target),
        outcome.cause,
        outcome.phase,
        exchange.tries,
        _rounded(now - exchange.started_at),
        exchange.body_bytes,
        exchange.sent_bytes,
        exchange.status or None,
    )
    lease = exchange.lease
    if lease is not None:
        out.replica = lease.replica.id
        out.reason = lease.choice.reason
        out.wait_s = _rounded(lease.choice.wait_s)
        out.prefill_s = _rounded(lease.choice.prefill_s)
        out.resident_tokens = lease.choice.resident_tokens
    identity = exchange.identity
    if identity is not None:
        out.rule = identity.rule
        if (pools := exchange.pools) is not None:
            out.pool = pools.shown(exchange.request.pool)
        if identity.key is not None:
            out.session = identity.key.hex()
    if exchange.holder is not None:
        out.key = exchange.holder.name
    if exchange.refusal is not None:
        out.refusal = exchange.refusal.reason
    out.failed = exchange.why or None
    if exchange.queued_s is not None:
        out.queued_s = _rounded(exchange.queued_s)
    if exchange.first_byte_at:
        out.first_byte_s = _rounded(exchange.first_byte_at - exchange.received_at)
    if usage is not None:
        out.prompt_tokens = usage.prompt_tokens
        out.cached_tokens = usage.cached_tokens
        out.completion_tokens = usage.completion_tokens
    return out


def _rounded(seconds: float) -> float:
    """To a tenth of a millisecond."""
    return int(seconds * 1e4) / 1e4


class AccessLog:
    """Collects lines and hands them in batches to a thread that writes to a file descriptor.

    The session is logged as its digest; no prompt text and no raw key is.
    """

    def __init__(self, form: Literal["json", "text"], fd: int, sample: float = 1.0, *, shared: bool = False) -> None:
        """`sample`: share of the requests that went well of which a line is written.

        `shared`: other processes write there, too, and their lines must not end up within ours.
        """
        self._json = form == "json"
        self._encode = msgspec.json.Encoder().encode
        self._fd = fd
        self._shared = shared
        self._lines: list[bytes] = []
        self._flush_due = False
        self._batches: queue.Queue[bytes | None] = queue.Queue(MAX_BATCHES)
        self.dropped = 0
        self.sample = sample
        self._due = 0.5
        """Lines owed: it grows by `sample` with each request that went well."""
        self._writer = threading.Thread(target=self._drain, name="access-log", daemon=True)
        self._writer.start()

    def write(self, exchange: Exchange, outcome: Outcome, usage: Usage | None, now: float) -> None:
        """Add the line of a finished request, unless it went well and is not of the sample."""
        if self.sample < 1.0 and outcome.cause is Cause.DONE and exchange.status < 400 and not exchange.why:
            self._due += self.sample
            if self._due < 1.0:
                return
            self._due -= 1.0
        if len(self._lines) >= MAX_LINES:
            self.dropped += 1
            return
        out = line(exchange, outcome, usage, now)
        self._lines.append(self._encode(out) + b"\n" if self._json else text(out))
        if not self._flush_due:
            self._flush_due = True
            exchange.proxy.loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Hand over what there is."""
        self._flush_due = False
        if not self._lines:
            return
        batch = b"".join(self._lines)
        count = len(self._lines)
        self._lines.clear()
        try:
            self._batches.put_nowait(batch)
        except queue.Full:
            self.dropped += count

    def close(self) -> None:
        """Write what is left, waiting at most 2 seconds for a slow reader."""
        self.flush()
        try:
            self._batches.put(None, timeout=2)
        except queue.Full:
            return
        self._writer.join(2)

    def _drain(self) -> None:
        torn = False
        while (batch := self._batches.get()) is not None:
            for data in _pieces(batch) if self._shared else (batch,):
                torn = self._write(data, torn)

    def _write(self, data: bytes, torn: bool) -> bool:
        """Write it, behind what may have been cut off. Whether that is so again."""
        if torn:
            data = b"\n" + data  # what was cut off must not swallow the next line
        size = len(data)
        try:
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:  # a pipe that its other owner made non-blocking
                    select.select([], [self._fd], [], 1.0)
        except OSError:
            self.dropped += data.count(b"\n")  # nobody reads it any more; serving goes on
            return torn or len(data) < size
        return False


def _pieces(batch: bytes) -> Iterator[bytes]:
    """Whole lines, together no more than a pipe takes as one. A line that is longer goes alone."""
    start = end = 0
    for line in batch.splitlines(keepends=True):
        if end > start and end + len(line) - start > select.PIPE_BUF:
            yield batch[start:end]
            start = end
        end += len(line)
    yield batch[start:]
