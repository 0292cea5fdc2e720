"""A cheap look at a JSON body: one pass that keeps a few fields as they stand and decodes nothing else.

msgspec checks and skips what no field asks for, where `json.loads` builds every object (`python -m
benchmarks.identity` measures it). Lone surrogates (`"\\ud83d"`) are no JSON to it, as to the engine's tokenizer.
What is not JSON, not an object, or nested past the interpreter's recursion limit yields nothing and raises nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
from msgspec import Raw

MAX_BODY_BYTES = 16 << 20
"""Larger bodies are not looked at: the pass would hold up every other stream for several milliseconds."""

MAX_VALUES = 500_000
"""Commas in a body that is looked at: each may part two values, at 50 ns each. A megabyte of `0,0` has as many."""

MAX_OBJECT_BYTES = 65_536
"""Longest JSON object whose members are looked at by name."""

MAX_STRING_BYTES = 4096
"""Longest JSON string that is decoded as a name."""

ABSENT = Raw(b"")
"""Stands for a field that is not there."""

ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeError)
"""All that decoding raises on bytes that came from anywhere."""


class Head(msgspec.Struct):
    """What is kept of a body. `Raw` fields hold any type, so that an odd one does not cost the others."""

    model: Raw = ABSENT
    system: Raw = ABSENT
    instructions: Raw = ABSENT
    prompt: Raw = ABSENT
    text: Raw = ABSENT
    input_ids: Raw = ABSENT


class Listed(Head):
    """The usual shape: splitting the messages here saves a second pass over nearly the whole body."""

    messages: list[Raw] = []
    input: list[Raw] = []


class Loose(Head):
    """Any shape."""

    messages: Raw = ABSENT
    input: Raw = ABSENT


_items = msgspec.json.Decoder(list[Raw]).decode
_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_string = msgspec.json.Decoder(str).decode


def string(raw: Raw) -> str | None:
    """The JSON string in `raw`; None when it is of another type, too long, or not UTF-8."""
    if len(memoryview(raw)) > MAX_STRING_BYTES:
        return None
    try:
        return _string(raw)
    except ERRORS:
        return None


def items(raw: Raw) -> list[Raw]:
    """The elements of the JSON array in `raw`; none when it is of another type."""
    try:
        return _items(raw)
    except ERRORS:
        return []


def fields(raw: Raw) -> Mapping[str, Raw]:
    """The members of the JSON object in `raw`; none when it is of another type, or too long."""
    if len(memoryview(raw)) > MAX_OBJECT_BYTES:
        return {}
    try:
        return _fields(raw)
    except ERRORS:
        return {}


def readable(body: bytes) -> bool:
    """Whether a body may be read whole: no longer, and of no more values, than costs other streams little."""
    return len(body) <= MAX_BODY_BYTES and (len(body) <= MAX_VALUES or body.count(b",") <= MAX_VALUES)


class BodyReader:
    """Reads `Head` and the fields at `paths` (`name` or `object.name`)."""

    def __init__(self, paths: Sequence[str]) -> None:
        tops = list(dict.fromkeys(path.split(".")[0] for path in paths))
        slots = {top: f"field_{i}" for i, top in enumerate(tops)}
        self._paths = [(slots[top], inner) for top, _, inner in (path.partition(".") for path in paths)]
        extra = [(slot, Raw, ABSENT) for slot in slots.values()]
        rename = {slot: top for top, slot in slots.items()}
        listed = msgspec.defstruct("Body", extra, bases=(Listed,), rename=rename)
        loose = msgspec.defstruct("Body", extra, bases=(Loose,), rename=rename)
        self._listed = msgspec.json.Decoder(cast(type[Listed], listed)).decode
        self._loose = msgspec.json.Decoder(cast(type[Loose], loose)).decode

    def read(self, body: bytes) -> Listed | Loose | None:
        """The head of the body, None when there is none to be had."""
        if not readable(body):
            return None
        try:
            try:
                return self._listed(body)
            except msgspec.ValidationError:
                return self._loose(body)
        except ERRORS:
            return None

    def values(self, head: Head) -> list[str | None]:
        """The strings at the paths, in their order; None where there is no usable string."""
        found: list[str | None] = []
        objects: dict[str, Mapping[str, Raw]] = {}
        for slot, inner in self._paths:
            raw: Raw = getattr(head, slot)
            if raw is not ABSENT and inner:
                if slot not in objects:
                    objects[slot] = fields(raw)
                raw = objects[slot].get(inner, ABSENT)
            found.append(None if raw is ABSENT else string(raw))
        return found
