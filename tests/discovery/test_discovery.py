"""Sources, and the fleet that a router makes of them: in the test's process, without a port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from policies.types import Replica, State
from router.admin import Admin
from router.app import Router
from router.configuration import load
from router.discovery import feed as discovery_feed
from router.discovery.file import FileSource
from router.discovery.kubernetes import KubernetesSource
from router.drains import Homes
from router.source import Source
from tests.control.test_metrics import parse, total
from tests.fakes.kubernetes import KubernetesApi, endpoint_slice, pod
from tests.fakes.logged import logged
from tests.fakes.wire import eventually

UNTOUCHED = {"health": {"fail_after": 100_000}, "log": {"level": "info"}}
"""Replicas that are not there are not found out while a test runs."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_feed, "FIRST_PAUSE_S", 0.02)
    for source in (KubernetesSource, FileSource):
        monkeypatch.setattr(source, "longest_pause_s", 0.1)
    monkeypatch.setattr(FileSource.__init__, "__defaults__", (0.02,))


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    server = KubernetesApi()
    server.tokens = {""}
    await server.start()
    yield server
    await server.stop()


class Found:
    """A router that is run without its ports."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file = file
        self.write(settings)
        self.router = Router(load(str(file)), Source(str(file), lambda: load(str(file))))

    def write(self, settings: dict[str, Any]) -> None:
        self.file.write_text(yaml.safe_dump(UNTOUCHED | settings))

    @property
    def replicas(self) -> dict[str, Replica]:
        return self.router.balancer.replicas

    async def ids(self, *ids: str) -> None:
        await self.until(lambda: set(self.replicas) == set(ids), f"{ids}")

    async def state(self, name: str, state: State) -> None:
        await self.until(lambda: name in self.replicas and self.replicas[name].state is state, f"{name} is {state}")

    async def until(self, holds: Callable[[], object], what: str) -> None:
        try:
            await eventually(holds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; {[(r.id, r.state) for r in self.replicas.values()]}") from None

    async def told(self, path: str) -> httpx.Response:
        transport = httpx.ASGITransport(Admin(self.router).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path)


@asynccontextmanager
async def found(folder: Path, **settings: Any) -> AsyncIterator[Found]:
    made = Found(folder / "c.yaml", settings)
    router = made.router
    router.proxy.loop = asyncio.get_running_loop()
    for given in router.settings.replicas:
        router.fleet.join(given)
    router.discovery.start()
    try:
        yield made
    finally:
        await router.discovery.stop()
        await router.fleet.close()
        router.access_log.close()


def kubernetes(api: KubernetesApi, **more: Any) -> dict[str, Any]:
    return {"kubernetes": [{"service": "sglang", "namespace": "default", "url": api.url} | more]}


def put(api: KubernetesApi, *pods: dict[str, Any]) -> None:
    api.put(endpoint_slice("s-1", pods))


# The fleet


async def test_replicas_of_settings_and_of_sources_live_side_by_side(api: KubernetesApi, tmp_path: Path) -> None:
    put(api, pod("p", "127.0.0.2"), pod("same", "127.0.0.9"))
    (tmp_path / "r.yaml").write_text("[{id: f, url: 'http://127.0.0.3:1', weight: 2}]")
    discovery = {"file": str(tmp_path / "r.yaml"), **kubernetes(api)}
    replicas = [{"id": "s", "url": "http://127.0.0.9:30000"}]
    async with found(tmp_path, replicas=replicas, discovery=discovery) as seen:
        await seen.ids("s", "f", "p")
        assert seen.replicas["f"].weight == 2
        told = (await seen.told("/replicas")).json()["replicas"]
        sources = {each["id"]: each["source"] for each in told}
        assert sources["s"] == "settings"
        assert sources["f"].startswith("file:")
        assert sources["p"].startswith("kubernetes:")
        kept = seen.replicas["s"]
        put(api)
        api.put(endpoint_slice("s-1", [pod("q", "127.0.0.4")]))
        await seen.ids("s", "f", "q")
        assert seen.replicas["s"] is kept


async def test_a_pods_ranks_are_replicas_and_drain_with_it(api: KubernetesApi, tmp_path: Path) -> None:
    put(api, pod("p", "127.0.0.2"))
    async with found(tmp_path, discovery=kubernetes(api, ranks=2)) as seen:
        await seen.ids("p@0", "p@1")
        put(api, pod("p", "127.0.0.2", ready=False))
        for name in ("p@0", "p@1"):
            await seen.state(name, State.FINISHING)
        kept = seen.replicas["p@0"]
        seen.write({"discovery": kubernetes(api, ranks=3)})
        await seen.router.reload.reload("a test")
        await seen.until(lambda: seen.router.discovery.missing is None, "it is asked anew")
        put(api, pod("p", "127.0.0.2"))
        await seen.ids("p@0", "p@1", "p@2")
        assert seen.replicas["p@0"] is kept


async def test_services_have_shares_of_their_own_which_a_reload_changes(api: KubernetesApi, tmp_path: Path) -> None:
    put(api, pod("p", "127.0.0.2"))
    api.put(endpoint_slice("t-1", [pod("q", "127.0.0.3")], service="t"))

    def services(old: float) -> dict[str, Any]:
        entry = kubernetes(api)["kubernetes"][0]
        return {"kubernetes": [entry | {"weight": old}, entry | {"service": "t", "weight": 2.0}]}

    async with found(tmp_path, discovery=services(1.0)) as seen:
        await seen.ids("p", "q")
        assert {name: each.weight for name, each in seen.replicas.items()} == {"p": 1.0, "q": 2.0}
        kept = seen.replicas["p"]
        seen.write({"discovery": services(0.0)})
        await seen.router.reload.reload("a test")
        await seen.until(lambda: kept.weight == 0.0, "the old service gets no new sessions")
        assert seen.replicas["p"] is kept, "its sessions stay"


POOLS = [{"name": "large"}, {"name": "small", "models": ["*haiku*"]}]


async def test_two_services_are_two_pools_and_a_reload_moves_one(api: KubernetesApi, tmp_path: Path) -> None:
    put(api, pod("p", "127.0.0.2"))
    api.put(endpoint_slice("t-1", [pod("q", "127.0.0.3")], service="t"))

    def services(pool: str) -> dict[str, Any]:
        entry = kubernetes(api)["kubernetes"][0]
        return {"kubernetes": [entry, entry | {"service": "t", "pool": pool}]}

    async with found(tmp_path, discovery=services("small"), pools=POOLS) as seen:
        await seen.ids("p", "q")
        assert {name: each.pool for name, each in seen.replicas.items()} == {"p": "", "q": "small"}
        told = (await seen.told("/replicas")).json()["replicas"]
        assert {each["id"]: each["pool"] for each in told} == {"p": "large", "q": "small"}
        kept, moved = seen.replicas["p"], seen.replicas["q"]
        seen.write({"discovery": services("large"), "pools": POOLS})
        await seen.router.reload.reload("a test")
        await seen.until(lambda: "q" in seen.replicas and seen.replicas["q"] is not moved, "it is another one")
        assert seen.replicas["q"].pool == ""
        assert seen.replicas["p"] is kept


async def test_a_file_that_names_no_pool_that_there_is_counts_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("[{id: f, url: 'http://127.0.0.3:1', pool: small}]")
    async with found(tmp_path, discovery={"file": str(file)}, pools=POOLS) as seen:
        await seen.ids("f")
        kept = seen.replicas["f"]
        file.write_text("[{id: f, url: 'http://127.0.0.3:1', pool: smal}]")
        wrong = "replicas.0.pool: 'smal' is no pool: did you mean 'small'?"
        await seen.until(lambda: wrong in (seen.router.discovery.frozen or ""), "the file is refused")
        assert seen.replicas["f"] is kept
        seen.write({"discovery": {"file": str(file)}, "pools": [POOLS[0], POOLS[1] | {"name": "smal"}]})
        await seen.router.reload.reload("a test")
        await seen.until(lambda: [each.pool for each in seen.replicas.values()] == ["smal"], "it is read anew")


async def test_a_url_that_two_sources_tell_is_told_once(
    api: KubernetesApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(api, pod("p", "127.0.0.9"), pod("q", "127.0.0.2"))
    replicas = [{"id": "s", "url": "http://127.0.0.9:30000"}]
    async with found(tmp_path, replicas=replicas, discovery=kubernetes(api)) as seen:
        await seen.ids("s", "q")
        put(api, pod("p", "127.0.0.9"), pod("q", "127.0.0.2"), pod("r", "127.0.0.3"))
        await seen.ids("s", "q", "r")
    assert len([record for record in caplog.records if "it is one replica" in record.message]) == 1


async def test_a_pod_that_is_not_ready_finishes_its_sessions_and_comes_back(api: KubernetesApi, tmp_path: Path) -> None:
    put(api, pod("p", "127.0.0.2"), pod("q", "127.0.0.3"))
    async with found(tmp_path, discovery=kubernetes(api)) as seen:
        await seen.ids("p", "q")
        before = seen.replicas["p"]
        put(api, pod("p", "127.0.0.2", ready=False), pod("q", "127.0.0.3"))
        await seen.state("p", State.FINISHING)
        (told,) = [each for each in (await seen.told("/replicas")).json()["replicas"] if each["id"] == "p"]
        assert told["why"].startswith("not ready, says Kubernetes (kubernetes:")
        assert (told["drain"]["homes"], told["drain"]["by"]) == ("finish", told["why"])
        put(api, pod("p", "127.0.0.2"), pod("q", "127.0.0.3"))
        await seen.state("p", State.READY)
        assert seen.replicas["p"] is before
        put(api, pod("p", "127.0.0.2", ready=False, serving=True, terminating=True), pod("q", "127.0.0.3"))
        await seen.state("p", State.FINISHING)
        assert "terminates" in seen.router.health.why(before)
        put(api, pod("q", "127.0.0.3"))
        await seen.ids("q")


async def test_a_pod_that_never_was_ready_does_not_join(api: KubernetesApi, tmp_path: Path) -> None:
    """One that starts would be probed in vain; one that terminates and serves has sessions."""
    starting, ending = pod("p", "127.0.0.2", ready=False), pod("e", "127.0.0.4", serving=True, terminating=True)
    put(api, starting, pod("q", "127.0.0.3"), ending)
    async with found(tmp_path, discovery=kubernetes(api)) as seen:
        await seen.ids("q", "e")
        assert seen.replicas["e"].state is State.FINISHING
        put(api, pod("p", "127.0.0.2"), pod("q", "127.0.0.3"))
        await seen.ids("p", "q")


async def test_an_operators_drain_stays_an_operators(api: KubernetesApi, tmp_path: Path) -> None:
    put(api, pod("p", "127.0.0.2"), pod("q", "127.0.0.3"))
    async with found(tmp_path, discovery=kubernetes(api)) as seen:
        await seen.ids("p", "q")
        orders = seen.router.orders
        orders.drain("p", Homes.MOVE, "ann")
        assert seen.replicas["p"].state is State.DRAINING
        put(api, pod("p", "127.0.0.2", ready=False), pod("q", "127.0.0.3"))
        await seen.until(lambda: seen.router.fleet.why_drained(seen.replicas["p"]), "the source drains it, too")
        assert seen.replicas["p"].state is State.DRAINING, "the operator's goes before"
        put(api, pod("p", "127.0.0.2"), pod("q", "127.0.0.3", ready=False))
        await seen.state("q", State.FINISHING)
        assert seen.replicas["p"].state is State.DRAINING, "it is not taken back by being ready"
        orders.drain("q", Homes.MOVE, "ann")
        assert seen.replicas["q"].state is State.DRAINING
        orders.undrain("q", "ann")
        assert seen.replicas["q"].state is State.FINISHING, "what the source says of it is not taken back"
        orders.undrain("p", "ann")
        assert seen.replicas["p"].state is State.READY


async def test_an_operators_drain_is_one_of_the_name(api: KubernetesApi, tmp_path: Path) -> None:
    put(api, pod("p-0", "127.0.0.2", "u1"), pod("q", "127.0.0.3"))
    async with found(tmp_path, discovery=kubernetes(api)) as seen:
        await seen.ids("p-0", "q")
        before = seen.replicas["p-0"]
        seen.router.orders.drain("p-0", Homes.MOVE, "ann")
        put(api, pod("p-0", "127.0.0.2", "u2"), pod("q", "127.0.0.3"))
        await seen.until(lambda: seen.replicas.get("p-0") not in (None, before), "another pod")
        assert seen.replicas["p-0"].state is State.DRAINING
        seen.router.orders.undrain("p-0", "ann")
        assert seen.replicas["p-0"].state is State.READY


async def test_a_new_pod_under_an_old_name_and_address_is_another_replica(api: KubernetesApi, tmp_path: Path) -> None:
    put(api, pod("p-0", "127.0.0.2", "u1"))
    async with found(tmp_path, discovery=kubernetes(api)) as seen:
        await seen.ids("p-0")
        before = seen.replicas["p-0"]
        put(api, pod("p-0", "127.0.0.2", "u2"))
        await seen.until(lambda: seen.replicas.get("p-0") not in (None, before), "another object")
        assert not before.present
        moved = seen.replicas["p-0"]
        put(api, pod("p-0", "127.0.0.3", "u2"))
        await seen.until(lambda: seen.replicas.get("p-0") not in (None, moved), "another address")


async def test_a_thousand_replicas_join_and_leave_while_all_else_goes_on(api: KubernetesApi, tmp_path: Path) -> None:
    pods = [pod(f"p{number}", f"127.1.{number // 250}.{number % 250 + 1}") for number in range(1000)]
    sizes: set[int] = set()
    probes = {"interval_s": 600, "deep_interval_s": 600, "fail_after": 100_000}

    async def watch() -> None:
        while True:
            sizes.add(len(seen.replicas))
            await asyncio.sleep(0)

    settings = {"health": probes, "reports": {"interval_s": 600}, "discovery": kubernetes(api)}
    async with found(tmp_path, **settings) as seen:
        watching = asyncio.create_task(watch())
        try:
            api.put(*(endpoint_slice(f"s-{at}", pods[at * 100 : at * 100 + 100]) for at in range(10)))
            await seen.until(lambda: len(seen.replicas) == 1000, "all have joined")
            joined = set(sizes)
            sizes.clear()
            api.put(*(endpoint_slice(f"s-{at}", pods[at * 100 : at * 100 + 1]) for at in range(10)))
            await seen.until(lambda: len(seen.replicas) == 10, "most have left")
        finally:
            watching.cancel()
    # On any machine some do not fit into the time that is taken at once.
    assert len(joined - {0, 1000}) >= 5
    assert len(sizes - {10, 1000}) >= 5


# What is seen


async def test_a_source_that_is_lost_is_seen_and_changes_nothing(api: KubernetesApi, tmp_path: Path) -> None:
    put(api, pod("p", "127.0.0.2"))
    async with found(tmp_path, discovery=kubernetes(api)) as seen:
        await seen.ids("p")
        (source,) = (await seen.told("/overview")).json()["discovery"]
        name = f"kubernetes:{api.url}/default/sglang"
        assert (source["source"], source["up"], source["why"], source["replicas"]) == (name, True, None, 1)
        await eventually(lambda: seen.router.not_ready() is None)
        await api.stop()
        await eventually(lambda: not seen.router.discovery.feeds[0].up)
        overview = (await seen.told("/overview")).json()
        assert "cannot be heard" in overview["discovery"][0]["why"]
        assert overview["verdict"]["level"] == "warn"
        assert "cannot be heard" in overview["verdict"]["text"]
        assert seen.router.not_ready() is None
        assert list(seen.replicas) == ["p"]
        samples = parse((await seen.told("/metrics")).text)
        assert total(samples, "warmroute_discovery_up", source=name) == 0
        assert total(samples, "warmroute_discovery_replicas", source=name) == 1
        assert total(samples, "warmroute_discovery_faults_total", source=name) >= 1
        assert total(samples, "warmroute_discovery_heard_timestamp_seconds", source=name) > 0
        await api.start()
        await eventually(lambda: seen.router.discovery.feeds[0].up)
        assert (await seen.told("/overview")).json()["verdict"]["level"] == "ok"


async def test_it_starts_without_any_replica_and_says_what_is_missing(api: KubernetesApi, tmp_path: Path) -> None:
    await api.stop()
    async with found(tmp_path, discovery=kubernetes(api)) as seen:
        assert seen.router.not_ready() == "not all sources of replicas have answered yet"
        await eventually(lambda: seen.router.discovery.feeds[0].faults)
        verdict = (await seen.told("/overview")).json()["verdict"]
        assert verdict["level"] == "bad"
        assert "cannot be heard" in verdict["text"]
        seen.router.started_at -= 60
        assert seen.router.not_ready() == "no replica is found"
        put(api, pod("p", "127.0.0.2"))
        await api.start()
        await seen.ids("p")
        await eventually(lambda: seen.router.not_ready() is None)


async def test_few_are_named_of_many_that_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    urls = [f"http://127.0.0.{number}:1" for number in range(1, 21)]
    listed = tmp_path / "r.yaml"
    listed.write_text(yaml.safe_dump([{"id": f"r{at}", "url": url} for at, url in enumerate(urls)]))
    async with found(tmp_path, replicas=urls, discovery={"file": str(listed)}) as seen:
        await seen.ids(*urls)
        await eventually(lambda: seen.router.discovery.feeds[0].heard)
        await eventually(lambda: "12 more are left out likewise" in caplog.text)
    assert len([each for each in logged(caplog, "warmroute.fleet") if "it is one replica" in each.message]) == 8


# Reloading


async def test_a_source_that_is_added_or_taken_out(api: KubernetesApi, tmp_path: Path) -> None:
    put(api, pod("p", "127.0.0.2"))
    (tmp_path / "r.yaml").write_text("[{id: f, url: 'http://127.0.0.3:1'}]")
    async with found(tmp_path, replicas=["http://127.0.0.9:1"]) as seen:
        await seen.ids("http://127.0.0.9:1")
        seen.write({"replicas": ["http://127.0.0.9:1"], "discovery": {"file": str(tmp_path / "r.yaml")}})
        await seen.router.reload.reload("a test")
        await seen.ids("http://127.0.0.9:1", "f")
        kept = seen.replicas["f"]
        seen.write({"discovery": {"file": str(tmp_path / "r.yaml"), **kubernetes(api)}})
        await seen.router.reload.reload("a test")
        await seen.ids("f", "p")
        assert seen.replicas["f"] is kept
        seen.write({"discovery": kubernetes(api)})
        await seen.router.reload.reload("a test")
        await seen.ids("p")
        assert len(seen.router.discovery.feeds) == 1
        seen.write({"replicas": ["http://127.0.0.9:1"]})
        await seen.router.reload.reload("a test")
        await seen.ids("http://127.0.0.9:1")


async def test_what_a_source_told_stays_until_the_one_in_its_place_has_answered(
    api: KubernetesApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    put(api, pod("p", "127.0.0.2"), pod("q", "127.0.0.3"))
    async with found(tmp_path, discovery=kubernetes(api)) as seen:
        await seen.ids("p", "q")
        kept = seen.replicas["p"]
        seen.write({"discovery": kubernetes(api, service="sglang-new")})
        await seen.router.reload.reload("a test")
        await eventually(lambda: "it tells no replica" in caplog.text)
        assert set(seen.replicas) == {"p", "q"}, "a service that is not there yet, or misspelt"
        api.put(endpoint_slice("n-1", [pod("p", "127.0.0.2"), pod("r", "127.0.0.4")], service="sglang-new"))
        await seen.ids("p", "r")
        assert seen.replicas["p"] is kept, "the same pod, told by another source"
        assert "is not configured any more, and what it told goes" in caplog.text


async def test_a_source_told_by_other_settings_is_begun_anew_and_its_replicas_stay(
    api: KubernetesApi, tmp_path: Path
) -> None:
    put(api, pod("p", "127.0.0.2"))
    async with found(tmp_path, discovery=kubernetes(api)) as seen:
        await seen.ids("p")
        await eventually(lambda: api.watches)
        kept, asked = seen.replicas["p"], len(api.asked)
        (tmp_path / "token").write_text("token-2")
        api.tokens = {"token-2"}
        seen.write({"discovery": kubernetes(api, token_file=str(tmp_path / "token"))})
        await seen.router.reload.reload("a test")
        await eventually(lambda: [each.token for each in api.asked[asked:]] == ["token-2"] * 2)
        assert seen.replicas["p"] is kept
        assert await seen.router.reload.reload("a test") == ([], [])
