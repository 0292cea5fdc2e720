"""The index of prompts' beginnings: a walk over plain sets is the model, halving and eviction must agree with it."""

from __future__ import annotations

from collections import OrderedDict
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from policies.events import CacheCleared, Event, Finished, LoadReported, ReplicaAdded, ReplicaRemoved, Routed
from policies.prefix_index import BLOCK_TOKENS, MAX_ENTRIES, PrefixIndex, raw_tokens, shares
from policies.types import Choice, Load, Reason, Replica, Request, Resident
from router.identity.fingerprint import BLOCK_BYTES
from router.proxy.exchange import BYTES_PER_TOKEN
from tests.fakes.fleet import DONE

A, B, C = Replica("a"), Replica("b"), Replica("c")


def chain(text: str) -> tuple[int, ...]:
    """One block a letter: equal up to the first letter that differs."""
    hashes: list[int] = []
    for letter in text:
        hashes.append(xxh3_64_intdigest(letter.encode(), hashes[-1] if hashes else 0))
    return tuple(hashes)


def test_a_block_has_the_tokens_that_the_router_counts_for_it() -> None:
    assert BLOCK_TOKENS == BLOCK_BYTES // BYTES_PER_TOKEN


def test_a_prompt_is_known_where_it_was_sent_as_far_as_it_is_the_same() -> None:
    index = PrefixIndex()
    index.insert(A, chain("system one"), 1.0)
    index.insert(B, chain("system two"), 2.0)
    for text, expected in [
        ("system one", [10, 7, 0]),
        ("system one and more", [10, 7, 0]),
        ("system three", [7, 8, 0]),
        ("sys", [3, 3, 0]),
        ("other", [0, 0, 0]),
        ("", [0, 0, 0]),
    ]:
        assert index.matches([A, B, C], chain(text), 3.0) == expected, text


def test_looking_up_changes_nothing() -> None:
    index = PrefixIndex(max_blocks=4)
    index.insert(A, chain("xy"), 1.0)
    index.insert(A, chain("pq"), 2.0)
    for _ in range(5):
        assert index.matches([A], chain("xy"), 3.0) == [2]
    index.insert(A, chain("rs"), 4.0)
    assert index.matches([A], chain("xy"), 5.0) == [0], "it was used least recently, however often it was asked for"
    assert index.matches([A], chain("pq"), 5.0) == [2]


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    index = PrefixIndex(max_blocks=6)
    index.insert(A, chain("abcdef"), 1.0)
    for n, letter in enumerate("UVWX"):
        index.insert(A, chain(letter), 2.0 + n)
        assert index.matches([A], chain("abcdef"), 3.0 + n) == [5 - n]
    assert len(index) == 6


def test_of_a_prompt_longer_than_the_bound_the_beginning_is_kept() -> None:
    index = PrefixIndex(max_blocks=4)
    index.insert(A, chain("abcdefgh"), 1.0)
    assert index.matches([A], chain("abcdefgh"), 2.0) == [4]
    index.insert(A, chain("abcdefgh"), 2.0, max_blocks=2)
    assert (index.matches([A], chain("abcdefgh"), 3.0), len(index)) == ([2], 2)


def test_a_beginning_that_many_share_outlives_their_ends() -> None:
    index = PrefixIndex(max_blocks=10)
    for n, tail in enumerate("ghijklmnop"):
        index.insert(A, chain("abcd" + tail * 3), float(n))
    assert index.matches([A], chain("abcd"), 20.0) == [4]
    assert index.matches([A], chain("abcdppp"), 20.0) == [7]
    assert index.matches([A], chain("abcdggg"), 20.0) == [4]


def test_what_was_not_used_for_the_ttl_does_not_count() -> None:
    index = PrefixIndex(ttl_s=10.0)
    index.insert(A, chain("abcdef"), 0.0)
    index.insert(A, chain("abc"), 6.0)
    blocks = chain("abcdef")
    assert [index.matches([A], blocks, now)[0] for now in (10.0, 10.5, 16.0, 16.5)] == [6, 3, 3, 0]
    index.insert(A, chain("z"), 10.5)
    assert len(index) == 4, "blocks past it are dropped when something is added"


