"""Many slices, one set of replicas: whatever way the pods are spread over them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.discovery.slices import NOT_READY, TERMINATING, Slice, naming, targets
from router.discovery.targets import Target
from router.settings import KubernetesSettings
from tests.fakes.kubernetes import endpoint_slice, pod


def by_name(namespace: str, name: str, port: int) -> str:
    return name


def made(slices: Iterable[dict[str, Any]], port: int | str = "", scheme: str = "http") -> dict[str, Target]:
    decoded = [msgspec.json.decode(json.dumps(each).encode(), type=Slice) for each in slices]
    return {target.id: target for target in targets(decoded, port, scheme, by_name)}


# Conditions


@pytest.mark.parametrize(
    ("conditions", "drains", "serving"),
    [
        ({"ready": True, "serving": True, "terminating": False}, "", True),
        ({"ready": False, "serving": False, "terminating": False}, NOT_READY, False),
        ({"ready": False, "serving": True, "terminating": True}, TERMINATING, True),
        ({"ready": False, "serving": False, "terminating": True}, TERMINATING, False),
        ({"ready": True, "serving": True, "terminating": True}, TERMINATING, True),  # publishNotReadyAddresses
        ({}, "", True),
        (None, "", True),
        ({"ready": None, "serving": None, "terminating": None}, "", True),
        ({"ready": False}, NOT_READY, False),
    ],
)
def test_what_conditions_mean(conditions: Any, drains: str, serving: bool) -> None:
    """Unknown is ready, and serving as it is ready, as the API's documentation says."""
    endpoint = pod("a", "10.0.0.1") | {"conditions": conditions}
    (target,) = made([endpoint_slice("s", [endpoint])]).values()
    assert (target.drains, target.serving) == (drains, serving)


# Ports

TWO = [{"name": "http", "port": 30000}, {"name": "metrics", "port": 9090}]


@pytest.mark.parametrize(
    ("ports", "wanted", "url"),
    [
        ([{"name": "http", "port": 30000}], "", "http://10.0.0.1:30000"),
        ([{"name": "", "port": 30000}], "", "http://10.0.0.1:30000"),
        ([{"port": 30000}], 30000, "http://10.0.0.1:30000"),
        (TWO, "metrics", "http://10.0.0.1:9090"),
        (TWO, 30000, "http://10.0.0.1:30000"),
        ([], 30000, "http://10.0.0.1:30000"),
        (None, 30000, "http://10.0.0.1:30000"),
        ([{"name": "http", "port": 80}], "http", "http://10.0.0.1"),
    ],
)
def test_ports_by_number_and_by_name(ports: Any, wanted: int | str, url: str) -> None:
    given = endpoint_slice("s", [pod("a", "10.0.0.1")]) | {"ports": ports}
    assert [each.url for each in made([given], wanted).values()] == [url]


@pytest.mark.parametrize(
    ("ports", "wanted", "why"),
    [
        (TWO, "", r"several ports, http \(30000\), metrics \(9090\): set port to one of them"),
        (TWO, "api", r"none of its slices has the port api: set port to a name or number of http \(30000\), metrics"),
        (TWO, 80, r"none of its slices has the port 80"),
        ([{"name": "http", "port": None}], "http", r"none of its slices has the port http"),
    ],
)
def test_a_port_that_is_not_there_is_told(ports: Any, wanted: int | str, why: str) -> None:
    given = endpoint_slice("s", [pod("a", "10.0.0.1")], ports=ports)
    with pytest.raises(ValueError, match=why):
        made([given], wanted)


def test_slices_without_pods_need_no_port() -> None:
    assert made([endpoint_slice("s", [], ports=[])], "http") == {}
    assert made([endpoint_slice("s", []) | {"endpoints": None, "ports": None}], "http") == {}


def test_named_ports_may_differ_from_pod_to_pod() -> None:
    old = endpoint_slice("s-1", [pod("a", "10.0.0.1")], port=30000)
    new = endpoint_slice("s-2", [pod("b", "10.0.0.2")], port=31000)
    assert {each.url for each in made([old, new], "http").values()} == {
        "http://10.0.0.1:30000",
        "http://10.0.0.2:31000",
    }


# Families


def test_a_pod_with_two_addresses_is_one_replica_by_ipv4() -> None:
    four = endpoint_slice("s-4", [pod("a", "10.0.0.1", "u1"), pod("b", "10.0.0.2", "u2")])
    six = endpoint_slice("s-6", [pod("a", "fd00::1", "u1"), pod("b", "fd00::2", "u2")], family="IPv6")
    assert {each.url for each in made([six, four]).values()} == {"http://10.0.0.1:30000", "http://10.0.0.2:30000"}


