"""Sentences over constructed choices, and over those of every policy."""

from __future__ import annotations

import json
from math import inf

import pytest

from policies.balancer import Balancer
from policies.registry import POLICIES, make
from policies.responses import PREFIX, issued
from policies.types import Candidate, Choice, Reason, Replica, Request, Resident
from router.explanation import sentence, table
from tests.fakes.fleet import fleet, turn

R1, R2, R3 = (Replica(f"r{number}") for number in (1, 2, 3))


def candidate(replica: Replica, **terms: float) -> Candidate:
    return Candidate(replica, sum(terms.values()), terms)


def choice(replica: Replica, reason: Reason, *candidates: Candidate, resident: int = 0) -> Choice:
    return Choice(replica, reason, 0.2, resident, 6.9, candidates)


HOME = candidate(R3, queue=1.2, prefill=0.1, neighbours=0.0)
OTHER = candidate(R1, queue=0.0, prefill=7.0, neighbours=0.0)
DEARER = candidate(R2, queue=3.0, prefill=7.0, neighbours=0.0)


def test_staying_names_what_moving_would_cost_and_save() -> None:
    told = sentence(choice(R3, Reason.HOME, OTHER, HOME, DEARER), Request())
    assert told == "stays on r3: moving would cost 6.9 s of prefill to save 1.2 s of queue"


def test_staying_is_compared_with_the_best_other_that_may_be_chosen() -> None:
    forbidden = Candidate(R2, inf, {"queue": 0.0, "prefill": 0.0})
    told = sentence(choice(R3, Reason.HOME, forbidden, DEARER, OTHER, HOME), Request())
    assert "6.9 s of prefill to save 1.2 s of queue" in told


def test_staying_where_nothing_is_saved() -> None:
    told = sentence(choice(R3, Reason.HOME, HOME, candidate(R1, queue=1.2, prefill=7.0, neighbours=0.04)), Request())
    assert told == "stays on r3: moving would cost 6.9 s of prefill and save nothing", "hundredths are not worth naming"


def test_staying_though_another_is_better_by_less_than_the_hysteresis() -> None:
    better = candidate(R1, queue=0.0, prefill=0.6, neighbours=0.08)
    told = sentence(choice(R3, Reason.HOME, better, HOME), Request())
    assert told == (
        "stays on r3: moving would cost 0.5 s of prefill and 80 ms of waiting of its neighbours to save 1.2 s of queue"
        ", not enough to leave its cache"
    )


def test_staying_alone_and_without_a_table() -> None:
    assert sentence(choice(R3, Reason.HOME, HOME), Request()) == "stays on r3: no other was weighed"
    told = sentence(choice(R3, Reason.HOME, resident=900), Request(prompt_tokens=1000))
    assert told == "stays on r3: its KV cache is there, 900 of 1000 tokens"


def test_moving_is_compared_with_the_home_left() -> None:
    left = candidate(R3, queue=9.0, prefill=0.1)
    request = Request(residents=(Resident(R3, 900, 900), Resident(R2, 950, 950, own=False)))
    told = sentence(choice(R1, Reason.MOVED, OTHER, DEARER, left), request)
    assert told == "moves from r3 to r1: it costs 6.9 s of prefill to save 9.0 s of queue"


def test_moving_to_where_it_is_resident_too_costs_nothing() -> None:
    left = candidate(R3, queue=9.0, prefill=0.1)
    request = Request(residents=(Resident(R3, 900, 900), Resident(R1, 900, 900)))
    told = sentence(choice(R1, Reason.MOVED, candidate(R1, queue=0.0, prefill=0.1), left), request)
    assert told == "moves from r3 to r1: it costs nothing to save 9.0 s of queue"


def test_splitting_says_that_others_are_under_way() -> None:
    left = candidate(R3, queue=9.0, prefill=0.1)
    request = Request(residents=(Resident(R3, 900, 900),), concurrent=True)
    told = sentence(choice(R1, Reason.SPLIT, OTHER, left), request)
    assert told == (
        "splits off from r3 to r1, others of its session being under way: "
        "it costs 6.9 s of prefill to save 9.0 s of queue"
    )


