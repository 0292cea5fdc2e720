"""What is asked for together, and what of it each gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from router.store.batches import Batches
from tests.fakes.wire import LIMIT_S, eventually


class Answering:
    """Answers with ten times each question, when it is told to."""

    def __init__(self, most: int = 10, at_once: int = 1) -> None:
        self.asked: list[list[int]] = []
        self.may = asyncio.Event()
        self.fault: Exception | None = None
        self.batches = Batches[int, int](self._answer, most, at_once)

    async def _answer(self, questions: Sequence[int]) -> list[int]:
        self.asked.append(list(questions))
        await self.may.wait()
        if self.fault is not None:
            raise self.fault
        return [10 * question for question in questions]

    def ask(self, *questions: int) -> list[asyncio.Task[int]]:
        return [asyncio.create_task(self.batches.ask(question)) for question in questions]


async def test_what_is_asked_for_at_the_same_time_goes_together_and_each_gets_its_answer() -> None:
    there = Answering(most=3, at_once=2)
    asked = there.ask(1, 2, 3, 4, 5, 6, 7)
    await eventually(lambda: len(there.asked) == 2)
    later = there.ask(8)
    await asyncio.sleep(0)
    assert there.asked == [[1, 2, 3], [4, 5, 6]], "no more than two are under way"
    there.may.set()
    assert await asyncio.gather(*asked, *later) == [10, 20, 30, 40, 50, 60, 70, 80]
    assert there.asked[2:] == [[7, 8]], "what came meanwhile goes together"


async def test_one_alone_goes_at_once() -> None:
    there = Answering(most=3, at_once=2)
    [first] = there.ask(1)
    await eventually(lambda: there.asked == [[1]])
    [second] = there.ask(2)
    await eventually(lambda: there.asked == [[1], [2]], "it does not wait for the first")
    there.may.set()
    assert (await first, await second) == (10, 20)


@pytest.mark.parametrize("at_once", [1, 2])
async def test_who_asks_as_soon_as_the_others_are_answered_is_answered(at_once: int) -> None:
    """It may ask before those batches are over, whose place it is to have."""
    there = Answering(most=1, at_once=at_once)
    there.may.set()

    async def talk(begin: int) -> None:
        for question in range(begin, begin + 20):
            assert await there.batches.ask(question) == 10 * question

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(talk(100 * number) for number in range(at_once)))


async def test_who_is_cancelled_is_in_nobodys_way() -> None:
    there = Answering()
    under_way, other = there.ask(1, 2)
    await eventually(lambda: bool(there.asked))
    waits, after = there.ask(3, 4)
    await asyncio.sleep(0)
    under_way.cancel()
    waits.cancel()
    there.may.set()
    assert (await other, await after) == (20, 40)
    assert there.asked == [[1, 2], [4]], "who was cancelled before has not asked"


async def test_a_fault_is_of_all_who_asked_together_and_of_nobody_else() -> None:
    there = Answering()
    there.fault = ValueError("no")
    asked = there.ask(1, 2)
    await eventually(lambda: bool(there.asked))
    there.may.set()
    assert [str(each) for each in await asyncio.gather(*asked, return_exceptions=True)] == ["no", "no"]
    there.fault = None
    assert await there.batches.ask(3) == 30


async def test_nobody_waits_for_one_that_is_closed() -> None:
    there = Answering()
    asked = there.ask(1)
    await eventually(lambda: bool(there.asked))
    asked += there.ask(2)
    await asyncio.sleep(0)
    await there.batches.close()
    for each in asked:
        with pytest.raises(asyncio.CancelledError):
            await each
