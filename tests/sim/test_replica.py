"""The scheduler of a replica: passes, KV for answers, retraction, mixed chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import hardware
from sim.hardware import CHUNK_TOKENS
from sim.new_token_ratio import CLIP_TOKENS, DECAY_STEPS, RETRACT_STEPS, NewTokenRatio
from sim.replica import Limits, Replica, Stage, Work

PAGE = 64
SPECULATING = hardware.load()
TIMES = replace(SPECULATING, accept_length=1.0)


def finish(replica: Replica) -> None:
    while (due := replica.next_time) is not None:
        replica.advance(due)


def own(name: int, prompt: int, output: int, most: int = 0) -> Work:
    return Work([name * 1_000_000 + page for page in range((prompt + output - 1) // PAGE)], prompt, output, most)


def test_short_prompts_share_a_pass_and_its_fixed_time() -> None:
    replica = Replica(TIMES, Limits(100_000, PAGE))
    first = own(0, 64, 1)
    waiting = [own(name, 1000, 1) for name in range(1, 5)]
    for work in (first, *waiting):
        replica.submit(work, 0.0)
    finish(replica)
    began = first.first_token or 0.0
    parts = 4 * (TIMES.prefill_seconds(1000, 0) - TIMES.prefill.a) + TIMES.prefill.a
    assert [work.first_token for work in waiting] == [pytest.approx(began + parts)] * 4


def test_the_prompt_that_does_not_fit_a_pass_is_cut_at_a_page_and_goes_first_in_the_next() -> None:
    replica = Replica(TIMES, Limits(100_000, PAGE))
    first, small, long, last = own(0, 64, 1), own(1, 1000, 1), own(2, CHUNK_TOKENS, 1), own(3, 500, 1)
    for work in (first, small, long, last):
        replica.submit(work, 0.0)
    replica.advance(replica.next_time or 0.0)
    replica.advance(replica.next_time or 0.0)
    assert small.stage is Stage.DONE
    # 1,000 tokens are 16 pages, which leaves 112.
    assert long.prefilled_tokens == (CHUNK_TOKENS // PAGE - 16) * PAGE
    assert last.prefilled_tokens == 0
    finish(replica)
    assert long.first_token == last.first_token


def test_a_cut_prompt_can_be_dropped_piece_by_piece() -> None:
    replica = Replica(TIMES, Limits(20 * 1024, PAGE))
    long = own(1, 2 * CHUNK_TOKENS, 1)
    replica.submit(long, 0.0)
    finish(replica)
    replica.submit(own(2, CHUNK_TOKENS, 1), 10.0)
    finish(replica)
    assert replica.cache.resident(long.pages, len(long.pages)) == CHUNK_TOKENS // PAGE


# KV for answers


def test_the_ratio_falls_with_decode_steps_and_is_put_right_by_retraction() -> None:
    """SGLang's defaults: 0.7 at first, 0.14 of that after 600 steps."""
    ratio = NewTokenRatio(1.0)
    assert ratio.value == 0.7
    ratio.decoded(DECAY_STEPS // 2)
    assert ratio.value == pytest.approx(0.7 * (1 + 0.14) / 2)
    ratio.decoded(10 * DECAY_STEPS)
    assert ratio.value == pytest.approx(0.098)
    works = [Work([], 10, 2, 10), Work([], 10, 3, 20)]
    works[0].produced, works[1].produced = 2, 3
    ratio.retracted(works)
    ratio.decoded(1)  # the step that follows
    assert ratio.value == min(1.0, (2 + 3 + 2 * RETRACT_STEPS) / (10 + 20 + 1))
    ratio.reset()
    assert ratio.value == 0.7
    assert NewTokenRatio(9.0).value == 1.0


def test_admission_keeps_back_a_share_of_what_runs_and_all_of_what_comes() -> None:
    """Beside a running one, a request is let in if its prompt, all of its answer, a page and the kept share fit."""
    most = 3000
    for spare, admitted in ((1, True), (0, False)):
        kept = 0.7 * (most - 1)  # one token is there when the second one comes
        needed = 1024 + 2048 + 3000 + PAGE + PAGE + kept
        replica = Replica(TIMES, Limits((int(needed / PAGE) + spare) * PAGE, PAGE))
        running, coming = own(1, 1024, 3000, most), own(2, 2048, 3000)
        replica.submit(running, 0.0)
        replica.advance(replica.next_time or 0.0)
        replica.submit(coming, replica.next_time or 0.0)
        replica.advance(replica.next_time or 0.0)
        assert (coming.stage is Stage.PREFILL) == admitted
        finish(replica)
        assert coming.stage is Stage.DONE


def test_of_what_comes_in_one_pass_the_first_keeps_back_all_of_its_answer() -> None:
    """Both fit beside what runs, but not both with all that they may produce."""
    replica = Replica(TIMES, Limits(8128, PAGE))
    for work in (own(1, 64, 2), own(2, 1024, 3000), own(3, 1024, 3000)):
        replica.submit(work, 0.0)
    replica.advance(replica.next_time or 0.0)
    assert [len(replica.running), len(replica.waiting)] == [2, 1]
    finish(replica)
    assert replica.totals.finished == 3


def test_more_output_than_the_clip_is_not_reckoned_with() -> None:
    replica = Replica(TIMES, Limits(12_000, PAGE))
    for name in (1, 2):
        replica.submit(own(name, 1000, 10, 1_000_000), 0.0)
    replica.advance(replica.next_time or 0.0)
    assert 2 * (1000 + CLIP_TOKENS) < 12_000
    finish(replica)
    assert replica.totals.finished == 2
    assert replica.totals.decode_batch == 2 * replica.totals.decode_steps


def crowded(times: hardware.Hardware, prompts: tuple[int, ...]) -> tuple[Replica, list[Work]]:
    """More answers than the pool holds, nothing kept back for them, and one just retracted."""
    replica = Replica(times, Limits(4096, PAGE, schedule_conservativeness=0.0))
    works = [own(name, prompt, 1500) for name, prompt in enumerate(prompts)]
    for work in works:
        # Each comes when the one before has its first token: in one pass, all would be kept back.
        replica.submit(work, replica.next_time or 0.0)
        replica.advance(replica.next_time or 0.0)
    while not replica.totals.retracted:
        replica.advance(replica.next_time or 0.0)
    return replica, works


@pytest.mark.parametrize("times", [TIMES, SPECULATING])
def test_without_room_requests_are_retracted_and_end_all_the_same(times: hardware.Hardware) -> None:
    replica, works = crowded(times, (320, 384, 448))
    (retracted,) = [work for work in works if work.stage is Stage.WAITING]
    produced, first = retracted.produced, retracted.first_token
    assert produced == retracted.recomputed > 1
    assert replica.new_token_ratio == pytest.approx(2 * (produced + RETRACT_STEPS) / (2 * 1500 + 1), abs=0.01)
    finish(replica)
    assert [(work.stage, work.produced) for work in works] == [(Stage.DONE, 1500)] * 3
    assert retracted.first_token == first
    totals = replica.totals
    assert totals.output_tokens == 4500
    # Its prompt may still have been cached; its answer had to be computed again.
    assert produced <= totals.refill_tokens
    assert totals.prompt_tokens == totals.cached_tokens + totals.prefill_tokens - totals.refill_tokens
    assert replica.cache.pinned_pages == replica.cache.allocated_pages == 0


def test_of_equal_answers_the_longest_prompt_is_retracted_and_with_speculation_the_last() -> None:
    for times, gone in ((TIMES, 1), (SPECULATING, 2)):
        _, works = crowded(times, (384, 448, 320))
        assert [work.stage is Stage.WAITING for work in works] == [index == gone for index in range(3)]


def test_a_request_that_the_pool_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"4000 \+ 200 tokens does not fit kv_tokens 4096: use a machine"):
        Replica(TIMES, Limits(4096, PAGE)).submit(own(1, 4000, 200), 0.0)


