"""When a replica is ready, draining or ejected: values in, state out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.types import State
from router.settings import HealthSettings
from router.standing import Standing

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
    standing.probe_passed()
    assert (standing.state, standing.why) == (State.READY, "ready")


def test_failed_probes_eject_only_in_a_row() -> None:
    standing = Standing(SETTINGS)
    for _ in range(5):
        standing.probe_failed("refused")
        standing.probe_failed("refused")
        assert standing.state is State.READY
        standing.probe_passed()
    assert standing.state is State.READY


def test_two_good_probes_in_a_row_readmit() -> None:
    standing = ejected()
    assert standing.why == "refused"
    standing.probe_passed()
    standing.probe_failed("refused")
    standing.probe_passed()
    assert standing.state is State.EJECTED
    standing.probe_passed()
    assert (standing.state, standing.why) == (State.READY, "ready")


def test_its_own_word_counts_at_once_both_ways() -> None:
    standing = Standing(SETTINGS)
    standing.probe_not_ready("draining")
    assert (standing.state, standing.why) == (State.DRAINING, "draining")
    standing.probe_passed()
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
    standing.request_failed("connect")
    standing.request_failed("connect")
    standing.request_succeeded()
    standing.request_failed("connect")
    standing.request_failed("connect")
    assert standing.state is State.READY
    standing.request_failed("reset")
    assert standing.state is State.EJECTED
    assert "3 requests in a row failed" in standing.why
    assert "reset" in standing.why


def test_only_probes_readmit() -> None:
    standing = Standing(SETTINGS)
    for _ in range(3):
        standing.request_failed("reset")
    standing.request_succeeded()  # one that was under way
    assert standing.state is State.EJECTED
    standing.probe_passed()
    standing.probe_passed()
    assert standing.state is State.READY
    standing.request_failed("reset")
    standing.request_failed("reset")
    assert standing.state is State.READY, "failures before the readmission do not count any more"


def test_a_hung_one_is_ready_again_only_when_it_generates() -> None:
    standing = Standing(SETTINGS)
    standing.deep_probe_failed("silent", standing.successes)
    assert (standing.state, standing.why, standing.hung) == (State.EJECTED, "silent", True)
    for _ in range(5):
        standing.probe_passed()
    standing.probe_not_ready("says 503")
    assert (standing.state, standing.why) == (State.EJECTED, "silent")
    standing.deep_probe_passed()
    standing.probe_passed()
    standing.probe_passed()
    assert standing.state is State.READY


def test_a_hung_one_that_ends_is_not_asked_to_prove_itself_in_its_next_life() -> None:
    standing = Standing(SETTINGS)
    standing.deep_probe_failed("silent", standing.successes)
    for _ in range(3):
        standing.probe_failed("refused")
    standing.probe_not_ready("starting")
    standing.probe_passed()
    assert standing.state is State.READY


def test_an_answered_request_overrides_a_failed_deep_probe() -> None:
    standing = Standing(SETTINGS)
    before = standing.successes
    standing.request_succeeded()
    standing.deep_probe_failed("silent", before)
    assert standing.state is State.READY
    assert not standing.hung


EVENTS = ("pass", "not_ready", "fail", "deep_pass", "deep_fail", "request_ok", "request_failed")


@given(st.lists(st.sampled_from(EVENTS), max_size=60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_whatever_happens(events: list[str], fail_after: int, pass_after: int, passive: int) -> None:
    """Each change of state has its cause, told here independently of how it is counted there."""
    standing = Standing(HealthSettings(fail_after=fail_after, pass_after=pass_after, passive_fail_after=passive))
    for i, event in enumerate(events):
        before = standing.state
        match event:
            case "pass":
                standing.probe_passed()
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
            case "request_failed":
                standing.request_failed("reset")
        after = standing.state
        if before is after:
            continue
        so_far = events[: i + 1]
        if after is State.READY:
            assert event == "pass"
            if before is State.EJECTED:
                probes = [e for e in so_far if e in ("pass", "fail", "not_ready")]
                assert probes[-pass_after:] == ["pass"] * pass_after
        elif after is State.DRAINING:
            assert event == "not_ready"
        elif event == "fail":
            probes = [e for e in so_far if e in ("pass", "fail", "not_ready")]
            assert probes[-fail_after:] == ["fail"] * fail_after
        elif event == "request_failed":
            assert before is State.READY
            requests = [e for e in so_far if e in ("request_ok", "request_failed")]
            assert requests[-passive:] == ["request_failed"] * passive
        else:
            assert event == "deep_fail"
