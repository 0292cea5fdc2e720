"""What is asked for at the same time, asked together: most of what a question costs is the way there and back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar, cast

Q = TypeVar("Q")
A = TypeVar("A")


class Batches(Generic[Q, A]):
    """Nobody waits for others to come. What is asked for in one turn of the loop goes together, at once as long as
    fewer than `at_once` batches are under way; else with what comes until one of them is back.
    """

    def __init__(self, send: Callable[[Sequence[Q]], Awaitable[Sequence[A]]], most: int, at_once: int) -> None:
        """`send` answers at most `most` in their order, in limited time; what it raises, all who asked get."""
        self._send = send
        self._most = most
        self._at_once = at_once
        self._waiting: deque[tuple[Q, asyncio.Future[A | Exception]]] = deque()
        self._under_way: set[asyncio.Task[None]] = set()
        self._begun = False
        """Whether one of them has not taken its questions yet."""

    async def ask(self, question: Q) -> A:
        """The answer. Who is cancelled in time has not asked."""
        answered: asyncio.Future[A | Exception] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answered))
        self._begin()
        answer = await answered
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        """Who still waits is cancelled."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        for _, answered in self._waiting:
            answered.cancel()

    def _begin(self) -> None:
        if self._waiting and not self._begun and len(self._under_way) < self._at_once:
            self._begun = True
            self._under_way.add(asyncio.create_task(self._go()))

    async def _go(self) -> None:
        """Batches, one after the other while anybody waits."""
        try:
            await self._batches()
        finally:
            # In the step that saw nobody wait: who asked before a callback's turn came would see all places taken,
            # and nobody to begin for him.
            self._under_way.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _batches(self) -> None:
        while batch := self._taken():
            try:
                answers: Sequence[A | Exception] = await self._send([question for question, _ in batch])
            except Exception as error:
                answers = [error] * len(batch)
            except asyncio.CancelledError:
                for _, answered in batch:
                    answered.cancel()
                raise
            for (_, answered), answer in zip(batch, answers, strict=True):
                if not answered.done():
                    answered.set_result(answer)

    def _taken(self) -> list[tuple[Q, asyncio.Future[A | Exception]]]:
        self._begun = False
        batch: list[tuple[Q, asyncio.Future[A | Exception]]] = []
        while self._waiting and len(batch) < self._most:
            question = self._waiting.popleft()
            if not question[1].done():
                batch.append(question)
        self._begin()
        return batch
