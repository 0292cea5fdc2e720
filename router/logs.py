"""The access log: one canonical line per request, written off the event loop."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Literal

from policies.types import Outcome, Usage

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange

FLUSH_S = 0.1
"""How long a line may wait for others before it is written."""
MAX_BATCHES = 256
"""Batches waiting for a slow reader of the log; past it lines are dropped and counted, never waited for."""
MAX_LINES = 4096
"""Lines in one batch."""

_quote = json.encoder.encode_basestring_ascii


class AccessLog:
    """Collects lines and hands them in batches to a thread that writes to a file descriptor.

    The session is logged as the first 16 hex digits of its digest; no prompt text and no raw key is.
    """

    def __init__(self, form: Literal["json", "text"], fd: int) -> None:
        self._json = form == "json"
        self._fd = fd
        self._lines: list[str] = []
        self._flush_due = False
        self._batches: queue.Queue[str | None] = queue.Queue(MAX_BATCHES)
        self.dropped = 0
        self._thread = threading.Thread(target=self._drain, name="access-log", daemon=True)
        self._thread.start()

    def write(self, exchange: Exchange, outcome: Outcome, usage: Usage | None, now: float) -> None:
        """Add the line of a finished request."""
        if len(self._lines) >= MAX_LINES:
            self.dropped += 1
            return
        self._lines.append(
            self._as_json(exchange, outcome, usage, now) if self._json else self._as_text(exchange, outcome, usage, now)
        )
        if not self._flush_due:
            self._flush_due = True
            exchange.proxy.loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Hand over what there is."""
        self._flush_due = False
        if not self._lines:
            return
        batch = "".join(self._lines)
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
        self._thread.join(2)

    def _drain(self) -> None:
        while (batch := self._batches.get()) is not None:
            data = batch.encode()
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                self.dropped += 1  # nobody reads it any more; serving goes on

    def _as_json(self, exchange: Exchange, outcome: Outcome, usage: Usage | None, now: float) -> str:
        identity = exchange.identity
        lease = exchange.lease
        first = exchange.first_byte_at
        line = (
            f'{{"time":{time.time():.3f},"request_id":{_quote(exchange.identifier.decode("latin-1"))}'
            f',"method":"{exchange.method.decode("latin-1")}","path":{_quote(_path(exchange))}'
            f',"status":{exchange.status or "null"},"cause":"{outcome.cause}","phase":"{outcome.phase}"'
        )
        if lease is not None:
            choice = lease.choice
            line += f',"replica":{_quote(lease.replica.id)},"reason":"{choice.reason}","wait_s":{choice.wait_s:.3f}'
        if exchange.refusal is not None:
            line += f',"refusal":"{exchange.refusal.reason}"'
        if identity is not None:
            key = identity.key
            line += f',"rule":"{identity.rule}"' + (f',"session":"{key.hex()[:16]}"' if key is not None else "")
        line += f',"tries":{exchange.tries}'
        if exchange.why:
            line += f',"failed":"{exchange.why}"'
        if first:
            line += f',"first_byte_s":{first - exchange.received_at:.4f}'
        line += f',"duration_s":{now - exchange.started_at:.4f}'
        line += f',"bytes_in":{exchange.body_bytes},"bytes_out":{exchange.sent_bytes}'
        if usage is not None:
            line += (
                f',"prompt_tokens":{_number(usage.prompt_tokens)},"cached_tokens":{_number(usage.cached_tokens)}'
                f',"completion_tokens":{_number(usage.completion_tokens)}'
            )
        return line + "}\n"

    def _as_text(self, exchange: Exchange, outcome: Outcome, usage: Usage | None, now: float) -> str:
        lease = exchange.lease
        where = f"{lease.replica.id} ({lease.choice.reason})" if lease is not None else "-"
        refusal = f" refused: {exchange.refusal.reason}" if exchange.refusal is not None else ""
        tokens = ""
        if usage is not None:
            tokens = f" {_number(usage.cached_tokens)}/{_number(usage.prompt_tokens)} tokens cached"
        ended = "" if outcome.cause == "done" else f" ended by {outcome.cause} in {outcome.phase}"
        return (
            f"{time.strftime('%H:%M:%S')} {exchange.status or '-'} {exchange.method.decode('latin-1')}"
            f" {_path(exchange)} -> {where} {now - exchange.started_at:.3f}s{tokens}{refusal}{ended}\n"
        )


def _path(exchange: Exchange) -> str:
    """The path without its query, which may hold secrets."""
    return exchange.target.split(b"?", 1)[0][:256].decode("latin-1")


def _number(value: int | None) -> str:
    return "null" if value is None else str(value)