# Mixed chunks


def test_mixed_chunks_let_the_others_decode_beside_a_prefill() -> None:
    """Without, a 40,000-token prompt stops everyone; with, each of its passes brings everyone a token."""
    produced = {}
    for mixed in (False, True):
        replica = Replica(TIMES, Limits(100_000, PAGE, mixed_chunk=mixed))
        running, coming = own(1, 500, 100), own(2, 5 * CHUNK_TOKENS, 10)
        replica.submit(running, 0.0)
        for _ in range(5):
            replica.advance(replica.next_time or 0.0)
        replica.submit(coming, replica.next_time or 0.0)
        replica.advance(replica.next_time or 0.0)
        before = running.produced
        while coming.first_token is None:
            replica.advance(replica.next_time or 0.0)
        produced[mixed] = running.produced - before
        finish(replica)
        assert (running.produced, coming.produced) == (100, 10)
    assert produced == {False: 0, True: 6}  # the running one takes a token of each pass, so it takes six


def test_mixed_chunks_are_refused_with_speculation() -> None:
    with pytest.raises(ValueError, match="mixed_chunk: not with speculative decoding"):
        Replica(SPECULATING, Limits(100_000, PAGE, mixed_chunk=True))


# KV from elsewhere


@given(st.integers(1, 30_000), st.integers(1, 50))
def test_a_transferred_prompt_is_decoded_without_prefill_and_stays_cached(prompt: int, output: int) -> None:
    replica = Replica(TIMES, Limits(100_000, PAGE))
    pages = own(1, prompt, output).pages
    work = Work(pages, prompt, output, transferred=True)
    replica.submit(work, 1.0)
    assert work.first_token == 1.0
    finish(replica)
    assert (work.stage, work.produced) == (Stage.DONE, output)
    totals = replica.totals
    assert (totals.prefill_tokens, totals.prompt_tokens, totals.transferred_tokens) == (0, 0, prompt)
    assert replica.cache.resident(pages, len(pages)) == len(pages)


def test_a_transferred_prompt_that_is_retracted_is_computed() -> None:
    replica = Replica(TIMES, Limits(4096, PAGE, schedule_conservativeness=0.0))
    works = [Work([], 384, 1900, transferred=True) for _ in range(3)]
    for work in works:
        replica.submit(work, 0.0)
    finish(replica)
    assert [work.stage for work in works] == [Stage.DONE] * 3
    totals = replica.totals
    assert totals.retracted > 0
    assert totals.transferred_tokens == 3 * 384
    assert totals.prefill_tokens == totals.refill_tokens > 384
