"""What is seen of the shared state: metrics, `/overview` and those who show it, and who ordered what."""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from rich.console import Console

from policies.sharing import Note
from policies.types import Request
from router.admin import Admin
from router.app import Router
from router.commands.policy import policy_text
from router.commands.replicas import replicas_table
from router.metrics.exposition import Exposition
from router.metrics.table import FAMILIES
from router.settings import HealthSettings, ReplicaSettings, Settings
from router.sharing import CLAIMS, DIRECTIONS, OPS
from router.store import MemoryStore, Remembered, Store, StoreError
from router.top.feed import Seen
from router.top.screen import Screen
from tests.control.test_metrics import Samples, parse, total
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S, eventually
from tests.sharing.sites import sites
from tests.sharing.test_sharing import Faulty, key

REPLICAS = ("r1", "r2")
SETTINGS = Settings(
    replicas=[ReplicaSettings(id=name, url=f"http://127.0.0.1:9/{name}") for name in REPLICAS],
    health=HealthSettings(fail_after=1000),
)
"""Of replicas that are not there, which takes probes longer to find out than any test."""
OURS = {family.name for family in FAMILIES if family.name.startswith("warmroute_store_")}


class Shown:
    """A router that serves no port, and what it shows."""

    def __init__(self, router: Router, admin: httpx.AsyncClient) -> None:
        assert router.sharing is not None
        self.router = router
        self.sharing = router.sharing
        self.admin = admin

    async def told(self, path: str = "/overview") -> dict[str, Any]:
        return dict((await self.admin.get(path)).raise_for_status().json())

    async def samples(self) -> Samples:
        return parse((await self.admin.get("/metrics")).raise_for_status().text)


@asynccontextmanager
async def shown(*stores: Store) -> AsyncIterator[list[Shown]]:
    """A router for each store."""
    async with AsyncExitStack() as stack:
        made = []
        for store in stores:
            router = Router(SETTINGS, store=store)
            stack.callback(router.access_log.close)
            stack.push_async_callback(router.fleet.close)
            for given in SETTINGS.replicas:
                router.fleet.join(given)
            assert router.sharing is not None
            await router.sharing.start()
            stack.push_async_callback(router.sharing.stop)
            transport = httpx.ASGITransport(Admin(router).app())
            client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
            await eventually(lambda router=router: router.not_ready() is None, "its probes are back")
            made.append(Shown(router, await stack.enter_async_context(client)))
        yield made


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(time.monotonic)


def drawn(overview: Mapping[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(Screen(Seen(dict(overview)), "name"), end="")
    return out.getvalue()


# Counted


async def test_what_comes_of_claims_and_notes_is_counted(store: MemoryStore) -> None:
    faulty = Faulty(store)
    async with sites(store, faulty, wait_s=0.05) as (one, other):
        for number in range(5):
            await one.turn(key(number))
        await eventually(lambda: other.sharing.notes["heard"] >= 5, "all is heard")
        assert 5 <= other.sharing.notes["heard"] <= one.sharing.notes["told"] <= 10, "begin and end may be one"
        assert one.sharing.claims == dict.fromkeys(CLAIMS, 0) | {"claimed": 5}
        assert sum(one.sharing.waits.counts) == 5
        for number in range(100, 103):
            await store.claim(Note(key(number), 7, b"", False, 1.0, "r1", "", 20_000, 20_000))
            await other.turn(key(number))
        assert other.sharing.claims["adopted"] == 3
        faulty.hangs = True
        await other.turn(key(200))
        assert other.sharing.claims["late"] == 1
        assert other.sharing.waits.total >= 0.05
        faulty.hangs, faulty.refuses = False, True
        await eventually(lambda: not other.sharing.up, "it is seen to be away")
        faults = sum(other.sharing.faults.values())
        assert faults > 0
        before = dict(other.sharing.claims)
        await other.turn(key(201))
        assert other.sharing.claims == before | {"not_asked": before["not_asked"] + 1}
        await eventually(lambda: other.sharing.faults["reach"] > 0, "it is tried again")
        assert set(other.sharing.faults) == set(OPS)
        assert other.sharing.untold > 0


async def test_a_claim_that_is_refused_is_a_fault(store: MemoryStore) -> None:
    class Unclaimable(Faulty):
        async def claim(self, note: Note) -> Sequence[Remembered]:
            raise StoreError("refused")

    async with sites(Unclaimable(store)) as (one,):
        await one.turn(key(1))
        assert one.sharing.claims == dict.fromkeys(CLAIMS, 0) | {"failed": 1}
        assert one.sharing.faults == dict.fromkeys(OPS, 0) | {"claim": 1}


async def test_all_of_it_is_exposed_from_the_start(store: MemoryStore) -> None:
    """Closed sets of labels as zeros, so that a first fault is an increase."""
    async with shown(store) as (one,):
        seen = await one.samples()
    assert {name for name, _ in seen if "_claim_seconds" not in name} >= OURS - {"warmroute_store_claim_seconds"}
    for name, label, values in (
        ("claims", "outcome", CLAIMS),
        ("notes", "direction", DIRECTIONS),
        ("faults", "op", OPS),
    ):
        told = {dict(labels)[label] for found, labels in seen if found == f"warmroute_store_{name}_total"}
        assert told == set(values)
    assert total(seen, "warmroute_store_up") == 1
    assert total(seen, "warmroute_store_claim_seconds_count") == 0


async def test_without_a_store_there_is_nothing_to_see() -> None:
    router = Router(Settings())
    seen = parse(exposed(router))
    assert not [name for name, _ in seen if name.startswith("warmroute_store_")]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Admin(router).app()), base_url="http://x") as admin:
        told = (await admin.get("/overview")).json()
        assert told["store"] is None
        assert "<dt>Store</dt>" not in (await admin.get("/ui")).text
    assert "store" not in drawn(told)
    router.access_log.close()


