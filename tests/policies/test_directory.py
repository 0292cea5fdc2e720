"""The session directory: bounds, order, forgetting; and agreement with a model too simple to be wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.directory import MAX_BRANCHES, Directory
from policies.types import Home


def _homes(directory: Directory, key: bytes, now: float) -> list[tuple[str, int, int]]:
    return [(h.replica_id, h.fingerprint, h.tokens) for h in directory.homes(key, now)]


def test_an_unknown_session_has_no_home() -> None:
    assert Directory().homes(b"k", 0.0) == []


def test_a_placed_session_has_one() -> None:
    directory = Directory()
    directory.place(b"k", 7, "a", 0, 5.0)
    assert directory.homes(b"k", 5.0) == [Home("a", 0, 5.0, 7)]
    assert len(directory) == 1


def test_a_conversation_placed_again_is_moved_not_doubled() -> None:
    directory = Directory()
    directory.place(b"k", 7, "a", 900, 1.0)
    directory.place(b"k", 7, "b", 0, 2.0)
    assert directory.homes(b"k", 2.0) == [Home("b", 0, 2.0, 7)]


def test_what_is_resident_grows_only_where_the_conversation_lives() -> None:
    directory = Directory()
    directory.place(b"k", 7, "a", 0, 1.0)
    directory.grow(b"k", 7, "b", 500, 2.0)
    directory.grow(b"k", 8, "a", 500, 2.0)
    directory.grow(b"other", 7, "a", 500, 2.0)
    assert directory.homes(b"k", 2.0) == [Home("a", 0, 1.0, 7)]
    assert len(directory) == 1
    directory.grow(b"k", 7, "a", 500, 3.0)
    assert directory.homes(b"k", 3.0) == [Home("a", 500, 3.0, 7)]


def test_a_late_word_does_not_turn_time_back() -> None:
    directory = Directory()
    directory.place(b"k", 7, "a", 0, 5.0)
    directory.grow(b"k", 7, "a", 500, 4.0)
    assert directory.homes(b"k", 5.0) == [Home("a", 500, 5.0, 7)]


def test_branches_of_a_session_are_kept_apart_latest_first() -> None:
    directory = Directory()
    directory.place(b"k", 1, "a", 100, 1.0)
    directory.place(b"k", 2, "b", 200, 2.0)
    directory.place(b"k", 3, "a", 300, 3.0)
    assert _homes(directory, b"k", 3.0) == [("a", 3, 300), ("b", 2, 200), ("a", 1, 100)]
    directory.place(b"k", 1, "a", 110, 4.0)
    assert _homes(directory, b"k", 4.0) == [("a", 1, 110), ("a", 3, 300), ("b", 2, 200)]


def test_branches_are_bounded_and_the_oldest_goes() -> None:
    directory = Directory()
    for fingerprint in range(MAX_BRANCHES + 3):
        directory.place(b"k", fingerprint, "a", 1, float(fingerprint))
    kept = [h.fingerprint for h in directory.homes(b"k", 20.0)]
    assert kept == list(range(MAX_BRANCHES + 2, 2, -1))
    assert len(kept) == MAX_BRANCHES


def test_sessions_are_bounded_and_the_least_recently_used_goes() -> None:
    directory = Directory(max_sessions=2)
    directory.place(b"x", 0, "a", 1, 1.0)
    directory.place(b"y", 0, "a", 1, 2.0)
    directory.place(b"x", 0, "a", 1, 3.0)
    directory.place(b"z", 0, "a", 1, 4.0)
    assert directory.homes(b"y", 4.0) == []
    assert directory.homes(b"x", 4.0)
    assert directory.homes(b"z", 4.0)
    assert (len(directory), directory.evicted) == (2, 1)


def test_a_session_whose_turn_has_just_ended_is_not_the_first_to_go() -> None:
    directory = Directory(max_sessions=2)
    directory.place(b"long", 0, "a", 0, 1.0)
    directory.place(b"short", 0, "a", 0, 2.0)
    directory.grow(b"long", 0, "a", 100_000, 300.0)
    directory.place(b"new", 0, "a", 0, 301.0)
    assert directory.homes(b"long", 301.0)


def test_room_for_one_is_enough() -> None:
    directory = Directory(max_sessions=1)
    for n in range(5):
        directory.place(b"%d" % n, 0, "a", 1, float(n))
    assert len(directory) == 1
    assert directory.homes(b"4", 5.0)
    assert directory.evicted == 4


def test_an_idle_session_is_forgotten_when_next_asked_for() -> None:
    directory = Directory(idle_s=60.0)
    directory.place(b"k", 0, "a", 1, 100.0)
    assert directory.homes(b"k", 160.0)
    assert directory.homes(b"k", 160.1) == []
    assert len(directory) == 0
    assert directory.evicted == 0, "forgotten in its own time, not for want of room"


def test_a_turn_that_ends_keeps_the_session_from_being_idle() -> None:
    directory = Directory(idle_s=60.0)
    directory.place(b"k", 0, "a", 0, 100.0)
    directory.grow(b"k", 0, "a", 10, 150.0)
    assert directory.homes(b"k", 205.0)


def test_one_branch_in_use_keeps_the_whole_session() -> None:
    directory = Directory(idle_s=60.0)
    directory.place(b"k", 1, "a", 0, 0.0)  # the main thread: a long answer
    directory.place(b"k", 2, "b", 0, 1.0)  # its title, done at once
    directory.grow(b"k", 1, "a", 100_000, 90.0)
    assert _homes(directory, b"k", 91.0) == [("a", 1, 100_000), ("b", 2, 0)]


def test_a_forgotten_session_is_gone() -> None:
    directory = Directory()
    directory.place(b"k", 0, "a", 1, 0.0)
    assert directory.forget(b"k") is True
    assert directory.forget(b"k") is False
    assert directory.homes(b"k", 0.0) == []


@pytest.mark.parametrize("value", [0, -1])
def test_a_directory_without_room_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"max_sessions must be at least 1, got {value}"):
        Directory(max_sessions=value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_an_idle_time_that_is_not_positive_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"idle_s must be more than 0 seconds, got {value}"):
        Directory(idle_s=value)


# Against a model: every branch of every session in one flat list, in order of use.

ROOM, IDLE_S = 3, 50.0


@dataclass
class _Branch:
    key: bytes
    fingerprint: int
    replica_id: str
    tokens: int
    last_use: float


class _Model:
    def __init__(self) -> None:
        self.branches: list[_Branch] = []
        """Least recently used first."""

    def find(self, key: bytes) -> list[_Branch]:
        return [b for b in reversed(self.branches) if b.key == key]

    def drop(self, key: bytes) -> None:
        self.branches = [b for b in self.branches if b.key != key]

    def place(self, key: bytes, fingerprint: int, replica_id: str, tokens: int, now: float) -> None:
        old = next((b for b in self.find(key) if b.fingerprint == fingerprint), None)
        if old is not None:
            self.branches.remove(old)
        self.branches.append(_Branch(key, fingerprint, replica_id, tokens, now))
        self._bound(key)

    def grow(self, key: bytes, fingerprint: int, replica_id: str, tokens: int, now: float) -> None:
        old = next((b for b in self.find(key) if (b.fingerprint, b.replica_id) == (fingerprint, replica_id)), None)
        if old is not None:
            self.branches.remove(old)
            self.branches.append(_Branch(key, fingerprint, replica_id, tokens, now))

    def _bound(self, key: bytes) -> None:
        for extra in self.find(key)[MAX_BRANCHES:]:
            self.branches.remove(extra)
        latest = list(dict.fromkeys(b.key for b in reversed(self.branches)))
        for key in latest[ROOM:]:
            self.drop(key)


_keys = st.sampled_from([b"u", b"v", b"w", b"x", b"y"])
_prints = st.integers(0, MAX_BRANCHES + 1)
_ids = st.sampled_from(["a", "b"])
_tokens = st.integers(0, 10**12)
_steps = st.lists(
    st.tuples(
        st.sampled_from([0.5, 20.0, 60.0]),
        st.one_of(
            st.tuples(st.sampled_from(["place", "grow"]), _keys, _prints, _ids, _tokens),
            st.tuples(st.just("homes"), _keys),
            st.tuples(st.just("forget"), _keys),
        ),
    ),
    max_size=60,
)


@given(_steps)
@settings(max_examples=150, deadline=None)
def test_it_agrees_with_the_model(steps: list[tuple[float, tuple[Any, ...]]]) -> None:
    directory, model, now = Directory(ROOM, IDLE_S), _Model(), 0.0
    for wait, (verb, key, *rest) in steps:
        now += wait
        if verb in ("place", "grow"):
            fingerprint, replica_id, tokens = rest
            getattr(directory, verb)(key, fingerprint, replica_id, tokens, now)
            getattr(model, verb)(key, fingerprint, replica_id, tokens, now)
        elif verb == "forget":
            assert directory.forget(key) is bool(model.find(key))
            model.drop(key)
        else:
            found = model.find(key)
            if found and now - found[0].last_use > IDLE_S:
                model.drop(key)
                found = []
            assert directory.homes(key, now) == [Home(b.replica_id, b.tokens, b.last_use, b.fingerprint) for b in found]
        assert len(directory) == len({b.key for b in model.branches}) <= ROOM
