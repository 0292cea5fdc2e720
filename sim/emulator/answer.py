"""What a request makes a replica produce, and waiting for it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.replica import Stage, Work

if TYPE_CHECKING:
    from sim.emulator.engine import Engine
    from sim.emulator.scheduler import Scheduler


def new_id() -> str:
    """A request id in SGLang's form: 32 hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(slots=True)
class Record:
    """What one inference request was, for tests that ask which replica got it."""

    path: str
    headers: dict[str, str]
    """Without those that hold credentials."""
    rid: str = ""
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    """`length`, `stop`, `abort`; None while it lives and when it was refused."""
    error: int | None = None
    """Status it was refused with; 503 for a full queue, also when a stream's HTTP status was 200."""


@dataclass(slots=True, eq=False)
class Generation:
    """One output sequence in the making."""

    rid: str
    work: Work
    scheduler: Scheduler
    """Of the rank that it runs on."""
    words: list[str]
    reason: str
    """How it ends if nobody aborts it: `length` or `stop`."""
    record: Record
    seen: int = 0
    """Output tokens its readers were told of."""

    @property
    def ended(self) -> bool:
        return self.work.stage in (Stage.DONE, Stage.ABORTED)

    @property
    def finish_reason(self) -> str | None:
        """`length`, `stop` or `abort`; None while it lives."""
        if self.work.stage is Stage.ABORTED:
            return "abort"
        return self.reason if self.work.stage is Stage.DONE else None

    @property
    def text(self) -> str:
        return "".join(self.words[: self.work.produced])


@dataclass(slots=True, eq=False)
class Answer:
    """The output sequences of one request (`n` of them), and a way to wait for them."""

    engine: Engine
    prompt_tokens: int
    generations: list[Generation] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    created: float = field(default_factory=time.time)

    @property
    def id(self) -> str:
        return self.generations[0].rid

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, from the first sequence: the others find what that one has just computed."""
        return self.generations[0].work.cached_tokens

    @property
    def completion_tokens(self) -> int:
        return sum(generation.work.produced for generation in self.generations)

    @property
    def ended(self) -> bool:
        return all(generation.ended for generation in self.generations)

    async def first(self) -> None:
        """Returns when there is a token, or when there will be none."""
        while not self.ended and not any(generation.work.produced for generation in self.generations):
            await self._changed()

    async def done(self) -> None:
        """Returns when all sequences have ended."""
        while not self.ended:
            await self._changed()

    async def tokens(self) -> AsyncIterator[tuple[int, Generation, int | None]]:
        """(choice, sequence, index of its token) as they are produced; the index is None once at the end of each."""
        sent = [0] * len(self.generations)
        open_choices = set(range(len(self.generations)))
        while True:
            for choice, generation in enumerate(self.generations):
                if choice not in open_choices:
                    continue
                while sent[choice] < generation.work.produced:
                    yield choice, generation, sent[choice]
                    sent[choice] += 1
                if generation.ended:
                    open_choices.discard(choice)
                    yield choice, generation, None
            if not open_choices:
                return
            if not any(self._pending(choice, sent[choice]) for choice in open_choices):
                await self._changed()

    def abort(self) -> None:
        """Ends all sequences that still run."""
        for generation in self.generations:
            self.engine.abort(generation)

    def _pending(self, choice: int, sent: int) -> bool:
        generation = self.generations[choice]
        return generation.ended or generation.work.produced > sent

    async def _changed(self) -> None:
        self.wake.clear()
        await self.wake.wait()
