"""Text to tokens, the same way every time and cheaply; no vocabulary.

A token is a unit of four bytes of UTF-8 text, a shorter rest padded; the marks that a chat template puts around
messages are units that cannot come from text. A conversation's units are then simply one bytes object, and a longer
conversation starts with the units of a shorter one. Output words are four ASCII bytes each, so that an answer that
comes back in the history has exactly the tokens that were generated.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import xxhash

UNIT = 4
"""Bytes in a token: about what a code model's tokenizer averages on English and code."""
VOCABULARY = 163_840
"""Token ids are below this (Kimi K2's vocabulary size); they are hashes, of use only to be counted and compared."""

_END = b"\xffEND"
_PAD = b"\xfe\xfe\xfe\xfe"
# The byte 0xff is in no UTF-8 text, so a mark is never equal to a unit of text.
_ROLES = {
    "system": b"\xffSYS",
    "developer": b"\xffSYS",
    "user": b"\xffUSR",
    "assistant": b"\xffAST",
    "tool": b"\xffTOL",
}
_TOOLS = b"\xffDEF"

_TEXT = (
    "the and for are but not you all any can had her was one our out day get has him his how man new now old see two "
    "way who boy did its let put say she too use dad mom car dog cat run sun sea sky map key log bit bug fix end top "
    "low red big few own off set try ask add act age air art bad bag bar bed box bus buy cup cut dry ear eat egg eye "
    "far fat fit fly fun gap gas got hat hit hot ice job kid law lay leg lie lip lot mix"
)
_WORDS = _TEXT.split()

Message = tuple[str, str]
"""Role and text."""


def units(text: str) -> bytes:
    """The tokens of a text."""
    data = text.encode("utf-8", "surrogatepass")
    rest = len(data) % UNIT
    return data + _PAD[rest:] if rest else data


def conversation(messages: Iterable[Message], tools: object = None) -> bytes:
    """The tokens of a chat, up to where the assistant's next answer begins."""
    parts = [_TOOLS, units(text_of(tools)), _END] if tools else []
    for role, text in messages:
        parts += (_ROLES.get(role, _ROLES["user"]), units(text), _END)
    parts.append(_ROLES["assistant"])
    return b"".join(parts)


def text_of(content: object) -> str:
    """A message's content as text: strings as they are, text parts joined, anything else as its JSON."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    return msgspec.json.encode(content).decode()


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return text_of(part)
    if isinstance(part.get("text"), str):
        return str(part["text"])
    if "content" in part:
        return text_of(part["content"])
    # Clients move this marker from turn to turn; it is not part of what the model reads.
    return text_of({key: value for key, value in part.items() if key != "cache_control"})


def from_ids(ids: Sequence[int]) -> bytes:
    """Tokens that a client made itself."""
    return array("I", (value & 0xFFFFFFFF for value in ids)).tobytes()


def ids(data: bytes) -> list[int]:
    """Token ids of units."""
    return [value % VOCABULARY for value in array("I", data)]


def count(data: bytes) -> int:
    """Number of tokens."""
    return len(data) // UNIT


def answer(prompt: bytes, tokens: int) -> list[str]:
    """The words a prompt is answered with, one a token. Fewer tokens give the beginning of the same answer."""
    words = random.Random(xxhash.xxh3_64_intdigest(prompt)).choices(_WORDS, k=tokens)
    return [word + " " for word in words]


def chain(data: bytes, page_size: int, salt: str = "") -> list[int]:
    """Chained hashes of the full pages: each covers all before it, and the salt."""
    size = page_size * UNIT
    value = xxhash.xxh3_64_intdigest(salt.encode()) if salt else 0
    hashes = []
    view = memoryview(data)
    for start in range(0, len(data) - size + 1, size):
        value = xxhash.xxh3_64_intdigest(view[start : start + size], value)
        hashes.append(value)
    return hashes
