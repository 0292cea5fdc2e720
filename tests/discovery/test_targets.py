"""What several sources say, as one fleet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.discovery.targets import Target, union

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


TARGETS = st.builds(Target, st.sampled_from("abcd"), st.sampled_from(["u", "v", "w", "x"]))


@given(st.dictionaries(st.sampled_from(["s1", "s2", "s3"]), st.lists(TARGETS, max_size=6)))
def test_no_id_and_no_url_twice_and_nothing_is_lost_without_a_word(told: dict[str, list[Target]]) -> None:
    fleet, left_out = union(told)
    urls = [given.target.url for given in fleet.values()]
    assert len(set(urls)) == len(urls)
    assert all(name == given.target.id and given.target in told[given.source] for name, given in fleet.items())
    for source, targets in told.items():
        for target in targets:
            known = fleet.get(target.id)
            kept = known is not None and (known.source, known.target.url) == (source, target.url)
            assert kept or any(sentence.startswith(f"{source} tells ") for sentence in left_out)
