"""A trace: recorded sessions, whatever file they come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Runs = tuple[range, ...]
"""Names of blocks, one after the other, as few ranges: prompts have thousands of them."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request."""

    prompt_tokens: int
    output_tokens: int
    gap_s: float = 0.0
    """From the end of what it waited for (the answer before and its forks; a fork's first, its parent's answer) until
    it was sent. Where ends are not told, from when the one before was sent."""
    at_s: float | None = None
    """When it was sent, from the trace's first request on. None where the trace does not tell."""
    blocks: Runs = ()
    """Of its prompt, chained: a name stands for all before it. Those from 2^32 on are met in one session only. Missing
    ones are of this request alone."""
    fingerprint: int = 0
    """Of the conversation's beginning. 0: of its session and first block."""
    forks: tuple[Session, ...] = ()
    """Started by its answer; the session's next request waits for their end."""


@dataclass(frozen=True, slots=True)
class Session:
    """Requests under one affinity key, one after the other."""

    name: str
    """Unique in the trace; its key is made of it."""
    steps: tuple[Step, ...]
    key: str = ""
    """Of the session whose affinity key it shares, when that is not its own."""
    parent: str = ""
    """Of the session that spawned it, when its requests name that one."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What was in a file."""

    format: str
    block_tokens: int
    """Tokens of a block."""
    sessions: tuple[Session, ...]
    resolution_s: float = 0.0
    """Of its times: requests of one tick are to be spread over it."""

    @property
    def timed(self) -> bool:
        """Whether every request has an absolute time."""
        return all(step.at_s is not None for session in self.sessions for step in session.steps)

    @property
    def requests(self) -> int:
        return sum(count(session) for session in self.sessions)


def count(session: Session) -> int:
    """Its requests, with those of its forks."""
    return sum(1 + sum(count(fork) for fork in step.forks) for step in session.steps)


def runs(names: Iterable[int]) -> Runs:
    """Names of blocks as ranges."""
    found: list[range] = []
    for name in names:
        if found and found[-1].stop == name:
            found[-1] = range(found[-1].start, name + 1)
        else:
            found.append(range(name, name + 1))
    return tuple(found)


def cut(blocks: Sequence[range], length: int) -> Runs:
    """The first so many blocks."""
    found = []
    for each in blocks:
        if length <= 0:
            break
        found.append(each[:length])
        length -= len(each)
    return tuple(found)


def length(blocks: Sequence[range]) -> int:
    return sum(map(len, blocks))


class Names:
    """Small names for the long hashes of blocks, in order of their coming. They are chained, whether the hashes are or
    not: a block that comes behind others is another one."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}

    def of(self, hashes: Iterable[int]) -> Runs:
        return runs(self.each(hashes))

    def each(self, hashes: Iterable[int]) -> list[int]:
        """The same one by one."""
        known, last = self._known, -1
        names = []
        for each in hashes:
            last = known.setdefault((last, each), len(known))
            names.append(last)
        return names


class Grower:
    """Names blocks for sessions of which only sizes are known: what is not shared gets names nobody else has."""

    def __init__(self, block_tokens: int, first: int) -> None:
        """`first` is the first name."""
        self._block = block_tokens
        self._next = first

    def grow(self, blocks: Sequence[range], shared_tokens: int, prompt_tokens: int) -> Runs:
        """Blocks of a prompt whose first so many tokens are those of an earlier one."""
        kept = cut(blocks, min(shared_tokens, prompt_tokens) // self._block)
        fresh = prompt_tokens // self._block - length(kept)
        if fresh <= 0:
            return kept
        self._next += fresh
        return (*kept, range(self._next - fresh, self._next))
