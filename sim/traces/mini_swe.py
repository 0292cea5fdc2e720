"""Requests of mini-swe-agent with their text, as of https://github.com/LMCache/lmcache-agent-trace.

Tokens are reckoned as 4 characters each. Times are of the requests alone, so that gaps hold the time of the answers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from xxhash import xxh3_64_intdigest

from sim.lines import Row, rows
from sim.traces.trace import Names, Session, Step, Trace

NAME = "mini_swe"
BLOCK_TOKENS = 64
_CHARACTERS = 4
"""Of a token."""


def recognises(first: Row) -> bool:
    return {"timestamp", "input", "output", "session_id"} <= set(first.values)


def load(path: Path) -> Trace:
    """Raises ValueError naming file, line, key, value and remedy."""
    found: list[tuple[float, str, Step]] = []
    names = Names()
    for row in rows(path):
        text = row.text("input")
        output = max(1, len(row.text("output")) // _CHARACTERS)
        step = Step(max(1, len(text) // _CHARACTERS), output, blocks=names.of(_hashes(text)))
        found.append((row.number("timestamp") / 1e6, row.text("session_id"), step))
    found.sort(key=lambda each: each[0])
    sessions: dict[str, list[Step]] = {}
    for at, session, step in found:
        steps = sessions.setdefault(session, [])
        step = replace(step, at_s=at - found[0][0])
        steps.append(replace(step, gap_s=(step.at_s or 0.0) - (steps[-1].at_s or 0.0)) if steps else step)
    return Trace(NAME, BLOCK_TOKENS, tuple(Session(name, tuple(steps)) for name, steps in sessions.items()))


def _hashes(text: str) -> list[int]:
    size = BLOCK_TOKENS * _CHARACTERS
    hashes: list[int] = []
    last = 0
    for start in range(0, len(text) - size + 1, size):
        last = xxh3_64_intdigest(text[start : start + size].encode(), last)
        hashes.append(last)
    return hashes
