"""The store that workers share, where the other end is busy, gone, or makes no sense."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import uvloop

from policies.sharing import Note
from router.store import Heard, MemoryStore, Message, Remembered, StoreError
from router.store import remote as remote_module
from router.store.remote import RemoteStore
from router.store.served import MAX_HEARS, Served
from tests.fakes.wire import eventually
from tests.store.notes import HANGS_S, note


class Held(MemoryStore):
    """Answers claims when it is let go."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.go = asyncio.Event()
        self.fault = ""

    async def claim(self, note: Note) -> Sequence[Remembered]:
        await self.go.wait()
        if self.fault:
            raise StoreError(self.fault)
        return await super().claim(note)


async def test_what_waits_to_hear_holds_nothing_up_and_may_be_given_up(tmp_path: Path) -> None:
    served, store = Served(MemoryStore(time.monotonic)), RemoteStore(str(tmp_path / "s"))
    await served.start(str(tmp_path / "s"))
    cursor = (await store.hear("", 0.0)).cursor
    for _ in range(2 * MAX_HEARS):
        waiting = asyncio.create_task(store.hear(cursor, 3600.0))
        assert list(await store.claim(note(tokens=0))) == []
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    last = asyncio.create_task(store.hear(cursor, 3600.0))
    await store.tell(Message("one"))
    heard: Heard = await asyncio.wait_for(last, HANGS_S)
    assert [message.sender for message in heard.messages] == ["one"]
    await store.close()
    await served.stop()


async def test_a_fault_of_the_store_is_told_where_it_is_asked(tmp_path: Path) -> None:
    held = Held()
    served, store = Served(held), RemoteStore(str(tmp_path / "s"))
    await served.start(str(tmp_path / "s"))
    held.go.set()
    held.fault = "it is full: make room"
    with pytest.raises(StoreError, match="it is full: make room"):
        await store.claim(note())
    held.fault = ""
    assert list(await store.claim(note())) == [], "the connection is still good"
    await store.close()
    await served.stop()


async def test_a_server_that_goes_is_told_to_all_who_wait_and_found_again(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    held = Held()
    served, store = Served(held), RemoteStore(path)
    with pytest.raises(StoreError, match=r"/s: No such file or directory: is the supervisor alive\?"):
        await store.claim(note())
    await served.start(path)
    waiting = [asyncio.create_task(store.claim(note(key))) for key in range(5)]
    waiting.append(asyncio.create_task(store.hear("", 3600.0)))
    await eventually(lambda: len(store._waiting) == len(waiting), "all wait")
    await served.stop()
    for each in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), HANGS_S):
        assert isinstance(each, StoreError), each
    with pytest.raises(StoreError):
        await store.claim(note())
    again = Served(MemoryStore(time.monotonic))
    await again.start(path)
    assert list(await store.claim(note())) == []
    await store.close()
    await again.stop()


def test_a_connection_that_is_reset_is_told_as_a_fault_of_the_store_in_every_turn_of_the_loop(tmp_path: Path) -> None:
    """On the loop of production, which does not let a lost connection be written to."""

    async def ask_on() -> list[object]:
        loop, store = asyncio.get_running_loop(), RemoteStore(str(tmp_path / "s"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            listener.listen()
            listener.setblocking(False)
            calls = [asyncio.create_task(store.claim(note()))]
            peer, _ = await loop.sock_accept(listener)
            await eventually(lambda: store._waiting, "one is sent")
            peer.close()  # with what it has not read: a reset
        while not calls[0].done():
            calls.append(asyncio.create_task(store.claim(note())))
            await asyncio.sleep(0)
        answers: list[object] = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), HANGS_S)
        await store.close()
        return answers

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for answer in runner.run(ask_on()):
            assert isinstance(answer, StoreError), answer


async def test_calls_that_are_not_answered_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "MAX_UNDER_WAY", 10)
    held = Held()
    served, store = Served(held), RemoteStore(str(tmp_path / "s"))
    await served.start(str(tmp_path / "s"))
    waiting = [asyncio.create_task(store.claim(note(key))) for key in range(10)]
    await eventually(lambda: len(store._waiting) == 10, "all wait")
    with pytest.raises(StoreError, match="10 calls wait for its answers"):
        await store.claim(note())
    held.go.set()
    assert await asyncio.wait_for(asyncio.gather(*waiting), HANGS_S) == [[]] * 10
    await store.close()
    await served.stop()


async def test_what_a_stuck_server_does_not_take_is_not_kept_for_ever(tmp_path: Path) -> None:
    """It accepts, and reads nothing: what is given up stays in the buffer, which is bounded."""

    async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader.feed_eof()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await over.wait()
        writer.close()

    over = asyncio.Event()
    server = await asyncio.start_unix_server(stuck, str(tmp_path / "s"))
    store = RemoteStore(str(tmp_path / "s"))
    message = Message("one", [note(chain=bytes(100_000)) for _ in range(5)])

    async def tell_and_give_up() -> None:
        for _ in range(100):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(store.tell(message), 0.01)

    with pytest.raises(StoreError, match="it does not take what it is told"):
        await tell_and_give_up()
    over.set()
    await store.close()
    server.close()


async def test_an_answer_that_makes_no_sense_ends_the_connection_alone(tmp_path: Path) -> None:
    async def raving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)
        writer.write(b"\x00\x00\x00\x03\xff\xff\xff")
        await reader.read()
        writer.close()

    path = str(tmp_path / "s")
    server = await asyncio.start_unix_server(raving, path)
    store = RemoteStore(path)
    with pytest.raises(StoreError, match="the supervisor's store at "):
        await asyncio.wait_for(store.claim(note()), HANGS_S)
    server.close()
    (tmp_path / "s").unlink(missing_ok=True)
    served = Served(MemoryStore(time.monotonic))
    await served.start(path)
    assert list(await store.claim(note())) == []
    await store.close()
    await served.stop()


@pytest.mark.parametrize(
    "sent", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x04\x93\x01\xa1x", b"\x00"]
)
async def test_a_client_that_makes_no_sense_is_left_and_others_are_served(tmp_path: Path, sent: bytes) -> None:
    path = str(tmp_path / "s")
    served, store = Served(MemoryStore(time.monotonic)), RemoteStore(path)
    await served.start(path)
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(sent)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), HANGS_S) == b""
    assert list(await store.claim(note())) == []
    writer.close()
    await store.close()
    await served.stop()
