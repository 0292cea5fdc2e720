"""Notes and messages come back from bytes as they were, and bytes that are none are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.sharing import Note
from router.store import Message, Remembered, wire
from tests.store.notes import note

_numbers = st.integers(0, wire.MAX_COUNT)
_floats = st.floats(0.0, wire.MAX_S)
_text = st.text(max_size=20)
_notes = st.builds(
    Note,
    st.binary(max_size=32),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=64),
    st.booleans(),
    st.floats(0.01, 100.0),
    _text,
    _text,
    _numbers,
    _numbers,
)
_messages = st.builds(
    Message,
    _text,
    st.lists(_notes, max_size=3),
    st.dictionaries(_text, st.tuples(_numbers, _numbers, _floats), max_size=3),
    st.booleans(),
    st.dictionaries(_text, st.none() | st.binary(max_size=20), max_size=3),
    st.booleans(),
)
_DECODERS = (wire.decode_note, wire.decode_notes, wire.decode_message, wire.decode_remembered)


@given(_notes)
def test_notes(note: Note) -> None:
    assert wire.decode_note(wire.encode_note(note)) == note


@given(_messages)
def test_messages(message: Message) -> None:
    assert wire.decode_message(wire.encode_message(message)) == message
    encoded = [wire.encode_note(note) for note in message.notes]
    assert wire.encode_message(message, encoded) == wire.encode_message(message)


@given(st.lists(st.builds(Remembered, _notes, _floats), max_size=3))
def test_lists(remembered: list[Remembered]) -> None:
    assert wire.decode_remembered(wire.encode_remembered(remembered)) == remembered
    notes = [each.note for each in remembered]
    assert wire.decode_notes(wire.encode_notes(notes)) == notes


@pytest.mark.parametrize("decode", _DECODERS)
@given(data=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(decode: Callable[[bytes], Any], data: bytes) -> None:
    with suppress(wire.WireError):
        decode(data)


@pytest.mark.parametrize(
    ("decode", "data"),
    [
        (wire.decode_note, b""),
        (wire.decode_note, wire.encode_note(note())[:-1]),
        (wire.decode_note, wire.encode_note(note()) + b"\x00"),
        (wire.decode_note, wire.encode_notes([note()])),
        (wire.decode_message, wire.encode_message(Message("one", [note()]))[:-2]),
        (wire.decode_message, wire.encode_note(note())),
    ],
)
def test_what_is_cut_or_something_else_is_refused(decode: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(wire.WireError):
        decode(data)


@pytest.mark.parametrize("load", [(1, 1, inf), (1, 1, -inf), (1, 1, nan), (1, 1, 1e300), (-1, 1, 0.0), (1, 2**60, 0.0)])
def test_loads_beyond_belief_are_refused(load: tuple[int, int, float]) -> None:
    """Replicas are compared by sums of them."""
    with pytest.raises(wire.WireError):
        wire.decode_message(wire.encode_message(Message("one", loads={"r": load})))


@pytest.mark.parametrize(
    "changed", [{"ratio": inf}, {"ratio": nan}, {"ratio": 0.0}, {"tokens": -1}, {"counted": 2**60}]
)
def test_notes_beyond_belief_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_note(wire.encode_note(note(**changed)))