def exposed(router: Router) -> str:
    return b"".join(Exposition(router.metrics).slices()).decode()


# Shown


async def test_routers_that_hear_each_other_are_seen(store: MemoryStore) -> None:
    async with shown(store, store) as (one, other):
        await eventually(lambda: len(one.sharing.others) == len(other.sharing.others) == 1, "both are heard")
        assert total(await one.samples(), "warmroute_store_routers") == 1
        told = await one.told()
        assert [each["name"] for each in told["store"]["routers"]] == [other.sharing.name]
        assert 0 <= told["store"]["routers"][0]["heard_s_ago"] <= 3.5
        assert (told["store"]["kind"], told["store"]["up"], told["store"]["why"]) == ("memory", True, None)
        assert "store up, 1 other router heard, 0 of 0 new sessions known elsewhere" in drawn(told)
        page = (await one.admin.get("/ui")).text
        assert "<dt>Store</dt><dd><b>up</b>" in page
        assert "1 other router," in page


async def test_a_store_that_is_away_is_seen_with_the_reason(store: MemoryStore) -> None:
    faulty = Faulty(store)
    faulty.refuses = True
    async with shown(faulty) as (one,):
        assert total(await one.samples(), "warmroute_store_up") == 0
        assert total(await one.samples(), "warmroute_store_faults_total", op="reach") >= 1
        told = await one.told()
        assert (told["store"]["up"], told["store"]["why"]) == (False, "refused")
        assert told["verdict"]["level"] == "warn"
        assert told["verdict"]["text"].endswith("the store is away, and nothing is shared with other routers")
        assert "store away: refused; 0 homes untold" in drawn(told)
        assert "<dt>Store</dt><dd><b>away</b>" in (await one.admin.get("/ui")).text
        faulty.refuses = False
        await until(one.told, lambda told: told["verdict"]["level"] == "ok", LIMIT_S, "it is back")


async def test_what_a_store_says_is_shown_as_text(store: MemoryStore) -> None:
    class Hostile(Faulty):
        async def epoch(self, offered: str) -> str:
            raise StoreError("<script>alert(1)</script>\x1b[2J")

    async with shown(Hostile(store)) as (one,):
        assert "<script>alert(1)" not in (await one.admin.get("/ui")).text
        assert "\x1b" not in drawn(await one.told())


async def test_what_others_have_under_way_is_seen_on_replicas(store: MemoryStore) -> None:
    async with shown(store, store) as (one, other):
        router = other.router
        leases = [router.balancer.acquire(Request(key(n), prompt_tokens=9_000), router.clock()) for n in range(3)]
        replicas = one.router.balancer.replicas
        await eventually(lambda: sum(replicas[name].others_running for name in REPLICAS) == 3, "they are heard of")
        told = (await one.told("/replicas"))["replicas"]
        assert sum(each["others_in_flight"] for each in told) == 3
        assert sum(each["in_flight"] for each in told) == 0
        counts = {each["id"]: str(each["others_in_flight"]) for each in told}
        rows = [line.split() for line in replicas_table(told).splitlines()[1:]]
        assert {row[0]: row[3] for row in rows} == counts
        assert len({lease.replica.id for lease in leases}) == len([count for count in counts.values() if count != "0"])


# Who ordered


async def test_who_switched_the_policy_is_seen_at_every_router(store: MemoryStore) -> None:
    async with shown(store, store) as (one, other):
        assert (await other.told("/policy"))["asked_by"] is None, "it is the settings'"
        (await one.admin.put("/policy", json={"name": "random"})).raise_for_status()
        (await one.admin.put("/policy/shadow", json={"name": "sticky"})).raise_for_status()
        await eventually(lambda: other.router.balancer.shadow is not None, "both are carried out")
        here, there = await one.told("/policy"), await other.told("/policy")
        assert here["policy"] == there["policy"] == "random"
        assert there["asked_by"] == f"{here['asked_by']}, at another router"
        assert there["shadow"]["asked_by"] == f"{here['shadow']['asked_by']}, at another router"
        assert f"policy random, asked by {there['asked_by']}\n" in policy_text(there)
        overview = await other.told()
        assert overview["policy"]["asked_by"] == there["asked_by"]
        assert overview["shadow"]["asked_by"] == there["shadow"]["asked_by"]
        page = (await other.admin.get("/ui")).text
        assert page.count(f"<small>asked by {there['asked_by']}</small>") == 2
