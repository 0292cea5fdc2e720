"""The ids of `/v1/responses`: which response a request goes on from, whether its answer is kept, and its id.

As SGLang 0.5.23 has them (its serving_responses module): an id begins with `resp_` and is the first field of its
response, which is kept unless the request says `"store": false`. All is found by name in the raw bytes; a body is
decoded only if it has the field's name, which few have: a client that sends its whole history names no response.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from router.identity.body import ABSENT, ERRORS, readable, string

_PREVIOUS = b'"previous_response_id"'
_STORE = b'"store"'

_false = re.compile(rb"\s*:\s*false").match
_issued = re.compile(rb'"id"\s*:\s*"(resp_[!#-\[\]-~]{1,250})"').search
"""Of an answer's beginning: text has its quotes escaped, and other objects' ids begin otherwise."""


class _Head(msgspec.Struct):
    previous_response_id: Raw = ABSENT


_head = msgspec.json.Decoder(_Head).decode


def previous(body: bytes) -> str | None:
    """The response that the request goes on from; None when it names none. Never raises."""
    if _PREVIOUS not in body or not readable(body):
        return None
    try:
        return string(_head(body).previous_response_id)
    except ERRORS:
        return None


def kept(body: bytes) -> bool:
    """Whether the engine is to keep the response. Clients write `store` near the end, and are believed at its last."""
    at = body.rfind(_STORE)
    return at < 0 or _false(body, at + len(_STORE)) is None


def issued(beginning: bytes) -> str | None:
    """The id of the response that an answer's first bytes tell, streamed or not."""
    found = _issued(beginning)
    return None if found is None else found[1].decode()
