"""The simulator beside the emulator: the same sessions over sockets and in virtual time.

Synthetic sessions of coding agents go over HTTP through `warmroute serve` to emulated replicas, each a process. The
journal that the router writes meanwhile is made again call by call (`sim.replay`): every choice must be the same. Then
the simulator's replicas get the requests that the journal placed on them, at its times: what clients saw must be what
they say, within a tenth at p50, p90 and p99 of the time to first token. Beside it, without a limit, stands what the
simulator makes of the same sessions when it places them itself, and of the journal as a trace (`warmroute sim replay`).

    python -m benchmarks.fidelity
    python -m benchmarks.fidelity --sessions 60 --replicas 4 --speed 1

The higher the speed, the larger is the part of sockets and Python in what clients see. Exit status 1 beyond the limits.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from pathlib import Path
from random import Random

import uvloop

from benchmarks import fleet
from benchmarks.conversations import Answered, Session, play
from router.identity import IdentityRules
from sim import journal, traces
from sim.fleet import Fleet, Group
from sim.lines import Row
from sim.machine import DEFAULT_MACHINE, find_machine
from sim.measure import Measure, percentile
from sim.replay import Replayed, replay
from sim.replica import Limits, Replica, Work
from sim.traces import TraceWorkload
from sim.workload import NO_FORKS, Conversation, Rate, Synthetic, SyntheticWorkload, open_arrivals
from sim.world import World

POLICY = "session_affinity"
MACHINE = find_machine(DEFAULT_MACHINE)
PAGE_TOKENS = 64
LIMITS = Limits(MACHINE.kv_tokens, PAGE_TOKENS)
"""Of each replica. The emulated ones have no host tier."""
SESSIONS = Synthetic(
    system_tokens=8_192,
    turns=5,
    first_tokens=16_000,
    first_sigma=0.7,
    first_most=100_000,
    input_tokens=3_000,
    input_sigma=0.8,
    output_tokens=48,
    output_sigma=0.6,
    tool_gap_sigma=1.0,
    human_gap_s=20.0,
    forks=NO_FORKS,
)
"""Shorter than real ones, with short answers, so that some minutes hold many and events of streams cost little. Long
enough that replicas run out of KV memory and evict."""
STARTS_PER_S = 0.25
"""Sessions that begin for each replica, a second."""
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
RUNS = 6
"""Of simulations that place by themselves."""
LIMIT = 0.10
"""How far apart the times to first token may be."""


@dataclass(slots=True)
class Placed:
    """A request of the journal."""

    at: float
    """When the router placed it, seconds of the router's clock."""
    replica: str
    session: str
    turn: int
    work: Work
    """What it is to a replica."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Requests of one run. Times in seconds of the emulated hardware."""

    first_s: Sequence[float]
    """To the first token."""
    whole_s: Sequence[float]
    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, requests: Iterable[tuple[float, float | None, float | None, int, int]], scale: float) -> Seen:
        """Of when each was sent, had its first token, and ended, and its prompt and cached tokens."""
        sent, first, ended, prompt, cached = zip(*requests, strict=True)
        return cls(
            [((at or inf) - since) / scale for at, since in zip(first, sent, strict=True)],
            [((at or inf) - since) / scale for at, since in zip(ended, sent, strict=True)],
            sum(prompt),
            sum(cached),
        )

    def figures(self) -> dict[str, float]:
        first, whole = sorted(self.first_s), sorted(self.whole_s)
        return {
            **{f"TTFT {name}, s": percentile(first, share) for name, share in SHARES.items()},
            **{f"whole answer {name}, s": percentile(whole, share) for name, share in SHARES.items()},
            "hit rate": self.cached_tokens / self.prompt_tokens,
        }


def draw(count: int, replicas: int, scale: float, seed: int = 1) -> list[Session]:
    """So many sessions. `scale` is wall-clock seconds per emulated second."""
    workload = SyntheticWorkload(SESSIONS, PAGE_TOKENS, seed)
    starts = open_arrivals(Rate(STARTS_PER_S * replicas), workload.random("starts"), inf)
    sessions = []
    for at, index, _ in islice(starts, count):
        conversation = workload.session(index, initial=False)
        turns = [replace(turn, gap_s=turn.gap_s * scale) for turn in conversation.turns]
        sessions.append(Session(f"session {conversation.name}", at * scale, turns))
    return sessions


