"""Token counts, read once from what is remembered of an answer's beginning and end.

Where each API tells them, and with which engine flags, is in SGLang's server code (0.5.23) and in
its documentation; the fields are found by name, so that no answer is ever parsed whole.
"""

from __future__ import annotations

import re

from policies.types import Usage

HEAD_BYTES = 4096
"""How much of an answer's beginning is kept: Anthropic tells prompt tokens in its first event."""
TAIL_BYTES = 8192
"""How much of its end is kept: OpenAI and SGLang tell usage in the last event."""

_number = re.compile(rb"\s*:\s*(\d{1,12})").match

_END = re.compile(rb'data: ?\[DONE\]|"type": ?"(?:message_stop|response\.(?:completed|incomplete|failed))"')


def ended(tail: bytes) -> bool:
    """Whether an event stream said that it is complete. A client that leaves after it has missed nothing."""
    return _END.search(tail) is not None


def _last(name: bytes, text: bytes) -> int | None:
    """The number that the last field of this name holds."""
    at = text.rfind(name)
    if at < 0:
        return None
    found = _number(text, at + len(name))
    return int(found[1]) if found is not None else None


def read(head: bytes, tail: bytes) -> Usage | None:
    """Token counts of an answer, from its first and last few KB; None when it tells none.

    Anthropic's `input_tokens` leaves out what came from cache, OpenAI's `prompt_tokens` and the Responses
    API's `input_tokens` do not: prompt_tokens here always means the whole prompt.
    """
    prompt = _last(b'"prompt_tokens"', tail)
    if prompt is not None:
        if prompt == 0:
            return None  # the zeros that follow an error event
        return Usage(prompt, _last(b'"cached_tokens"', tail), _last(b'"completion_tokens"', tail))
    text = head + tail
    given = _last(b'"input_tokens"', text)
    if given is None:
        return None
    output = _last(b'"output_tokens"', text)
    read_tokens = _last(b'"cache_read_input_tokens"', text)
    if read_tokens is None:
        return Usage(given, _last(b'"cached_tokens"', text), output)
    return Usage(given + read_tokens + (_last(b'"cache_creation_input_tokens"', text) or 0), read_tokens, output)