def test_the_first_holder_is_the_one_that_had_it_first_as_long_as_it_has_it() -> None:
    index = PrefixIndex(ttl_s=100.0)
    index.insert(B, chain("abcd"), 1.0)
    index.insert(A, chain("abcdef"), 2.0)
    index.insert(C, chain("abcd"), 3.0)
    assert index.longest([A, B, C], chain("abcd"), 4.0) == (B, 4)
    assert index.longest([A, C], chain("abcd"), 4.0) == (A, 4)
    assert index.longest([A, B, C], chain("abcdef"), 4.0) == (A, 6)
    assert index.longest([B, C], chain("zz"), 4.0) == (None, 0)
    index.insert(B, chain("abcd"), 5.0)
    assert index.longest([A, B, C], chain("abcd"), 6.0) == (B, 4), "using it again makes it no newcomer"
    index.forget(B)
    index.insert(B, chain("abcd"), 7.0)
    assert index.longest([A, B, C], chain("abcd"), 8.0) == (A, 4), "it had lost it, and now has it last"
    index.insert(C, chain("abcd"), 103.0)
    index.insert(A, chain("abcd"), 104.0)
    index.insert(B, chain("abcd"), 105.0)
    assert index.longest([A, B, C], chain("abcd"), 106.0) == (C, 4), "A's had expired when C's was still there"


@pytest.mark.parametrize("lose", [ReplicaRemoved, CacheCleared])
def test_a_lost_cache_is_forgotten_at_once(lose: type[ReplicaRemoved | CacheCleared]) -> None:
    index = PrefixIndex()
    for replica in (A, B):
        index.observe(Routed(1.0, Request(blocks=chain("abc")), Choice(replica, Reason.PREFIX)))
    assert index.matches([A, B], chain("abc"), 2.0) == [3, 3]
    index.observe(lose(2.0, A))
    assert (index.matches([A, B], chain("abc"), 2.0), len(index)) == ([0, 3], 3)


def test_other_events_are_none_of_its_business() -> None:
    index = PrefixIndex()
    index.insert(A, chain("abc"), 1.0)
    request = Request(blocks=chain("xyz"))
    others: list[Event] = [ReplicaAdded(2.0, A), Finished(2.0, request, A, DONE, None), LoadReported(2.0, A, Load(2.0))]
    for event in others:
        index.observe(event)
    index.observe(Routed(2.0, Request(), Choice(B, Reason.NEW)))
    assert (index.matches([A, B], chain("abc"), 2.0), len(index)) == ([3, 0], 3)


def test_the_whole_is_bounded_and_each_replica_has_an_equal_part() -> None:
    index = PrefixIndex(max_entries=12)
    index.insert(A, chain("abcdefghijklmn"), 1.0)
    assert (index.matches([A], chain("abcdefghijklmn"), 1.0), len(index)) == ([12], 12)
    index.insert(B, chain("abcdefghijklmn"), 2.0)
    assert index.matches([A, B], chain("abcdefghijklmn"), 2.0) == [6, 6]
    index.insert(C, chain("x"), 3.0)
    assert index.matches([A, B, C], chain("abcdefghijklmn"), 3.0) == [4, 4, 0]
    for n in range(40):
        index.insert(Replica(str(n)), chain("abc"), 4.0 + n)
        assert len(index) <= max(12, n + 4), "one block each is the least"


def test_a_hundred_thousand_sessions_stay_within_the_bound() -> None:
    index = PrefixIndex()
    replicas = [Replica(str(n)) for n in range(50)]
    for n in range(100_000):
        index.insert(replicas[n % 50], tuple(range(n << 8, (n << 8) + 12)), float(n))
    assert MAX_ENTRIES * 0.99 < len(index) <= MAX_ENTRIES
    assert index.matches([replicas[49]], tuple(range(99_999 << 8, (99_999 << 8) + 12)), 1e5) == [12]
    assert index.matches([replicas[0]], tuple(range(12)), 1e5) == [0]


