"""Sessions of Claude Code: those of kv-cache-tester, and what the packaged file keeps of them.

See sim/data/claude_code_sessions/SOURCE.md. Neither has absolute times. In the full form a request's prompt is told as
runs of blocks of 64 tokens that are numbered within its session; the reduced one says how many tokens a prompt has in
common with the one before. The beginning that holds the tools is taken to be the same wherever it is equally long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from sim.lines import Row, rows
from sim.traces.trace import Grower, Runs, Session, Step, Trace, cut, length
from sim.workload.conversation import fingerprint_of
from sim.workload.pages import COMMON_PAGES

NAME = "claude_code"
BLOCK_TOKENS = 64
_SESSION = COMMON_PAGES
"""Between the blocks of two sessions."""


def recognises(first: Row) -> bool:
    return {"tool_tokens", "requests"} <= set(first.values) or {"tools", "turns"} <= set(first.values)


def load(path: Path) -> Trace:
    """Raises ValueError naming file, line, key, value and remedy."""
    grower = Grower(BLOCK_TOKENS, _SESSION)
    sessions = []
    ids: set[str] = set()
    for number, row in enumerate(rows(path), 1):
        if "turns" in row.values:
            session = _reduced(row, str(number), grower)
        elif "duplicate_of" in row.values:
            continue
        elif (name := row.text("id")) in ids:
            raise row.error("id", name, "a line before has it, too: leave one out, or give it another")
        else:
            ids.add(name)
            session = _full(row, name, number * _SESSION)
        if session.steps:
            sessions.append(session)
    return Trace(NAME, BLOCK_TOKENS, tuple(sessions))


def _tools(tokens: int) -> range:
    """The blocks of tools that take so many tokens."""
    first = (1 + tokens) << 12
    return range(first, first + tokens // BLOCK_TOKENS)


def _reduced(row: Row, name: str, grower: Grower) -> Session:
    tools = row.count("tools")
    head = tools + row.count("system")
    steps: list[Step] = []
    blocks: Runs = (_tools(tools),)
    begun = 0
    for number, turn in enumerate(row.items("turns")):
        if not isinstance(turn, list) or len(turn) != 4:
            raise row.error("turns", turn, "write [gap, input, output, shared] for each")
        given = Row(row.path, row.line, dict(zip(("gap", "input", "output", "shared"), turn, strict=True)))
        prompt, shared = given.count("input", 1), given.count("shared") if number else tools
        blocks = grower.grow(blocks, shared, prompt)
        begun = number if shared < head and number else begun
        steps.append(
            Step(prompt, given.count("output", 1), given.number("gap"), None, blocks, fingerprint_of(name, begun))
        )
    return Session(name, tuple(steps))


def _full(row: Row, name: str, base: int, key: str = "", waited_s: float = 0.0) -> Session:
    """A session, or one of its sub-agents, which come under its key and begin some time after the answer before them.

    A sub-agent's own `t` is when it ended.
    """
    tools = row.count("tool_tokens")
    head = (tools + row.count("system_tokens")) // BLOCK_TOKENS
    requests = row.parts("requests")
    steps: list[Step] = []
    first = -1
    before: Runs = ()
    begun = 0
    answered = ended = 0.0
    """When the last answer ended, and when what the next request waits for."""
    forks: list[Session] = []
    for number, request in enumerate(requests):
        if request.text("type") == "subagent":
            over = request.number("t")
            waited = max(0.0, over - request.number("duration_ms") / 1000.0 - answered)
            forks.append(_full(request, f"{name}.{request.text('agent_id')}", base, key or name, waited))
            ended = max(ended, over)
            continue
        thinking = "think_time" in request.values and not forks
        steps = _forked(steps, forks)
        blocks = tuple(_runs(request, base))
        first = blocks[0].start if first < 0 and blocks else first
        if blocks and blocks[0].start == first and len(blocks[0]) >= tools // BLOCK_TOKENS:
            blocks = (_tools(tools), *cut((blocks[0][tools // BLOCK_TOKENS :],), len(blocks[0])), *blocks[1:])
        begun = number if steps and _shared(before, blocks) < min(head, length(before)) else begun
        sent = request.number("t")
        gap = request.number("think_time") if thinking else max(0.0, sent - ended)
        gap = gap if steps else waited_s
        ended = answered = sent + (request.number("api_time") if "api_time" in request.values else 0.0)
        output = max(1, request.count("out"))
        steps.append(Step(request.count("in", 1), output, gap, None, blocks, fingerprint_of(name, begun)))
        before = blocks
    return Session(name, tuple(_forked(steps, forks)), key)


def _forked(steps: list[Step], forks: list[Session]) -> list[Step]:
    """The same with the forks started by the last of them; forks before any request have nobody to wait for them."""
    started = tuple(fork for fork in forks if fork.steps)
    forks.clear()
    if not steps or not started:
        return steps
    last = steps[-1]
    return [
        *steps[:-1],
        Step(last.prompt_tokens, last.output_tokens, last.gap_s, None, last.blocks, last.fingerprint, started),
    ]


def _runs(request: Row, base: int) -> Iterator[range]:
    for run in request.items("hash_runs"):
        if not (isinstance(run, list) and len(run) == 2 and all(isinstance(n, int) and 0 <= n < _SESSION for n in run)):
            raise request.error("hash_runs", run, "write [first block, number of blocks] for each")
        yield range(base + run[0], base + run[0] + run[1])


def _shared(one: Sequence[range], other: Sequence[range]) -> int:
    """Leading blocks in common."""
    found = 0
    for a, b in zip(one, other, strict=False):
        if a.start != b.start:
            break
        found += min(len(a), len(b))
        if len(a) != len(b):
            break
    return found
