"""The model that a body asks for: its member `model` at the top, wherever it stands, and no other of that name.

Clients write it first, or behind what is short; or, as OpenAI's own library, behind the messages and before the rest.
Where it is one of the first members or of the last, the others need not be looked at: a regular expression reads whole
members, and what begins or ends with the body itself is at its top. Else the body is read once, as for an identity.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from router.identity.body import ABSENT, ERRORS, readable, string

NEAR_BYTES = 1024
"""Of the body's beginning and of its end that are looked at before the rest."""

_KEY = rb'"[^"\\]*"\s*:\s*'
_PLAIN = rb'(?:"[^"\\]*"|[-+.0-9A-Za-z]+)'
"""A value that holds no other."""
_MODEL = rb'"model"\s*:\s*"([^"\\]*)"'

_FIRST = re.compile(rb"\s*\{\s*(?:(?!\"model\")" + _KEY + _PLAIN + rb"\s*,\s*)*" + _MODEL)
_LAST = re.compile(_MODEL + rb"\s*(?:,\s*" + _KEY + _PLAIN + rb"\s*)*\}\s*\Z")


class _Asked(msgspec.Struct):
    model: Raw = ABSENT


_read = msgspec.json.Decoder(_Asked).decode


def model_of(body: bytes) -> str | None:
    """None when there is none that could be one: no JSON object, no such member, no string."""
    near = _FIRST.match(body, 0, NEAR_BYTES) or _at_the_end(body)
    if near is not None:
        try:
            return near[1].decode()
        except UnicodeError:
            return None
    if not readable(body):
        return None
    try:
        return string(_read(body).model)
    except ERRORS:
        return None


def _at_the_end(body: bytes) -> re.Match[bytes] | None:
    start = body.rfind(b'"model"', max(0, len(body) - NEAR_BYTES))
    if start <= 0 or body[start - 1] == 0x5C:  # behind a backslash it is a part of a text
        return None
    return _LAST.match(body, start)
