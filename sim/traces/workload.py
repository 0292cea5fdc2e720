"""Plays a trace: at its own times whatever becomes of the answers (open loop), or each request after the answer before
(closed loop)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Literal

from xxhash import xxh3_64_intdigest

from sim.hardware import Hardware
from sim.traces.trace import Session, Step, Trace
from sim.workload import PATIENT, Conversation, Patience, Turn, Workload
from sim.workload.conversation import fingerprint_of, key_of
from sim.workload.pages import COMMON_PAGES
from sim.workload.sessions import nominal

_LAP = 1 << 52
"""Between the names of one session's pages when it is used again."""
_ALONE = 1 << 63
"""Names from here on are of pages that only one request has."""


class TraceWorkload(Workload):
    """The sessions of a trace, for `World`.

    `replay` plays each once, as recorded. `session` gives them one by one, again and again, to arrivals that are made
    up; from the second time on their blocks are new. Answers are not reused: a trace tells a prompt's blocks only.
    """

    def __init__(
        self,
        trace: Trace,
        page_size: int,
        seed: int,
        *,
        gap_cap_s: float = math.inf,
        patience: Patience = PATIENT,
        most_tokens: int = 262_144,
        kv_tokens: float = math.inf,
    ) -> None:
        """Sessions with longer prompts than `most_tokens`, the window of Kimi K2, are left out, and those of which a
        prompt and its answer do not fit `kv_tokens`, the smallest KV pool.

        Raises ValueError when none is left.
        """
        super().__init__(page_size, seed, gap_cap_s=gap_cap_s, patience=patience)
        self.trace = trace
        self.sessions = [
            session
            for session in trace.sessions
            if all(
                step.prompt_tokens <= most_tokens and step.prompt_tokens + step.output_tokens <= kv_tokens
                for _, step in _flat(session)
            )
        ]
        if not self.sessions:
            raise ValueError(
                f"the trace has no session whose prompts all fit {most_tokens} tokens, and with their answers a "
                f"replica's KV memory ({kv_tokens:,.0f} tokens): use a larger machine, or another trace"
            )

        self._several = -(-trace.block_tokens // page_size)
        """Pages that may end in a block."""
        runs = [run for session in self.sessions for _, step in _flat(session) for run in step.blocks]
        self._common = self._several * max((run.stop for run in runs if run.stop <= COMMON_PAGES), default=1)
        """More than any name that several sessions have."""

    def session(self, index: int, *, initial: bool) -> Conversation:
        lap, number = divmod(index, len(self.sessions))
        session = self.sessions[number]
        start = self.random(f"{session.name}@{lap}/start").randrange(len(session.steps)) if initial else 0
        return self._closed(session, lap, start)

    def session_seconds(self, hardware: Hardware) -> float:
        return sum(nominal(self._closed(session), hardware) for session in self.sessions) / len(self.sessions)

    def replay(
        self, loop: Literal["open", "closed"] = "open", *, speed: float = 1.0
    ) -> Iterator[tuple[float, Conversation]]:
        """(time, conversation) in order of time; every session once.

        Open loop: each request is a conversation of its own, sent at its time over `speed`, whether or not the one
        before it is answered. Closed loop: sessions begin at their time over `speed` and go on at their own pace.

        Raises ValueError for a speed that is not above 0, and when the trace has no absolute times.
        """
        if not 0.0 < speed < math.inf:
            raise ValueError(f"speed must be more than 0 and finite, got {speed}")
        if not self.trace.timed:
            raise ValueError(
                f"traces of the format {self.trace.format} have no absolute times: set play to again, so that "
                "their sessions come at a rate, or as many as leave"
            )
        ticks = self.random("ticks")
        played = self._requests() if loop == "open" else self._sessions()
        # Made when they begin: a conversation takes a kilobyte, and of a long trace few are under way at a time.
        spread = [(at_s + ticks.uniform(0.0, self.trace.resolution_s), make) for at_s, make in played]
        spread.sort(key=lambda start: start[0])
        return ((at_s / speed, make()) for at_s, make in spread)

    def _sessions(self) -> Iterator[tuple[float, Callable[[], Conversation]]]:
        for session in self.sessions:
            yield _at(session.steps[0]), partial(self._closed, session)

    def _requests(self) -> Iterator[tuple[float, Callable[[], Conversation]]]:
        alone = self._alone
        for session in self.sessions:
            for number, (owner, step) in enumerate(_flat(session)):
                yield _at(step), partial(alone, session, number, owner, step)

    def _alone(self, session: Session, number: int, owner: Session, step: Step) -> Conversation:
        name = f"{session.name}#{number}"
        turns = self._turns(owner, (replace(step, gap_s=0.0, forks=()),), 0, name)
        return self._made(owner, name, 0, turns, self.random(f"{owner.name}@0"), True)

    def _closed(self, session: Session, lap: int = 0, start: int = 0, main: bool = True) -> Conversation:
        name = f"{session.name}@{lap}"
        steps = session.steps[start:]
        if main:
            steps = (replace(steps[0], gap_s=0.0), *steps[1:])
        return self._made(session, name, lap, self._turns(session, steps, lap, name), self.random(name), main)

    def _made(
        self, session: Session, name: str, lap: int, turns: Iterator[Turn], random: Random, main: bool
    ) -> Conversation:
        made = self._conversation(name, _key(session.key or session.name, lap), turns, random, main)
        made.parent = _key(session.parent, lap) if session.parent else None
        return made

    def _turns(self, session: Session, steps: tuple[Step, ...], lap: int, name: str) -> Iterator[Turn]:
        for number, step in enumerate(steps):
            yield Turn(
                min(step.gap_s, self.gap_cap_s),
                self._pages(step, lap, f"{name}/{number}"),
                step.prompt_tokens,
                step.output_tokens,
                step.fingerprint or fingerprint_of(session.name, step.blocks[0].start if step.blocks else 0),
                tuple(self._closed(fork, lap, main=False) for fork in step.forks),
            )

    def _pages(self, step: Step, lap: int, request: str) -> list[int]:
        """A page is named by the block in which it ends, and by its place in it where a block holds several."""
        page, block = self.page_size, self.trace.block_tokens
        several = self._several
        pages: list[int] = []
        whole = step.prompt_tokens // page
        before = 0
        for run in step.blocks:
            after = before + len(run)
            while len(pages) < whole:
                last = (len(pages) + 1) * page - 1
                if last // block >= after:
                    break
                name = run[last // block - before] * several + last % block // page
                pages.append(name + lap * (self._common if name < COMMON_PAGES else _LAP))
            before = after
        alone = _ALONE | xxh3_64_intdigest(request.encode()) >> 1
        return pages + [alone + number for number in range(whole - len(pages))]


def _key(session: str, lap: int) -> bytes:
    return key_of(f"{session}@{lap}")


def _at(step: Step) -> float:
    assert step.at_s is not None
    return step.at_s


def _flat(session: Session) -> Iterator[tuple[Session, Step]]:
    """All requests, those of forks with the fork they belong to."""
    for step in session.steps:
        yield session, step
        for fork in step.forks:
            yield from _flat(fork)
