"""What it costs to find out whose request it is: once per request, before it is placed.

    python -m benchmarks.identity

For each shape of body and size, one JSON line per kind of work:

    headers       session from a header (an agent's whole set of headers); the body is not looked at
    fingerprint   a session from a header, then the conversation's fingerprint from the body
    nothing       no header names a session: body rules, then the fingerprint and a key from it
    blocks        as fingerprint, with hashes of the body's blocks
    model         what pools go by, the first member of the body
    model_last    the same behind the messages, as OpenAI's library writes it
    model_within  the same with large members on both sides: the body is read whole

The bodies are conversations of short turns, English and code with their escapes, and 10 KB of system prompt in the
large ones. Microseconds of one process, collector on; the machine is best left alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from router.identity import Identity, IdentityRules, chain, model_of

SIZES_KB = (1, 400)
JSON = b"application/json"
TURN = 'Look at `router/app.py`:\n\n\tdef main() -> None:\n\t\tprint("hello")\n\nand say what it does, step by step. '

HEADERS = {
    "chat": {b"authorization": b"Bearer sk-x", b"x-session-affinity": b"ses_dd8da6311ffeteAPmq8pjb8fci"},
    "messages": {
        b"x-api-key": b"sk-x",
        b"x-claude-code-session-id": b"0aed17fb-d65c-45a2-a998-6289b8a9c753",
        b"x-claude-code-agent-id": b"aa4952d5ffe39fe8d",
    },
    "responses": {
        b"authorization": b"Bearer sk-x",
        b"session-id": b"01a2272e-0654-7191-ade6-4b579e4ea1bf",
        b"thread-id": b"01a2272e-0654-7191-ade6-4b579e4ea1bf",
    },
}


def body(shape: str, size_kb: int) -> bytes:
    """A conversation in that API's shape, of about `size_kb` KB."""
    size = size_kb * 1000
    system = (TURN * 200)[: min(10_000, size // 4)]
    turn = TURN * (16 if size > 100_000 else 1)
    turns = max(1, (size - len(system)) // (len(json.dumps(turn)) + 60))
    said = [("assistant" if i % 2 else "user", turn) for i in range(turns)]
    out: dict[str, Any] = {"model": "m", "stream": True}
    if shape == "chat":
        out["messages"] = [{"role": role, "content": text} for role, text in [("system", system), *said]]
    elif shape == "messages":
        out["messages"] = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said]
        out["system"] = [{"type": "text", "text": system}]
    else:
        out["input"] = [
            {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
            for role, text in [("developer", system), *said]
        ]
    return json.dumps(out).encode()


def look(rules: IdentityRules, headers: dict[bytes, bytes], sent: bytes) -> Identity:
    """What the router does for a request whose conversation the headers do not tell."""
    return rules.from_body(rules.from_headers(headers), sent, JSON, want_fingerprint=True)


def hash_blocks(rules: IdentityRules, headers: dict[bytes, bytes], sent: bytes) -> Identity:
    """What it does for one that visibly continues its session's only conversation."""
    identity = rules.from_headers(headers)
    identity.blocks = chain(sent)
    return identity


def rearranged(sent: bytes, tools: int) -> bytes:
    """The same body with the model behind the messages, and so many tools behind that."""
    out = json.loads(sent)
    model, stream = out.pop("model"), out.pop("stream")
    tool = {"type": "function", "function": {"name": "read", "description": TURN, "parameters": {"model": {}}}}
    return json.dumps(out | {"model": model, "stream": stream} | ({"tools": [tool] * tools} if tools else {})).encode()


def measure(work: Callable[[], object], seconds: float) -> dict[str, float]:
    """Percentiles of the work's time, microseconds."""
    times: list[int] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        before = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - before)
    times.sort()
    return {"p50_us": times[len(times) // 2] / 1000, "p99_us": times[len(times) * 99 // 100] / 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line (default: %(default)s)")
    seconds = parser.parse_args().seconds
    rules = IdentityRules(secret=b"benchmark")
    for shape, headers in HEADERS.items():
        named = {name: value for name, value in headers.items() if name in rules.header_names}
        unnamed = {b"authorization": b"Bearer sk-x"}
        for size_kb in SIZES_KB:
            sent = body(shape, size_kb)

            kinds: dict[str, Callable[[], Identity]] = {
                "headers": partial(rules.from_headers, named),
                "fingerprint": partial(look, rules, named, sent),
                "nothing": partial(look, rules, unnamed, sent),
                "blocks": partial(hash_blocks, rules, named, sent),
            }
            models = {"model": sent, "model_last": rearranged(sent, 0), "model_within": rearranged(sent, 20)}
            for kind, arranged in models.items():
                assert model_of(arranged) == "m"
                found = measure(partial(model_of, arranged), seconds)
                print(json.dumps({"shape": shape, "bytes": len(arranged), "work": kind, **found}))
            for kind, call in kinds.items():
                identity = call()
                assert identity.key is not None
                assert kind in ("headers", "blocks") or identity.fingerprint
                print(json.dumps({"shape": shape, "bytes": len(sent), "work": kind, **measure(call, seconds)}))


if __name__ == "__main__":
    main()
