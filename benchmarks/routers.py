"""Several routers with one memory: what sessions see of it.

The sessions of a trace of coding agents, each turn through a router drawn anew, as behind a balancer that knows
nothing of sessions. They meet emulated replicas; prompts agree as far as the trace's blocks do. Prints a JSON line for
each number of routers: `hit_rate` (of prompt tokens, as the replicas count them), `ttft_p50_s` and `ttft_p99_s` (of the
emulated hardware), `failed`, and `moved` (turns that did not go where the turn before was). `--alone` adds lines of
routers that share nothing. `--outage` stops the store's process for 5 seconds in the middle; `recovered_s` is how long
it then took until every router was in touch with it and had told all it knew. `store_ops_per_s` and `store_mib` are
what the store was asked for, on average, and the memory that it took, by its own INFO. What sharing costs a router is
measured by `benchmarks.store_cost`.

    python -m benchmarks.routers                                # three sessions of an excerpt
    python -m benchmarks.routers --trace sessions.jsonl.gz --outage
    python -m benchmarks.routers --routers 2

It needs a Redis or Valkey as the tests do (`tests.store.servers`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

import httpx
import uvloop

from benchmarks import fleet, processes, store_cost
from sim import traces
from sim.emulator.tokens import UNIT
from sim.traces import Session, Step
from tests.store.servers import Server

TRACE = Path(__file__).parent.parent / "tests/sim/data/claude_code.jsonl"
MOST_TOKENS = 100_000
"""Sessions are cut before a longer prompt: the client, too, wants a core."""
GAP_CAP_S = 30.0
"""Of the time between two turns, seconds of the emulated hardware."""
SPREAD_S = 60.0
"""Over which sessions begin, likewise."""
FIRST_BLOCKS, MESSAGE_BLOCKS = 4, 64
"""Of a trace's blocks: in the user's first message, and in each after it."""
OUTAGE_S = 5.0


@dataclass(slots=True)
class Seen:
    """Of one run."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    failed: int = 0
    moved: int = 0