# In virtual time


def placed(path: Path, sessions: Sequence[Session]) -> list[Placed]:
    """The journal's requests, in order. Raises ValueError when one was refused, sent twice, or is of no session."""
    keys = {key_of(session.name).hex(): session for session in sessions}
    turns = dict.fromkeys(keys, 0)
    ids: dict[int, str] = {}
    found = []
    for row in journal.calls(path):
        call = row.text("call")
        for join in row.parts("replicas") if call == "journal" else [row] if call == "join" else []:
            ids[join.count("replica")] = join.text("id")
        if call == "acquire":
            key = _plain_key(row, keys)
            session, number = keys[key], turns[key]
            turn = session.turns[number]
            work = Work(turn.pages, turn.prompt_tokens, turn.output_tokens)
            found.append(Placed(row.number("at"), ids[row.count("replica")], session.name, number, work))
            turns[key] += 1
    return found


def _plain_key(row: Row, keys: dict[str, Session]) -> str:
    """The key of a request that found its replica at once."""
    for trouble in ("refused", "failed"):
        if trouble in row.values:
            raise row.error(trouble, row.values[trouble], "run it again: there is nothing to compare with this request")
    if (key := row.text("key")) not in keys:
        raise row.error("key", key, "play these sessions alone")
    return key


def key_of(session: str) -> bytes:
    """The affinity key that the router makes of a session's name."""
    return IdentityRules().digest_of(session)


def force(requests: Sequence[Placed], scale: float) -> dict[str, Replica]:
    """Put each request where and when the journal says. Returns the replicas, when all is done.

    Their hardware is slowed by the scale, so that the router's clock is theirs.
    """
    hardware = MACHINE.hardware.slowed(scale)
    replicas = {name: Replica(hardware, LIMITS, bulk=True) for name in sorted({each.replica for each in requests})}
    for each in requests:
        replica = replicas[each.replica]
        replica.advance(each.at)
        replica.submit(each.work, each.at)
    for replica in replicas.values():
        replica.advance(inf)
    return replicas


def free(conversations: Iterable[tuple[float, Conversation]], replicas: int, scale: float, seed: int = 0) -> Seen:
    """A whole simulation, which places by itself. Times in wall-clock seconds, as those of reports are not scaled.

    The seed is of the moments at which load reports are taken: all the chance there is.
    """
    played = list(conversations)
    measure = Measure(0.0, inf)
    measure.keep = True
    group = Group(replicas, MACHINE.hardware.slowed(scale), LIMITS)
    world = World(POLICY, {}, Fleet((group,)), iter(played), Random(f"reports {seed}"), measure)
    world.run(played[-1][0])
    while world.live:
        world.run(world.engine.now + 1.0)
    return Seen.of(
        ((s.arrived, s.first_token, s.finished, s.prompt_tokens, s.cached_tokens) for s in measure.served), scale
    )


def closed(sessions: Sequence[Session]) -> list[tuple[float, Conversation]]:
    """The sessions, each going on when it was answered."""
    return [
        (each.start_s, Conversation(each.name, key_of(each.name), True, iter(each.turns), 1.0)) for each in sessions
    ]


# Side by side


def markdown(real: Seen, simulated: Seen, own: Sequence[Seen], traced: Seen) -> str:
    head = f"| | over sockets | simulated, placed by the journal | by itself, {len(own)} runs | journal as a trace |"
    lines = [head, "|---|---:|---:|---:|---:|"]
    runs, forced, trace = [run.figures() for run in own], simulated.figures(), traced.figures()
    for name, value in real.figures().items():
        ours, lowest, highest = forced[name], min(run[name] for run in runs), max(run[name] for run in runs)
        beside = f"{ours:.3f} ({ours / value - 1:+.1%}) | {lowest:.3f} to {highest:.3f} | {trace[name]:.3f}"
        lines.append(f"| {name} | {value:.3f} | {beside} |")
    return "\n".join(lines)


