"""Sessions: what they ask, and that they ask it whatever the policy."""

from __future__ import annotations

import gzip
import math
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import fmean, stdev

import pytest

from sim import hardware
from sim.workload import (
    Breaks,
    Conversation,
    Forks,
    Patience,
    Population,
    Rate,
    RecordedWorkload,
    Synthetic,
    SyntheticWorkload,
    Turn,
    Workload,
    arrivals,
    load_recorded,
    open_arrivals,
)

PAGE = 256
RECORDED = load_recorded()


def all_turns(conversation: Conversation) -> list[Turn]:
    """With those of the forks."""
    found = []
    for turn in conversation.turns:
        found.append(turn)
        for fork in turn.forks:
            found += all_turns(fork)
    return found


WORKLOADS = {
    "synthetic": lambda seed: SyntheticWorkload(Synthetic(forks=Forks(probability=0.3)), PAGE, seed),
    "recorded": lambda seed: RecordedWorkload(RECORDED, PAGE, seed, forks=Forks(probability=0.05)),
}


@pytest.fixture(params=WORKLOADS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_same_seed_gives_the_same_sessions(kind: str) -> None:
    first, second, other = (WORKLOADS[kind](seed) for seed in (1, 1, 2))
    for index in range(5):
        turns = all_turns(first.session(index, initial=False))
        assert [(t.gap_s, t.pages, t.output_tokens) for t in turns] == [
            (t.gap_s, t.pages, t.output_tokens) for t in all_turns(second.session(index, initial=False))
        ]
        assert turns != all_turns(other.session(index, initial=False))


def test_page_names_are_chained(kind: str) -> None:
    """The name of a page stands for all before it, over all sessions of a run."""
    workload: Workload = WORKLOADS[kind](3)
    before: dict[int, int] = {}
    for index in range(30):
        for turn in all_turns(workload.session(index, initial=index % 2 == 0)):
            assert turn.prompt_tokens // PAGE <= len(turn.pages) <= (turn.prompt_tokens + turn.output_tokens) // PAGE
            for page, name in enumerate(turn.pages):
                assert before.setdefault(name, turn.pages[page - 1] if page else 0) == (
                    turn.pages[page - 1] if page else 0
                )


def test_a_shared_fork_begins_with_its_parents_context_and_a_fresh_one_with_the_system_prompt() -> None:
    for shared in (0.0, 1.0):
        workload = SyntheticWorkload(Synthetic(forks=Forks(probability=1.0, shared=shared)), PAGE, 5)
        session = workload.session(0, initial=False)
        parent = next(session.turns)
        for fork in parent.forks:
            child = next(fork.turns)
            common = len([1 for a, b in zip(parent.pages, child.pages, strict=False) if a == b])
            assert common == (len(parent.pages) if shared else 12_000 // PAGE)
            assert (child.fingerprint == parent.fingerprint) == bool(shared)
            assert fork.key == session.key
            assert not fork.main


def test_no_fork_outgrows_the_models_window() -> None:
    """It begins with up to all of a parent that is near it, and no replica could hold what is beyond."""
    forks = Forks(probability=0.2, shared=1.0, turns=30.0)
    workload = RecordedWorkload(RECORDED, PAGE, 1, forks=forks)
    longest = 0
    for index in range(12):
        for turn in islice(workload.session(index, initial=False).turns, 120):
            for fork in turn.forks:
                longest = max(longest, *(each.prompt_tokens for each in fork.turns), 0)
    assert 0.7 * workload.most_tokens < longest <= workload.most_tokens


def test_the_recording_is_what_its_source_says() -> None:
    """Means over the sessions that fit 262,144 tokens: about 95k in, 420 out, 97 % of a prompt shared with the last."""
    turns = [turn for s in RecordedWorkload(RECORDED, PAGE, 1).sessions for turn in s.turns]
    later = [turn for s in RecordedWorkload(RECORDED, PAGE, 1).sessions for turn in s.turns[1:]]
    assert sum(turn[1] for turn in turns) / len(turns) == pytest.approx(95_000, rel=0.01)
    assert sum(turn[2] for turn in turns) / len(turns) == pytest.approx(420, rel=0.01)
    assert sum(turn[3] for turn in later) / sum(turn[1] for turn in later) == pytest.approx(0.97, abs=0.005)


def test_arrivals_come_in_order_and_at_the_rate_of_departures() -> None:
    population = Population(live=100, session_seconds=500.0, spread_s=60.0)
    found = list(arrivals(population, Random(1), 10_000.0))
    assert [time for time, _, _ in found] == sorted(time for time, _, _ in found)
    assert [index for _, index, _ in found] == list(range(len(found)))
    assert sum(initial for _, _, initial in found) == 100
    assert len(found) - 100 == pytest.approx(100 / 500 * 10_000, rel=0.1)


def test_arrivals_stop_when_sessions_stay() -> None:
    found = list(arrivals(Population(live=7, session_seconds=float("inf")), Random(1), 1e6))
    assert len(found) == 7


@pytest.mark.parametrize("cv", [1.0, 1.65, 0.5])
def test_open_arrivals_come_at_their_rate_and_in_their_bursts(cv: float) -> None:
    found = list(open_arrivals(Rate(2.0, cv), Random(1), 5_000.0))
    times = [time for time, _, _ in found]
    assert [index for _, index, _ in found] == list(range(len(found)))
    assert not any(initial for _, _, initial in found)
    assert len(times) == pytest.approx(10_000, rel=0.05)
    gaps = [after - before for before, after in pairwise(times)]
    assert stdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize(("rate", "words"), [((0.0, 1.0), "per_s must be more than 0"), ((1.0, -1.0), "cv must be")])
def test_rates_that_cannot_be_are_refused(rate: tuple[float, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rate(*rate)


def test_a_share_of_turns_has_clients_that_leave_and_nothing_else_changes(kind: str) -> None:
    patient, other = WORKLOADS[kind](1), WORKLOADS[kind](1)
    other.patience = Patience(0.2, 30.0)
    before, after = ([t for i in range(60) for t in all_turns(w.session(i, initial=False))] for w in (patient, other))
    assert {turn.patience_s for turn in before} == {math.inf}
    assert {turn.patience_s for turn in after} == {30.0, math.inf}
    assert sum(turn.patience_s == 30.0 for turn in after) / len(after) == pytest.approx(0.2, abs=0.03)
    assert [(t.gap_s, t.pages, t.output_tokens) for t in before] == [(t.gap_s, t.pages, t.output_tokens) for t in after]


def test_patience_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"abandon_share must be from 0 to 1, got 1\.5"):
        Patience(1.5)
    with pytest.raises(ValueError, match="patience_s must be more than 0 seconds and finite, got inf"):
        Patience(0.5, math.inf)


def test_breaks_rewrite_the_history_and_change_nothing_else() -> None:
    def turns(breaks: Breaks) -> list[list[Turn]]:
        workload = SyntheticWorkload(Synthetic(breaks=breaks, forks=Forks(probability=0.0)), PAGE, 1)
        return [list(workload.session(index, initial=False).turns) for index in range(200)]

    def kept(before: Turn, after: Turn) -> int:
        """Leading tokens in common."""
        pairs = zip(before.pages, after.pages, strict=False)
        return PAGE * next((number for number, (a, b) in enumerate(pairs) if a != b), len(before.pages))

    whole, broken = turns(Breaks(share=0.0)), turns(Breaks(share=0.1, head=0.5))
    head = middle = total = 0
    for plain, session in zip(whole, broken, strict=True):
        assert [(t.gap_s, t.prompt_tokens, t.output_tokens) for t in plain] == [
            (t.gap_s, t.prompt_tokens, t.output_tokens) for t in session
        ]
        for (_, plain_after), (before, after) in zip(pairwise(plain), pairwise(session), strict=True):
            if after.prompt_tokens < before.prompt_tokens:
                continue  # compacted
            total += 1
            if kept(before, after) < len(before.pages) * PAGE:
                at_head = kept(before, after) <= 12_000
                head += at_head
                middle += not at_head
                assert (after.fingerprint == before.fingerprint) or at_head
            assert len(plain_after.pages) == len(after.pages)
    assert (head + middle) / total == pytest.approx(0.1, abs=0.01)
    assert head / (head + middle) == pytest.approx(0.5, abs=0.06)


def test_breaks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="share must be from 0 to 1, got -1"):
        Breaks(share=-1)


def test_a_session_lasts_about_as_long_as_reckoned() -> None:
    """0.2 s to 20 s a turn, 28 turns, more with forks."""
    seconds = SyntheticWorkload(Synthetic(), PAGE, 9).session_seconds(hardware.load())
    assert 28 * 5 < seconds < 28 * 60


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"tools": 1, "system": 2, "turns": [[1, 2]]}\n'))
    with pytest.raises(ValueError, match="line 1: no session"):
        load_recorded(path)


def test_a_session_of_the_start_is_somewhere_in_its_life() -> None:
    workload = RecordedWorkload(RECORDED, PAGE, 4)
    lengths = [len(list(islice(workload.session(i, initial=True).turns, 1000))) for i in range(40)]
    assert len(set(lengths)) > 10
