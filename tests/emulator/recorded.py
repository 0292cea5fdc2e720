"""Recorded answers of a real SGLang 0.5.23 server, and what of an answer is not an accident of that one run.

The files in captures/ are our own recordings: a line with the request, then the raw HTTP answer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes.client import Answer, parse_head

CAPTURES = Path(__file__).parent / "captures"

_VOLATILE = """
    id created created_at content text delta timestamp input output_ids tokens count end
    input_tokens output_tokens prompt_tokens total_tokens completion_tokens cached_tokens cache_read_input_tokens device
    forward_entry_time prefill_finished_time queue_time e2e_latency request_received_ts first_token_latency
    api_server_dispatch_finish_ts response_sent_to_client_ts request_finished_ts decode_throughput
    total_prefill_uncached_tokens total_prefill_busy_us decode_moments kv_cache_gb weight_gb gen_throughput
    num_used_tokens num_total_tokens num_active_tokens num_waiting_uncached_tokens token_usage
"""
VOLATILE = frozenset(_VOLATILE.split())
"""Fields whose values depend on the model's weights, the clock or the load; their types are compared."""


@dataclass(frozen=True)
class Recorded:
    """A request and its recorded answer."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    answer: Answer


def load(name: str) -> Recorded:
    """The capture in a file."""
    asked, raw = (CAPTURES / name).read_bytes().split(b"\n", 1)
    line = asked.decode().removeprefix("# ")
    given = re.match(r"(\w+) (\S+)(?:\s+headers=(\{.*?\})  body=(.*))?", line)
    method, target, headers, body = given.groups() if given else ("", "", None, None)
    named = dict(re.findall(r"'([^']+)': '([^']+)'", headers or ""))
    return Recorded(method, target, named, (body or "").encode(), _answer(raw))


def _answer(raw: bytes) -> Answer:
    head, rest = raw.split(b"\r\n\r\n", 1)
    answer = parse_head(head + b"\r\n\r\n")
    chunked = answer.header("content-type") == "text/event-stream; charset=utf-8"
    if not chunked:
        # Not by its length: paths in it have been made shorter. The recorder took the framing of /metrics off.
        answer.body = rest.split(b"\n# --- recv() timings")[0]
        return answer
    # The tail of an aborted stream begins in the middle of a chunk.
    rest = re.sub(rb"\A(?![0-9a-f]+\r\n).*?\r\n", b"", rest, flags=re.DOTALL)
    while (found := re.match(rb"([0-9a-f]+)\r\n", rest)) and (size := int(found[1], 16)):
        answer.chunks.append(rest[found.end() : found.end() + size])
        rest = rest[found.end() + size + 2 :]
    answer.body = b"".join(answer.chunks)
    return answer


def header_names(answer: Answer) -> set[str]:
    """Which headers came; `connection` is left out because the recorder asked for it to close."""
    return {name for name, _ in answer.headers} - {"connection"}


def signature(value: Any, key: str = "") -> Any:
    """What must be equal: keys in their order, types, and the values of fields that are not volatile."""
    if isinstance(value, dict):
        return [(name, signature(item, name)) for name, item in value.items()]
    if isinstance(value, list):
        if value and all(isinstance(item, (int, float)) for item in value):
            return f"list of {type(value[0]).__name__}"
        return [signature(item, key) for item in value]
    if key in VOLATILE and value is not None:
        return type(value).__name__
    if isinstance(value, str):
        return message(value)
    return value


def message(text: str) -> str:
    """A message without token counts, which depend on the tokenizer, and without the engine's source lines."""
    return re.sub(r"\d+ tokens", "N tokens", re.sub(r'File "[^"]+", line \d+, in', "in", text))


def events(answer: Answer) -> list[tuple[str, Any]]:
    """Name and signature of the events, each the whole of a chunk; runs of alike ones are one."""
    found: list[tuple[str, Any]] = []
    for chunk in answer.chunks:
        event = parse_event(chunk)
        shape = (event[0], signature(event[1]))
        if not found or found[-1] != shape:
            found.append(shape)
    return found


def parse_event(chunk: bytes) -> tuple[str, Any]:
    """Name and data of the one event in a chunk."""
    text = chunk.decode()
    assert text.endswith("\n\n"), text
    assert text.count("\n\n") == 1, f"not one event: {text}"
    name, data = "", ""
    for line in text.strip().split("\n"):
        field, _, rest = line.partition(": ")
        name, data = (rest, data) if field == "event" else (name, rest)
    return name, data if data == "[DONE]" else json.loads(data)
