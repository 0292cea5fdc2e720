"""The canonical line of one request, and how a person reads it."""

from __future__ import annotations

import time

import msgspec


class Line(msgspec.Struct, omit_defaults=True):
    """The canonical line of one request. What does not apply is left out."""

    time: float
    """When it ended, seconds since the epoch."""
    request_id: str
    method: str
    path: str
    """Without its query, which may hold secrets."""
    cause: str
    phase: str
    tries: int
    """Replicas it was sent to."""
    duration_s: float
    """From its first byte to its end."""
    bytes_in: int
    """Of the request's body."""
    bytes_out: int
    """Of the answer, head included."""
    status: int | None = None
    """None: nothing was answered."""
    replica: str | None = None
    reason: str | None = None
    """Why that replica."""
    wait_s: float | None = None
    """Seconds of waiting expected there when it was chosen."""
    prefill_s: float | None = None
    """Seconds of prefill expected there."""
    resident_tokens: int | None = None
    """Prompt tokens believed to be in its KV cache."""
    rule: str | None = None
    """The identity rule that matched."""
    session: str | None = None
    """The affinity key in hexadecimal, as `/sessions/{key}` takes it."""
    key: str | None = None
    """Who holds the API key it came with."""
    pool: str | None = None
    """Whose replicas it was for, where there are several pools."""
    refusal: str | None = None
    """Why the router answered itself."""
    failed: str | None = None
    """Why the last replica before failed it."""
    queued_s: float | None = None
    """How long it waited for a place, when it had to."""
    first_byte_s: float | None = None
    """From the whole request to the answer's first byte."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


def text(out: Line) -> bytes:
    """The line for a person at a terminal."""
    where = f"{out.replica} ({out.reason})" if out.replica else "-"
    failed = f", {out.tries} tried, failed: {out.failed}" if out.failed else ""
    refusal = f" refused: {out.refusal}" if out.refusal else ""
    tokens = ""
    if out.prompt_tokens is not None:
        cached = "?" if out.cached_tokens is None else out.cached_tokens
        tokens = f" {cached}/{out.prompt_tokens} tokens cached"
    ended = "" if out.cause == "done" else f" ended by {out.cause} in {out.phase}"
    at = time.strftime("%H:%M:%S", time.localtime(out.time))
    session = f" [{out.rule} {out.session}]" if out.session else ""
    return (
        f"{at} {out.status or '-'} {out.method} {out.path}{session} -> {where}{failed} {out.duration_s:.3f}s{tokens}"
        f"{refusal}{ended}\n"
    ).encode()
