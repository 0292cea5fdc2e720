"""Prefix reuse under round robin, by this simulator and by an independent one: NVIDIA Dynamo's mocker.

Both play the same recorded sessions: 40 of the packaged ones begin within ten minutes and go on in closed loop, over
four replicas of 450k tokens in blocks of 64 without a host tier. Both reckon time by the mocker's default polynomials,
so that what is compared is caches and scheduling, not hardware. Answers are not reused, as in the recording. Prints a
table in Markdown; exit status 1 when the two are further apart than five points.

    python -m benchmarks.independent PYTHON --seeds 1..3

PYTHON is an interpreter that has ai-dynamo 1.3.1 (`scripts/check-independent` makes one).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from sim.fleet import Fleet, Group
from sim.hardware import CHUNK_TOKENS, Decode, Hardware, Prefill
from sim.machine import NO_SPECULATION
from sim.measure import Measure
from sim.replica import Limits
from sim.workload import Conversation, Recorded, Turn, load_recorded
from sim.world import World

SESSIONS = 40
REPLICAS = 4
BLOCK_TOKENS = 64
BLOCKS = 7_031
"""Of each replica: 450k tokens."""
STARTS_S = 600.0
"""Within which the sessions begin."""
GAP_CAP_S = 300.0
WINDOW_TOKENS = 262_144
"""Sessions with longer prompts are left out."""
POINTS = 0.05
"""How far apart the two may be."""

Session = tuple[float, list[Turn]]
"""When it begins, and its turns."""


def draw(recorded: Sequence[Recorded], seed: int) -> list[Session]:
    """Sessions of that seed."""
    random = Random(seed)
    fit = [session for session in recorded if max(turn[1] for turn in session.turns) <= WINDOW_TOKENS]
    fresh = iter(range(1, 1 << 40))
    return [(random.uniform(0.0, STARTS_S), _turns(session, fresh)) for session in random.sample(fit, SESSIONS)]


def _turns(session: Recorded, fresh: Iterator[int]) -> list[Turn]:
    """Of whole blocks, as only those are reused. What two turns share is in whole blocks, too."""
    held: list[int] = []
    turns = []
    for number, (gap, prompt, output, shared) in enumerate(session.turns):
        held = held[: shared // BLOCK_TOKENS if number else 0]
        held = held + [next(fresh) for _ in range(prompt // BLOCK_TOKENS - len(held))]
        turns.append(Turn(min(gap, GAP_CAP_S) if number else 0.0, held, prompt, output, 1))
    return turns


def reusable(sessions: Sequence[Session]) -> float:
    """Share of all prompt tokens that the turn before had, too: what endless memory in one place would reuse."""
    reused = tokens = 0
    for _, turns in sessions:
        before: frozenset[int] = frozenset()
        for turn in turns:
            reused += BLOCK_TOKENS * sum(page in before for page in turn.pages)
            tokens += turn.prompt_tokens
            before = frozenset(turn.pages)
    return reused / tokens


def polynomials() -> Hardware:
    """The mocker's default times, in ms: prefill 4.21e-7 n^2 + 0.01518 n + 16.5, decode -25.74 p^2 + 54.01 p + 5.74.

    n is the new tokens of a pass, p the share of the KV pool that the batch's contexts take, at most all (perf_model.rs
    of the mocker). A lone prompt of 6,400 tokens has its first token there after 137.42 ms, the sum of both.
    """
    contexts = [4096.0 * i for i in range(65)]
    batches = [float(i) for i in range(41)]

    def step(batch: float, context: float) -> float:
        p = min(1.0, batch * context / (BLOCKS * BLOCK_TOKENS))
        return (-25.74 * p * p + 54.01 * p + 5.74) / 1000

    seconds = [[step(batch, context) for batch in batches] for context in contexts]
    prefill = Prefill(1.650142e-2, 1.518344e-5, 0.0, 2 * 4.209989e-10)
    return Hardware(prefill, Decode(contexts, batches, seconds), NO_SPECULATION)


def ours(sessions: Sequence[Session]) -> float:
    """Share of all prompt tokens that were found cached."""
    limits = Limits(BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS)
    conversations = (
        (start, Conversation(str(i), i.to_bytes(16, "big"), True, iter(turns), 1.0))
        for i, (start, turns) in enumerate(sorted(sessions, key=lambda session: session[0]))
    )
    measure = Measure(0.0, inf)
    measure.keep = True
    fleet = Fleet((Group(REPLICAS, polynomials(), limits),))
    world = World("round_robin", {}, fleet, conversations, Random(0), measure)
    total = sum(len(turns) for _, turns in sessions)
    while sum(served.finished is not None for served in measure.served) < total:
        world.run(world.engine.now + STARTS_S)
    world.close()
    return sum(s.cached_tokens for s in measure.served) / sum(s.prompt_tokens for s in measure.served)


def write(sessions: Sequence[Session], path: Path) -> None:
    """As a Mooncake trace with sessions: milliseconds, and an id for each block, the last and partial one included."""
    last = 1 << 40
    with path.open("w") as trace:
        for name, (start, turns) in enumerate(sessions):
            for number, turn in enumerate(turns):
                blocks = list(turn.pages)
                if turn.prompt_tokens % BLOCK_TOKENS:
                    last += 1
                    blocks.append(last)
                when = {"delay": 1000 * turn.gap_s} if number else {"timestamp": 1000 * start}
                sizes = {"input_length": turn.prompt_tokens, "output_length": turn.output_tokens}
                trace.write(json.dumps({"session_id": str(name), **when, **sizes, "hash_ids": blocks}) + "\n")


def theirs(python: Path, sessions: Sequence[Session]) -> float:
    """The mocker's prefix cache reuse ratio. Its engine of SGLang's kind breaks off when the pool is full (1.3.1)."""
    engine = {
        "engine_type": "vllm",
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks": BLOCKS,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "enable_prefix_caching": True,
    }
    with TemporaryDirectory() as folder:
        trace, report = Path(folder, "trace.jsonl"), Path(folder, "report.json")
        write(sessions, trace)
        command = [str(python), "-m", "dynamo.replay", str(trace), "--report-json", str(report)]
        command += ["--trace-format", "mooncake", "--trace-block-size", str(BLOCK_TOKENS), "--replay-mode", "offline"]
        command += ["--router-mode", "round_robin", "--num-workers", str(REPLICAS)]
        command += ["--extra-engine-args", json.dumps(engine)]
        run = subprocess.run(command, env={**os.environ, "DYN_LOG": "error"}, capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"dynamo.replay failed:\n{run.stderr[-2000:]}")
        return float(json.loads(report.read_text())["prefix_cache_reused_ratio"])


def main() -> None:
    cli = argparse.ArgumentParser(description="Prefix reuse beside an independent simulator.")
    cli.add_argument("python", type=Path, help="interpreter with ai-dynamo 1.3.1")
    cli.add_argument("--seeds", default="1..3", help="first..last (default: %(default)s)")
    args = cli.parse_args()
    first, _, last = args.seeds.partition("..")
    recorded = load_recorded()
    print("| seed | requests | prompt tokens | reusable | reuse here | reuse there | apart |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    for seed in range(int(first), int(last or first) + 1):
        sessions = draw(recorded, seed)
        turns = [turn for _, session in sessions for turn in session]
        here, there = ours(sessions), theirs(args.python, sessions)
        worst = max(worst, abs(here - there))
        tokens = sum(turn.prompt_tokens for turn in turns)
        work = f"{len(turns):,} | {tokens / 1e6:.1f} M | {reusable(sessions):.3f}"
        print(f"| {seed} | {work} | {here:.3f} | {there:.3f} | {100 * (here - there):+.1f} |", flush=True)
    sys.exit(f"more than {100 * POINTS:.0f} points apart" if worst > POINTS else 0)


if __name__ == "__main__":
    main()
