"""A conversation's tokens are the beginning of its continuation's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sim.emulator import tokens

texts = st.text(max_size=40)
messages = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), texts), min_size=1, max_size=5)


@given(messages, st.integers(1, 40), messages)
def test_the_next_turn_extends_this_one_and_its_answer(
    history: list[tokens.Message], length: int, more: list[tokens.Message]
) -> None:
    prompt = tokens.conversation(history)
    words = tokens.answer(prompt, length)
    following = tokens.conversation([*history, ("assistant", "".join(words)), *more])
    assert following.startswith(prompt + "".join(words).encode())


@given(messages, st.integers(2, 40), messages)
def test_an_answer_that_was_trimmed_loses_its_last_token_only(
    history: list[tokens.Message], length: int, more: list[tokens.Message]
) -> None:
    prompt = tokens.conversation(history)
    words = tokens.answer(prompt, length)
    following = tokens.conversation([*history, ("assistant", "".join(words).strip()), *more])
    assert following.startswith(prompt + "".join(words[:-1]).encode())


@given(messages, messages)
def test_different_conversations_differ(one: list[tokens.Message], other: list[tokens.Message]) -> None:
    known = {"tool", "user", "system", "assistant"}
    assert {role for role, _ in one + other} <= known
    assert (tokens.conversation(one) == tokens.conversation(other)) == (one == other)


@given(texts)
def test_a_token_is_four_bytes(text: str) -> None:
    units = tokens.units(text)
    assert tokens.count(units) == -(-len(text.encode()) // 4)
    assert len(tokens.ids(units)) == tokens.count(units)


@given(messages, st.integers(1, 30), st.integers(1, 30))
def test_a_shorter_answer_is_the_beginning_of_a_longer_one(
    history: list[tokens.Message], length: int, more: int
) -> None:
    prompt = tokens.conversation(history)
    assert tokens.answer(prompt, length + more)[:length] == tokens.answer(prompt, length)


@given(st.binary(min_size=0, max_size=400).map(lambda data: data[: len(data) // 4 * 4]), st.integers(1, 8))
def test_pages_are_chained(data: bytes, page_size: int) -> None:
    pages = tokens.chain(data, page_size)
    assert len(pages) == tokens.count(data) // page_size
    assert tokens.chain(data + b"more" * page_size, page_size)[: len(pages)] == pages
    # A page after a different beginning is another page, even with equal tokens.
    changed = tokens.chain(b"\xffXXX" + data[4:], page_size) if len(data) >= 4 else []
    assert not set(pages) & set(changed)


@given(st.binary(min_size=64, max_size=64))
def test_a_salt_makes_other_pages(data: bytes) -> None:
    assert not set(tokens.chain(data, 4)) & set(tokens.chain(data, 4, "tenant"))


def test_content_of_parts() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]
    assert tokens.text_of(parts) == tokens.text_of("one two")
    assert tokens.text_of([{"type": "tool_result", "content": parts}]) == "one two"


def test_a_moved_cache_marker_changes_nothing() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}}
    assert tokens.text_of([call]) == tokens.text_of([{**call, "cache_control": {"type": "ephemeral"}}])
