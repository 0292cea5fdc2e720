"""Engines' reports, as recorded from a real SGLang 0.5.23 and as older ones or liars would give them."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import UTC, datetime
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import loads
from tests.emulator import recorded

NOW = 1000.0


def body(name: str) -> bytes:
    """The body of a recorded answer."""
    return recorded.load(name).answer.body


def answer(*ranks: dict[str, Any], timestamp: object = "2026-11-29T12:00:31+00:00") -> bytes:
    return json.dumps({"timestamp": timestamp, "loads": ranks}).encode()


TAKEN = 1795953631.0
"""Of the answer above, seconds since the epoch."""


# Recorded


def test_an_idle_engine() -> None:
    report = loads.from_loads(body("v1_loads_idle.json.txt"), NOW)
    load = report.load
    assert (load.running, load.waiting, load.waiting_tokens, load.used_tokens) == (0, 0, 0, 0)
    assert load.capacity_tokens == 20_000
    assert (report.prefilled_tokens, report.prefill_busy_us, report.ranks) == (12, 48_915, 1)
    assert NOW - load.at == pytest.approx(31.479378 - 31.478247, abs=1e-5)
    assert report.taken == 1795953631.478247


def test_a_full_engine() -> None:
    load = loads.from_loads(body("v1_loads_under_load.json.txt"), NOW).load
    assert (load.running, load.waiting) == (4, 4)
    assert NOW - load.at == pytest.approx(36.535228 - 36.4808545, abs=1e-5)


def test_its_metrics() -> None:
    load = loads.from_metrics(body("metrics_after.txt"), NOW).load
    assert (load.running, load.waiting, load.capacity_tokens) == (0, 0, 20_000)
    assert load.host_capacity_tokens is None
    assert load.waiting_tokens is None, "not told there: unknown, not none"


def test_its_server_info() -> None:
    info = loads.from_server_info(body("server_info.txt"))
    assert info.mark is not None
    assert "0.3433109749998948" in info.mark
    assert info.capacity_tokens == 20_000
    assert info.host_capacity_tokens is None, "its hierarchical cache is off"
    assert loads.from_server_info(body("get_server_info.txt")) == info


# Made up


def test_ranks_are_summed_and_as_old_as_the_oldest() -> None:
    ranks = [
        {"timestamp": TAKEN - 7, "num_running_reqs": 1, "num_waiting_reqs": 2, "max_total_num_tokens": 100},
        {"timestamp": TAKEN - 1, "num_running_reqs": 4, "num_waiting_reqs": 8, "max_total_num_tokens": 100},
    ]
    report = loads.from_loads(answer(*ranks), NOW)
    assert (report.load.running, report.load.waiting, report.load.capacity_tokens) == (5, 10, 200)
    assert (report.ranks, report.taken, report.load.at) == (2, TAKEN - 7, NOW - 7)


def test_of_a_rank_only_its_own_counts() -> None:
    """Also when all are told: an engine may not know the question."""
    ranks = [
        {"dp_rank": 0, "timestamp": TAKEN - 7, "num_running_reqs": 1, "num_waiting_reqs": 2},
        {"dp_rank": 1, "timestamp": TAKEN - 1, "num_running_reqs": 4, "num_waiting_reqs": 8},
    ]
    report = loads.from_loads(answer(*ranks), NOW, 1)
    assert (report.load.running, report.load.waiting, report.ranks) == (4, 8, 1)
    assert (report.taken, report.load.at) == (TAKEN - 1, NOW - 1)


NO_SUCH = "the engine tells of no data-parallel rank 2: `ranks` is greater than its --dp-size, set it to that"


def test_a_rank_that_is_not_told_is_said_to_be_missing() -> None:
    old = json.dumps([{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2}]).encode()
    for parse, said in (
        (loads.from_loads, answer()),
        (loads.from_loads, answer({"dp_rank": 0, "num_running_reqs": 1})),
        (loads.from_get_load, old),
        (loads.from_metrics, b'sglang:num_running_reqs{dp_rank="0"} 3.0\n'),
        (loads.from_metrics, b"sglang:num_running_reqs 3.0\n"),
    ):
        with pytest.raises(ValueError, match=re.escape(NO_SUCH)):
            parse(said, NOW, 2)
    with pytest.raises(ValueError, match="no engine's load in it"):
        loads.from_metrics(b"up 1\n", NOW, 2)


@pytest.mark.parametrize("offset_s", [-1e6, 0.0, 1e6])
def test_the_engines_clock_need_not_be_ours(offset_s: float) -> None:
    answered = datetime.fromtimestamp(TAKEN + offset_s, UTC).isoformat()
    said = answer({"timestamp": TAKEN + offset_s - 3, "num_running_reqs": 0}, timestamp=answered)
    assert loads.from_loads(said, NOW).load.at == pytest.approx(NOW - 3, abs=1e-3)


@pytest.mark.parametrize("said", [None, 3, "yesterday", "2026-11-29T12:00:31", "9999999-01-01"])
def test_without_a_time_of_its_answer_the_age_is_not_guessed(said: object) -> None:
    """A time without zone would be taken for our local one."""
    report = loads.from_loads(answer({"timestamp": TAKEN - 50, "num_running_reqs": 1}, timestamp=said), NOW)
    assert report.load.at == NOW
    assert report.taken == TAKEN - 50, "so that whoever sees it twice knows"


def test_an_age_is_never_negative() -> None:
    assert loads.from_loads(answer({"timestamp": TAKEN + 9, "num_running_reqs": 1}), NOW).load.at == NOW


@pytest.mark.parametrize("bad", [None, -1, "3", True, [], 1 << 60, 1e300, float("nan"), float("inf")])
def test_what_cannot_be_is_unknown_not_zero(bad: object) -> None:
    good = {"num_running_reqs": 3, "num_waiting_reqs": 5, "num_waiting_uncached_tokens": 7}
    load = loads.from_loads(answer(good | {"num_waiting_uncached_tokens": bad}), NOW).load
    assert (load.running, load.waiting, load.waiting_tokens) == (3, 5, None)
    summed = loads.from_loads(answer(good, good | {"num_running_reqs": bad}), NOW).load
    assert (summed.running, summed.waiting) == (None, 10), "a sum with an unknown part is unknown"


@pytest.mark.parametrize(
    "said", [b"", b"[]", b"{}", b"<html>", b'{"loads": []}', b'{"loads": [1]}', b'{"loads": [{}]}', b"[" * 100_000]
)
def test_what_is_no_report_is_refused(said: bytes) -> None:
    with pytest.raises(ValueError, match=r"in it|not JSON|not a JSON object"):
        loads.from_loads(said, NOW)


def test_the_older_form() -> None:
    said = [
        {"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 100},
        {"dp_rank": 1, "num_reqs": 1, "num_waiting_reqs": 0, "num_tokens": 50},
    ]
    load = loads.from_get_load(json.dumps(said).encode(), NOW).load
    assert (load.at, load.running, load.waiting) == (NOW, 4, 2)
    assert loads.from_get_load(json.dumps(said[0]).encode(), NOW).load.running == 3
    assert loads.from_get_load(json.dumps(said).encode(), NOW, 1).load.running == 1
    for bad in (b"", b"[]", b"[{}]", b"null", b'"x"'):
        with pytest.raises(ValueError, match=r"in it|not JSON"):
            loads.from_get_load(bad, NOW)


@pytest.mark.parametrize("prefix", ["sglang:", "sglang_"])
def test_both_prefixes_of_metrics(prefix: str) -> None:
    text = (
        f"# TYPE {prefix}num_running_reqs gauge\n"
        f'{prefix}num_running_reqs{{dp_rank="0",tp_rank="0"}} 3.0\n'
        f'{prefix}num_running_reqs{{dp_rank="0",tp_rank="1"}} 3.0\n'
        f'{prefix}num_running_reqs{{dp_rank="1",tp_rank="0"}} 4.0\n'
        f'{prefix}num_running_reqs_offline_batch{{dp_rank="1"}} 99.0\n'
        f"{prefix}num_queue_reqs 5.0\n"
        f"{prefix}hicache_host_total_tokens 900.0\n"
        "num_running_reqs 77\n"
    )
    load = loads.from_metrics(text.encode(), NOW).load
    assert load.running == 7, "tensor-parallel ranks tell the same, data-parallel ranks add up"
    assert (load.waiting, load.host_capacity_tokens) == (5, 900)
    second = loads.from_metrics(text.encode(), NOW, 1).load
    assert (second.running, second.waiting) == (4, None), "what is told of no rank is not this one's"


@pytest.mark.parametrize(
    "said", [b"", b"\xff\xfe", b"up 1\n", b"sglang:num_running_reqs{ 1\n", b"sglang:num_running_reqs NaN\n"]
)
def test_metrics_without_a_load_are_refused(said: bytes) -> None:
    with pytest.raises(ValueError, match=r"no engine's load|text format"):
        loads.from_metrics(said, NOW)


def test_the_host_tier_is_derived_from_its_ratio() -> None:
    said = {"max_total_num_tokens": 1000, "dp_size": 2, "enable_hierarchical_cache": True, "hicache_ratio": 2.5}
    assert loads.from_server_info(json.dumps(said | {"hicache_size": 0}).encode()).host_capacity_tokens == 5000
    in_gigabytes = loads.from_server_info(json.dumps(said | {"hicache_size": 30}).encode())
    assert (in_gigabytes.capacity_tokens, in_gigabytes.host_capacity_tokens, in_gigabytes.mark) == (2000, None, None)
    of_one = loads.from_server_info(json.dumps(said | {"hicache_size": 0}).encode(), 1)
    assert (of_one.capacity_tokens, of_one.host_capacity_tokens, of_one.ranks) == (1000, 2500, 2)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_FIELDS = """
    timestamp dp_rank num_running_reqs num_waiting_reqs num_used_tokens total_prefill_uncached_tokens loads num_reqs
    startup_time max_total_num_tokens dp_size hicache_ratio hicache_size enable_hierarchical_cache
