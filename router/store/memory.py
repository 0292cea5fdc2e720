"""A store in this process: for routers that live in one, and behind the one that workers share."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from policies.sharing import Note
from router.store.store import MAX_MESSAGES, MAX_NOTES, Heard, Message, Remembered

MAX_HEARD = 100
"""Messages passed on at once; the next call gives those behind them."""

Place = tuple[int, bool, str]
"""Which home of a session: fingerprint, fork, replica."""


class MemoryStore:
    """Bounded: the session used least recently goes first; one unused for `idle_s` seconds is not known any more."""

    def __init__(self, clock: Callable[[], float], max_sessions: int = 200_000, idle_s: float = 3600.0) -> None:
        self._clock = clock
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._sessions: OrderedDict[bytes, OrderedDict[Place, tuple[Note, float]]] = OrderedDict()
        self._used: dict[bytes, float] = {}
        self._messages: deque[Message] = deque(maxlen=MAX_MESSAGES)
        self._told = 0
        """Messages ever."""
        self._came = asyncio.Event()
        self._controls: dict[str, bytes] = {}
        self._epoch = ""

    async def claim(self, note: Note) -> Sequence[Remembered]:
        now = self._clock()
        known = self._sessions.get(note.key)
        if known is None or now - self._used[note.key] > self._idle_s:
            self._forget(note.key)
            self._put(note, now)
            return []
        self._use(note.key, now)
        return [Remembered(old, now - at) for old, at in reversed(known.values())]

    async def tell(self, message: Message) -> None:
        now = self._clock()
        for note in message.notes:
            self._put(note, now)
        for name, value in message.controls.items():
            if value is None:
                self._controls.pop(name, None)
            else:
                self._controls[name] = value
        self._messages.append(message)
        self._told += 1
        self._came.set()
        self._came = asyncio.Event()

    async def restore(self, notes: Sequence[Note]) -> None:
        now = self._clock()
        told = {note.key: list(self._sessions.get(note.key, ())) for note in notes}
        for note in notes:
            if _place(note) not in self._sessions.get(note.key, ()):
                self._put(note, now)
        for key, places in told.items():  # after what the store forgot, and so latest
            homes = self._sessions.get(key, OrderedDict())
            for place in places:
                if place in homes:
                    homes.move_to_end(place)

    async def hear(self, cursor: str, wait_s: float) -> Heard:
        told = self._told if cursor == "" else int(cursor)
        if told >= self._told:
            try:
                async with asyncio.timeout(wait_s):
                    await self._came.wait()
            except TimeoutError:
                return Heard((), str(told))
        first = self._told - len(self._messages)
        end = min(self._told, max(told, first) + MAX_HEARD)
        messages = [self._messages[number - first] for number in range(max(told, first), end)]
        return Heard(messages, str(end), lost=told < first)

    async def controls(self) -> Mapping[str, bytes]:
        return dict(self._controls)

    async def epoch(self, offered: str) -> str:
        self._epoch = self._epoch or offered
        return self._epoch

    async def close(self) -> None:
        pass

    def _put(self, note: Note, now: float) -> None:
        place = _place(note)
        homes = self._sessions.get(note.key)
        if not note.tokens:
            if homes is not None:
                homes.pop(place, None)
                if not homes:
                    self._forget(note.key)
            return
        if homes is None:
            homes = self._sessions[note.key] = OrderedDict()
            if len(self._sessions) > self._max_sessions:
                self._forget(next(iter(self._sessions)))
        homes[place] = (note, now)
        homes.move_to_end(place)
        if len(homes) > MAX_NOTES:
            homes.popitem(last=False)
        self._use(note.key, now)

    def _use(self, key: bytes, now: float) -> None:
        self._sessions.move_to_end(key)
        self._used[key] = now

    def _forget(self, key: bytes) -> None:
        self._sessions.pop(key, None)
        self._used.pop(key, None)


def _place(note: Note) -> Place:
    return note.fingerprint, note.fork, note.replica
