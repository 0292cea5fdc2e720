"""The Kubernetes client before a real API server: its pages, bookmarks and refusals."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.discovery import feed as discovery_feed
from router.discovery.kubernetes import PAGE_SLICES, KubernetesSource, Times
from router.discovery.slices import TERMINATING, naming
from router.settings import KubernetesSettings
from tests.discovery.followed import Followed, followed
from tests.fakes.kubernetes import endpoint_slice, pod
from tests.fakes.wire import eventually
from tests.kubernetes.cluster import ACCOUNT, Api, access
from tests.kubernetes.server import ControlPlane, Tree, path_of

pytestmark = pytest.mark.kubernetes

QUICK = Times(least_s=0.05, settle_s=0.0)
"""As it is, but that nothing waits for decency's sake."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever failed is asked again soon."""
    monkeypatch.setattr(KubernetesSource, "longest_pause_s", 0.2)
    monkeypatch.setattr(discovery_feed, "FIRST_PAUSE_S", 0.05)


class Place:
    """A namespace, and a router's account in it that may nothing yet."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane = plane
        self.namespace = plane.namespace()
        self.api = Api(plane, self.namespace)
        self._account, *self._role = access(self.namespace)
        plane.apply(self._account)
        self.token = folder / "token"
        self.token.write_text(plane.token(self.namespace, ACCOUNT))

    def allow(self) -> None:
        """Not waiting until it is in force."""
        for manifest in self._role:
            self.plane.apply(manifest)

    def allowed(self) -> None:
        self.allow()
        token = self.token.read_text()
        self.plane.until(lambda: self.plane.slices(self.namespace, token).is_success, "the role is in force")

    def put(self, name: str, *pods: Tree, service: str = "sglang") -> None:
        self.api.put(endpoint_slice(name, pods, namespace=self.namespace, service=service))

    def following(self, times: Times = QUICK, **given: Any) -> AbstractAsyncContextManager[Followed]:
        tree = {"namespace": self.namespace, "service": "sglang", "port": "http", "url": self.api.url}
        files = {"token_file": str(self.token), "ca_file": str(self.plane.ca_file)}
        settings = KubernetesSettings(**(tree | files | given))
        return followed(KubernetesSource(settings, naming(settings, [settings]), times))

    @property
    def kinds(self) -> list[str]:
        """Of questions so far."""
        return [each.kind for each in self.api.asked]


@pytest.fixture
def place(plane: ControlPlane, tmp_path: Path) -> Place:
    return Place(plane, tmp_path)


def address(number: int) -> str:
    return f"10.1.{number // 250}.{number % 250 + 1}"


async def test_a_thousand_pods_are_listed_in_pages_and_then_watched(place: Place) -> None:
    sliced = {f"s-{at:03}": range(8 * at, 8 * at + 8) for at in range(125)}
    for name, numbers in sliced.items():
        place.put(name, *(pod(f"p-{number}", address(number)) for number in numbers))
    place.put("other", pod("x", "10.9.9.9"), service="other")
    place.allowed()
    async with place.following() as seen:
        await seen.ids(*(f"p-{number}" for number in range(1000)))
        assert len(seen.sets) == 1, "a part of the list is none"
        assert seen.last["p-999"].url == f"http://{address(999)}:30000"
        pages = -(-125 // PAGE_SLICES)
        await eventually(lambda: place.kinds == ["list"] * pages + ["watch"])
        assert all("continue" in each.query for each in place.api.asked[1:pages])
        for name in list(sliced)[:10]:
            gone, *_, moved = sliced[name]
            stays = [pod(f"p-{number}", address(number)) for number in sliced[name][1:-1]]
            ends = pod(f"p-{gone}", address(gone), ready=False, serving=True, terminating=True)
            place.put(name, ends, *stays, pod(f"new-{moved}", address(moved)))
        for name in list(sliced)[-5:]:
            place.api.delete(name)
        gone = {f"p-{8 * at + 7}" for at in range(10)} | {f"p-{number}" for number in range(960, 1000)}
        left = {f"p-{number}" for number in range(1000)} - gone | {f"new-{8 * at + 7}" for at in range(10)}
        last = await seen.ids(*left)
        assert {each.id for each in last.values() if each.drains == TERMINATING} == {f"p-{8 * at}" for at in range(10)}
        assert place.kinds == ["list"] * pages + ["watch"], "all that in one watch"
        assert not seen.feed.faults


async def test_a_watch_goes_on_from_a_bookmark(place: Place) -> None:
    """What happens to others raises the version, and only a bookmark tells of it."""
    place.put("s-1", pod("a", "10.0.0.1"))
    place.allowed()
    # The API server sends one two seconds before the end.
    async with place.following(replace(QUICK, watch_s=4.0)) as seen:
        await seen.ids("a")
        await eventually(lambda: place.api.watches)
        other = endpoint_slice("other", [pod("x", "10.0.9.9")], namespace=place.namespace, service="other")
        place.api.put(other)
        marked = int(place.plane.told("GET", path_of(other))["metadata"]["resourceVersion"])
        await eventually(lambda: int(place.api.asked[-1].query.get("resourceVersion", "0")) >= marked)
        place.put("s-1", pod("b", "10.0.0.1"))
        await seen.ids("b")
        assert place.kinds.count("list") == 1
        assert not seen.feed.faults


async def test_another_pod_at_the_same_address_is_another_target(place: Place) -> None:
    place.put("s-1", pod("a", "10.0.0.1", "u1"))
    place.allowed()
    async with place.following() as seen:
        before = (await seen.ids("a"))["a"]
        place.put("s-1", pod("a", "10.0.0.1", "u1", ready=False, serving=True, terminating=True))
        await seen.until(lambda: seen.last["a"].drains == TERMINATING, "a terminates")
        assert seen.last["a"].same_as(before)
        place.put("s-1", pod("a", "10.0.0.1", "u2"))
        await seen.until(lambda: seen.last["a"].uid == "u2", "another one is there")
        assert not seen.last["a"].same_as(before)
        place.put("s-1", pod("b", "10.0.0.1", "u3"))
        assert (await seen.ids("b"))["b"].url == before.url


async def test_who_may_not_is_told_how_he_may(place: Place) -> None:
    place.put("s-1", pod("a", "10.0.0.1"))
    async with place.following() as seen:
        await seen.trouble("may not read EndpointSlices", place.namespace, "(403: ", f"{place.namespace}:{ACCOUNT}")
        place.allow()
        await seen.ids("a")


async def test_who_is_not_known_is_told_so(place: Place) -> None:
    """Such as with a token that has ended, until the kubelet has exchanged it."""
    place.put("s-1", pod("a", "10.0.0.1"))
    place.allowed()
    good = place.token.read_text()
    place.token.write_text(good[:-8] + "AAAAAAAA")
    async with place.following() as seen:
        await seen.trouble("does not know the token", "(401: ")
        place.token.write_text(good)
        await seen.ids("a")


async def test_a_selector_chooses_slices(place: Place) -> None:
    for name, tier in (("a", "gpu"), ("b", "cpu"), ("c", "none")):
        given = endpoint_slice(f"s-{name}", [pod(name, "10.0.0.1")], namespace=place.namespace, port=30000 + ord(name))
        given["metadata"]["labels"] |= {"tier": tier}
        place.api.put(given)
    place.allowed()
    async with place.following(service="", selector="tier in (gpu, cpu),tier!=none") as seen:
        await seen.ids("a", "b")
