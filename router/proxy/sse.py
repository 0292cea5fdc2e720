"""The first event of a stream: an answer, or SGLang's way of saying that its queue is full.

A full queue is told in a stream as HTTP 200 whose first event holds an error with code 503 (SGLang 0.5.23;
SGLang pull request 31802); Anthropic's form is `event: error` with `overloaded_error`.
"""

from __future__ import annotations

import json
from enum import Enum, auto

HOLD_BYTES = 65_536
"""A first event longer than this is passed on unread."""

_STARTS = (b'data: {"error"', b'data:{"error"', b"event: error", b"event:error")
_LONGEST = max(map(len, _STARTS))


class First(Enum):
    """What the first event is."""

    UNDECIDED = auto()
    """More bytes are needed."""
    ANSWER = auto()
    """Anything that is to be passed on."""
    BUSY = auto()
    """The replica did not take the request; another may."""


def first_event(body: bytes) -> First:
    """Judge the decoded beginning of an event stream."""
    if len(body) < _LONGEST and any(start.startswith(body) for start in _STARTS):
        return First.UNDECIDED
    if not body.startswith(_STARTS):
        return First.ANSWER
    end = body.replace(b"\r\n", b"\n").find(b"\n\n")
    if end < 0:
        return First.UNDECIDED if len(body) < HOLD_BYTES else First.ANSWER
    for line in body.replace(b"\r\n", b"\n")[:end].split(b"\n"):
        if line.startswith(b"data:"):
            return First.BUSY if _is_busy(line[5:]) else First.ANSWER
    return First.ANSWER


def _is_busy(data: bytes) -> bool:
    try:
        error = json.loads(data)["error"]
        return str(error.get("code")) == "503" or error.get("type") in ("overloaded_error", "SERVICE_UNAVAILABLE")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
