"""Notes and messages as bytes, for stores outside of this process: msgpack, arrays without names.

Another form of an array is another `VERSION`, which is part of the keys in Redis: routers of two versions keep two
memories for as long as an upgrade takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from policies.sharing import Note
from router.store.store import Message, Remembered

VERSION = 1

MAX_COUNT = 1 << 50
MAX_S = 1e6
MAX_TEXT = 4096
MAX_CONTROL_BYTES = 1 << 20
"""Beyond these nothing is believed: the arithmetic of placing must hold whatever somebody writes into a store."""

_Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
_Seconds = Annotated[float, Meta(ge=0.0, le=MAX_S)]
_Ratio = Annotated[float, Meta(ge=0.01, le=100.0)]
_Text = Annotated[str, Meta(max_length=MAX_TEXT)]
_Bytes = Annotated[bytes, Meta(max_length=MAX_TEXT)]
_Control = Annotated[bytes, Meta(max_length=MAX_CONTROL_BYTES)]

_NoteArray = tuple[_Bytes, int, _Bytes, bool, _Ratio, _Text, _Text, _Count, _Count]
_OwnArray = tuple[_Count, _Count, _Seconds]
_MessageArray = tuple[_Text, list[_NoteArray], dict[_Text, _OwnArray], bool, dict[_Text, _Control | None], bool]
_RememberedArray = tuple[_NoteArray, float]

_encode = msgspec.msgpack.Encoder().encode
_note = msgspec.msgpack.Decoder(_NoteArray).decode
_notes = msgspec.msgpack.Decoder(list[_NoteArray]).decode
_message = msgspec.msgpack.Decoder(_MessageArray).decode
_remembered = msgspec.msgpack.Decoder(list[_RememberedArray]).decode

T = TypeVar("T")


class WireError(ValueError):
    """Bytes that are not of this form: damaged, or written by another version."""


def encode_note(note: Note) -> bytes:
    return _encode(_array(note))


def decode_note(data: bytes) -> Note:
    """Raises WireError."""
    return Note(*_decoded(_note, data))


def encode_notes(notes: Iterable[Note]) -> bytes:
    return _encode([_array(note) for note in notes])


def decode_notes(data: bytes) -> list[Note]:
    """Raises WireError."""
    return [Note(*each) for each in _decoded(_notes, data)]


def encode_message(message: Message, encoded: Sequence[bytes] | None = None) -> bytes:
    """`encoded` are its notes, when they have been encoded already."""
    notes = [_array(note) for note in message.notes] if encoded is None else [msgspec.Raw(each) for each in encoded]
    return _encode((message.sender, notes, dict(message.loads), message.whole, dict(message.controls), message.leaving))


def decode_message(data: bytes) -> Message:
    """Raises WireError."""
    sender, notes, loads, whole, controls, leaving = _decoded(_message, data)
    return Message(sender, [Note(*each) for each in notes], loads, whole, controls, leaving)


def encode_remembered(remembered: Iterable[Remembered]) -> bytes:
    return _encode([(_array(each.note), each.age_s) for each in remembered])


def decode_remembered(data: bytes) -> list[Remembered]:
    """Raises WireError."""
    return [Remembered(Note(*note), age_s) for note, age_s in _decoded(_remembered, data)]


def _decoded(decode: Callable[[bytes], T], data: bytes) -> T:
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"{len(data)} bytes cannot be read: {error}") from None


def _array(note: Note) -> _NoteArray:
    return (
        note.key,
        note.fingerprint,
        note.chain,
        note.fork,
        note.ratio,
        note.replica,
        note.incarnation,
        note.tokens,
        note.counted,
    )
