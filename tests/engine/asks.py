"""Requests in each of the engine's dialects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

TEXT = "Describe in a few words how a cache keeps what was computed before, and when it has to let go of it again."


@dataclass(frozen=True)
class Ask:
    """A request: where it goes, and its JSON body."""

    name: str
    path: str
    body: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def chat(messages: list[dict[str, str]], tokens: int, *, stream: bool) -> dict[str, Any]:
    """Body of a chat completion of exactly `tokens` tokens, decoded greedily; a stream ends with its usage."""
    body = {"model": "tiny", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return body | {"stream": True, "stream_options": {"include_usage": True}} if stream else body


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


_COMPLETION = {"model": "tiny", "prompt": TEXT, "max_tokens": 12, "temperature": 0}
_GENERATE = {"text": TEXT, "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
_MESSAGES = {"model": "tiny", "messages": [user(TEXT)], "max_tokens": 12, "temperature": 0}
_RESPONSES = {"model": "tiny", "input": TEXT, "max_output_tokens": 12, "temperature": 0}
_STREAM = {"stream": True}

INFERENCE = (
    Ask("chat", "/v1/chat/completions", chat([user(TEXT)], 12, stream=False)),
    Ask("chat-stream", "/v1/chat/completions", chat([user(TEXT)], 12, stream=True)),
    Ask("completions", "/v1/completions", _COMPLETION),
    Ask("completions-stream", "/v1/completions", _COMPLETION | _STREAM | {"stream_options": {"include_usage": True}}),
    Ask("generate", "/generate", _GENERATE),
    Ask("generate-stream", "/generate", _GENERATE | _STREAM),
    Ask("messages", "/v1/messages", _MESSAGES),
    Ask("messages-stream", "/v1/messages", _MESSAGES | _STREAM),
    Ask("responses", "/v1/responses", _RESPONSES),
    Ask("responses-stream", "/v1/responses", _RESPONSES | _STREAM),
)
"""Answered with 200."""

_TOO_LONG = chat([user("word " * 9_000)], 12, stream=False)

MISTAKES = (
    Ask("too-long", "/v1/chat/completions", _TOO_LONG),
    Ask("too-long-stream", "/v1/chat/completions", _TOO_LONG | _STREAM),
    Ask("bad-temperature", "/v1/completions", _COMPLETION | {"temperature": -1}),
    Ask("no-messages", "/v1/messages", {"model": "tiny", "max_tokens": 12}),
)
"""Answered with 400 by the engine."""
