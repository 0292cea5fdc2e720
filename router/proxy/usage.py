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

_PROMPT = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,12})')
_COMPLETION = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,12})')
_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,12})')
_INPUT = re.compile(rb'"input_tokens"\s*:\s*(\d{1,12})')
_OUTPUT = re.compile(rb'"output_tokens"\s*:\s*(\d{1,12})')
_CACHE_READ = re.compile(rb'"cache_read_input_tokens"\s*:\s*(\d{1,12})')
_CACHE_WRITE = re.compile(rb'"cache_creation_input_tokens"\s*:\s*(\d{1,12})')

_END = re.compile(rb'data: ?\[DONE\]|"type": ?"(?:message_stop|response\.(?:completed|incomplete|failed))"')


def ended(tail: bytes) -> bool:
    """Whether an event stream said that it is complete. A client that leaves after it has missed nothing."""
    return _END.search(tail) is not None


def _last(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None


def read(head: bytes, tail: bytes) -> Usage | None:
    """Token counts of an answer, from its first and last few KB; None when it tells none.

    Anthropic's `input_tokens` leaves out what came from cache, OpenAI's `prompt_tokens` and the Responses
    API's `input_tokens` do not: prompt_tokens here always means the whole prompt.
    """
    prompt = _last(_PROMPT, tail)
    if prompt is not None:
        if prompt == 0:
            return None  # the zeros that follow an error event
        return Usage(prompt, _last(_CACHED, tail), _last(_COMPLETION, tail))
    text = head + tail
    given = _last(_INPUT, text)
    if given is None:
        return None
    output = _last(_OUTPUT, text)
    read_tokens = _last(_CACHE_READ, text)
    if read_tokens is None:
        return Usage(given, _last(_CACHED, text), output)
    return Usage(given + read_tokens + (_last(_CACHE_WRITE, text) or 0), read_tokens, output)
