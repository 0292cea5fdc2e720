"""Ids of responses in requests and answers."""

from __future__ import annotations

import pytest

from router.identity import IdentityRules, responses

EVENT = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1","object":"response"'


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"input": "x", "previous_response_id": "resp_1"}', "resp_1"),
        (b'{"previous_response_id":"resp_\\u0031","input":[{"previous_response_id":"resp_2"}]}', "resp_1"),
        (b'{"input": [{"previous_response_id": "resp_2"}]}', None),
        (b'{"input": "a \\"previous_response_id\\": \\"resp_2\\""}', None),
        (b'{"previous_response_id": null}', None),
        (b'{"previous_response_id": 7}', None),
        (b'{"previous_response_id": "resp_1"', None),
        (b'"previous_response_id"', None),
        (b"[" * 100_000 + b'"previous_response_id"', None),
        (b'{"previous_response_id": "resp_1", "x": [' + b"0," * 500_001 + b"0]}", None),
        (b"", None),
    ],
)
def test_the_response_that_a_request_goes_on_from(body: bytes, named: str | None) -> None:
    assert responses.previous(body) == named


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (b'{"input": "x"}', True),
        (b'{"input": "x", "store": true}', True),
        (b'{"input": "x", "store": false}', False),
        (b'{"store" :false, "input": "x"}', False),
        (b'{"input": "\\"store\\": false"}', True),
        (b'{"tools": [{"store": {"type": "boolean"}}], "store":\n false}', False),
    ],
)
def test_whether_it_is_kept(body: bytes, *, kept: bool) -> None:
    assert responses.kept(body) is kept


@pytest.mark.parametrize(
    ("beginning", "found"),
    [
        (b'{"id":"resp_1","object":"response"', "resp_1"),
        (b'{ "id" : "resp_1", "object": "response"', "resp_1"),
        (EVENT, "resp_1"),
        (b'{"error": {"message": "Response with id \'resp_1\' not found."}}', None),
        (b'{"id":"chatcmpl-1","object":"chat.completion"', None),
        (b'{"previous_response_id":"resp_2"', None),
        (b'{"id":"resp_', None),
        (b'{"id":"resp_' + b"x" * 300 + b'"', None),
        (b"", None),
    ],
)
def test_the_id_in_an_answer(beginning: bytes, found: str | None) -> None:
    assert responses.issued(beginning) == found


def test_keys_hide_ids_and_are_a_tenants_own() -> None:
    rules = IdentityRules(secret=b"s")
    keys = [rules.response_key("resp_1"), rules.response_key("resp_1", b"t"), rules.response_key("resp_2")]
    keys += [IdentityRules(secret=b"other").response_key("resp_1"), rules.digest_of("resp_1")]
    assert len(set(keys)) == 5
    assert not any(b"resp_" in (key or b"") for key in keys)
    assert rules.response_key("x" * 257) is None
    assert rules.response_key("") is None
