"""What is told of several workers as of one router."""

from __future__ import annotations

from typing import Any

import pytest

from router.workers import figures


def replica(name: str, **changed: Any) -> dict[str, Any]:
    told = {"id": name, "in_flight": 1, "served": 10, "pending_prefill_tokens": 100, "others_in_flight": 0}
    return told | {"drain": None, "state": "ready"} | changed


def load(**replicas: int) -> dict[str, Any]:
    keys = ("in_flight", "served", "pending_prefill_tokens", "awaiting_first_token")
    return {"replicas": {name: dict.fromkeys(keys, value) for name, value in replicas.items()}, "leaving": []}


def test_what_is_under_way_is_added_up_and_the_rest_is_as_one_knows_it() -> None:
    told = {"replicas": [replica("a", others_in_flight=5), replica("b")], "leaving": [], "panic": False}
    out = figures.replicas(told, [load(a=2, b=0), load(a=1)], True)
    a, b = out["replicas"]
    assert (a["in_flight"], a["served"], a["pending_prefill_tokens"], a["state"]) == (4, 13, 103, "ready")
    assert a["others_in_flight"] == 2, "of the 6 seen there 4 are the workers'"
    assert (b["in_flight"], b["others_in_flight"]) == (1, 0)


def test_a_drain_is_over_when_it_is_for_all() -> None:
    drain = {"in_flight": 0, "done": True, "homes": "move"}
    told = {"replicas": [replica("a", in_flight=0, drain=drain)], "leaving": [], "panic": False}
    [still] = figures.replicas(told, [load(a=2)], True)["replicas"]
    assert still["drain"] == {"in_flight": 2, "done": False, "homes": "move"}
    [over] = figures.replicas(told, [load(a=0)], True)["replicas"]
    assert over["drain"]["done"]
    [unknown] = figures.replicas(told, [load(a=0)], False)["replicas"]
    assert not unknown["drain"]["done"], "who says nothing may have requests there"


def test_replicas_that_have_left_are_told_while_any_has_requests_there() -> None:
    told = {"replicas": [], "leaving": [{"id": "x", "url": "http://x", "in_flight": 1}], "panic": False}
    other = {"replicas": {}, "leaving": [{"id": "x", "in_flight": 2}, {"id": "a", "in_flight": 3}]}
    assert figures.replicas(told, [other], True)["leaving"] == [
        {"id": "a", "url": None, "in_flight": 3},
        {"id": "x", "url": "http://x", "in_flight": 3},
    ]


def overview(level: str = "ok", text: str = "All is well", **fleet: Any) -> dict[str, Any]:
    told = {"requests_per_s": 1.0, "in_flight": 1, "awaiting_first_token": 0, "waiting": 2, "held_sessions": 0}
    told |= {"pending_prefill_tokens": 5, "connections": 3, "longest_wait_s": None, "resident_tokens": 10}
    told |= {"capacity_tokens": 100, "sessions": 4, "sessions_limit": 50, "requests_per_s_series": [1.0, 2.0]}
    told |= {"hit_rate": None, "regretted_tokens": {"elsewhere": 1, "evicted": 2}, "refusals": {}}
    return {
        "uptime_s": 5.0,
        "verdict": {"level": level, "text": text},
        "fleet": told | fleet,
        "store": {"up": True, "why": None},
        "draining": [],
        "replicas": [],
        "decisions": [],
    }


def test_the_fleets_figures_are_added_up_where_each_has_its_own() -> None:
    one = overview(hit_rate=0.5, refusals={"room_full": 1}, longest_wait_s=1.5)
    other = overview(hit_rate=0.8, requests_per_s=3.0, requests_per_s_series=[4.0], refusals={"all_ejected": 5})
    fleet = figures.overview({1: one, 2: other}, [load()], True, 2, 40)["fleet"]
    assert (fleet["requests_per_s"], fleet["in_flight"], fleet["waiting"], fleet["connections"]) == (4.0, 2, 4, 6)
    assert fleet["requests_per_s_series"] == [1.0, 6.0], "the latest stand one above the other"
    assert fleet["hit_rate"] == 0.725, "by their requests"
    assert (fleet["sessions"], fleet["capacity_tokens"], fleet["longest_wait_s"]) == (4, 100, 1.5)
    assert list(fleet["refusals"].items()) == [("all_ejected", 5), ("room_full", 1)]
    assert fleet["regretted_tokens"] == {"elsewhere": 2, "evicted": 4}
    alone = figures.overview({2: overview(requests_per_s=None)}, [], True, 1, 40)["fleet"]
    assert (alone["requests_per_s"], alone["hit_rate"]) == (None, None)


@pytest.mark.parametrize(
    ("levels", "count", "level", "text"),
    [
        (["ok", "ok"], 2, "ok", "says 1"),
        (["ok", "bad"], 2, "warn", "Worker 2: says 2"),
        (["bad", "bad"], 2, "bad", "says 1"),
        (["ok"], 2, "warn", "1 of 2 workers does not answer. says 1"),
        (["bad"], 3, "bad", "2 of 3 workers do not answer. says 1"),
    ],
)
def test_the_verdict_is_of_all(levels: list[str], count: int, level: str, text: str) -> None:
    living = {number: overview(each, f"says {number}") for number, each in enumerate(levels, 1)}
    assert figures.overview(living, [], True, count, 40)["verdict"] == {"level": level, "text": text}


def test_the_store_is_told_of_as_a_worker_sees_it_that_does_not_reach_it() -> None:
    living = {number: overview() for number in (1, 2, 3)}
    assert figures.overview(living, [], True, 3, 40)["store"] == {"up": True, "why": None, "worker": 1}
    living[2]["store"] = {"up": False, "why": "refused"}
    assert figures.overview(living, [], True, 3, 40)["store"] == {"up": False, "why": "refused", "worker": 2}


def test_the_latest_decisions_of_all_are_told_and_no_two_have_one_number() -> None:
    made = [
        [{"number": n, "time": f"2026-01-01T00:00:0{at}"} for n, at in each] for each in ([(1, 5), (0, 1)], [(1, 3)])
    ]
    living = {number: overview() | {"decisions": each} for number, each in enumerate(made, 1)}
    told = figures.overview(living, [], True, 2, 2)["decisions"]
    assert [each["time"][-1] for each in told] == ["5", "3"]
    assert len({each["number"] for each in told}) == 2
