"""What holds for every store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from router.store import Heard, MemoryStore, Message, Store
from router.store.redis import RedisStore
from router.store.remote import RemoteStore
from router.store.served import Served
from router.store.store import MAX_MESSAGES, MAX_NOTES
from tests.store.notes import NOTE, hear_all, note, settings
from tests.store.servers import NEEDED, Server, binaries

Open = Callable[[], Awaitable[Store]]
"""Another client of one and the same store."""

IDLE_S = 3600.0
_PREFIXES = count()

KINDS = ("memory", "remote", *(binaries() or {"no-redis": ""}))


@pytest.fixture(scope="module")
def redis_server(kind: str) -> Iterator[Server | None]:
    if kind in ("memory", "remote"):
        yield None
        return
    assert kind in binaries(), NEEDED
    server = Server(binaries()[kind])
    server.start()
    yield server
    server.remove()


@pytest.fixture
def idle_s() -> float:
    return IDLE_S


@pytest.fixture
async def client(kind: str, redis_server: Server | None, idle_s: float, tmp_path: Path) -> AsyncIterator[Open]:
    memory = MemoryStore(time.monotonic, idle_s=idle_s)
    prefix = f"test{next(_PREFIXES)}"
    async with AsyncExitStack() as stack:
        served = Served(memory)
        path = str(tmp_path / "s")
        if kind == "remote":
            await served.start(path)
            stack.push_async_callback(served.stop)

        async def client() -> Store:
            store: Store = memory
            if kind == "remote":
                store = RemoteStore(path)
            elif redis_server is not None:
                store = RedisStore(settings(redis_server.url, prefix=prefix), idle_s)
            stack.push_async_callback(store.close)
            return store

        yield client


@pytest.fixture
async def store(client: Open) -> Store:
    return await client()


pytestmark = pytest.mark.parametrize("kind", KINDS, scope="module")


async def homes(store: Store, key: int = 1) -> list[str]:
    """Replicas where a session is known to have been, the latest first."""
    return [each.note.replica for each in await store.claim(note(key, "asks"))]


# Claims


async def test_who_claims_first_is_told_of_nothing_and_who_comes_later_of_the_first(client: Open) -> None:
    one, other = await client(), await client()
    assert list(await one.claim(note())) == []
    [known] = await other.claim(note(replica="elsewhere"))
    assert known.note == note()
    assert 0.0 <= known.age_s < 60.0
    assert await homes(one) == [NOTE.replica], "a claim that came late changes nothing"


async def test_of_many_that_claim_at_once_exactly_one_wins_and_the_others_adopt(client: Open) -> None:
    clients = [await client() for _ in range(4)]
    for key in range(50):
        claims = [each.claim(note(key, f"r{i}")) for i, each in enumerate(clients)]
        answers = await asyncio.gather(*claims)
        [winner] = [i for i, answer in enumerate(answers) if not answer]
        assert {each.note.replica for answer in answers for each in answer} == {f"r{winner}"}


async def test_all_homes_are_remembered_the_latest_first(store: Store) -> None:
    told = [note(replica="a"), note(replica="b"), note(fingerprint=8), note(fork=True), note(replica="a", tokens=5)]
    await store.tell(Message("one", told))
    assert [each.note for each in await store.claim(NOTE)] == []
    assert [each.note for each in await store.claim(note())] == [told[4], told[3], told[2], told[1]]


async def test_a_note_without_tokens_takes_that_home_out_and_no_other(store: Store) -> None:
    await store.tell(Message("one", [note(replica="a"), note(replica="b"), note(2)]))
    await store.tell(Message("one", [note(replica="b", tokens=0)]))
    assert await homes(store) == ["a"]
    await store.tell(Message("one", [note(replica="a", tokens=0), note(3, tokens=0)]))
    assert list(await store.claim(note(replica="new"))) == [], "nothing is known of it any more"
    assert await homes(store, 2) == [NOTE.replica]


async def test_homes_of_one_session_are_bounded_and_the_oldest_go(store: Store) -> None:
    replicas = [f"r{i}" for i in range(MAX_NOTES + 10)]
    for replica in replicas[: MAX_NOTES + 5]:
        await store.tell(Message("one", [note(replica=replica)]))
    await store.tell(Message("one", [note(replica=replica) for replica in replicas[MAX_NOTES + 5 :]]))
    assert await homes(store) == replicas[: -MAX_NOTES - 1 : -1]


async def test_what_is_restored_does_not_take_the_place_of_what_is_known(store: Store) -> None:
    await store.tell(Message("one", [note(tokens=9)]))
    cursor = (await store.hear("", 0.0)).cursor
    await store.restore([note(tokens=1), note(replica="b"), note(2)])
    known = {each.note.replica: each.note.tokens for each in await store.claim(note())}
    assert known == {NOTE.replica: 9, "b": NOTE.tokens}
    assert await homes(store, 2) == [NOTE.replica]
    await store.restore([])
    assert (await hear_all(store, cursor)).messages == [], "it is passed on to nobody"


async def test_what_is_restored_is_older_than_what_is_known(store: Store) -> None:
    """It was told before the store forgot, and what is known since."""
    await store.tell(Message("one", [note(replica="c"), note(replica="d")]))
    await store.restore([note(replica="a"), note(replica="b"), note(replica="c"), note(2, "a"), note(2, "b")])
    assert await homes(store) == ["d", "c", "b", "a"]
    assert await homes(store, 2) == ["b", "a"]


async def test_ages_grow_by_the_stores_clock(store: Store) -> None:
    await store.claim(note())
    [first] = await store.claim(note())
    await asyncio.sleep(0.02)  # the time itself is what is measured
    [later] = await store.claim(note())
    assert later.age_s >= first.age_s + 0.015
    await store.tell(Message("one", [note(tokens=5)]))
    [told] = await store.claim(note())
    assert told.age_s <= later.age_s + 60.0
    assert told.note.tokens == 5


class TestForgetting:
    @pytest.fixture
    def idle_s(self) -> float:
        return 0.6

    async def test_a_session_that_is_not_used_is_forgotten(self, store: Store) -> None:
        await store.claim(note())
        async with asyncio.timeout(60.0):
            while True:
                await asyncio.sleep(0.7)  # to ask is to use it
                if not await store.claim(note(replica="new")):
                    break
        assert await homes(store) == ["new"]

    async def test_to_ask_for_it_keeps_it(self, store: Store) -> None:
        async with asyncio.timeout(60.0):
            while not await self._kept(store):
                pass

    async def _kept(self, store: Store) -> bool:
        """Asked for longer than it would be kept without. False when this machine was too slow to ask in time."""
        await store.claim(note())
        last = begun = time.monotonic()
        while time.monotonic() < begun + 1.0:
            known = await store.claim(note())
            now = time.monotonic()
            if now > last + 0.4:
                return False
            assert known
            last = now
            await asyncio.sleep(0.05)
        return True


# Messages


async def test_everyone_hears_what_is_told_in_order_and_as_it_was_told(client: Open) -> None:
    one, other = await client(), await client()
    mine = (await one.hear("", 0.0)).cursor
    others = (await other.hear("", 0.0)).cursor
    whole = Message("one", [note(), note(2, tokens=0)], {"r1": (3, 4000, 1.5)}, True, {"x": b"1", "y": None}, True)
    told = [Message("one", loads={"r1": (1, 2, 0.5)}), whole, Message("one")]
    for message in told:
        await one.tell(message)
    for store, cursor in ((one, mine), (other, others)):
        heard = await hear_all(store, cursor)
        assert [_plain(message) for message in heard.messages] == [_plain(message) for message in told]
        assert not heard.lost
        assert (await hear_all(store, heard.cursor)).messages == []


def _plain(message: Message) -> Any:
    return message.sender, [*message.notes], {**message.loads}, message.whole, {**message.controls}, message.leaving


async def test_who_begins_to_hear_hears_what_comes_and_not_what_was(client: Open) -> None:
    one, other = await client(), await client()
    await one.tell(Message("before"))
    cursor = (await other.hear("", 0.0)).cursor
    await one.tell(Message("after"))
    assert [message.sender for message in (await hear_all(other, cursor)).messages] == ["after"]


async def test_who_waits_hears_as_soon_as_something_is_told(client: Open) -> None:
    one, other = await client(), await client()
    cursor = (await other.hear("", 0.0)).cursor
    waiting = asyncio.create_task(_hear(other, cursor))
    assert list(await one.claim(note())) == [], "who waits holds nobody up"
    await one.tell(Message("one"))
    assert [message.sender for message in (await waiting).messages] == ["one"]


async def _hear(store: Store, cursor: str) -> Heard:
    async with asyncio.timeout(60.0):
        while True:
            heard = await store.hear(cursor, 2.0)
            if heard.messages:
                return heard
            cursor = heard.cursor


async def test_who_waits_in_vain_is_told_so(store: Store) -> None:
    cursor = (await store.hear("", 0.0)).cursor
    heard = await store.hear(cursor, 0.05)
    assert (list(heard.messages), heard.lost) == ([], False)


async def test_hearing_that_was_given_up_loses_nothing(client: Open) -> None:
    one, other = await client(), await client()
    cursor = (await other.hear("", 0.0)).cursor
    for number in range(3):
        waiting = asyncio.create_task(other.hear(cursor, 5.0))
        await asyncio.sleep(0)
        if number:
            await one.claim(note())  # long enough for it to wait there
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await one.tell(Message(f"m{number}"))
    heard = await hear_all(other, cursor)
    assert [message.sender for message in heard.messages] == ["m0", "m1", "m2"]
    assert not heard.lost


async def test_another_client_goes_on_where_one_was(client: Open) -> None:
    one, before, after = await client(), await client(), await client()
    cursor = (await before.hear("", 0.0)).cursor
    await one.tell(Message("a"))
    cursor = (await hear_all(before, cursor)).cursor
    await before.close()
    await one.tell(Message("b"))
    await one.tell(Message("c"))
    heard = await hear_all(after, cursor)
    assert ([message.sender for message in heard.messages], heard.lost) == (["b", "c"], False)


async def test_who_was_away_for_too_long_is_told_that_messages_are_lost(client: Open) -> None:
    one, other = await client(), await client()
    await one.tell(Message("first"))
    cursor = (await other.hear("", 0.0)).cursor
    at_once = 500
    for _ in range(MAX_MESSAGES // at_once + 1):
        await asyncio.gather(*(one.tell(Message("one")) for _ in range(at_once)))
    heard = await other.hear(cursor, 0.0)
    assert heard.lost
    rest = await hear_all(other, heard.cursor)
    assert not rest.lost, "from there on nothing is missing"
    assert len(heard.messages) + len(rest.messages) <= MAX_MESSAGES + 1000


# Controls and the epoch


async def test_controls_are_kept_until_they_are_taken_back(client: Open) -> None:
    one, other = await client(), await client()
    assert dict(await one.controls()) == {}
    await one.tell(Message("one", controls={"drain:r1": b"\x00\xff", "policy": b"{}", "none": None}))
    assert dict(await other.controls()) == {"drain:r1": b"\x00\xff", "policy": b"{}"}
    await other.tell(Message("other", controls={"drain:r1": None, "policy": b"2"}))
    assert dict(await one.controls()) == {"policy": b"2"}


async def test_the_first_epoch_stays(client: Open) -> None:
    stores = [await client() for _ in range(3)]
    answers = set(await asyncio.gather(*(store.epoch(f"e{i}") for i, store in enumerate(stores))))
    assert len(answers) == 1
    assert await stores[0].epoch("later") in answers
    assert answers <= {"e0", "e1", "e2"}
