"""What several sources say, as one fleet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.discovery.targets import Target, in_ranks, listed, union
from router.settings import ReplicaSettings

A = Target("a", "http://10.0.0.1:30000")


def test_sources_live_side_by_side() -> None:
    b, c = Target("b", "http://10.0.0.2:30000"), Target("c", "http://10.0.0.3:30000")
    fleet, left_out = union({"settings": [A], "file:x": [b], "dns:y": [c]})
    assert {name: given.source for name, given in fleet.items()} == {"a": "settings", "b": "file:x", "c": "dns:y"}
    assert not left_out


def test_a_url_is_one_replica_and_the_first_source_calls_it() -> None:
    fleet, left_out = union({"settings": [A], "dns:y": [Target("10.0.0.1:30000", A.url)]})
    assert {name: given.source for name, given in fleet.items()} == {"a": "settings"}
    (sentence,) = left_out
    assert sentence.startswith(f"dns:y tells {A.url} as 10.0.0.1:30000, which settings tells as a: it is one replica")


def test_an_id_is_one_replica() -> None:
    fleet, left_out = union({"file:x": [A], "dns:y": [Target("a", "http://10.0.0.2:30000")]})
    assert [given.target for given in fleet.values()] == [A]
    assert "dns:y tells a at http://10.0.0.2:30000" in left_out[0]


def test_which_source_answered_first_does_not_matter() -> None:
    """All routers and workers call a replica the same."""
    told = {"settings": [A], "dns:y": [Target("10.0.0.1:30000", A.url)]}
    assert union(told)[0].keys() == union({"settings": [A], "dns:y": []})[0].keys()


def test_another_uid_is_another_replica_where_both_are_known() -> None:
    assert not Target("a", "u", uid="1").same_as(Target("a", "u", uid="2"))
    assert Target("a", "u", uid="1").same_as(Target("a", "u"))
    assert Target("a", "u").same_as(Target("a", "u", weight=2, drains="x"))
    assert not Target("a", "u").same_as(Target("a", "v"))


# Ranks


def test_an_engine_is_one_target_or_one_for_each_rank() -> None:
    pod = Target("a", "u", 2.0, uid="1", drains="it goes", serving=False)
    assert list(in_ranks(pod, 1)) == [pod]
    first, second = in_ranks(pod, 2)
    assert first == Target("a@0", "u", 2.0, "1", "it goes", False, rank=0, ranks=2)
    assert second == Target("a@1", "u", 2.0, "1", "it goes", False, rank=1, ranks=2)
    assert not first.same_as(second)
    assert first.same_as(next(in_ranks(pod, 3))), "one more beside it is no reason to forget what it holds"
    assert not Target("a@0", "u").same_as(first), "an engine may be called as a rank is"


def test_a_list_gives_each_rank_the_entrys_weight() -> None:
    entries = [ReplicaSettings(url="http://b:1", id="b"), ReplicaSettings(url="http://a:1", weight=3, ranks=2)]
    assert [(each.id, each.url, each.weight, each.rank) for each in listed(entries)] == [
        ("b", "http://b:1", 1.0, None),
        ("http://a:1@0", "http://a:1", 3.0, 0),
        ("http://a:1@1", "http://a:1", 3.0, 1),
    ]


def test_two_sources_that_tell_the_same_ranks_tell_the_same_replicas() -> None:
    fleet, left_out = union({"settings": list(in_ranks(A, 2)), "dns:y": list(in_ranks(Target("d", A.url), 2))})
    assert {name: (given.source, given.target.rank) for name, given in fleet.items()} == {
        "a@0": ("settings", 0),
        "a@1": ("settings", 1),
    }
    assert [sentence[: len(f"dns:y tells {A.url} as d@0")] for sentence in left_out] == [
        f"dns:y tells {A.url} as d@0",
        f"dns:y tells {A.url} as d@1",
    ]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (1, 4, "in 4 ranks, but settings tells it whole"),
        (4, 1, "whole, but settings tells it in 4 ranks"),
        (2, 4, "in 4 ranks, but settings tells it in 2 ranks"),
    ],
)
def test_how_many_ranks_there_are_is_for_the_first_to_say(first: int, second: int, words: str) -> None:
    told = {"settings": list(in_ranks(A, first)), "dns:y": list(in_ranks(Target("d", A.url), second))}
    fleet, left_out = union(told)
    assert [given.target for given in fleet.values()] == told["settings"]
    assert left_out == [f"dns:y tells {A.url} {words}: the first is used, the other is not; set the same ranks in both"]


@st.composite
def engines(draw: st.DrawFn) -> list[Target]:
    """What one source tells: engines, some of them in ranks, and some of those with ranks missing."""
    told = []
    for _ in range(draw(st.integers(0, 4))):
        engine = Target(draw(st.sampled_from(["a", "b", "a@0", "a@1"])), draw(st.sampled_from("uvwx")))
        told += [each for each in in_ranks(engine, draw(st.integers(1, 3))) if draw(st.booleans())]
    return told


@given(st.dictionaries(st.sampled_from(["s1", "s2", "s3"]), engines()))
def test_no_id_and_no_place_twice_and_nothing_is_lost_without_a_word(told: dict[str, list[Target]]) -> None:
    fleet, left_out = union(told)
    places = [(given.target.url, given.target.rank) for given in fleet.values()]
    assert len(set(places)) == len(places)
    sizes = {(given.target.url, given.target.ranks) for given in fleet.values()}
    assert len(sizes) == len({url for url, _ in places}), "none is told in two ways"
    assert all(name == given.target.id and given.target in told[given.source] for name, given in fleet.items())
    for source, targets in told.items():
        for target in targets:
            known = fleet.get(target.id)
            kept = known is not None and (known.source, known.target) == (source, target)
            assert kept or any(sentence.startswith(f"{source} tells ") for sentence in left_out)
