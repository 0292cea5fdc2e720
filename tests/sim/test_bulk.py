"""The replica in bulk against the same replica one step at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim import hardware
from sim.hardware import CHUNK_TOKENS, Decode, Hardware, Prefill
from sim.prefix_cache import HostWrite
from sim.replica import Limits, Replica, Stage, Work

PAGE = 64
TIMES = hardware.load()
KINKED = Hardware(
    Prefill(0.01, 1e-5, 1e-10, 1e-10),
    Decode((100.0, 150.0, 300.0), (1.0, 2.0, 8.0), ((0.01, 0.02, 0.03), (0.02, 0.05, 0.06), (0.1, 0.11, 0.3))),
    1.0,
)
"""Its decode table bends where contexts of these tests pass by."""


@dataclass(frozen=True)
class Asked:
    after_s: float
    prompt: int
    output: int
    stem: int
    aborted_after_s: float | None


ASKED = st.builds(
    Asked,
    st.floats(0.0, 2.0),
    st.integers(1, 3 * CHUNK_TOKENS),
    st.integers(1, 400),
    st.integers(0, 3),
    st.none() | st.floats(0.01, 3.0),
)
LEAVES = st.none() | st.floats(0.01, 3.0)
BURST = st.builds(Asked, st.floats(0.0, 0.2), st.integers(1, 900), st.integers(1, 700), st.integers(0, 3), LEAVES)


def course(asked: list[Asked], times: Hardware, limits: Limits, *, bulk: bool) -> tuple[Replica, list[Work]]:
    """Runs all to the end, at the times given."""
    replica = Replica(times, limits, bulk=bulk)
    works = []
    now = 0.0
    happens: list[tuple[float, int, Work]] = []
    for index, a in enumerate(asked):
        now += a.after_s
        common = min(a.prompt // PAGE, 40)
        pages = [page + 1000 * a.stem for page in range(common)]
        pages += [(index + 1) * 1_000_000 + page for page in range(common, (a.prompt + a.output - 1) // PAGE)]
        work = Work(pages, a.prompt, a.output, 2000 * (index % 3))
        works.append(work)
        happens.append((now, 0, work))
        if a.aborted_after_s is not None:
            happens.append((now + a.aborted_after_s, 1, work))
    for at, what, work in sorted(happens, key=lambda h: (h[0], h[1])):
        replica.advance(at)
        if what == 0:
            replica.submit(work, at)
        else:
            replica.abort(work, at)
    while (due := replica.next_time) is not None:
        replica.advance(due)
    return replica, works


def same(asked: list[Asked], times: Hardware, limits: Limits) -> Replica:
    one, singly = course(asked, times, limits, bulk=False)
    other, bulk = course(asked, times, limits, bulk=True)
    for a, b in zip(singly, bulk, strict=True):
        assert (b.stage, b.cached_tokens, b.host_tokens, b.prefilled_tokens, b.produced, b.recomputed) == (
            a.stage,
            a.cached_tokens,
            a.host_tokens,
            a.prefilled_tokens,
            a.produced,
            a.recomputed,
        )
        for mine, its in ((a.started, b.started), (a.first_token, b.first_token), (a.finished, b.finished)):
            assert its == (mine if mine is None else pytest.approx(mine, rel=1e-9))
    for name in COUNTS:
        assert getattr(other.totals, name) == getattr(one.totals, name)
    for name in ("prefill_seconds", "decode_seconds", "decode_batch_seconds"):
        assert getattr(other.totals, name) == pytest.approx(getattr(one.totals, name), rel=1e-9)
    for replica in (one, other):
        assert replica.idle
        assert replica.cache.pinned_pages == replica.cache.allocated_pages == 0
        assert replica.cache.copied_pages <= replica.cache.host_pages
    assert other.cache.cached_pages == one.cache.cached_pages
    assert other.cache.tree_pages == one.cache.tree_pages
    return one


COUNTS = (
    "finished",
    "aborted",
    "retracted",
    "cached_tokens",
    "output_tokens",
    "prefill_tokens",
    "refill_tokens",
    "decode_steps",
)


@given(st.lists(ASKED, max_size=8), st.sampled_from([0, 60_000]), st.sampled_from(HostWrite))
def test_the_same_course_with_the_engines_tables(asked: list[Asked], host_tokens: int, host_write: HostWrite) -> None:
    same(asked, TIMES, Limits(50_000, PAGE, max_running=4, host_tokens=host_tokens, host_write=host_write))


@given(st.lists(st.builds(Asked, st.floats(0, 3), st.integers(1, 320), st.integers(1, 300), st.just(0), st.none())))
def test_the_same_course_over_the_bends_of_a_table(asked: list[Asked]) -> None:
    same(asked, KINKED, Limits(2_000, PAGE, max_running=3))


@given(st.lists(BURST, max_size=14), st.sampled_from([0.0, 1.0]), st.sampled_from([KINKED, TIMES]), st.booleans())
def test_the_same_course_when_kv_runs_out(asked: list[Asked], careful: float, times: Hardware, mixed: bool) -> None:
    """Without conservativeness nothing is kept back for answers, so many are retracted."""
    limits = Limits(2_500, PAGE, schedule_conservativeness=careful, mixed_chunk=mixed and times is KINKED)
    same(asked, times, limits)


@given(st.lists(ASKED, max_size=8))
def test_the_same_course_with_mixed_chunks(asked: list[Asked]) -> None:
    same(asked, replace(TIMES, accept_length=1.0), Limits(50_000, PAGE, max_running=4, mixed_chunk=True))


def test_an_arrival_cuts_decoding_at_the_next_token() -> None:
    replica = Replica(TIMES, Limits(100_000, PAGE), bulk=True)
    first, second = Work([], 1000, 500), Work([], 1000, 5)
    replica.submit(first, 0.0)
    replica.advance(replica.next_time or 0.0)
    begun = first.first_token or 0.0
    replica.advance(begun + 0.1)
    replica.submit(second, begun + 0.1)
    due = replica.next_time
    assert due is not None
    step = TIMES.token_seconds(1, 1500)
    assert begun + 0.1 <= due < begun + 0.1 + step
    assert 0 < first.produced < 500
    while (due := replica.next_time) is not None:
        replica.advance(due)
    assert second.finished is not None
    assert first.finished is not None
    assert second.finished < first.finished


def test_settling_shows_what_is_complete_and_changes_no_time() -> None:
    plain, settled = (Replica(TIMES, Limits(100_000, PAGE), bulk=True) for _ in range(2))
    ends = []
    for replica in (plain, settled):
        work = Work([], 3 * CHUNK_TOKENS, 300)
        replica.submit(work, 0.0)
        if replica is settled:
            replica.settle(TIMES.prefill.seconds(CHUNK_TOKENS, 0) * 1.1)
            assert work.prefilled_tokens == CHUNK_TOKENS
        for _ in range(2):  # what fills passes alone, and the last pass, into which others might come
            replica.advance(replica.next_time or 0.0)
        assert work.stage is Stage.DECODE
        if replica is settled:
            for after in (0.1, 0.2):
                replica.settle((work.first_token or 0.0) + after)
            assert 1 < work.produced < 300
        replica.advance(replica.next_time or 0.0)
        ends.append(work.finished)
    assert ends[1] == pytest.approx(ends[0], rel=1e-12)