def test_moving_from_a_home_that_is_not_in_the_table() -> None:
    request = Request(residents=(Resident(R3, 900, 900),))
    told = sentence(choice(R1, Reason.MOVED, OTHER), request)
    assert told == "moves from r3 to r1: 0.2 s of queue and 6.9 s of prefill there"


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (Reason.NEW, "goes to r1: nothing is known of it; 7.00 s there, 10.00 s on r2"),
        (
            Reason.EVICTED,
            "goes to r1: its KV cache is believed to be gone from every replica; 7.00 s there, 10.00 s on",
        ),
        (Reason.HOME_LOST, "goes to r1: its home cannot take it; 7.00 s there, 10.00 s on r2"),
        (Reason.NO_SESSION, "goes to r1: nothing tells whose request it is, so that load decides"),
    ],
)
def test_a_new_place_is_compared_with_the_next_best(reason: Reason, told: str) -> None:
    assert sentence(choice(R1, reason, OTHER, DEARER), Request()).startswith(told)


def test_costs_that_are_no_seconds_are_not_called_so() -> None:
    scores = candidate(R1, blocks=-3.0), candidate(R2, blocks=-1.0)
    chosen = choice(R1, Reason.SCORE, *scores)
    chosen.unit = ""
    told = "goes to r1: the best sum of what its policy weighs; -3.00 there, -1.00 on r2"
    assert sentence(chosen, Request()) == told
    chosen.unit = "blocks"
    assert sentence(chosen, Request()) == told.replace("there", "blocks there").replace("-1.00", "-1.00 blocks")


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_sentence_without_a_table(reason: Reason) -> None:
    told = sentence(choice(R1, reason), Request())
    assert told.split(" ")[0] in ("stays", "moves", "splits", "goes")
    assert "r1" in told
    assert told == told.strip()
    assert "\n" not in told


# Of real policies


def explained(balancer: Balancer, request: Request, now: float) -> dict[str, object]:
    return table(balancer.explain(request, now), request)


@pytest.mark.parametrize("name", POLICIES)
def test_any_policy_is_explained_as_it_would_choose(name: str) -> None:
    balancer = fleet(make(name))
    blocks = tuple(range(1, 60))
    turn(balancer, Request(b"k", blocks=blocks, prompt_tokens=60_000), 1.0, 60_000)
    for request in (
        Request(b"k", blocks=blocks, prompt_tokens=60_000),
        Request(b"other", blocks=(7, 8, 9), prompt_tokens=3_000),
        Request(prompt_tokens=100),
    ):
        told = explained(balancer, request, 9.0)
        assert json.loads(json.dumps(told, allow_nan=False)) == told
        listed = told["candidates"]
        assert isinstance(listed, list)
        assert not listed or told["replica"] in [each["replica"] for each in listed]
        chosen = balancer.acquire(request, 9.0).choice
        assert (told["replica"], told["reason"]) == (chosen.replica.id, chosen.reason)


@pytest.mark.parametrize("name", ["session_affinity", "round_robin"])
def test_who_goes_on_from_a_response_goes_where_that_is_and_the_sentence_says_so(name: str) -> None:
    balancer = fleet(make(name))
    response = PREFIX + b"0" * 16
    balancer.hear(issued(response, balancer.replicas["b"]), 1.0)
    told = explained(balancer, Request(b"k", prompt_tokens=100, response=response), 2.0)
    assert (told["reason"], told["candidates"]) == ("home", [])
    assert told["sentence"] == "goes to b: the response that it goes on from is there alone"


def test_the_terms_add_up_to_the_cost_and_the_home_is_marked_resident() -> None:
    balancer = fleet(make("session_affinity"))
    home = turn(balancer, Request(b"k", prompt_tokens=50_000), 1.0, 50_000).replica.id
    told = explained(balancer, Request(b"k", prompt_tokens=50_000), 9.0)
    assert (told["replica"], told["reason"], told["resident_tokens"]) == (home, "home", 50_000)
    listed = told["candidates"]
    assert isinstance(listed, list)
    assert len(listed) == 3
    assert [each["cost"] for each in listed] == sorted(each["cost"] for each in listed)
    for each in listed:
        assert sum(each["terms"].values()) == pytest.approx(each["cost"], abs=1e-3)
        assert each["resident_tokens"] == (50_000 if each["replica"] == home else 0)


def test_what_no_json_can_hold_is_none() -> None:
    forbidden = Candidate(R2, inf, {"queue": 0.0, "grace": inf})
    told = table(choice(R1, Reason.NEW, OTHER, forbidden), Request())
    assert told["candidates"][-1]["cost"] is None
    assert told["candidates"][-1]["terms"] == {"queue": 0.0, "grace": None}
