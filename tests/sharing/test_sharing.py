"""Several routers act as one: homes, loads, and what becomes of both when the store does not do its work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from policies import cost
from policies.sharing import Note
from policies.types import OUTCOMES, Cause, Phase, Request
from router.others import SILENT_S
from router.store import Heard, MemoryStore, Message, Remembered, StoreError
from tests.fakes.logged import logged
from tests.fakes.wire import LIMIT_S, eventually
from tests.sharing.sites import REPLICAS, Held, Site, sites


class Faulty:
    """A store that refuses, or does not answer, while it is told to."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.refuses = False
        self.hangs = False
        self.read_only = False
        self.told = 0
        """Times that it was told something, or was to be."""

    async def _pass(self) -> None:
        if self.refuses:
            raise StoreError("refused")
        if self.hangs:
            await asyncio.Event().wait()

    async def claim(self, note: Note) -> Sequence[Remembered]:
        await self._pass()
        return await self.store.claim(note)

    async def tell(self, message: Message) -> None:
        self.told += 1
        await self._pass()
        if self.read_only:
            raise StoreError("read only")
        await self.store.tell(message)

    async def restore(self, notes: Sequence[Note]) -> None:
        await self._pass()
        await self.store.restore(notes)

    async def hear(self, cursor: str, wait_s: float) -> Heard:
        await self._pass()
        return await self.store.hear(cursor, wait_s)

    async def controls(self) -> Mapping[str, bytes]:
        await self._pass()
        return await self.store.controls()

    async def epoch(self, offered: str) -> str:
        await self._pass()
        return await self.store.epoch(offered)

    async def close(self) -> None:
        pass


def key(number: int) -> bytes:
    return b"%016d" % number


def home(site: Site, session: bytes) -> str | None:
    """Where a site believes the session's KV to be."""
    branches = site.balancer.directory.branches(session, site.clock())
    homes = [home for branch in branches for home in branch.homes if home.resident]
    return homes[0].replica.id if homes else None


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(time.monotonic)


async def test_the_next_turn_reaches_its_home_through_any_router(store: MemoryStore) -> None:
    async with sites(store, store, store) as routers:
        placed = {key(n): await routers[0].turn(key(n)) for n in range(20)}
        assert set(placed.values()) == set(REPLICAS)
        for number, router in enumerate(routers[1:]):
            for session, replica in placed.items():
                assert await router.turn(session, 21_000 + number) == replica


async def test_a_router_that_starts_later_asks_for_what_was_told_before(store: MemoryStore) -> None:
    async with sites(store) as (old,):
        placed = {key(n): await old.turn(key(n)) for n in range(20)}
    async with sites(store) as (new,):
        assert {session: await new.turn(session, 21_000) for session in placed} == placed
        assert new.sharing.claims["adopted"] == 20


async def test_what_is_asked_for_is_no_load_before_it_is_placed() -> None:
    """Else many sessions that come to a router at once, as after a restart, flee from each other's first guesses."""
    store = Held(time.monotonic)
    async with sites(store) as (one,):
        asking = asyncio.create_task(one.begin(key(1), 500_000))
        await eventually(lambda: store.asked, "the store is asked")
        [proposed] = store.asked
        await store.tell(Message("router-9", [replace(proposed, key=key(2), tokens=20_000, counted=20_000)]))
        store.held = False
        assert await one.turn(key(2), 20_500) == proposed.replica
        store.answers.set()
        one.end(await asking)


async def test_a_place_that_was_proposed_and_not_taken_is_no_home(store: MemoryStore) -> None:
    async with sites(store, store) as (one, other):
        asked = asyncio.Event()
        claim = one.sharing.ask(Request(key(1), fingerprint=7, prompt_tokens=20_000), one.clock(), asked.set)
        assert claim is not None
        await asked.wait()
        claim.placed(None)  # its client has left
        await eventually(lambda: one.sharing.notes["told"], "that is told")
        await other.turn(key(1))
        assert other.sharing.claims["claimed"] == 1


