"""The session directory: bounds, order, forgetting; and agreement with a model too simple to be wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.directory import MAX_BRANCHES, STRIDE, Branch, Directory, condense, links, shared
from policies.residency import Home
from policies.types import Replica


def _branch(key: bytes = b"k", fingerprint: int = 0, now: float = 0.0) -> Branch:
    return Branch(key, fingerprint, b"", now)


def _put(directory: Directory, key: bytes, now: float, fingerprint: int = 0) -> Branch:
    branch = _branch(key, fingerprint, now)
    directory.put(branch, now)
    return branch


def _live_on(branch: Branch, replica: Replica, tokens: int, now: float) -> Home:
    """Give the branch a home there."""
    home = Home(replica, now)
    branch.homes.insert(0, home)
    replica.cache.touch(home, tokens, tokens, now)
    return home


def test_an_unknown_session_has_no_branch() -> None:
    assert list(Directory().branches(b"k", 0.0)) == []


def test_branches_of_a_session_are_kept_apart_the_last_used_first() -> None:
    directory = Directory()
    one, two, three = (_put(directory, b"k", float(n), n) for n in range(3))
    assert list(directory.branches(b"k", 3.0)) == [three, two, one]
    directory.put(one, 4.0)
    assert list(directory.branches(b"k", 4.0)) == [one, three, two]
    assert [b.last_use for b in (one, two, three)] == [4.0, 1.0, 2.0]
    assert len(directory) == 1


def test_a_late_word_does_not_turn_time_back() -> None:
    directory = Directory()
    branch = _put(directory, b"k", 5.0)
    directory.put(branch, 4.0)
    assert branch.last_use == 5.0


def test_branches_are_bounded_and_the_oldest_goes() -> None:
    directory = Directory()
    all_ = [_put(directory, b"k", float(n), n) for n in range(MAX_BRANCHES + 3)]
    assert list(directory.branches(b"k", 20.0)) == all_[:2:-1]
    assert [directory.holds(b) for b in all_] == [False] * 3 + [True] * MAX_BRANCHES


def test_of_too_many_branches_one_that_is_idle_goes_first() -> None:
    directory = Directory()
    busy = _put(directory, b"k", 0.0)
    busy.open = 1
    idle = _put(directory, b"k", 1.0)
    for n in range(MAX_BRANCHES - 1):
        _put(directory, b"k", 2.0 + n).open = 1
    assert directory.holds(busy)
    assert not directory.holds(idle)
    newest = _put(directory, b"k", 50.0)
    assert not directory.holds(busy), "all are busy: the oldest"
    assert directory.holds(newest)
    assert len(directory.branches(b"k", 50.0)) == MAX_BRANCHES


def test_sessions_are_bounded_and_the_least_recently_used_goes() -> None:
    directory = Directory(max_sessions=2)
    x, y = _put(directory, b"x", 1.0), _put(directory, b"y", 2.0)
    directory.put(x, 3.0)
    _put(directory, b"z", 4.0)
    assert [directory.holds(b) for b in (x, y)] == [True, False]
    assert list(directory.branches(b"y", 4.0)) == []
    assert (len(directory), directory.evicted) == (2, 1)


def test_room_for_one_is_enough() -> None:
    directory = Directory(max_sessions=1)
    branches = [_put(directory, b"%d" % n, float(n)) for n in range(5)]
    assert len(directory) == 1
    assert list(directory.branches(b"4", 5.0)) == branches[4:]
    assert directory.evicted == 4


def test_an_idle_session_is_not_known_and_forgotten_when_it_begins_anew() -> None:
    """To look is not to forget: people look too."""
    directory = Directory(idle_s=60.0)
    _put(directory, b"k", 100.0)
    assert directory.branches(b"k", 160.0)
    assert not directory.branches(b"k", 160.1)
    assert directory.branches(b"k", 160.0)
    anew = _put(directory, b"k", 161.0)
    assert list(directory.branches(b"k", 161.0)) == [anew]
    assert (len(directory), directory.branch_count) == (1, 1)
    assert directory.evicted == 0, "forgotten in its own time, not for want of room"


def test_branches_are_counted() -> None:
    directory = Directory(max_sessions=2)
    counts = []
    for n, key in enumerate((b"a", b"a", b"b", b"b", b"b", b"c")):
        _put(directory, key, float(n))
        counts.append(directory.branch_count)
    assert counts == [1, 2, 3, 4, 5, 4]
    directory.forget(b"b")
    assert directory.branch_count == 1
    for n in range(40):
        _put(directory, b"c", 10.0 + n)
    assert directory.branch_count == len(directory.branches(b"c", 60.0))


def test_a_session_with_requests_under_way_is_not_idle() -> None:
    directory = Directory(idle_s=60.0)
    long = _put(directory, b"k", 0.0)
    long.open = 1
    _put(directory, b"k", 1.0)
    assert len(directory.branches(b"k", 500.0)) == 2
    long.open = 0
    assert not directory.branches(b"k", 500.0)


def test_one_branch_in_use_keeps_the_whole_session() -> None:
    directory = Directory(idle_s=60.0)
    main = _put(directory, b"k", 0.0)
    _put(directory, b"k", 1.0)
    directory.put(main, 90.0)
    assert len(directory.branches(b"k", 140.0)) == 2


def test_a_forgotten_session_is_gone() -> None:
    directory = Directory()
    _put(directory, b"k", 0.0)
    assert directory.forget(b"k") is True
    assert directory.forget(b"k") is False
    assert not directory.branches(b"k", 0.0)


def test_a_home_is_that_of_the_very_replica() -> None:
    branch = _branch()
    old, new = Replica("a"), Replica("a")
    home = _live_on(branch, old, 10, 0.0)
    assert branch.home_on(old) is home
    assert branch.home_on(new) is None


@pytest.mark.parametrize("how", ["forget", "idle", "room", "branches"])
def test_what_is_forgotten_takes_no_room_in_any_shadow(how: str) -> None:
    directory, a, b = Directory(max_sessions=1, idle_s=60.0), Replica("a"), Replica("b")
    branch = _put(directory, b"k", 0.0)
    homes = [_live_on(branch, replica, 1_000, 0.0) for replica in (a, b)]
    if how == "forget":
        directory.forget(b"k")
    elif how == "idle":
        _put(directory, b"k", 100.0)
    elif how == "room":
        _put(directory, b"other", 1.0)
    else:
        for n in range(MAX_BRANCHES):
            _live_on(_put(directory, b"k", 1.0 + n), Replica("longer"), 2_000, 1.0 + n)
    assert [len(r.cache) for r in (a, b)] == [0, 0]
    assert [(r.cache.held_tokens, r.cache.live(1.0)) for r in (a, b)] == [(0, 0.0)] * 2
    assert not any(home.resident or home.tokens for home in homes)


@pytest.mark.parametrize("value", [0, -1])
def test_a_directory_without_room_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"max_sessions must be at least 1, got {value}"):
        Directory(max_sessions=value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_an_idle_time_that_is_not_positive_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"idle_s must be more than 0 seconds, got {value}"):
        Directory(idle_s=value)


# Chains

_block = st.integers(0, 2**64 - 1)
_blocks = st.lists(_block, max_size=60, unique_by=lambda block: block & 0xFFFFFFFF)


@given(_blocks)
def test_every_fourth_block_is_kept(blocks: list[int]) -> None:
    assert links(condense(blocks)) == len(blocks) // STRIDE
    assert condense(blocks[: len(blocks) // STRIDE * STRIDE]) == condense(blocks)
    assert condense(tuple(blocks)) == condense(blocks)


@given(_blocks, _blocks, st.integers(0, 60))
def test_chains_share_the_links_before_they_part(common: list[int], rest: list[int], cut: int) -> None:
    """As block hashes are chained, what follows a difference differs too."""
    taken = {block & 0xFFFFFFFF for block in common}
    rest = [block for block in rest if block & 0xFFFFFFFF not in taken]
    one, other = common, common[:cut] + rest
    expected = 0
    for left, right in zip(one[STRIDE - 1 :: STRIDE], other[STRIDE - 1 :: STRIDE], strict=False):
        if left != right:
            break
        expected += 1
    assert shared(condense(one), condense(other)) == expected
    assert shared(condense(other), condense(one)) == expected


@given(_blocks, st.integers(0, 60))
def test_a_chain_shares_all_of_its_beginning(blocks: list[int], cut: int) -> None:
    whole, beginning = condense(blocks), condense(blocks[:cut])
    assert shared(whole, beginning) == links(beginning)
    assert shared(whole, whole) == links(whole)
    assert shared(whole, b"") == 0


def test_a_main_thread_outlives_its_fan_out() -> None:
    directory = Directory()
    replica = Replica("a")
    main = Branch(b"k", 1, b"", 0.0)
    home = Home(replica, 0.0)
    main.homes.append(home)
    replica.cache.touch(home, 100_000, 100_000, 0.0)
    directory.put(main, 0.0)
    for n in range(2 * MAX_BRANCHES):
        branch = Branch(b"k", 2 + n, b"", 1.0 + n)
        directory.put(branch, 1.0 + n)
    assert directory.holds(main)
    assert len(directory.branches(b"k", 50.0)) == MAX_BRANCHES


# Against a model: every branch of every session in one flat list, in order of use.

ROOM, IDLE_S = 3, 50.0


@dataclass(eq=False)
class _Note:
    branch: Branch
    last_use: float
    homes: set[str] = field(default_factory=set)


class _Model:
    def __init__(self) -> None:
        self.notes: list[_Note] = []
        """Least recently used first."""

    def of(self, key: bytes) -> list[_Note]:
        return [n for n in reversed(self.notes) if n.branch.key == key]

    def drop(self, key: bytes) -> None:
        self.notes = [n for n in self.notes if n.branch.key != key]

    def put(self, note: _Note, now: float) -> None:
        if note in self.notes:
            self.notes.remove(note)
        note.last_use = now
        self.notes.append(note)
        mine = self.of(note.branch.key)
        if len(mine) > MAX_BRANCHES:
            idle = [n for n in reversed(mine[1:]) if not n.branch.open]
            self.notes.remove(min(idle, key=lambda n: n.branch.size()) if idle else mine[-1])
        for key in list(dict.fromkeys(n.branch.key for n in reversed(self.notes)))[ROOM:]:
            self.drop(key)


_keys = st.sampled_from([b"u", b"v", b"w", b"x", b"y"])
_steps = st.lists(
    st.tuples(
        st.sampled_from([0.5, 0.5, 20.0, 60.0]),
        st.one_of(
            st.tuples(st.just("new"), _keys, st.integers(0, 1), st.sampled_from(["", "a", "b", "ab"])),
            st.tuples(st.just("use"), _keys, st.integers(0, MAX_BRANCHES), st.sampled_from(["", "a"])),
            st.tuples(st.just("close"), _keys, st.integers(0, MAX_BRANCHES)),
            st.tuples(st.just("ask"), _keys),
            st.tuples(st.just("forget"), _keys),
        ),
    ),
    max_size=80,
)


def _expired(notes: list[_Note], now: float) -> bool:
    return bool(notes) and now - notes[0].last_use > IDLE_S and not any(n.branch.open for n in notes)


@given(_steps)
@settings(max_examples=200)
def test_it_agrees_with_the_model(steps: list[tuple[float, tuple[Any, ...]]]) -> None:
    directory, model, now = Directory(ROOM, IDLE_S), _Model(), 0.0
    replicas = {"a": Replica("a"), "b": Replica("b")}
    for wait, (verb, key, *rest) in steps:
        now += wait
        mine = model.of(key)
        if verb == "new":
            branch = _branch(key, now=now)
            branch.open = rest[0]
            note = _Note(branch, now)
            if _expired(mine, now):
                model.drop(key)
            directory.put(branch, now)
            model.put(note, now)
        elif verb == "use" and mine:
            note = mine[rest[0] % len(mine)]
            directory.put(note.branch, now)
            model.put(note, now)
        elif verb == "close" and mine:
            mine[rest[0] % len(mine)].branch.open = 0
        elif verb == "forget":
            assert directory.forget(key) is bool(mine)
            model.drop(key)
        elif verb == "ask":
            if _expired(mine, now):
                mine = []
            assert list(directory.branches(key, now)) == [n.branch for n in mine]
            assert [b.last_use for b in directory.branches(key, now)] == [n.last_use for n in mine]
        if verb in ("new", "use") and (verb == "new" or mine):
            for replica_id in rest[1]:
                if note in model.notes and replica_id not in note.homes:
                    note.homes.add(replica_id)
                    _live_on(note.branch, replicas[replica_id], 10, now)
        assert len(directory) == len({n.branch.key for n in model.notes}) <= ROOM
        assert all(directory.holds(n.branch) for n in model.notes)
        for replica_id, replica in replicas.items():
            assert replica.cache.held_tokens == 10 * sum(replica_id in n.homes for n in model.notes)
