"""The opening of an answer: an answer indeed, or SGLang's way of saying that its queue is full.

SGLang 0.5.23 answers a stream with HTTP 200 before it knows whether the queue has room, and says so in the first
events; each API in its own form (seen on a real server, `tests/engine/test_overload.py`):

- chat and completions: a first event with `error` of code 503
- `/generate`: a first event whose `finish_reason` is an abort with status 503
- `/v1/messages`: `message_start`, which a real answer sends together with its first token, then `event: error`
- `/v1/responses`: `response.created` and `response.in_progress`, then `response.failed`; not streamed: a 400
"""

from __future__ import annotations

import json
from enum import Enum, auto

HOLD_BYTES = 524_288
"""A longer opening is passed on unread. `/v1/responses` repeats the request's instructions and tools in its own."""

DRIPS = 64
"""Fragments after which an opening is looked at only when a line has ended, lest it be scanned for every byte."""

_SUSPECTS = (b"data: {", b"data:{", b"event: error", b"event:error", b"event: message_start", b"event: response.")
"""How the events begin that must be looked into. Anything else (a comment, another event) is an answer."""
_LONGEST = max(map(len, _SUSPECTS))

_CLEARLY_ANSWERS = (b'data: {"id":"', b'data: {"id": "')
"""Chunks of OpenAI's APIs: let through without decoding, since nearly every stream begins so."""

_PREAMBLE = ("message_start", "response.created", "response.queued", "response.in_progress")

_FULL = "queue is full"


class Verdict(Enum):
    """What an opening is."""

    UNDECIDED = auto()
    """More bytes are needed."""
    ANSWER = auto()
    """Anything that is to be passed on."""
    BUSY = auto()
    """The replica did not take the request; another may."""


def first_event(body: bytes) -> Verdict:
    """Judge the decoded beginning of an event stream."""
    if body.startswith(_CLEARLY_ANSWERS):
        return Verdict.ANSWER
    rest = body.replace(b"\r\n", b"\n")
    while True:
        if len(rest) < _LONGEST and any(start.startswith(rest) for start in _SUSPECTS):
            return Verdict.UNDECIDED
        if not rest.startswith(_SUSPECTS):
            return Verdict.ANSWER
        event, end, rest = rest.partition(b"\n\n")
        if not end:
            return Verdict.UNDECIDED if len(body) < HOLD_BYTES else Verdict.ANSWER
        verdict = _judge(event)
        if verdict is not Verdict.UNDECIDED:
            return verdict


def _judge(event: bytes) -> Verdict:
    """One whole event. UNDECIDED: it says nothing yet, the next one will."""
    data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return Verdict.ANSWER
    if not isinstance(said, dict):
        return Verdict.ANSWER
    if said.get("type") in _PREAMBLE:
        return Verdict.UNDECIDED
    return Verdict.BUSY if _is_busy(said) else Verdict.ANSWER


def _is_busy(said: dict[str, object]) -> bool:
    error = said.get("error")
    if said.get("type") == "response.failed" and isinstance(response := said.get("response"), dict):
        error = response.get("error")
    if isinstance(error, dict):
        if str(error.get("code")) == "503" or error.get("type") in ("overloaded_error", "SERVICE_UNAVAILABLE"):
            return True
        return _FULL in str(error.get("message"))
    if isinstance(meta := said.get("meta_info"), dict) and isinstance(finish := meta.get("finish_reason"), dict):
        return finish.get("type") == "abort" and str(finish.get("status_code")) == "503"
    return False


def error_body(body: bytes, complete: bool) -> Verdict:
    """Judge the body of an error answer: `/v1/responses` tells a full queue with a 400."""
    if not complete and len(body) < HOLD_BYTES:
        return Verdict.UNDECIDED
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return Verdict.ANSWER
    return Verdict.BUSY if isinstance(said, dict) and _is_busy(said) else Verdict.ANSWER


class Opening:
    """The beginning of an answer, held until it is known to be one."""

    __slots__ = ("_size", "_stream", "fragments")

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._size = 0
        self.fragments: list[bytes] = []

    def add(self, fragments: list[bytes], *, ended: bool) -> Verdict:
        """More of it, or its end. After any other verdict than UNDECIDED it is held no longer."""
        self.fragments += fragments
        self._size += sum(map(len, fragments))
        dripping = len(self.fragments) > DRIPS and self._size < HOLD_BYTES
        if dripping and not ended and b"\n" not in self.fragments[-1]:
            return Verdict.UNDECIDED  # an event ends with a newline: nothing can have been decided by this
        body = b"".join(self.fragments)
        verdict = first_event(body) if self._stream else error_body(body, ended)
        return Verdict.ANSWER if ended and verdict is Verdict.UNDECIDED else verdict

    def head(self, size: int) -> bytes:
        """Its first `size` bytes."""
        return b"".join(self.fragments)[:size]
