"""A conversation is known by how it begins, in every shape of the APIs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.identity import Identity, IdentityRules, chain

RULES = IdentityRules()
BILLING = "x-anthropic-billing-header: cc_version=2.1.332.%s; cc_entrypoint=cli;"

Turns = list[tuple[str, str]]
"""What was said: (question, answer), the last answer not yet given."""


def look(body: object, **options: bool) -> Identity:
    return RULES.from_body(Identity(), json.dumps(body).encode(), b"application/json", **options)


def mark(body: object) -> int:
    return look(body, want_fingerprint=True).fingerprint


def chat(system: str, turns: Turns) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"model": "m", "messages": messages[:-1]}


def anthropic(system: str, turns: Turns) -> dict[str, Any]:
    """As Claude Code sends it: marks move to the last message, and a system message follows the first."""
    messages: list[dict[str, Any]] = []
    for i, (question, answer) in enumerate(turns):
        part: dict[str, Any] = {"type": "text", "text": question}
        if i == len(turns) - 1:
            part["cache_control"] = {"type": "ephemeral"}
        messages.append({"role": "user", "content": [part]})
        if i == 0:
            messages.append({"role": "system", "content": f"tools as of turn {len(turns)}"})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    blocks = [{"type": "text", "text": BILLING % len(turns)}, {"type": "text", "text": system}]
    return {"model": "m", "messages": messages[:-1], "system": blocks, "tools": [{"name": f"t{len(turns)}"}]}


def responses(system: str, turns: Turns) -> dict[str, Any]:
    """As Codex sends it: a developer item, the same context in every session, then the prompt; ids change."""
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": system}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
    ]
    for question, answer in turns:
        items += [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": question}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "output": answer},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]},
        ]
    items = [{**item, "id": f"id-{len(turns)}-{i}"} for i, item in enumerate(items[:-4])]
    return {"model": "m", "input": items}


def instructed(system: str, turns: Turns) -> dict[str, Any]:
    """As the short form of responses: a string first, then items."""
    items = [item for item in chat(system, turns)["messages"] if item["role"] != "system"]
    return {"model": "m", "instructions": system, "input": items if len(turns) > 1 else turns[0][0]}


def completion(system: str, turns: Turns) -> dict[str, Any]:
    said = "".join(f"\nUser: {question}\nAssistant: {answer}" for question, answer in turns[:-1])
    start = f"{system}\n{turns[0][0]}\n".ljust(5000, ".")
    return {"model": "m", "prompt": f"{start}{said}"}


def generate(system: str, turns: Turns) -> dict[str, Any]:
    return {"model": "m", "text": completion(system, turns)["prompt"]}


def tokens(system: str, turns: Turns) -> dict[str, Any]:
    return {"model": "m", "input_ids": list(completion(system, turns)["prompt"].encode())}


SHAPES = [chat, anthropic, responses, instructed, completion, generate, tokens]
shaped = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
Shape = Callable[[str, Turns], dict[str, Any]]

_texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
_turns = st.lists(st.tuples(_texts, _texts), min_size=2, max_size=5)


@shaped
@given(system=_texts, turns=_turns)
def test_later_turns_keep_the_key(shape: Shape, system: str, turns: Turns) -> None:
    found = [look(shape(system, turns[:n])) for n in range(1, len(turns) + 1)]
    assert {identity.rule for identity in found} == {"fingerprint"}
    assert len({identity.fingerprint for identity in found}) == 1
    assert len({identity.key for identity in found}) == 1


@shaped
@given(system=_texts, turns=_turns, other=_texts)
def test_another_first_message_is_another_conversation(shape: Shape, system: str, turns: Turns, other: str) -> None:
    others = [(turns[0][0] + other, turns[0][1]), *turns[1:]]
    assert mark(shape(system, turns)) != mark(shape(system, others))


@shaped
def test_another_system_prompt_is_another_conversation(shape: Shape) -> None:
    assert mark(shape("a", [("q", "")])) != mark(shape("b", [("q", "")]))


def _shuffled(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        members = [(name, _shuffled(inner, chance)) for name, inner in value.items()]
        chance.shuffle(members)
        return dict(members)
    return [_shuffled(inner, chance) for inner in value] if isinstance(value, list) else value


@shaped
@given(system=_texts, turns=_turns, chance=st.randoms(use_true_random=False))
def test_the_order_of_names_does_not_matter(shape: Shape, system: str, turns: Turns, chance: random.Random) -> None:
    body = shape(system, turns)
    assert mark(_shuffled(body, chance)) == mark(body)


def test_what_the_system_says_the_user_does_not() -> None:
    def body(*roles: str) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": text} for role, text in zip(roles, "ab", strict=True)]}

    assert len({mark(body("system", "user")), mark(body("user", "user")), mark(body("system", "system"))}) == 3
    assert mark(chat("ab", [("c", "")])) != mark(chat("a", [("bc", "")]))


def test_a_string_and_a_list_of_one_text_say_the_same() -> None:
    blocks = [{"type": "text", "text": "hello"}]
    for field in ("system", "instructions"):
        assert mark({field: "hello", "messages": []}) == mark({field: blocks, "messages": []}) != 0
    plain = {"messages": [{"role": "user", "content": "hello"}]}
    assert mark({"messages": [{"role": "user", "content": blocks}]}) == mark(plain)


def test_the_billing_block_is_no_part_of_it() -> None:
    def body(*system: str) -> dict[str, Any]:
        return {"system": [{"type": "text", "text": text} for text in system], **said}

    said = {"messages": [{"role": "user", "content": "hello"}]}
    assert mark(body(BILLING % "1c9", "be kind")) == mark(body(BILLING % "34c", "be kind")) == mark(body("be kind"))
    assert mark({"system": BILLING % "1c9", **said}) == mark(said)


def test_a_greeting_before_the_first_question_is_passed_over() -> None:
    greeting = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "Hello! How can I help?"}]
    asked = [mark({"messages": [*greeting, {"role": "user", "content": text}]}) for text in ("a", "b")]
    assert asked[0] != asked[1]


@pytest.mark.parametrize(
    "picture",
    [
        lambda data: {"type": "image_url", "image_url": {"url": data}},
        lambda data: {"type": "image", "source": {"type": "base64", "data": data}},
        lambda data: {"type": "input_image", "image_url": data},
        lambda data: {"type": "input_audio", "input_audio": {"data": data}},
        lambda data: {"type": "input_file", "file_id": data},
    ],
)
def test_pictures_and_files_count(picture: Callable[[str], dict[str, Any]]) -> None:
    def body(data: str) -> dict[str, Any]:
        content = [picture(data), {"type": "text", "text": "What is this?"}]
        return {"messages": [{"role": "user", "content": content}]}

    assert mark(body("aaaa")) == mark(body("aaaa")) != mark(body("bbbb"))


def test_content_of_no_known_shape_still_counts() -> None:
    bodies = [{"messages": [{"role": "user", "content": [text]}]} for text in ("a", "b")]
    assert mark(bodies[0]) != mark(bodies[1])


def test_a_message_of_no_known_shape_is_passed_over() -> None:
    said = {"role": "user", "content": "hello"}
    assert mark({"messages": [5, {"role": 7, "content": "x"}, None, said]}) == mark({"messages": [said]})


def test_the_first_messages_are_enough() -> None:
    many = [{"role": "user", "content": str(i)} for i in range(100)]
    assert mark({"messages": many}) == mark({"messages": many[:64]}) != mark({"messages": many[:63]})


def test_a_short_prompt_counts_whole_and_a_long_one_by_its_head() -> None:
    assert mark({"prompt": "a"}) != mark({"prompt": "ab"})
    long = "x" * 5000
    assert mark({"prompt": long}) == mark({"prompt": long + "y"}) != mark({"prompt": "y" + long})


def test_messages_come_before_a_prompt_and_the_settings_of_responses_are_none() -> None:
    said = {"messages": [{"role": "user", "content": "hello"}]}
    assert mark({**said, "prompt": "p", "text": "t", "input": [{"role": "user", "content": "i"}]}) == mark(said)
    assert mark({"text": {"format": {"type": "text"}}}) == 0


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"model": "m"},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"messages": {"role": "user"}},
        {"prompt": None},
        {"input": ["two", "texts"]},
        {"input": 7},
        {"query": "q", "documents": ["d"]},
    ],
)
def test_where_nothing_is_said_there_is_no_key(body: object) -> None:
    identity = look(body, want_fingerprint=True)
    assert (identity.fingerprint, identity.key, identity.rule) == (0, None, "none")


# Blocks


def test_blocks_agree_up_to_the_first_that_differs() -> None:
    bodies = [json.dumps({"messages": [{"role": "user", "content": "x" * 10_000 + end}]}).encode() for end in "ab"]
    bodies += [bodies[0].replace(b"xxx", b"xyx", 1)]
    one, two, other = (chain(body) for body in bodies)
    assert len(one) == len(set(one)) == 2
    assert two == one
    assert not set(other) & set(one)


def test_blocks_are_whole_and_bounded() -> None:
    body = b'{"x": "' + b"x" * 4087 + b'"}'
    assert len(body) == 4096
    assert len(chain(body)) == 1
    assert chain(body[1:]) == ()
    assert len(chain(body * 2000)) == 1024


def test_what_a_program_adds_to_the_users_words_is_not_part_of_them() -> None:
    """Qwen Code adds the date to the newest message only: the first one loses it with the second turn."""
    asked = [{"type": "text", "text": "an environment"}, {"type": "text", "text": "fix the tests"}]
    dated = [asked[0], {"type": "text", "text": "<system-reminder>\nThe current date is today"}, asked[1]]
    turns = [{"role": "assistant", "content": "done"}, {"role": "user", "content": "go on"}]
    first = look({"messages": [{"role": "user", "content": dated}]})
    second = look({"messages": [{"role": "user", "content": asked}, *turns]})
    assert first.key == second.key
    only = look({"messages": [{"role": "user", "content": dated[1:2]}]})
    assert only.fingerprint, "a message that is nothing but a reminder still begins a conversation"
