"""Data-parallel ranks of an engine: N KV caches behind one URL, each of them a replica of its own.

SGLang (0.5.23) serves a request on the rank that its header `X-Data-Parallel-Rank` names, whatever the body says. Only
`/generate` does not look at it. Where an engine is told to obey headers (SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1),
that obeys `x-override-routed-dp-rank`, and chats do before the other. So both are sent; a client's go no further.
"""

from __future__ import annotations

MAX_RANKS = 64

HEADERS = frozenset({b"x-data-parallel-rank", b"x-override-routed-dp-rank"})
"""In lower case."""


def ids(id: str, ranks: int) -> list[str]:
    """What the replicas are called that an engine is: one called as it is, or one for each of several ranks."""
    return [id] if ranks == 1 else [f"{id}@{rank}" for rank in range(ranks)]


def header_lines(rank: int) -> bytes:
    """By which an engine knows the rank that a request is for."""
    return b"x-data-parallel-rank: %d\r\nx-override-routed-dp-rank: %d\r\n" % (rank, rank)