_texts = st.text("ab", min_size=1, max_size=9)
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(0, 2), _texts, st.floats(0.0, 3.0)),
        st.tuples(st.just("forget"), st.integers(0, 2), st.just(""), st.just(0.0)),
    ),
    max_size=40,
)


class Walked:
    """What the index must say, said without its cleverness: plain LRU lists, walked from the first block on."""

    def __init__(self, capacity: int, ttl_s: float) -> None:
        self.capacity, self.ttl_s = capacity, ttl_s
        self.used: dict[int, OrderedDict[int, float]] = {n: OrderedDict() for n in range(3)}

    def insert(self, n: int, blocks: tuple[int, ...], now: float) -> None:
        used = self.used[n]
        for block in reversed(blocks[: self.capacity]):
            used[block] = now
            used.move_to_end(block)
        while len(used) > self.capacity:
            used.popitem(last=False)

    def match(self, n: int, blocks: tuple[int, ...], now: float) -> int:
        reach = 0
        for block in blocks:
            if block not in self.used[n] or self.used[n][block] < now - self.ttl_s:
                break
            reach += 1
        return reach


@given(_steps, st.integers(1, 12), st.sampled_from([inf, 8.0, 2.5]), st.lists(_texts, min_size=1, max_size=6))
@settings(max_examples=300)
def test_halving_finds_what_walking_finds(
    steps: list[tuple[str, int, str, float]], capacity: int, ttl_s: float, asked: list[str]
) -> None:
    replicas = [Replica(str(n)) for n in range(3)]
    index, model, now = PrefixIndex(max_blocks=capacity, ttl_s=ttl_s), Walked(capacity, ttl_s), 0.0
    for verb, n, text, later in steps:
        now += later
        if verb == "insert":
            index.insert(replicas[n], chain(text), now)
            model.insert(n, chain(text), now)
        else:
            index.forget(replicas[n])
            model.used[n].clear()
        assert len(index) <= 3 * capacity
        for question in asked:
            blocks = chain(question)
            walked = [model.match(m, blocks, now) for m in range(3)]
            assert index.matches(replicas, blocks, now) == walked
            holder, most = index.longest(replicas, blocks, now)
            assert most == max(walked)
            assert (walked[replicas.index(holder)] if holder is not None else 0) == most


# Shares of a prompt


def test_a_share_is_of_the_whole_prompt_its_last_part_block_included() -> None:
    index = PrefixIndex()
    index.insert(A, chain("abcd"), 1.0)
    request = Request(blocks=chain("abcdefg"), prompt_tokens=8 * BLOCK_TOKENS)
    assert shares(index, request, [A, B], 2.0) == [0.5, 0.0]


def test_a_share_does_not_change_with_the_correction_of_the_prompts_size() -> None:
    index = PrefixIndex()
    index.insert(A, chain("abcd"), 1.0)
    request = Request(blocks=chain("abcdefg"), prompt_tokens=5_000, estimate_tokens=8 * BLOCK_TOKENS)
    assert raw_tokens(request) == 8 * BLOCK_TOKENS
    assert shares(index, request, [A], 2.0) == [0.5]


def test_a_share_is_never_more_than_the_whole() -> None:
    index = PrefixIndex()
    index.insert(A, chain("abcd"), 1.0)
    assert shares(index, Request(blocks=chain("abcd"), prompt_tokens=7), [A], 2.0) == [1.0]


def test_without_blocks_the_session_directory_tells() -> None:
    index = PrefixIndex()
    index.insert(A, chain("abcd"), 1.0)
    residents = (Resident(B, 3_000, 3_000), Resident(C, 9_000, 0))
    request = Request(key=b"k", prompt_tokens=6_000, residents=residents)
    assert shares(index, request, [A, B, C], 2.0) == [0.0, 0.5, 1.0]
    assert shares(index, Request(key=b"k", residents=residents), [A, B, C], 2.0) == [0.0, 0.0, 0.0]