@pytest.mark.parametrize("wait_s", [LIMIT_S, 0.01], ids=["left", "late"])
async def test_a_home_is_not_taken_back_by_who_asked_for_it_and_was_not_answered(wait_s: float) -> None:
    """Its request was given up, or refused, before it could know that another router's turn is there."""
    store = Held(time.monotonic)
    async with sites(store, wait_s=wait_s) as (one,):
        asked = asyncio.Event()
        claim = one.sharing.ask(Request(key(1), fingerprint=7, prompt_tokens=20_000), one.clock(), asked.set)
        assert claim is not None
        await eventually(lambda: store.asked, "the store is asked")
        [note] = store.asked
        await store.tell(Message("router-9", [replace(note, tokens=50_000, counted=50_000)]))
        if wait_s < LIMIT_S:
            await asked.wait()
        claim.placed(None)
        store.held = False
        store.answers.set()
        lease = await one.begin(key(2))
        await eventually(lambda: one.sharing.notes["told"], "what there is to tell is told")
        one.end(lease)
        async with sites(store) as (other,):
            await other.turn(key(1), 51_000)
            assert other.sharing.claims["adopted"] == 1


async def test_a_place_that_is_given_up_before_the_answer_is_no_home() -> None:
    store = Held(time.monotonic)
    async with sites(store) as (one,):
        asked = asyncio.Event()
        claim = one.sharing.ask(Request(key(1), fingerprint=7, prompt_tokens=20_000), one.clock(), asked.set)
        assert claim is not None
        await eventually(lambda: store.asked, "the store is asked")
        claim.placed(None)
        store.held = False
        store.answers.set()
        await eventually(lambda: one.sharing.notes["told"], "that is told")
        assert not asked.is_set(), "nobody waits for it any more"
        async with sites(store) as (other,):
            await other.turn(key(1))
            assert other.sharing.claims["claimed"] == 1


async def test_a_home_stays_that_another_router_made_of_a_place_that_was_proposed(store: MemoryStore) -> None:
    """As when the first request waits for room until its client has left, and the second does not."""
    async with sites(store, store) as (one, other):
        asked = asyncio.Event()
        claim = one.sharing.ask(Request(key(1), fingerprint=7, prompt_tokens=20_000), one.clock(), asked.set)
        assert claim is not None
        await asked.wait()
        assert await other.turn(key(1)) == claim.note.replica
        await eventually(lambda: home(one, key(1)) == claim.note.replica, "it is heard of")
        claim.placed(None)
        await one.turn(key(2))
        await eventually(lambda: home(other, key(2)) is not None, "what one has to tell is heard of")
        assert home(other, key(1)) == claim.note.replica
        async with sites(store) as (new,):
            assert await new.turn(key(1), 21_000) == claim.note.replica
            assert new.sharing.claims["adopted"] == 1


@pytest.mark.parametrize("policy", ["session_affinity", "random", "round_robin"])
async def test_first_requests_at_once_end_on_one_home(store: MemoryStore, policy: str) -> None:
    """Whoever claims first keeps it: the others hear of the home before they place. Policies without homes aside."""
    async with sites(store, store, store, policy=policy) as routers:
        for number in range(30):
            leases = await asyncio.gather(*(router.begin(key(number)) for router in routers))
            if policy == "session_affinity":
                assert len({lease.replica.id for lease in leases}) == 1
            for router, lease in zip(routers, leases, strict=True):
                router.end(lease)
        asked = [router.sharing.claims for router in routers]
        assert sum(claims["claimed"] for claims in asked) == 30
        assert sum(claims["adopted"] for claims in asked) == 60


async def test_a_session_that_moved_is_known_to_have_moved(store: MemoryStore) -> None:
    async with sites(store, store) as (one, other):
        first = await one.turn(key(1))
        await eventually(lambda: home(other, key(1)) == first, "it is heard of")
        one.balancer.leave(first, one.clock())
        second = await one.turn(key(1))
        assert second != first
        await eventually(lambda: home(other, key(1)) == second, "the move is heard of")


