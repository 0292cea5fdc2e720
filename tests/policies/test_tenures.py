"""Sessions that were let in, counted a few at a time: beside a plain model that goes through all of them."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.admission.tenures import IDLE_S, MOST_KEYS, Tenure, Tenures
from policies.balancer import Balancer
from policies.directory import Branch, Directory
from policies.lease import Lease
from policies.registry import make
from policies.types import Replica, Request, Usage
from tests.fakes.fleet import DONE

_keys = st.sampled_from([bytes([n]) for n in range(65, 75)])
MOST_SESSIONS = 8
"""Fewer than there are keys, so that sessions are forgotten."""


def _live(branches: list[Branch], now: float) -> bool:
    return any(branch.open or now - branch.last_use <= IDLE_S for branch in branches)


class TenuresMachine(RuleBasedStateMachine):
    """Of each that was let in: its keys, its tokens and whether it is cold, as of when its turn to be counted was."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1.0
        self.balancer = Balancer(make("session_affinity"), Directory(MOST_SESSIONS))
        for name in "ab":
            self.balancer.join(Replica(name), self.now)
        self.tenures = Tenures(self.balancer.directory)
        self.open: list[Lease] = []
        self.inside: list[Tenure] = []
        self.cold: set[Tenure] = set()

    @rule(key=_keys, tokens=st.sampled_from([0, 100, 30_000]))
    def ask(self, key: bytes, tokens: int) -> None:
        self.open.append(self.balancer.acquire(Request(key=key, prompt_tokens=tokens), self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), more=st.sampled_from([1, 20_000]))
    def finish(self, data: st.DataObject, more: int) -> None:
        lease = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        lease.finish(DONE, Usage(lease.request.prompt_tokens, 0, more), self.now)

    @rule(passed=st.sampled_from([1.0, 100.0, IDLE_S + 1.0]))
    def time(self, passed: float) -> None:
        self.now += passed

    @rule(name=st.sampled_from("ab"))
    def flush(self, name: str) -> None:
        self.balancer.cache_cleared(self.balancer.replicas[name], self.now)

    @rule(key=_keys)
    def forget(self, key: bytes) -> None:
        self.balancer.directory.forget(key)

    @rule(key=_keys, tokens=st.integers(0, 50_000))
    def let_in(self, key: bytes, tokens: int) -> None:
        if self.tenures.of(key) is None and not self.tenures.full:
            self.inside.append(self.tenures.let_in(key, tokens, self.now))

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), key=_keys)
    def join(self, data: st.DataObject, key: bytes) -> None:
        self.tenures.join(key, data.draw(st.sampled_from(self.inside)))

    @precondition(lambda self: self.inside)
    @rule(which=st.sampled_from(["first_to_go", "oldest"]))
    def end(self, which: str) -> None:
        self._leaves(getattr(self.tenures, which)())

    def _leaves(self, tenure: Tenure) -> None:
        self.tenures.end(tenure)
        self.inside.remove(tenure)
        self.cold.discard(tenure)

    @rule()
    def clear(self) -> None:
        self.tenures.clear()
        self.inside.clear()
        self.cold.clear()

    @rule(most=st.integers(1, 4))
    def find(self, most: int) -> None:
        """All sessions that are live, a few at a time, while nothing else happens."""
        directory = self.balancer.directory
        known = directory.keys()
        live = [key for key in known if _live(list(directory.branches(key, self.now)), self.now)]
        self.tenures.seek()
        before = 0
        while self.tenures.find(most, self.now):
            assert before <= len(self.tenures) <= before + most
            before = len(self.tenures)
        self.inside = [tenure for key in live if (tenure := self.tenures.of(key)) is not None]
        assert len(self.inside) == len(live) == len(self.tenures)
        self.cold = {tenure for tenure in self.inside if self._is_cold(tenure)}

    @rule(most=st.integers(1, 4))
    def count(self, most: int) -> None:
        """However few at a time: after as many counts as there are, each was counted."""
        for _ in range(max(1, len(self.inside))):
            self.tenures.count(most, self.now)
        directory = self.balancer.directory
        for tenure in list(self.inside):
            branches = {key: list(directory.branches(key, self.now)) for key in tenure.keys}
            live = {key for key in tenure.keys if _live(branches[key], self.now)}
            if not live and self.now - tenure.since > IDLE_S:
                assert self.tenures.of(tenure.keys[0]) is not tenure
                self.inside.remove(tenure)
                self.cold.discard(tenure)
                continue
            assert set(tenure.keys) == live | {tenure.keys[0]}
            tokens = sum(
                branch.homes[0].counted if branch.fork and branch.homes[0].resident else branch.size()
                for key in live
                for branch in branches[key]
                if branch.homes and _live([branch], self.now)
            )
            assert not tokens or tenure.tokens == tokens
            (self.cold.add if self._is_cold(tenure) else self.cold.discard)(tenure)

    def _is_cold(self, tenure: Tenure) -> bool:
        homes = [h for b in self.balancer.directory.branches(tenure.keys[0], self.now) for h in b.homes]
        return 2 * max((home.tokens for home in homes), default=0) <= tenure.tokens

    @invariant()
    def the_books_agree(self) -> None:
        tenures, inside = self.tenures, self.inside
        assert len(tenures) == len(inside)
        assert tenures.tokens == sum(tenure.tokens for tenure in inside)
        keys = [key for tenure in inside for key in tenure.keys]
        assert tenures.keys == len(keys) == len(set(keys)) <= MOST_SESSIONS
        assert all(tenures.of(key) is tenure for tenure in inside for key in tenure.keys)
        assert tenures.oldest() is (inside[0] if inside else None)
        cold = [tenure for tenure in inside if tenure in self.cold]
        assert tenures.first_to_go() is next(reversed(cold or inside), None)


TenuresMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestTenures = TenuresMachine.TestCase


def test_a_session_with_very_many_sub_agents_is_counted_in_one_look_as_no_more_than_so_many_keys() -> None:
    balancer = Balancer(make("session_affinity"))
    balancer.join(Replica("a"), 0.0)
    tenures = Tenures(balancer.directory)
    tenure = tenures.let_in(b"session", 1000, 0.0)
    for n in range(3 * MOST_KEYS):
        key = b"agent %d" % n
        balancer.acquire(Request(key=key, parent=b"session", prompt_tokens=1000), 0.0)
        tenures.join(key, tenure)
    other = tenures.let_in(b"other", 1000, 0.0)
    assert len(tenure.keys) == MOST_KEYS
    balancer.acquire(Request(key=b"other", prompt_tokens=2000), 0.0)
    tenures.count(1, 0.0)
    assert (tenure.tokens, other.tokens) == ((MOST_KEYS - 1) * 1000, 1000)
    tenures.count(1, 0.0)
    assert other.tokens == 2000


def test_of_the_cold_ones_the_newest_is_the_first_to_go_whichever_became_cold_last() -> None:
    balancer = Balancer(make("session_affinity"))
    balancer.join(Replica("a"), 0.0)
    tenures = Tenures(balancer.directory)
    for key in (b"old", b"new"):
        balancer.acquire(Request(key=key, prompt_tokens=1000), 0.0)
    old, new = tenures.let_in(b"old", 1000, 0.0), tenures.let_in(b"new", 1000, 0.0)
    newest = tenures.let_in(b"newest", 1000, 0.0)
    (home,) = balancer.directory.branches(b"new", 0.0)[0].homes
    home.replica.cache.forget(home)
    tenures.count(2, 0.0)
    assert (old.cold, new.cold) == (False, True)
    balancer.cache_cleared(balancer.replicas["a"], 0.0)
    tenures.count(3, 0.0)
    assert (old.cold, new.cold) == (True, True)
    assert tenures.first_to_go() is newest
    tenures.end(newest)
    assert tenures.first_to_go() is new
