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

_SUSPECTS = (b"data: {", b"data:{", b"event: error", b"event:error", b"event: message_start", b"event: response.")
"""How the events begin that must be looked into. Anything else (a comment, another event) is an answer."""
_LONGEST = max(map(len, _SUSPECTS))

_CLEARLY_ANSWERS = (b'data: {"id":"', b'data: {"id": "')
"""Chunks of OpenAI's APIs: let through without decoding, since nearly every stream begins so."""

_PREAMBLE = ("message_start", "response.created", "response.queued", "response.in_progress")

_FULL = "queue is full"


class First(Enum):
    """What an opening is."""

    UNDECIDED = auto()
    """More bytes are needed."""
    ANSWER = auto()
    """Anything that is to be passed on."""
    BUSY = auto()
    """The replica did not take the request; another may."""


def first_event(body: bytes) -> First:
    """Judge the decoded beginning of an event stream."""
    if body.startswith(_CLEARLY_ANSWERS):
        return First.ANSWER
    rest = body.replace(b"\r\n", b"\n")
    while True:
        if len(rest) < _LONGEST and any(start.startswith(rest) for start in _SUSPECTS):
            return First.UNDECIDED
        if not rest.startswith(_SUSPECTS):
            return First.ANSWER
        event, end, rest = rest.partition(b"\n\n")
        if not end:
            return First.UNDECIDED if len(body) < HOLD_BYTES else First.ANSWER
        verdict = _judge(event)
        if verdict is not First.UNDECIDED:
            return verdict


def _judge(event: bytes) -> First:
    """One whole event. UNDECIDED: it says nothing yet, the next one will."""
    data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return First.ANSWER
    if not isinstance(said, dict):
        return First.ANSWER
    if said.get("type") in _PREAMBLE:
        return First.UNDECIDED
    return First.BUSY if _is_busy(said) else First.ANSWER


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


def error_body(body: bytes, complete: bool) -> First:
    """Judge the body of an error answer: `/v1/responses` tells a full queue with a 400."""
    if not complete and len(body) < HOLD_BYTES:
        return First.UNDECIDED
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return First.ANSWER
    return First.BUSY if isinstance(said, dict) and _is_busy(said) else First.ANSWER
