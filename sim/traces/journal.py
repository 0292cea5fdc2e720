"""The router's own journal as a trace: the requests it placed, and not where.

Sizes are those the engines reported, where they did; else the router's estimates, corrected by what those of others
were off on the whole. Blocks are of bytes, and told only when a policy in charge or in the shadow asked for them;
without any a conversation's prompt is taken to begin with the one before, if it is no shorter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median

from sim import journal
from sim.lines import Row
from sim.traces.trace import Grower, Names, Runs, Session, Step, Trace

NAME = "journal"

BLOCK_TOKENS = 1024
"""Estimated tokens of a block: 4 KiB of body."""


@dataclass(slots=True)
class _Asked:
    """A request, through all its tries."""

    at: float
    """Seconds since the epoch."""
    key: str
    fingerprint: int
    parent: str
    estimate: int
    blocks: tuple[int, ...]
    ended: float = 0.0
    prompt_tokens: int = 0
    """As reported; 0 when it was not."""
    output_tokens: int | None = None
    """As reported; None when it was not."""


def recognises(first: Row) -> bool:
    return first.values.get("call") == "journal"


def load(path: Path) -> Trace:
    """Of all files that are left of the journal; `path` is the newest. Raises ValueError naming file, line and key."""
    asked = [each for each in _asked(path) if each.estimate or each.prompt_tokens]
    known = [each for each in asked if each.prompt_tokens and each.estimate]
    ratio = sum(each.prompt_tokens for each in known) / sum(each.estimate for each in known) if known else 1.0
    output = int(median([each.output_tokens for each in asked if each.output_tokens is not None] or [1]))
    block = max(1, round(BLOCK_TOKENS * ratio))
    hashed = any(each.blocks for each in asked)
    names, grower = Names(), Grower(block, 1)
    threads: dict[tuple[str, int], list[_Asked]] = defaultdict(list)
    latest: dict[str, dict[int, _Asked]] = defaultdict(dict)
    """Of each key's conversations, by fingerprint."""
    for number, each in enumerate(asked):
        key = each.key or f"request {number}"
        fingerprint = each.fingerprint or _continued(latest[key], each)
        latest[key][fingerprint] = each
        threads[key, fingerprint].append(each)
    first = min((each.at for each in asked), default=0.0)
    sessions = []
    for (key, fingerprint), thread in threads.items():
        steps: list[Step] = []
        blocks: Runs = ()
        ended = thread[0].at
        for each in thread:
            prompt = each.prompt_tokens or max(1, round(each.estimate * ratio))
            before = steps[-1].prompt_tokens if steps else 0
            blocks = names.of(each.blocks) if hashed else grower.grow(blocks, before if before <= prompt else 0, prompt)
            gap = max(0.0, each.at - ended)
            answer = max(1, output if each.output_tokens is None else each.output_tokens)
            steps.append(Step(prompt, answer, gap, each.at - first, blocks, fingerprint))
            ended = max(ended, each.ended)
        name = f"{key}/{fingerprint:x}" if fingerprint else key
        sessions.append(Session(name, tuple(steps), key, thread[0].parent))
    return Trace(NAME, block, tuple(sessions))


def _continued(known: Mapping[int, _Asked], each: _Asked) -> int:
    """The fingerprint of the conversation that a request without one goes on with; 0 when none is known.

    The router looks for none where the blocks tell already (`policies.lookup.unsure`).
    """
    return max(
        known,
        key=lambda fingerprint: (_common(known[fingerprint].blocks, each.blocks), known[fingerprint].at),
        default=0,
    )


def _common(blocks: Sequence[int], others: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(blocks, others, strict=False)))


def _asked(path: Path) -> list[_Asked]:
    """In order of their coming."""
    found: list[_Asked] = []
    leases: dict[int, _Asked] = {}
    failed: dict[tuple[str, int], _Asked] = {}
    """Requests whose last try failed, by what tells them from others."""
    epoch = 0.0
    for row in journal.calls(path):
        call = row.text("call")
        if call == "journal":
            epoch = row.number("time") - row.number("at")
            if not row.count("part"):
                leases.clear()
        elif call == "acquire" and row.values.get("turn") is not False:
            request = journal.request(row)
            key = request.key.hex() if request.key is not None else ""
            again = failed.pop((key, request.prompt_tokens), None) if "failed" in row.values else None
            if again is None:
                parent = request.parent.hex() if request.parent is not None else ""
                at = row.number("at") + epoch
                again = _Asked(at, key, request.fingerprint, parent, request.prompt_tokens, request.blocks, at)
                found.append(again)
            if "lease" in row.values:
                leases[row.count("lease")] = again
        elif call == "finish" and (each := leases.pop(row.count("lease"), None)) is not None:
            each.ended = row.number("at") + epoch
            each.prompt_tokens = journal.optional(row, "prompt_tokens") or 0
            each.output_tokens = journal.optional(row, "completion_tokens")
            if row.text("cause") == "upstream":
                failed[each.key, each.estimate] = each
    return found
