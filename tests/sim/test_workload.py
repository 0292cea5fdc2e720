"""Sessions: what they ask, and that they ask it whatever the policy."""

from __future__ import annotations

import gzip
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from sim import hardware
from sim.workload import (
    Conversation,
    Forks,
    Population,
    RecordedWorkload,
    Synthetic,
    SyntheticWorkload,
    Turn,
    Workload,
    arrivals,
    load_recorded,
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
