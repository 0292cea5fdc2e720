"""Request traces of NVIDIA Dynamo (`dynamo.request.trace.v1`), as its frontend writes them.

Agents name their session and the one that spawned them. A spawned one is started by the last answer of the other that
ended before its own first request came, and is waited for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from sim.lines import Row, rows
from sim.traces.trace import Names, Session, Step, Trace

NAME = "dynamo"

SCHEMA = "dynamo.request.trace.v1"


@dataclass(slots=True)
class _Thread:
    """A session as it is read."""

    name: str
    parent: str
    steps: list[Step]
    ends: list[float]
    """When the answers ended, seconds."""


def recognises(first: Row) -> bool:
    event = first.values.get("event")
    return isinstance(event, dict) and event.get("schema") == SCHEMA


def load(path: Path) -> Trace:
    """Raises ValueError naming file, line, key, value and remedy."""
    threads: dict[str, _Thread] = {}
    names = Names()
    block_tokens = 0
    requests = []
    for row in rows(path):
        event = row.part("event")
        if event.text("event_type") == "request_end":
            requests.append((event.part("request").number("request_received_ms") / 1000.0, event))
    requests.sort(key=lambda each: each[0])
    for at, event in requests:
        request, agent = event.part("request"), event.part("agent_context")
        prompt = request.part("replay")
        size = prompt.count("trace_block_size", 1)
        if block_tokens not in (0, size):
            raise prompt.error("trace_block_size", size, f"all requests of a trace have the same, here {block_tokens}")
        block_tokens = size
        hashes = prompt.items("input_sequence_hashes")
        if not all(isinstance(each, int) for each in hashes):
            raise prompt.error("input_sequence_hashes", hashes, "write whole numbers")
        name = agent.text("session_id")
        parent = agent.text("parent_session_id") if "parent_session_id" in agent.values else ""
        thread = threads.setdefault(name, _Thread(name, parent, [], []))
        thread.steps.append(
            Step(
                request.count("input_tokens", 1),
                max(1, request.count("output_tokens")),
                at_s=at - requests[0][0],
                blocks=names.of(each for each in hashes if isinstance(each, int)),
            )
        )
        thread.ends.append(at - requests[0][0] + request.number("total_time_ms") / 1000.0)
    return Trace(NAME, block_tokens or 1, _tree(threads))


def _tree(threads: dict[str, _Thread]) -> tuple[Session, ...]:
    children: dict[tuple[str, int], list[_Thread]] = defaultdict(list)
    roots: list[_Thread] = []
    for thread in threads.values():
        parent = threads.get(thread.parent)
        began = thread.steps[0].at_s or 0.0
        older = parent is not None and (parent.steps[0].at_s or 0.0) < began  # else two could be each other's parents
        before = [number for number, end in enumerate(parent.ends) if end <= began] if parent and older else []
        if before:
            children[thread.parent, before[-1]].append(thread)
        else:
            roots.append(thread)

    def made(thread: _Thread, ended: float) -> tuple[Session, float]:
        """The session, which waited for what ended then, and when the last of its own and its forks' answers ended."""
        steps: list[Step] = []
        for number, (step, end) in enumerate(zip(thread.steps, thread.ends, strict=True)):
            gap = max(0.0, (step.at_s or 0.0) - ended)
            forks = [made(child, end) for child in children[thread.name, number]]
            ended = max([end, *(last for _, last in forks)])
            steps.append(replace(step, gap_s=gap, forks=tuple(fork for fork, _ in forks)))
        return Session(thread.name, tuple(steps), parent=thread.parent), ended

    return tuple(made(root, root.steps[0].at_s or 0.0)[0] for root in roots)
