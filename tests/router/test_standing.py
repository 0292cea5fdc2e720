"""When a replica is ready, draining or ejected: values in, state out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.types import State
from router.settings import HealthSettings
from router.standing import Missing, Standing

SETTINGS = HealthSettings(fail_after=3, pass_after=2, passive_fail_after=3)


def ejected() -> Standing:
    standing = Standing(SETTINGS)
    for _ in range(3):
        standing.probe_failed("refused")
    assert standing.state is State.EJECTED
    return standing


def test_it_is_ready_until_it_is_probed() -> None:
    standing = Standing(SETTINGS)
    assert (standing.state, standing.why) == (State.READY, "not probed yet")
    standing.probe_passed(1.0)
    assert (standing.state, standing.why) == (State.READY, "ready")


def test_failed_probes_eject_only_in_a_row() -> None:
    standing = Standing(SETTINGS)
    for _ in range(5):
        standing.probe_failed("refused")
        standing.probe_failed("refused")
        assert standing.state is State.READY
        standing.probe_passed(1.0)
    assert standing.state is State.READY


def test_two_good_probes_in_a_row_readmit() -> None:
    standing = ejected()
    assert standing.why == "refused"
    standing.probe_passed(1.0)
    standing.probe_failed("refused")
    standing.probe_passed(1.0)
    assert standing.state is State.EJECTED
    standing.probe_passed(1.0)
    assert (standing.state, standing.why) == (State.READY, "ready")


def test_its_own_word_counts_at_once_both_ways() -> None:
    standing = Standing(SETTINGS)
    standing.probe_not_ready("draining")
    assert (standing.state, standing.why) == (State.DRAINING, "draining")
    standing.probe_passed(1.0)
    assert standing.state is State.READY


def test_a_draining_one_that_ends_is_ejected() -> None:
    standing = Standing(SETTINGS)
    standing.probe_not_ready("draining")
    standing.probe_failed("refused")
    standing.probe_failed("refused")
    assert standing.state is State.DRAINING
    standing.probe_failed("refused")
    assert standing.state is State.EJECTED


def test_an_ejected_one_that_starts_again_is_draining_until_it_is_ready() -> None:
    standing = ejected()
    standing.probe_not_ready("starting")
    assert standing.state is State.DRAINING


def test_failed_requests_eject_at_once() -> None:
    standing = Standing(SETTINGS)
    standing.request_failed("connect", 1.0)
    standing.request_failed("connect", 1.0)
    standing.request_answered(1.0)
    standing.request_failed("connect", 1.0)
    standing.request_failed("connect", 1.0)
    assert standing.state is State.READY
    standing.request_failed("reset", 1.0)
    assert standing.state is State.EJECTED
    assert "3 requests in a row failed" in standing.why
    assert "reset" in standing.why


def broken(now: float = 1.0) -> Standing:
    standing = Standing(SETTINGS)
    for _ in range(3):
        standing.request_failed("reset", now)
    assert standing.state is State.EJECTED
    return standing


def test_the_beginning_of_an_answer_proves_life_and_no_more() -> None:
    """A replica that begins every answer and breaks off each is not well."""
    standing = Standing(SETTINGS)
    for _ in range(3):
        standing.request_succeeded()
        standing.request_failed("broken", 1.0)
    assert (standing.state, standing.successes) == (State.EJECTED, 3)


def test_probes_that_passed_all_the_while_do_not_readmit_whose_requests_fail() -> None:
    standing = broken(1.0)
    for _ in range(10):
        standing.probe_passed(2.0)
    assert standing.state is State.EJECTED
    standing.tick(6.0)
    assert standing.state is State.HALF_OPEN
    assert "3 requests in a row failed" in standing.why
    standing.request_answered(6.0)
    assert (standing.state, standing.why) == (State.READY, "ready")


def test_another_process_is_not_blamed_for_what_the_last_one_did() -> None:
    standing = broken()
    for _ in range(3):
        standing.probe_failed("refused", Missing.NOBODY)
    standing.probe_passed(2.0)
    assert standing.state is State.EJECTED
    standing.probe_passed(2.0)
    assert standing.state is State.READY, "before its time is up"
    standing.request_failed("reset", 2.0)
    standing.request_failed("reset", 2.0)
    assert standing.state is State.READY, "failures before the readmission do not count any more"


def test_one_that_starts_over_before_its_probes_fail_is_judged_anew() -> None:
    standing = broken()
    standing.probe_not_ready("starting")
    assert standing.state is State.DRAINING
    standing.probe_passed(2.0)
    assert standing.state is State.READY


def test_streams_that_break_while_it_drains_are_not_held_against_it() -> None:
    standing = Standing(SETTINGS)
    standing.probe_not_ready("draining")
    for _ in range(9):
        standing.request_failed("broken", 1.0)
    standing.probe_passed(2.0)
    assert standing.state is State.READY


def test_what_is_known_of_one_that_is_out() -> None:
    """Refused, hung, mute, or answering nonsense: the panic rule tells them apart."""
    refused, mute, nonsense = Standing(SETTINGS), Standing(SETTINGS), Standing(SETTINGS)
    for _ in range(3):
        refused.probe_failed("refused", Missing.NOBODY)
        mute.probe_failed("no answer")
        nonsense.probe_failed("says 500", Missing.NONSENSE)
    assert (refused.dead, refused.silent) == (True, True)
    assert (mute.dead, mute.silent, mute.mute) == (False, True, True)
    assert (nonsense.dead, nonsense.silent, nonsense.mute) == (False, False, False)
    mute.request_succeeded()
    assert (mute.silent, mute.mute) == (True, False), "it answers requests"
    refused.probe_failed("no answer")
    assert not refused.dead
    hung = Standing(SETTINGS)
    hung.deep_probe_failed("silent", 0)
    assert hung.dead


def test_a_hung_one_is_ready_again_only_when_it_generates() -> None:
    standing = Standing(SETTINGS)
    standing.deep_probe_failed("silent", standing.successes)
    assert (standing.state, standing.why, standing.hung) == (State.EJECTED, "silent", True)
    for _ in range(5):
        standing.probe_passed(1.0)
    standing.probe_not_ready("says 503")
    assert (standing.state, standing.why) == (State.EJECTED, "silent")
    standing.deep_probe_passed()
    standing.probe_passed(1.0)
    standing.probe_passed(1.0)
    assert standing.state is State.READY


def test_a_hung_one_that_ends_is_not_asked_to_prove_itself_in_its_next_life() -> None:
    standing = Standing(SETTINGS)
    standing.deep_probe_failed("silent", standing.successes)
    for _ in range(3):
        standing.probe_failed("refused")
    standing.probe_not_ready("starting")
    standing.probe_passed(1.0)
    assert standing.state is State.READY


def test_an_answered_request_overrides_a_failed_deep_probe() -> None:
    standing = Standing(SETTINGS)
    before = standing.successes
    standing.request_succeeded()
    standing.deep_probe_failed("silent", before)
    assert standing.state is State.READY
    assert not standing.hung


EVENTS = ("pass", "not_ready", "fail", "deep_pass", "deep_fail", "request_ok", "request_failed", "time")


@given(st.lists(st.sampled_from(EVENTS), max_size=60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_whatever_happens(events: list[str], fail_after: int, pass_after: int, passive: int) -> None:
    """Each change of state has its cause, told here independently of how it is counted there."""
    settings = HealthSettings(fail_after=fail_after, pass_after=pass_after, passive_fail_after=passive)
    standing = Standing(settings)
    now = 0.0
    for i, event in enumerate(events):
        before = standing.state
        match event:
            case "pass":
                standing.probe_passed(now)
            case "not_ready":
                standing.probe_not_ready("503")
            case "fail":
                standing.probe_failed("refused")
            case "deep_pass":
                standing.deep_probe_passed()
            case "deep_fail":
                standing.deep_probe_failed("silent", standing.successes)
            case "request_ok":
                standing.request_succeeded()
                standing.request_answered(now)
            case "request_failed":
                standing.request_failed("reset", now)
            case "time":
                now += settings.open_max_s
                standing.tick(now)
        after = standing.state
        if before is after:
            continue
        so_far = events[: i + 1]
        probes = [e for e in so_far if e in ("pass", "fail", "not_ready")]
        if after is State.READY and event == "request_ok":
            assert before is State.HALF_OPEN
        elif after is State.READY:
            assert event == "pass"
            if before is State.EJECTED:
                assert probes[-pass_after:] == ["pass"] * pass_after
        elif after is State.HALF_OPEN:
            assert (event, before) == ("time", State.EJECTED)
        elif after is State.DRAINING:
            assert event == "not_ready"
        elif event == "fail":
            assert probes[-fail_after:] == ["fail"] * fail_after
        elif event == "request_failed":
            requests = [e for e in so_far if e in ("request_ok", "request_failed")]
            if before is State.READY:
                assert requests[-passive:] == ["request_failed"] * passive
            else:
                assert before is State.HALF_OPEN
        else:
            assert event == "deep_fail"
