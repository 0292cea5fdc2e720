"""What is remembered of decisions, and how it is told."""

from __future__ import annotations

import gc

import pytest

from policies.balancer import Balancer
from policies.lease import Lease
from policies.random import Random
from policies.types import OUTCOMES, Cause, Choice, Phase, Reason, Replica, Request, Resident, Usage
from router import errors
from router.decisions import Decision, Decisions
from router.explanation import recalled
from router.identity import Identity

R1, R2 = Replica("r1"), Replica("r2")
KEY = bytes(16)
DONE = OUTCOMES[Cause.DONE, Phase.BODY]


class Asked:
    """The part of an exchange that decisions look at."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.identity = Identity(key=request.key)
        self.decision: Decision | None = None
        self.refusal: errors.Refusal | None = None
        self.tries = 1
        self.why = ""
        self.received_at = 1.0
        self.first_byte_at = 0.0


def placed(kept: Decisions, asked: Asked, choice: Choice, now: float = 1.0) -> None:
    kept.placed(asked, Lease(Balancer(Random()), asked.request, choice, now), now)  # type: ignore[arg-type]


def latest(kept: Decisions) -> Decision:
    return next(kept.latest())[1]


def test_the_facts_of_a_choice_and_how_it_went_are_kept() -> None:
    kept, asked = Decisions(), Asked(Request(KEY, prompt_tokens=1000))
    placed(kept, asked, Choice(R1, Reason.HOME, 0.5, 900, 0.1), now=7.0)
    made = latest(kept)
    assert (made.at, made.replica, made.reason, made.key) == (7.0, "r1", "home", KEY)
    assert (made.prompt_tokens, made.resident_tokens, made.wait_s, made.prefill_s) == (1000, 900, 0.5, 0.1)
    assert made.cause == ""
    asked.first_byte_at = 1.25
    kept.finished(asked, DONE, Usage(1010, 880, 5), 2.0)  # type: ignore[arg-type]
    assert (made.cause, made.first_byte_s, made.cached_tokens, made.told_prompt_tokens) == ("done", 0.25, 880, 1010)


def test_the_home_that_is_left_is_told() -> None:
    residents = (Resident(R1, 100, 100, own=False), Resident(R2, 50, 50))
    asked = Asked(Request(KEY, prompt_tokens=100, residents=residents))
    kept = Decisions()
    placed(kept, asked, Choice(Replica("r3"), Reason.MOVED, 0.0, 0, 0.3))
    assert latest(kept).left == "r2", "its own home comes before one that it only shares"
    assert recalled(latest(kept), None) == "moves from r2 to r3: 0 ms of queue and 0.3 s of prefill there"


def test_a_try_that_failed_says_why_and_the_next_is_one_more() -> None:
    kept, asked = Decisions(), Asked(Request(KEY))
    placed(kept, asked, Choice(R1, Reason.NEW))
    asked.why, asked.tries = "reset", 2
    placed(kept, asked, Choice(R2, Reason.HOME_LOST))
    (_, second), (_, first) = kept.latest()
    assert (first.failed, second.failed, second.tries) == ("reset", "", 2)


@pytest.mark.parametrize(("refusal", "told"), [(errors.NO_REPLICA["all_ejected"], True), (errors.ADMIN_PATH, False)])
def test_a_refusal_for_want_of_a_place_is_a_decision_and_a_bad_request_is_none(
    refusal: errors.Refusal, told: bool
) -> None:
    kept, asked = Decisions(), Asked(Request(KEY))
    asked.refusal = refusal
    kept.finished(asked, OUTCOMES[Cause.ROUTER, Phase.QUEUE], None, 2.0)  # type: ignore[arg-type]
    assert kept.total == told
    if told:
        assert recalled(latest(kept), None) == "refused: all_ejected"


def test_the_oldest_is_forgotten_and_numbers_go_on() -> None:
    kept = Decisions(kept=3)
    for _ in range(5):
        placed(kept, Asked(Request()), Choice(R1, Reason.NO_SESSION))
    assert [number for number, _ in kept.latest()] == [5, 4, 3]


def test_nothing_of_the_request_is_kept_alive() -> None:
    kept, asked = Decisions(), Asked(Request(KEY, blocks=tuple(range(10**6, 10**6 + 500))))
    placed(kept, asked, Choice(Replica("gone"), Reason.MOVED))
    kept.finished(asked, DONE, None, 2.0)  # type: ignore[arg-type]
    reached, todo = set(), [latest(kept)]
    while todo:
        each = todo.pop()
        if id(each) not in reached and not isinstance(each, type):
            reached.add(id(each))
            assert isinstance(each, Decision | str | bytes | int | float | None), type(each)
            todo += gc.get_referents(each)


EXPECTED = "0.5 s of queue and 0.1 s of prefill there"


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (Reason.HOME, f"stays on r1: {EXPECTED}, 6.9 s without its cache"),
        (Reason.SPLIT, f"splits off from r0 to r1: {EXPECTED}"),
        (Reason.PREFIX, "goes to r1: the longest part of its prompt is there, 900 of 1000 tokens"),
        (Reason.EVICTED, f"goes to r1: its KV cache is believed to be gone from every replica; {EXPECTED}"),
    ],
)
def test_sentences(reason: Reason, told: str) -> None:
    made = Decision(0.0, None, 1000, "r1", reason, 900, 0.5, 0.1, left="r0")
    assert recalled(made, 6.9) == told


def test_every_reason_has_a_sentence() -> None:
    for reason in Reason:
        assert "r1" in recalled(Decision(0.0, None, 0, "r1", reason), None)