def test_a_pod_whose_ipv4_address_went_first_does_not_become_another_replica() -> None:
    """Slices of the two families are written one after the other."""
    four = endpoint_slice("s-4", [pod("a", "10.0.0.1", "u1")])
    six = endpoint_slice("s-6", [pod("a", "fd00::1", "u1"), pod("b", "fd00::2", "u2")], family="IPv6")
    assert set(made([four, six])) == {"a"}
    assert set(made([endpoint_slice("s-4", []), six])) == set()


def test_where_there_is_ipv6_only_it_is_used() -> None:
    six = endpoint_slice("s-6", [pod("a", "fd00::1")], family="IPv6")
    assert made([six])["a"].url == "http://[fd00::1]:30000"


# Identity


def test_a_new_pod_behind_an_old_address_is_another_replica() -> None:
    before = made([endpoint_slice("s", [pod("a", "10.0.0.1", "u1")])])["a"]
    after = made([endpoint_slice("s", [pod("a", "10.0.0.1", "u2")])])["a"]
    assert (before.id, before.url) == (after.id, after.url)
    assert not before.same_as(after)


def test_an_address_that_two_pods_seem_to_have_belongs_to_the_one_that_is_ready() -> None:
    """A slice may still hold the old one when another tells of the new."""
    old = endpoint_slice("s-1", [pod("a", "10.0.0.1", terminating=True)])
    new = endpoint_slice("s-2", [pod("b", "10.0.0.1")])
    assert set(made([old, new])) == set(made([new, old])) == {"b"}


def test_what_is_no_pod_is_called_by_its_address() -> None:
    endpoint = {"addresses": ["10.0.0.1"]}
    assert set(made([endpoint_slice("s", [endpoint])])) == {"10.0.0.1:30000"}
    six = endpoint_slice("s", [{"addresses": ["fd00::1"]}], family="IPv6")
    assert set(made([six], scheme="https")) == {"[fd00::1]:30000"}


def test_ids_tell_apart_what_may_meet() -> None:
    def id_of(*every: dict[str, Any]) -> str:
        settings = [KubernetesSettings(**each) for each in every]
        return naming(settings[0], settings)("ns", "pod-0", 30000)

    assert id_of({"service": "a"}) == "pod-0"
    assert id_of({"service": "a", "port": "http"}, {"service": "b", "port": "http"}) == "pod-0"
    assert id_of({"service": "a", "namespace": "ns"}, {"service": "a", "namespace": "other"}) == "ns/pod-0"
    assert id_of({"service": "a", "port": 30000}, {"service": "a", "port": 30001}) == "pod-0:30000"


@pytest.mark.parametrize("address", ["", "10.0.0", "10.0.0.1/24", "a.example", "10.0.0.1:80", "fd00::1%eth0 x"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        made([endpoint_slice("s", [pod("a", address)])])


# However they are spread

CONDITION = st.sampled_from([True, False, None])


@st.composite
def endpoints(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Pods, some of which are told twice, with other conditions, or have one's address."""
    number = st.integers(0, 7)
    told = draw(st.lists(st.tuples(number, st.integers(1, 5), CONDITION, CONDITION, CONDITION), max_size=16))
    return [
        pod(f"p{name}", f"10.0.0.{address}", ready=ready, serving=serving, terminating=terminating)
        for name, address, ready, serving, terminating in told
    ]


@st.composite
def spread(draw: st.DrawFn, told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same endpoints in slices, some in several."""
    slices: list[list[dict[str, Any]]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for endpoint in draw(st.permutations(told)):
        for at in draw(st.sets(st.integers(0, len(slices) - 1), min_size=1)):
            slices[at].append(endpoint)
    return [endpoint_slice(f"s-{at}", each) for at, each in enumerate(slices)]


@given(st.data())
def test_the_set_does_not_depend_on_how_pods_are_spread(data: st.DataObject) -> None:
    told = data.draw(endpoints())
    assert made(data.draw(spread(told))) == made(data.draw(spread(told)))


@given(st.data())
def test_no_id_and_no_url_is_there_twice_and_no_pod_that_is_ready_is_lost(data: st.DataObject) -> None:
    told = data.draw(endpoints())
    found = made(data.draw(spread(told)))
    urls = [target.url for target in found.values()]
    assert len(set(urls)) == len(urls)
    assert {target.uid for target in found.values()} <= {each["targetRef"]["uid"] for each in told}
    terminating = {each["targetRef"]["name"] for each in told if each["conditions"]["terminating"]}
    owners: dict[str, set[str]] = {}
    for each in told:
        owners.setdefault(each["addresses"][0], set()).add(each["targetRef"]["name"])
    for each in told:
        name = each["targetRef"]["name"]
        alone = all(owners[e["addresses"][0]] == {name} for e in told if e["targetRef"]["name"] == name)
        if alone and each["conditions"]["ready"] is not False and name not in terminating:
            assert found[name].drains == ""
        if alone and name in terminating:
            assert found[name].drains == TERMINATING, "it never comes back"
