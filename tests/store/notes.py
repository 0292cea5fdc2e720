"""Notes and settings for the tests of stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from policies.sharing import Note
from router.settings import StoreSettings
from router.store import Heard, Message, Store, StoreError
from router.store.redis import RedisStore

HANGS_S = 60.0
"""Nothing here takes so long unless it hangs."""

NOTE = Note(b"\x01" * 16, 7, b"\x02" * 100, False, 1.25, "http://10.0.0.1:30000", "engine-1", 24_000, 20_000)


def note(key: int = 1, replica: str = NOTE.replica, **changed: Any) -> Note:
    return replace(NOTE, key=key.to_bytes(16, "big"), replica=replica, **changed)


def settings(url: str, **given: Any) -> StoreSettings:
    """Time enough for a slow machine, where nothing else is asked for."""
    return StoreSettings.model_validate({"url": url, "timeout_s": 10.0, **given})


@asynccontextmanager
async def opened(url: str, idle_s: float = 3600.0, **given: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(settings(url, **given), idle_s)
    try:
        yield store
    finally:
        await store.close()


async def hear_all(store: Store, cursor: str) -> Heard:
    """Everything that has been told by now."""
    messages, lost = [], False
    while True:
        heard = await store.hear(cursor, 0.0)
        lost |= heard.lost
        messages += heard.messages
        if not heard.messages and not heard.lost:
            return Heard(messages, cursor, lost)
        cursor = heard.cursor


async def fault(call: Awaitable[Any]) -> str:
    """What a call that must fail says."""
    try:
        async with asyncio.timeout(HANGS_S):
            answer = await call
    except StoreError as error:
        return str(error)
    raise AssertionError(f"no fault, but {answer!r}")


async def works_again(store: Store) -> None:
    """Wait until a store does its work."""
    async with asyncio.timeout(HANGS_S):
        while True:
            try:
                await store.epoch("again")
                cursor = (await store.hear("", 0.0)).cursor
                await works(store, cursor)
                return
            except StoreError:
                await asyncio.sleep(0.05)


async def works(store: Store, cursor: str) -> None:
    """A session is claimed, told, heard and known."""
    await store.tell(Message("works", [note(987_654)]))
    assert (await hear_all(store, cursor)).messages[-1].notes == [note(987_654)]
    assert [each.note for each in await store.claim(note(987_654, "other"))] == [note(987_654)]
    await store.tell(Message("works", [note(987_654, tokens=0)]))