"""
_fields = st.sampled_from(_FIELDS.split())
_ranks = st.lists(st.dictionaries(_fields, _values, max_size=6), max_size=3)


@given(st.fixed_dictionaries({"loads": _ranks, "timestamp": _values}) | _ranks | st.dictionaries(_fields, _values))
def test_no_lie_makes_more_than_a_value_error(said: object) -> None:
    raw = json.dumps(said).encode()
    parsers = (loads.from_loads, loads.from_get_load, loads.from_metrics)
    for parse, rank in product(parsers, (None, 0)):
        try:
            load = parse(raw, NOW, rank).load
        except ValueError:
            continue
        numbers = (load.running, load.waiting, load.waiting_tokens, load.used_tokens, load.capacity_tokens)
        assert all(number is None or number >= 0 for number in numbers)
        assert load.at <= NOW
    with suppress(ValueError):
        loads.from_server_info(raw)


@given(st.lists(st.sampled_from(["sglang:num_running_reqs", "{", "}", 'a="b"', " ", "1", "NaN", "-1", "#", "\n", ","])))
def test_no_metrics_make_more_than_a_value_error(pieces: list[str]) -> None:
    try:
        load = loads.from_metrics("".join(pieces).encode(), NOW).load
    except ValueError:
        return
    assert load.running is None or load.running >= 0
