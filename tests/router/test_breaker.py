"""The circuit breaker: values and times in, a state out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.breaker import Breaker, Circuit
from router.settings import HealthSettings

SETTINGS = HealthSettings(
    passive_fail_after=3, error_fail_after=5, failure_share=0.5, failure_window=20, open_s=5, open_max_s=60
)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(SETTINGS)
    for _ in range(3):
        breaker.failed("reset", now)
    assert breaker.state is Circuit.OPEN
    return breaker


def tried(breaker: Breaker) -> float:
    """The moment at which it is on trial next."""
    now = breaker.retry_at
    breaker.tick(now)
    assert breaker.state is Circuit.HALF_OPEN
    return now


def test_it_opens_after_so_many_unanswered_in_a_row() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(9):
        breaker.failed("connect", 1.0)
        breaker.failed("connect", 1.0)
        breaker.answered(1.0)
        breaker.answered(1.0)
        breaker.answered(1.0)
    assert breaker.state is Circuit.CLOSED
    for _ in range(3):
        breaker.failed("reset", 2.0)
    assert (breaker.state, breaker.retry_at) == (Circuit.OPEN, 7.0)
    assert breaker.why == "3 requests in a row failed, the last by reset"


def test_answers_that_are_errors_need_more_in_a_row() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(4):
        breaker.failed("a 500", 1.0, answered=True)
    assert breaker.state is Circuit.CLOSED
    breaker.failed("a 500", 1.0, answered=True)
    assert breaker.state is Circuit.OPEN


def test_it_opens_when_a_share_of_the_last_requests_fails_though_never_in_a_row() -> None:
    breaker = Breaker(SETTINGS)
    for number in range(19):
        breaker.answered(1.0) if number % 2 else breaker.failed("broken", 1.0)
    assert breaker.state is Circuit.CLOSED, "a share of few says nothing"
    breaker.answered(1.0)
    breaker.failed("broken", 1.0)
    assert breaker.state is Circuit.OPEN
    assert breaker.why == "10 of the last 20 requests failed, the last by broken"


def test_a_lower_share_never_opens_it() -> None:
    breaker = Breaker(SETTINGS)
    for number in range(1000):
        breaker.failed("broken", 1.0) if number % 5 in (0, 2) else breaker.answered(1.0)
    assert breaker.state is Circuit.CLOSED


def test_one_answer_on_trial_closes_it_and_one_failure_opens_it_for_longer() -> None:
    breaker = opened(10.0)
    breaker.tick(14.9)
    assert breaker.state is Circuit.OPEN
    now = tried(breaker)
    assert now == 15.0
    breaker.failed("reset", now)
    assert (breaker.state, breaker.retry_at) == (Circuit.OPEN, now + 10.0)
    now = tried(breaker)
    breaker.answered(now)
    assert breaker.state is Circuit.CLOSED
    breaker.failed("reset", now)
    breaker.failed("reset", now)
    assert breaker.state is Circuit.CLOSED, "failures before do not count any more"


def test_the_time_doubles_up_to_a_bound_and_is_short_again_after_a_quiet_time() -> None:
    breaker = opened(0.0)
    spans = []
    for _ in range(6):
        now = tried(breaker)
        breaker.failed("reset", now)
        spans.append(breaker.retry_at - now)
    assert spans == [10.0, 20.0, 40.0, 60.0, 60.0, 60.0]
    for well_s, span_s in ((59.9, 60.0), (60.0, 60.0), (120.0, 40.0), (60.0, 40.0), (3600.0, 5.0)):
        now = tried(breaker)
        breaker.answered(now)
        for _ in range(3):
            breaker.failed("reset", now + well_s)
        assert breaker.retry_at == now + well_s + span_s, f"well for {well_s} s"


@pytest.mark.parametrize("trips", [64, 5000])
def test_however_often_it_opens_the_time_is_a_number(trips: int) -> None:
    breaker = opened()
    for _ in range(trips):
        breaker.failed("reset", tried(breaker))
    assert breaker.retry_at <= 60.0 * (trips + 1)


def test_while_it_is_open_nothing_counts() -> None:
    breaker = opened(0.0)
    breaker.answered(1.0)
    breaker.failed("reset", 1.0)
    assert (breaker.state, breaker.retry_at, breaker.trips) == (Circuit.OPEN, 5.0, 1)


class Machine(RuleBasedStateMachine):
    """Whatever happens: each change has its cause, told here independently of how it is counted there."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(SETTINGS)
        self.now = 0.0
        self.history: list[bool] = []
        """Since it was closed: whether each request failed."""
        self.state = Circuit.CLOSED
        self.opened_at = 0.0

    @rule(seconds=st.sampled_from([0.1, 3.0, 10.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.breaker.tick(self.now)
        if self.state is Circuit.OPEN and self.breaker.state is not Circuit.OPEN:
            assert self.breaker.state is Circuit.HALF_OPEN
            assert round(self.now - self.opened_at, 6) >= SETTINGS.open_s
        else:
            assert self.breaker.state is self.state
        self.state = self.breaker.state

    @rule(count=st.integers(1, 6))
    def answered(self, count: int) -> None:
        for _ in range(count):
            self.breaker.answered(self.now)
            if self.state is Circuit.HALF_OPEN:
                assert self.breaker.state is Circuit.CLOSED
                self.history = []
            else:
                assert self.breaker.state is self.state
                self.history.append(False)
            self.state = self.breaker.state

    @rule(count=st.integers(1, 6), answered=st.booleans())
    def failed(self, count: int, answered: bool) -> None:
        for _ in range(count):
            self.breaker.failed("reset", self.now, answered=answered)
            self.history.append(True)
            if self.state is Circuit.CLOSED:
                row = SETTINGS.error_fail_after if answered else SETTINGS.passive_fail_after
                last = self.history[-SETTINGS.failure_window :]
                in_a_row = len(self.history) >= row and all(self.history[-row:])
                share = len(last) == SETTINGS.failure_window and 2 * sum(last) >= len(last)
                assert (self.breaker.state is Circuit.OPEN) is (in_a_row or share)
            else:
                assert self.breaker.state is Circuit.OPEN
            if self.breaker.state is Circuit.OPEN and self.state is not Circuit.OPEN:
                self.opened_at = self.now
            self.state = self.breaker.state

    @precondition(lambda self: self.state is not Circuit.CLOSED)
    @rule()
    def another_process_is_there(self) -> None:
        self.breaker.close(self.now)
        self.history = []
        self.state = Circuit.CLOSED

    @invariant()
    def it_is_open_for_a_bounded_time(self) -> None:
        if self.breaker.state is Circuit.OPEN:
            span_s = round(self.breaker.retry_at - self.opened_at, 6)
            assert SETTINGS.open_s <= span_s <= SETTINGS.open_max_s
            assert self.breaker.why


TestMachine = Machine.TestCase


@given(st.lists(st.booleans(), max_size=200))
def test_equal_courses_are_equal(course: list[bool]) -> None:
    """No chance in it: two routers that see the same do the same."""
    breakers = [Breaker(SETTINGS), Breaker(SETTINGS)]
    for breaker in breakers:
        for second, failed in enumerate(course):
            breaker.tick(second)
            breaker.failed("reset", second) if failed else breaker.answered(second)
    first, second_ = ((b.state, b.retry_at, b.trips, b.why) for b in breakers)
    assert first == second_
