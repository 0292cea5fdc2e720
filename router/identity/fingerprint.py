"""What a conversation is known by when nothing names it: how it begins. And what it shares with others: raw blocks.

The fingerprint covers the system prompt and the first user turn: the user messages up to the first answer (Codex
and OpenCode's title call begin with a message that is the same in many sessions; the prompt comes in the next).
Later turns only append, so they keep it, and a fork keeps it, too. Text is hashed as the client wrote it in JSON,
which is the same in every turn of one client, and costs no decoding. Not covered, because they change while the
conversation goes on: item ids, cache marks, tools, reminders that a program adds to what the user said, and system
messages after the first user message.

A client that rewrites its beginning (compaction, a clock in the system prompt) gets a new fingerprint; the engine's
cached prefix ends at the same place.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Raw
from xxhash import xxh3_64_intdigest

from router.identity.body import ABSENT, ERRORS, Listed, Loose, items

PROMPT_HEAD_BYTES = 4096
"""How much of a plain prompt (`/v1/completions`, `/generate`) is hashed.

Such a prompt grows without a mark between its turns, so only a head that is whole in the first turn gives one key.
A prompt shorter than this changes its key when it grows, which costs a prefill of at most about 1,000 tokens
(4 bytes each); conversations that share a head longer than this share a key, which would crowd one replica.
The second is worse, so the head is as long as the first allows.
"""

MAX_PARTS = 20_000
"""Opening braces in a content that is taken apart: each may begin a part, at 0.7 us each. More is hashed as it is."""

MAX_MESSAGES = 64
"""Messages looked at; first turns measured have 1 to 5."""

BLOCK_BYTES = 4096
"""Of the raw body; about 1,000 tokens."""
MAX_BLOCKS = 1024
"""Blocks hashed, 4 MiB."""

_BILLING = b'"x-anthropic-billing-header:'
"""Claude Code's first system block: accounting, not prompt; it had a part that changed with every request once."""

_REMINDER = b'"<system-reminder>'
"""How Claude Code and Qwen Code mark what the program adds to the user's message. Qwen Code adds the date to the newest
message only, so that the first one loses that part with the second turn (seen with 0.24.4)."""

_SYSTEM = ("system", "developer")


class Message(msgspec.Struct):
    """A message of chat completions or Anthropic's, or an item of responses (those without a role are not said)."""

    role: str = ""
    content: Raw = ABSENT


class Part(msgspec.Struct):
    """What a part of a message's content says, under the names of the three APIs."""

    text: Raw = ABSENT
    source: Raw = ABSENT
    image_url: Raw = ABSENT
    video_url: Raw = ABSENT
    audio_url: Raw = ABSENT
    input_audio: Raw = ABSENT
    file: Raw = ABSENT
    file_id: Raw = ABSENT
    file_data: Raw = ABSENT
    file_url: Raw = ABSENT


_message = msgspec.json.Decoder(Message).decode
_parts = msgspec.json.Decoder(list[Part]).decode


def fingerprint(head: Listed | Loose) -> int:
    """64 bits of the conversation's beginning; 0 when the body holds none."""
    said: Iterable[bytes] = ()
    if isinstance(head, Listed):
        messages = head.messages or head.input
    else:
        messages = items(head.messages) or items(head.input)
        said = _texts(head.input)  # a string, the short form of one user message
    system = [*_texts(head.system), *_texts(head.instructions)]
    user: list[bytes] = []
    if messages:
        _begin(messages, system, user)
    else:
        user += said
    if not system and not user:
        for raw in (head.prompt, head.text, head.input_ids):
            start = bytes(memoryview(raw)[:PROMPT_HEAD_BYTES])
            if start[:1] in (b'"', b"["):
                user.append(start)
                break
        else:
            return 0
    # A NUL is in no JSON text, so that what is said on one side of it cannot be said on the other.
    return xxh3_64_intdigest(b"".join((*system, b"\x00", *user))) or 1


def _begin(messages: list[Raw], system: list[bytes], user: list[bytes]) -> None:
    """Collect the system messages before the first user message, and the user's first turn."""
    asked = False
    for raw in messages[:MAX_MESSAGES]:
        try:
            message = _message(raw)
        except ERRORS:
            continue
        if message.role == "user":
            asked = True
            said = _texts(message.content)
            user += [text for text in said if not text.startswith(_REMINDER)] or said
        elif message.role in _SYSTEM:
            if not asked:
                system += _texts(message.content)
        elif asked:
            return


def _texts(content: Raw) -> list[bytes]:
    """What the content says, as JSON: a string, or a list of parts in its order."""
    if content is ABSENT:
        return []
    token = bytes(content)
    if token[:1] == b'"':
        return [] if token.startswith(_BILLING) else [token]
    if token[:1] != b"[":
        return []
    if len(token) > MAX_PARTS and token.count(b"{") > MAX_PARTS:
        return [token]
    try:
        parts = _parts(token)
    except ERRORS:
        return [token]
    found: list[bytes] = []
    for part in parts:
        if part.text is not ABSENT:
            token = bytes(part.text)
            if not token.startswith(_BILLING):
                found.append(token)
        else:
            found += [bytes(raw) for name in Part.__struct_fields__ if (raw := getattr(part, name)) is not ABSENT]
    return found


def chain(body: bytes) -> tuple[int, ...]:
    """Hash of each whole block of the body with all before it: equal up to the first block that differs."""
    if len(body) < BLOCK_BYTES:
        return ()
    view = memoryview(body)
    end = min(len(body), MAX_BLOCKS * BLOCK_BYTES)
    hashes: list[int] = []
    last = 0
    for start in range(0, end - BLOCK_BYTES + 1, BLOCK_BYTES):
        last = xxh3_64_intdigest(view[start : start + BLOCK_BYTES], last)
        hashes.append(last)
    return tuple(hashes)
