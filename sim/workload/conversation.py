"""Who asks: a conversation, and its turns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from xxhash import xxh3_64_intdigest


@dataclass(init=False, slots=True)
class Turn:
    """One request."""

    gap_s: float
    """From the end of what it waits for (the answer before, the forks of that turn) until it is sent."""
    pages: list[int]
    """Chained hashes of the KV pages that can be reused later: the prompt's, and the answer's if that is kept."""
    prompt_tokens: int
    output_tokens: int
    fingerprint: int
    """Of the conversation's beginning; a shared-prefix fork has its parent's."""
    forks: tuple[Conversation, ...]
    """Started by its answer."""
    patience_s: float
    """After so many seconds without a first token its client leaves."""

    def __init__(
        self,
        gap_s: float,
        pages: list[int],
        prompt_tokens: int,
        output_tokens: int,
        fingerprint: int,
        forks: tuple[Conversation, ...] = (),
        patience_s: float = math.inf,
    ) -> None:
        self.gap_s = gap_s
        self.pages = pages
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.fingerprint = fingerprint
        self.forks = forks
        self.patience_s = patience_s


@dataclass(slots=True, eq=False)
class Conversation:
    """A linear thread of requests under one affinity key."""

    name: str
    """Unique in a run, and the same for every policy."""
    key: bytes | None
    """None: its client names no session, and nothing else does."""
    main: bool
    turns: Iterator[Turn]
    estimate: float
    """What the router takes a token for: its guess from the body's bytes over the truth. The same all session long."""
    parent: bytes | None = None
    """Key of the conversation that spawned it, when it goes by a key of its own and names that one."""


def key_of(session: str) -> bytes:
    """The affinity key of the session of that name."""
    return blake2b(session.encode(), digest_size=16).digest()


def fingerprint_of(name: str, turn: int) -> int:
    """Of what the conversation of that name began with at a turn. Not 0, which means unknown; equal in every run."""
    return xxh3_64_intdigest(f"{name}/{turn}".encode()) or 1