async def test_a_turn_that_computed_nothing_leaves_no_home(store: MemoryStore) -> None:
    """As when its client left: neither in the store nor at the other routers."""
    async with sites(store, store) as (one, other):
        lease = await one.begin(key(1))
        await eventually(lambda: home(other, key(1)) == lease.replica.id, "it is heard of")
        lease.finish(OUTCOMES[Cause.CLIENT, Phase.HEADERS], None, one.clock())
        await eventually(lambda: home(other, key(1)) is None, "so is its end")
    async with sites(store) as (new,):
        await new.turn(key(1))
        assert new.sharing.claims["claimed"] == 1


async def test_a_turn_that_computed_nothing_takes_no_home_that_another_router_made_meanwhile(
    store: MemoryStore,
) -> None:
    """As of a client that asked through both, and left the one that answered later."""
    async with sites(store, store) as (one, other):
        lease = await one.begin(key(1))
        await eventually(lambda: home(other, key(1)) == lease.replica.id, "it is heard of")
        heard = one.sharing.notes["heard"]
        assert await other.turn(key(1)) == lease.replica.id
        await eventually(lambda: one.sharing.notes["heard"] > heard, "so is the other's turn")
        lease.finish(OUTCOMES[Cause.CLIENT, Phase.HEADERS], None, one.clock())
        await one.turn(key(2))
        await eventually(lambda: home(other, key(2)) is not None, "what one has to tell is heard of")
        assert home(one, key(1)) == home(other, key(1)) == lease.replica.id
    async with sites(store) as (new,):
        await new.turn(key(1))
        assert new.sharing.claims["adopted"] == 1


async def test_one_routers_requests_count_at_the_others_until_they_end(store: MemoryStore) -> None:
    async with sites(store, store, policy="least_loaded") as (one, other):
        leases = [await one.begin(key(n)) for n in range(8)]
        counts = {lease.replica.id for lease in leases}
        assert counts == set(REPLICAS)
        replicas = other.balancer.replicas
        await eventually(lambda: all(replicas[r].others_running == 2 for r in REPLICAS), "two each")
        assert all(replicas[r].routers[1] == 40_000 for r in REPLICAS)
        waits = [cost.expected_wait(replicas[r], other.clock()) for r in REPLICAS]
        assert min(waits) > 0, "two prefills are before whatever comes next"
        for lease in leases:
            one.end(lease)
        await eventually(lambda: all(replicas[r].others_running == 0 for r in REPLICAS), "they have ended")


async def test_a_router_that_falls_silent_fades(store: MemoryStore) -> None:
    skipped_s = 0.0
    async with sites(store, store, clock=lambda: time.monotonic() + skipped_s) as (one, other):
        lease = await one.begin(key(1))
        replica = other.balancer.replicas[lease.replica.id]
        await eventually(lambda: replica.others_running == 1, "it is heard of")
        for task in one.sharing._tasks:  # as kill -9 would
            task.cancel()
        skipped_s = SILENT_S + 0.5
        await eventually(lambda: replica.others_running == 0 and len(other.sharing.others) == 0, "it fades")


async def test_a_router_that_stops_says_so(store: MemoryStore) -> None:
    async with sites(store) as (one,):
        async with sites(store) as (other,):
            lease = await other.begin(key(1))
            replica = one.balancer.replicas[lease.replica.id]
            await eventually(lambda: replica.others_running == 1, "it is heard of")
        await eventually(lambda: replica.others_running == 0 and len(one.sharing.others) == 0, "it has gone")


async def test_a_store_that_refuses_costs_no_request_and_hears_all_later(store: MemoryStore) -> None:
    faulty = Faulty(store)
    async with sites(faulty, store) as (one, other):
        faulty.refuses = True
        placed = {key(n): await one.turn(key(n)) for n in range(20)}
        assert not one.sharing.up
        faulty.refuses = False
        await eventually(lambda: one.sharing.up, "it is back")
        await eventually(lambda: all(home(other, s) == r for s, r in placed.items()), "what was placed is told")


