"""One whole chunk is told from everything else."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from router.proxy.chunk import MOST_DIGITS, is_whole

_SIZE_LINE = re.compile(rb"([1-9a-fA-F][0-9a-fA-F]{0,%d})\r\n" % (MOST_DIGITS - 1))


def _is_whole(data: bytes) -> bool:
    """The same, said otherwise."""
    line = _SIZE_LINE.match(data)
    return line is not None and line.end() + int(line[1], 16) + 2 == len(data) and data.endswith(b"\r\n")


@given(st.binary(min_size=1, max_size=600), st.booleans())
def test_a_chunk_is_one_whatever_it_holds(body: bytes, upper: bool) -> None:
    size = b"%X" % len(body) if upper else b"%x" % len(body)
    assert is_whole(size + b"\r\n" + body + b"\r\n")


@given(st.binary(min_size=1, max_size=300), st.data())
def test_no_chunk_with_a_byte_changed_left_out_or_added_is_taken_for_one(body: bytes, drawn: st.DataObject) -> None:
    chunk = bytearray(b"%x\r\n%b\r\n" % (len(body), body))
    at = drawn.draw(st.integers(0, len(chunk) - 1))
    how = drawn.draw(st.sampled_from(("change", "leave out", "add")))
    byte = drawn.draw(st.integers(0, 255))
    if how == "change":
        chunk[at] = byte
    elif how == "leave out":
        del chunk[at]
    else:
        chunk.insert(at, byte)
    assert is_whole(bytes(chunk)) == _is_whole(bytes(chunk))


@given(
    st.lists(
        st.sampled_from([b"0", b"1", b"2", b"a", b"F", b"\r", b"\n", b"\r\n", b";", b" ", b"x", b"_"]), max_size=24
    )
)
def test_what_looks_like_a_chunk_is_one_only_when_it_is(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    assert is_whole(data) == _is_whole(data)


def test_two_chunks_the_last_one_extensions_and_long_size_lines_are_not_one() -> None:
    assert is_whole(b"2\r\nab\r\n")
    for data in (
        b"",
        b"0\r\n\r\n",
        b"02\r\nab\r\n",
        b"2;a=b\r\nab\r\n",
        b"2\r\nab\r\n2\r\ncd\r\n",
        b"2\r\nab",
        b"000000002\r\nab\r\n",
        b"fffffffff\r\nab\r\n",
        b"ffffffff\r\nab\r\n",
        b"2\nab\r\n\r\n",
        b"+2\r\nab\r\n",
    ):
        assert not is_whole(data), data
