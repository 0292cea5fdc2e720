"""Mooncake's traces: when requests came, their lengths, and chained hashes of their blocks of 512 tokens.

Of https://github.com/kvcache-ai/Mooncake (FAST'25); many other tools write the same form. There are no sessions in it:
a request that begins with the whole of an earlier one is taken to be its next turn.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from pathlib import Path

from sim.lines import Row, rows
from sim.traces.trace import Names, Session, Step, Trace, runs

NAME = "mooncake"
BLOCK_TOKENS = 512

LEAST_BLOCKS = 2
"""Of a prompt, for another that begins with it to be its next turn: a shorter one may be a system prompt alone."""

ROUNDED_MS = 10.0
"""To find the ticks of its times: those of the hour of conversations are 3 s apart, give or take 3 ms."""


def recognises(first: Row) -> bool:
    return {"timestamp", "input_length", "output_length", "hash_ids"} <= set(first.values)


def load(path: Path) -> Trace:
    """Raises ValueError naming file, line, key, value and remedy."""
    found: list[tuple[float, Step, list[int]]] = []
    names = Names()
    for row in rows(path):
        ids = row.items("hash_ids")
        if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
            raise row.error("hash_ids", ids, "write whole numbers, 0 or more")
        blocks = names.each(each for each in ids if isinstance(each, int))
        step = Step(row.count("input_length", 1), max(1, row.count("output_length")), blocks=runs(blocks))
        found.append((row.number("timestamp"), step, blocks[: step.prompt_tokens // BLOCK_TOKENS]))
    found.sort(key=lambda each: each[0])
    first = found[0][0] if found else 0.0
    threads: list[list[Step]] = []
    last_blocks: dict[int, list[Step]] = {}
    """The thread by the last whole block of its last prompt: as names are chained, that is all of the prompt."""
    for at_ms, step, blocks in found:
        step = replace(step, at_s=(at_ms - first) / 1000.0)
        known = next((block for block in reversed(blocks[LEAST_BLOCKS - 1 :]) if block in last_blocks), None)
        thread: list[Step] = [] if known is None else last_blocks.pop(known)
        if known is None:
            threads.append(thread)
        else:
            step = replace(step, gap_s=(step.at_s or 0.0) - (thread[-1].at_s or 0.0))
        thread.append(step)
        if len(blocks) >= LEAST_BLOCKS:
            last_blocks[blocks[-1]] = thread
    tick = gcd(*(round((at_ms - first) / ROUNDED_MS) for at_ms, _, _ in found))
    return Trace(
        NAME,
        BLOCK_TOKENS,
        tuple(Session(str(number), tuple(thread)) for number, thread in enumerate(threads)),
        tick * ROUNDED_MS / 1000.0 if tick > 1 else 0.0,
    )