def apart(real: Seen, simulated: Seen) -> float:
    """The largest relative difference of the percentiles of the time to first token."""
    ours, theirs = simulated.figures(), real.figures()
    return max(abs(ours[f"TTFT {name}, s"] / theirs[f"TTFT {name}, s"] - 1) for name in SHARES)


def compare(sessions: Sequence[Session], replicas: int, scale: float, folder: Path) -> bool:
    """Run both and print what they say. Whether it is the same, within the limit."""
    print(f"Load average before: {os.getloadavg()[0]:.2f}", flush=True)
    begin = time.monotonic()
    options = ["--hardware", DEFAULT_MACHINE, "--page-size", str(PAGE_TOKENS), "--time-scale", str(scale)]
    with fleet.emulators(replicas, *options) as urls, fleet.router(urls, POLICY, folder) as url:
        answers = uvloop.run(play(url, sessions, SESSIONS.system_tokens))
    print(f"Load average after {time.monotonic() - begin:.0f} s: {os.getloadavg()[0]:.2f}\n", flush=True)
    path = folder / "journal.jsonl"
    again, requests = replay(path), placed(path, sessions)
    force(requests, scale)
    real = Seen.of(((a.sent, a.first_token, a.ended, a.prompt_tokens, a.cached_tokens) for a in answers), scale)
    works = [each.work for each in requests]
    simulated = Seen.of(
        ((w.arrived, w.first_token, w.finished, w.prompt_tokens, w.cached_tokens) for w in works), scale
    )
    own = [free(closed(sessions), replicas, scale, seed) for seed in range(RUNS)]
    traced = free(TraceWorkload(traces.load(path), PAGE_TOKENS, 1).replay("open"), replicas, scale)
    print(f"{len(sessions)} sessions, {len(answers)} requests, {replicas} replicas, speed {1 / scale:g}\n")
    print(markdown(real, simulated, own, traced), end="\n\n")
    print(_choices(again))
    print(_each(answers, requests))
    return not again.different and again.whole and not again.lost and apart(real, simulated) <= LIMIT


def _choices(again: Replayed) -> str:
    return "\n".join(
        [f"Choices made again from the journal: {again.choices}, of which {again.different} differ", *again.differences]
    )


def _each(answers: Sequence[Answered], requests: Sequence[Placed]) -> str:
    """Request by request."""
    by_turn = {(each.session, each.turn): each for each in answers}
    pairs = [(by_turn[each.session, each.turn], each.work) for each in requests]
    late = sorted(a.first_token - a.sent - ((work.first_token or inf) - work.arrived) for a, work in pairs)
    low, middle, high = (1000 * percentile(late, share) for share in (0.01, 0.5, 0.99))
    same = sum(answered.cached_tokens == work.cached_tokens for answered, work in pairs)
    return (
        f"First tokens come later over sockets by {middle:.1f} ms of wall-clock time (p1 {low:.1f}, p99 {high:.1f})\n"
        f"Cached tokens are the same in {same} of {len(pairs)} requests"
    )


def main() -> None:
    cli = argparse.ArgumentParser(description="The simulator beside the emulator, on the same sessions.")
    cli.add_argument("--sessions", type=int, default=200, help="default: %(default)s")
    cli.add_argument("--replicas", type=int, default=8, help="default: %(default)s")
    cli.add_argument("--speed", type=float, default=2.0, help="emulated seconds per second (default: %(default)s)")
    args = cli.parse_args()
    for name, value in vars(args).items():
        if not value > 0:
            cli.error(f"--{name} must be more than 0, not {value}")
    scale = 1.0 / args.speed
    with tempfile.TemporaryDirectory(prefix="warmroute-fidelity-") as folder:
        good = compare(draw(args.sessions, args.replicas, scale), args.replicas, scale, Path(folder))
    sys.exit(0 if good else "The simulator and the emulator are too far apart.")


if __name__ == "__main__":
    main()
