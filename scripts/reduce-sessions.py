#!/usr/bin/env python3
"""Makes sim/data/claude_code_sessions/sessions.jsonl.gz from traces of kv-cache-tester (see SOURCE.md beside it).

scripts/reduce-sessions.py TRACES.jsonl.gz OUT.jsonl.gz
"""

import gzip
import json
import sys

BLOCK = 64


def shared_blocks(old: list[list[int]], new: list[list[int]]) -> int:
    """Leading blocks in which two requests agree; each is runs of (first id, count)."""
    shared = 0
    for (first, count), (other, others) in zip(old, new, strict=False):
        if first != other:
            break
        shared += min(count, others)
        if count != others:
            break
    return shared


def reduced(session: dict) -> dict:
    turns = []
    runs: list[list[int]] = []
    ended = 0.0
    for request in session["requests"]:
        if request["type"] == "subagent":
            continue
        gap = request.get("think_time", max(0.0, request["t"] - ended))
        ended = request["t"] + request.get("api_time", 0.0)
        shared = min(shared_blocks(runs, request["hash_runs"]) * BLOCK, request["in"])
        turns.append([round(gap, 1), request["in"], max(1, request["out"]), shared])
        runs = request["hash_runs"]
    return {"tools": session["tool_tokens"], "system": session["system_tokens"], "turns": turns}


def main(source: str, target: str) -> None:
    with gzip.open(source, "rt") as lines:
        sessions = [reduced(json.loads(line)) for line in lines]
    text = "".join(json.dumps(session, separators=(",", ":")) + "\n" for session in sessions if session["turns"])
    with open(target, "wb") as file:
        file.write(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