async def test_a_store_that_may_be_read_only_is_away_and_said_to_be_once(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty(store)
    with caplog.at_level(logging.INFO, "warmroute.store"):
        async with sites(faulty) as (one,):
            faulty.read_only, before = True, faulty.told
            await eventually(lambda: faulty.told >= before + 4, "it has been tried again and again")
            assert (one.sharing.up, one.sharing.why) == (False, "read only")
            faulty.read_only = False
            await eventually(lambda: one.sharing.up, "it is back")
    said = [record.getMessage() for record in logged(caplog, "warmroute.store")]
    assert [text.partition(":")[0] for text in said] == [
        "the store is there",
        "the store does not do its work (tell)",
        "the store is there",
    ]


async def test_a_store_that_hangs_is_waited_for_a_few_times_only(store: MemoryStore) -> None:
    faulty = Faulty(store)
    async with sites(faulty, wait_s=0.01) as (one,):
        faulty.hangs = True
        for number in range(200):
            await one.turn(key(number))
        assert 1 <= one.sharing.claims["late"] < 100
        assert one.sharing.claims["not_asked"] + one.sharing.claims["late"] == 200


async def test_a_store_that_is_not_there_at_the_start_is_found_later(store: MemoryStore) -> None:
    faulty = Faulty(store)
    faulty.refuses = True
    async with sites(faulty) as (one,):
        assert not one.sharing.up
        assert one.sharing.why == "refused"
        await one.turn(key(1))
        faulty.refuses = False
        await eventually(lambda: one.sharing.up, "it is found")


async def test_a_store_that_forgot_gets_back_what_routers_know(store: MemoryStore) -> None:
    empty = MemoryStore(time.monotonic)
    faulty = Faulty(store)
    async with sites(faulty) as (one,):
        placed = {key(n): await one.turn(key(n), 2_000) for n in range(300)}
        faulty.store = empty
        await eventually(lambda: one.sharing.notes["restored"] >= 300, "all is given back")
        async with sites(empty) as (new,):
            assert {session: await new.turn(session, 2_100) for session in placed} == placed


async def test_a_store_that_forgets_while_it_gets_back_is_given_all_of_it_again(store: MemoryStore) -> None:
    class Slow(MemoryStore):
        """Takes back one message of notes, and no second."""

        took = False

        async def restore(self, notes: Sequence[Note]) -> None:
            if self.took:
                await over.wait()
            self.took = True
            await super().restore(notes)

    over = asyncio.Event()
    slow, empty = Slow(time.monotonic), MemoryStore(time.monotonic)
    faulty = Faulty(store)
    async with sites(faulty) as (one,):
        one.sharing.timeout_s = LIMIT_S
        placed = {key(n): await one.turn(key(n), 2_000) for n in range(300)}
        faulty.store = slow
        await eventually(lambda: slow.took, "some is given back")
        faulty.store = empty
        epoch = await empty.epoch("another")
        await eventually(lambda: one.sharing._epoch == epoch, "that it has forgotten once more is seen")
        over.set()
        await eventually(lambda: one.sharing._restoring is None or one.sharing._restoring.done(), "all is given back")
        async with sites(empty) as (new,):
            assert {session: await new.turn(session, 2_100) for session in placed} == placed
            assert new.sharing.claims["adopted"] == len(placed)


async def test_an_order_that_was_given_just_before_the_end_is_told(store: MemoryStore) -> None:
    async with sites(store) as (one,):
        one.sharing.order("drain:r1", b"{}")
    assert await store.controls() == {"drain:r1": b"{}"}


async def test_what_happened_in_a_gap_is_asked_for(store: MemoryStore) -> None:
    """A router that missed messages does not trust what it knew before."""
    async with sites(store, store) as (one, other):
        first = await one.turn(key(1))
        await eventually(lambda: home(other, key(1)) == first, "it is heard of")
        moved = Note(key(1), 7, b"", False, 1.0, next(r for r in REPLICAS if r != first), "", 30_000, 30_000)
        await store.tell(Message("router-9", [Note(key(1), 7, b"", False, 1.0, first, "", 0, 0)]))
        await store.restore([moved])  # stored, and passed on to nobody
        await eventually(lambda: home(other, key(1)) is None, "that it is not there any more is heard")
        other.sharing._gap_at = other.clock() + 1.0
        assert await other.turn(key(1), 31_000) == moved.replica