def sessions_of(path: Path, most: int, turns: int) -> list[Session]:
    """So many, evenly taken, each with so many turns at most. Raises ValueError when the trace has none that fits."""
    found = []
    for session in traces.load(path).sessions:
        short = [step for step in session.steps[:turns] if step.prompt_tokens <= MOST_TOKENS]
        if len(short) > 1:
            found.append(Session(session.name, tuple(short)))
    if not found:
        raise ValueError(f"{path} has no session of two prompts below {MOST_TOKENS:,} tokens: give another trace")
    return found[:: max(1, len(found) // most)][:most]


@cache
def _block(name: int, tokens: int) -> str:
    return Random(name).randbytes(tokens * UNIT // 2).hex()


def messages(session: str, turn: int, step: Step, block_tokens: int) -> list[dict[str, str]]:
    """A conversation that agrees with others as far as their blocks do, and ends with what is of this turn alone.

    As an agent's: a system prompt, the user's first message, and then what only grows.
    """
    system, *parts = step.blocks if len(step.blocks) > 1 else ((), *step.blocks)
    names = [name for part in parts for name in part]
    first, later = names[:FIRST_BLOCKS], names[FIRST_BLOCKS:]
    told = [("system", list(system)), ("user", first)]
    for number, at in enumerate(range(0, len(later), MESSAGE_BLOCKS)):
        told.append((("assistant", "user")[number % 2], later[at : at + MESSAGE_BLOCKS]))
    written = [
        {"role": role, "content": "".join(_block(name, block_tokens) for name in blocks)}
        for role, blocks in told
        if blocks
    ]
    rest = step.prompt_tokens * UNIT - sum(len(each["content"]) for each in written)
    return [*written, {"role": "user", "content": Random(f"{session} {turn}").randbytes(max(UNIT, rest) // 2).hex()}]


async def play(urls: Sequence[str], sessions: Sequence[Session], block_tokens: int, scale: float) -> Seen:
    """All sessions, each at its own pace. `scale` is wall-clock seconds for each of the emulated hardware."""
    seen = Seen()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:

        async def have(number: int, session: Session) -> None:
            chance = Random(session.name)
            home = ""
            await asyncio.sleep(SPREAD_S * scale * number / len(sessions))
            for turn, step in enumerate(session.steps):
                await asyncio.sleep(min(step.gap_s, GAP_CAP_S) * scale)
                told = messages(session.name, turn, step, block_tokens)
                try:
                    replica = await _ask(client, chance.choice(urls), session.name, told, step, seen, scale)
                except (httpx.HTTPError, ValueError) as error:
                    print(f"{session.name}, turn {turn}: {error!r}", file=sys.stderr)
                    seen.failed += 1
                    continue
                seen.moved += home not in ("", replica)
                home = replica

        await asyncio.gather(*(have(number, session) for number, session in enumerate(sessions)))
    return seen


async def _ask(
    client: httpx.AsyncClient,
    url: str,
    session: str,
    told: list[dict[str, str]],
    step: Step,
    seen: Seen,
    scale: float,
) -> str:
    body = {"model": "emulated", "stream": True, "max_tokens": max(1, step.output_tokens), "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}, "messages": told}
    began, first, usage, done = time.monotonic(), 0.0, None, False
    headers = {"x-session-affinity": session}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line:
                continue
            first = first or time.monotonic()
            done = line == "data: [DONE]"
            if '"usage":{' in line:
                usage = json.loads(line.removeprefix("data: "))["usage"]
    if not done or usage is None:
        raise ValueError("the stream did not end well")
    seen.ttft_s.append((first - began) / scale)
    seen.prompt_tokens += usage["prompt_tokens"]
    seen.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    return answer.headers["x-warmroute-replica"]


async def interrupted(server: Server, started: Sequence[fleet.Router], after_s: float) -> float:
    """Stop the store's process for a while. Seconds until all routers are over it."""
    await asyncio.sleep(after_s)
    server.pause()
    try:
        await asyncio.sleep(OUTAGE_S)
    finally:
        server.resume()
    back = time.monotonic()
    end = back + processes.START_S
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        for each in started:
            while True:
                store = (await client.get(f"{each.admin_url}/overview")).raise_for_status().json()["store"]
                if store["up"] and not store["untold"]:
                    break
                if time.monotonic() > end:
                    raise SystemExit(f"{each.admin_url} is not over the outage after {processes.START_S:g} s: {store}")
                await asyncio.sleep(fleet.POLL_S)
    return time.monotonic() - back


def compare(args: argparse.Namespace, server: Server, folder: Path) -> None:
    """Print a line for each number of routers."""
    sessions = sessions_of(args.trace, args.sessions, args.turns)
    block_tokens = traces.load(args.trace).block_tokens
    scale = 1.0 / args.speed
    runs = [(number, alone) for number in args.routers for alone in (False, True)[: 1 + (args.alone and number > 1)]]
    for number, alone in runs:
        options = ["--time-scale", str(scale), "--page-size", "16"]
        server.ask("FLUSHALL")
        store = "" if alone else server.url
        with (
            fleet.emulators(args.replicas, *options) as replicas,
            fleet.routers(number, replicas, store, folder) as started,
        ):

            async def all_of_it(
                started: Sequence[fleet.Router] = started, outage: bool = args.outage and not alone
            ) -> tuple[Seen, float | None]:
                playing = play([each.url for each in started], sessions, block_tokens, scale)
                if not outage:
                    return await playing, None
                return await asyncio.gather(playing, interrupted(server, started, SPREAD_S * scale * 0.75))

            began, before = time.monotonic(), store_cost.info(server)
            seen, recovered_s = uvloop.run(all_of_it())
            wall_s, after = time.monotonic() - began, store_cost.info(server)
        ordered = sorted(seen.ttft_s)
        row = {
            "routers": number,
            "shared": not alone,
            "outage_s": 0 if recovered_s is None else OUTAGE_S,
            "recovered_s": recovered_s and round(recovered_s, 1),
            "sessions": len(sessions),
            "requests": len(ordered) + seen.failed,
            "hit_rate": round(seen.cached_tokens / max(1, seen.prompt_tokens), 4),
            "ttft_p50_s": round(statistics.median(ordered), 3),
            "ttft_p99_s": round(ordered[int(0.99 * (len(ordered) - 1))], 3),
            "failed": seen.failed,
            "moved": seen.moved,
            "store_ops_per_s": round((after.commands - before.commands) / wall_s, 1),
            "store_mib": round((after.bytes - before.bytes) / 2**20, 2),
            "wall_s": round(wall_s, 1),
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    cli = argparse.ArgumentParser(description="Several routers with one memory.")
    numbers = [1, 2, 4]
    cli.add_argument("--routers", type=lambda text: [int(n) for n in text.split(",")], default=numbers)
    cli.add_argument("--trace", type=Path, default=TRACE, help="any that `warmroute sim` plays; default: an excerpt")
    cli.add_argument("--sessions", type=int, default=48, help="at most so many of it (default: %(default)s)")
    cli.add_argument("--turns", type=int, default=8, help="at most, of each (default: %(default)s)")
    cli.add_argument("--replicas", type=int, default=4, help="default: %(default)s")
    cli.add_argument("--speed", type=float, default=5.0, help="emulated seconds per second (default: %(default)s)")
    cli.add_argument("--outage", action="store_true", help=f"the store stands still for {OUTAGE_S:g} s in the middle")
    cli.add_argument("--alone", action="store_true", help="also routers that share nothing")
    args = cli.parse_args()
    with store_cost.started() as server, tempfile.TemporaryDirectory(prefix="warmroute-routers-") as folder:
        compare(args, server, Path(folder))


if __name__ == "__main__":
    main()
