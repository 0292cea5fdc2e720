"""Sessions of coding agents, as what they send and when.

A session is a tree of conversations: a main thread, and forks that it waits for. A conversation is a sequence of
turns, each a request that is sent some time after the answer before it (closed loop). All chance of a session comes
from a stream of its own, and that of a fork from one of the fork's, so that every policy meets the same sessions.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import resources
from itertools import accumulate, count, islice
from pathlib import Path
from random import Random

from xxhash import xxh3_64_intdigest

from sim.hardware import Hardware

NOMINAL_BATCH = 3
"""Running requests at which a session's length is reckoned when arrivals are set to reach a number of live sessions."""


@dataclass(slots=True)
class Turn:
    """One request."""

    gap_s: float
    """From the end of what it waits for (the answer before, the forks of that turn) until it is sent."""
    pages: Sequence[int]
    """Chained hashes of the KV pages that can be reused later: the prompt's, and the answer's if that is kept."""
    prompt_tokens: int
    output_tokens: int
    fingerprint: int
    """Of the conversation's beginning; a shared-prefix fork has its parent's."""
    forks: tuple[Conversation, ...] = ()
    """Started by its answer."""


@dataclass(slots=True, eq=False)
class Conversation:
    """A linear thread of requests under one affinity key."""

    name: str
    """Unique in a run, and the same for every policy."""
    key: bytes
    main: bool
    turns: Iterator[Turn]
    estimate: float
    """What the router takes a token for: its guess from the body's bytes over the truth. The same all session long."""


@dataclass(frozen=True, slots=True)
class Forks:
    """Sub-agents that a turn may start. Their requests carry the session's key."""

    probability: float = 0.06
    """Of a turn of the main thread to start some."""
    fewest: int = 2
    most: int = 6
    shared: float = 0.5
    """Share of those that begin with the parent's whole context; the others have only the system prompt."""
    turns: float = 7.0
    """Mean number of requests, geometric."""
    fresh_tokens: int = 8_000
    """Of a fresh one's first request, beyond the system prompt."""


NO_FORKS = Forks(probability=0.0)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Parameters of synthetic sessions; the defaults are of the design study (placement.md, section 3)."""

    system_tokens: int = 12_000
    """System prompt and tools, common to all sessions."""
    turns: float = 28.0
    """Mean number of requests, geometric."""
    first_tokens: float = 30_000.0
    """Median of the context a session begins with, log-normal."""
    first_sigma: float = 0.8
    first_most: int = 150_000
    input_tokens: float = 1_500.0
    """Median of what a turn adds, log-normal."""
    input_sigma: float = 1.1
    output_tokens: float = 380.0
    output_sigma: float = 0.75
    tool_gap_s: float = 3.0
    tool_gap_sigma: float = 1.2
    human_share: float = 0.07
    """Of the gaps that a human makes."""
    human_gap_s: float = 60.0
    human_gap_sigma: float = 0.9
    compact_tokens: int = 180_000
    """A longer context is compacted."""
    compacted_tokens: int = 15_000
    """What is left of it, beyond the system prompt."""
    heavy_share: float = 0.0
    """Of sessions that begin with 110,000 to 160,000 tokens and last twice as long."""
    forks: Forks = field(default_factory=Forks)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded session: see sim/data/claude_code_sessions/SOURCE.md."""

    tools: int
    system: int
    turns: tuple[tuple[float, int, int, int], ...]
    """Gap in seconds, prompt tokens, output tokens, prompt tokens shared with the turn before."""


class _Pages:
    """Makes the names of KV pages. A new page gets a new name, so names are chained hashes without any hashing."""

    def __init__(self, page_size: int, session: int) -> None:
        self.size = page_size
        self._fresh = count((session + 1) << 32)

    def grow(self, pages: list[int], tokens: int) -> None:
        """Adds pages until they cover the whole pages of `tokens`."""
        missing = tokens // self.size - len(pages)
        if missing > 0:
            pages += islice(self._fresh, missing)

    def common(self, tokens: int, kind: int) -> list[int]:
        """The pages of a beginning that all sessions of a kind share."""
        first = 1 + (kind << 12)
        return list(range(first, first + tokens // self.size))


class Workload:
    """Makes sessions. `page_size` in tokens; `seed` of all chance."""

    def __init__(self, page_size: int, seed: int, *, estimate_sigma: float = 0.1, gap_cap_s: float = 300.0) -> None:
        self.page_size = page_size
        self.seed = seed
        self.estimate_sigma = estimate_sigma
        self.gap_cap_s = gap_cap_s

    def random(self, name: str) -> Random:
        """The stream of that name."""
        return Random(f"{self.seed}/{name}")

    def session(self, index: int, *, initial: bool) -> Conversation:
        """The main thread of a session; one that is `initial` has a part of its life behind it."""
        raise NotImplementedError

    def session_seconds(self, hardware: Hardware) -> float:
        """Mean length of a session on a replica that is neither idle nor overloaded."""
        raise NotImplementedError

    def _conversation(self, name: str, key: bytes, turns: Iterator[Turn], random: Random, main: bool) -> Conversation:
        return Conversation(name, key, main, turns, math.exp(random.gauss(0.0, self.estimate_sigma)))


class SyntheticWorkload(Workload):
    """Sessions drawn from `Synthetic`."""

    def __init__(self, parameters: Synthetic, page_size: int, seed: int) -> None:
        super().__init__(page_size, seed)
        self.parameters = parameters

    def session(self, index: int, *, initial: bool) -> Conversation:
        name = str(index)
        random = self.random(name)
        return self._conversation(name, _key(name), self._main(name, random, index, initial), random, True)

    def session_seconds(self, hardware: Hardware) -> float:
        probe = SyntheticWorkload(self.parameters, self.page_size, 0)
        lengths = [_nominal(probe.session(i, initial=False), hardware) for i in range(300)]
        return sum(lengths) / len(lengths)

    def _main(self, name: str, random: Random, index: int, initial: bool) -> Iterator[Turn]:
        p = self.parameters
        pages = _Pages(self.page_size, index)
        heavy = random.random() < p.heavy_share
        turns = _geometric(random, p.turns * (2 if heavy else 1))
        first = random.uniform(110_000, 160_000) if heavy else _lognormal(random, p.first_tokens, p.first_sigma)
        tokens = p.system_tokens + int(min(first, p.first_most if not heavy else first))
        if initial:
            tokens += int(random.random() * p.turns * 2_000)
        prefix = pages.common(p.system_tokens, 0)
        return self._turns(name, random, pages, prefix, tokens, turns, p.forks, _fingerprint(name, 0))

    def _turns(
        self,
        name: str,
        random: Random,
        pages: _Pages,
        held: list[int],
        tokens: int,
        turns: int,
        forks: Forks,
        fingerprint: int,
    ) -> Iterator[Turn]:
        p = self.parameters
        gap = 0.0
        for turn in range(turns):
            if tokens > p.compact_tokens:
                tokens = p.system_tokens + p.compacted_tokens
                held = pages.common(p.system_tokens, 0)
                fingerprint = _fingerprint(name, turn)
            output = max(1, int(_lognormal(random, p.output_tokens, p.output_sigma)))
            whole = tokens + output - 1  # the last token's KV is not computed before the next turn
            pages.grow(held, whole)
            children: tuple[Conversation, ...] = ()
            if random.random() < forks.probability:
                branches = random.randint(forks.fewest, forks.most)
                children = tuple(
                    self._fork(f"{name}.{turn}.{child}", pages, held, tokens + output, fingerprint)
                    for child in range(branches)
                )
            yield Turn(gap, list(held), tokens, output, fingerprint, children)
            tokens += output + max(1, int(_lognormal(random, p.input_tokens, p.input_sigma)))
            if random.random() < p.human_share:
                gap = min(_lognormal(random, p.human_gap_s, p.human_gap_sigma), self.gap_cap_s)
            else:
                gap = min(_lognormal(random, p.tool_gap_s, p.tool_gap_sigma), self.gap_cap_s)

    def _fork(self, name: str, pages: _Pages, held: list[int], tokens: int, fingerprint: int) -> Conversation:
        p = self.parameters
        random = self.random(name)
        forks = p.forks
        turns = _geometric(random, forks.turns)
        if random.random() < forks.shared:
            start = list(held)
            begin = tokens + max(1, int(_lognormal(random, p.input_tokens, p.input_sigma)))
        else:
            start = pages.common(p.system_tokens, 0)
            begin = p.system_tokens + forks.fresh_tokens
            fingerprint = _fingerprint(name, 0)
        made = self._turns(name, random, pages, start, begin, turns, NO_FORKS, fingerprint)
        return self._conversation(name, _key(name.split(".")[0]), made, random, False)


class RecordedWorkload(Workload):
    """Recorded sessions, each used as often as it is drawn; block ids of different sessions never agree.

    What the tools take at a session's beginning is shared by sessions with tools of the same size. Answers are not
    reused, as in the recording. A session that is there from the start is drawn by length and begun anywhere.
    """

    def __init__(
        self,
        sessions: Sequence[Recorded],
        page_size: int,
        seed: int,
        *,
        forks: Forks = NO_FORKS,
        most_tokens: int = 262_144,
    ) -> None:
        """Sessions with longer prompts than `most_tokens`, the window of Kimi K2, are left out."""
        super().__init__(page_size, seed)
        self.sessions = [s for s in sessions if max(turn[1] for turn in s.turns) <= most_tokens]
        self.forks = forks
        self._by_length = list(accumulate(self._gaps(s) + 8.0 * len(s.turns) for s in self.sessions))

    def session(self, index: int, *, initial: bool) -> Conversation:
        name = str(index)
        random = self.random(name)
        start = 0
        if initial:
            recorded = random.choices(self.sessions, cum_weights=self._by_length)[0]
            start = random.randrange(len(recorded.turns))
        else:
            recorded = random.choice(self.sessions)
        turns = self._turns(name, random, recorded, _Pages(self.page_size, index), start)
        return self._conversation(name, _key(name), turns, random, True)

    def session_seconds(self, hardware: Hardware) -> float:
        total = 0.0
        for session in self.sessions:
            total += self._gaps(session) + 0.5 * len(session.turns)
            for _, prompt, output, shared in session.turns:
                total += _service(hardware, prompt - shared, shared, output)
        return total / len(self.sessions)

    def _gaps(self, session: Recorded) -> float:
        return sum(min(turn[0], self.gap_cap_s) for turn in session.turns[1:])

    def _turns(self, name: str, random: Random, recorded: Recorded, pages: _Pages, start: int) -> Iterator[Turn]:
        head = recorded.tools + recorded.system
        held = pages.common(recorded.tools, 1 + recorded.tools)
        fingerprint = _fingerprint(name, 0)
        for turn, (gap, prompt, output, shared) in enumerate(recorded.turns[start:]):
            if turn:
                held = held[: shared // self.page_size]
                if shared < head:
                    fingerprint = _fingerprint(name, turn)
            held = held[: prompt // self.page_size]
            pages.grow(held, prompt)
            children: tuple[Conversation, ...] = ()
            if self.forks.probability and random.random() < self.forks.probability:
                children = tuple(
                    self._fork(f"{name}.{turn}.{child}", pages, held, prompt + output, recorded, fingerprint)
                    for child in range(random.randint(self.forks.fewest, self.forks.most))
                )
            pause = min(gap, self.gap_cap_s) + random.random() if turn else 0.0
            yield Turn(pause, list(held), prompt, output, fingerprint, children)

    def _fork(
        self, name: str, pages: _Pages, held: list[int], tokens: int, recorded: Recorded, fingerprint: int
    ) -> Conversation:
        random = self.random(name)
        if random.random() < self.forks.shared:
            start = list(held)
        else:
            start = pages.common(self.forks.fresh_tokens, 0)
            tokens = self.forks.fresh_tokens + 2_000
            fingerprint = _fingerprint(name, 0)
        turns = self._fork_turns(random, pages, start, tokens, fingerprint)
        return self._conversation(name, _key(name.split(".")[0]), turns, random, False)

    def _fork_turns(
        self, random: Random, pages: _Pages, held: list[int], tokens: int, fingerprint: int
    ) -> Iterator[Turn]:
        """Log-normal fits of the recorded sub-agents and turns (workloads.md, A1)."""
        for turn in range(_geometric(random, self.forks.turns)):
            pages.grow(held, tokens)
            output = max(1, int(_lognormal(random, math.exp(5.565), 0.895)))
            gap = min(_lognormal(random, 4.0, 1.2), self.gap_cap_s) if turn else random.uniform(0.2, 1.0)
            yield Turn(gap, list(held), tokens, output, fingerprint)
            tokens += output + int(_lognormal(random, 2_500.0, 1.2))


@dataclass(frozen=True, slots=True)
class Population:
    """How sessions come: so many from the start, then as many as leave on average.

    `burst_share` of the sessions that come later do so within five seconds, `burst_size` at a time.
    """

    live: int
    session_seconds: float
    """Mean length of a session; infinite when none ends, so that none follows."""
    spread_s: float = 300.0
    """Over how long those of the start begin."""
    burst_share: float = 0.3
    burst_size: int = 9


def arrivals(population: Population, random: Random, until: float) -> Iterator[tuple[float, int, bool]]:
    """(time, index of the session, whether it is one of the start), in order of time."""
    times = [(random.uniform(0.0, population.spread_s), True) for _ in range(population.live)]
    rate = population.live / population.session_seconds or 1e-300
    for share, size, width in (
        (1 - population.burst_share, 1, 0.0),
        (population.burst_share, population.burst_size, 5.0),
    ):
        time = 0.0
        while share > 0:
            time += random.expovariate(rate * share / size)
            if time >= until:
                break
            times += [(time + random.uniform(0.0, width), False) for _ in range(size)]
    times.sort()
    for index, (time, initial) in enumerate(times):
        yield time, index, initial


def load_recorded(path: Path | None = None) -> list[Recorded]:
    """The sessions of a reduced file, by default the packaged one. Raises ValueError for a line that is none."""
    if path is None:
        packed = resources.files("sim").joinpath("data", "claude_code_sessions", "sessions.jsonl.gz").read_bytes()
    else:
        packed = path.read_bytes()
    sessions = []
    for number, line in enumerate(gzip.decompress(packed).decode().splitlines(), 1):
        try:
            given = json.loads(line)
            turns = tuple((float(gap), int(i), int(o), int(shared)) for gap, i, o, shared in given["turns"])
            sessions.append(Recorded(int(given["tools"]), int(given["system"]), turns))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path or 'sessions.jsonl.gz'}, line {number}: no session: {error}") from None
    return sessions


def _service(hardware: Hardware, new: int, resident: int, output: int) -> float:
    context = resident + new
    return hardware.prefill.seconds(new, resident) + output * hardware.token_seconds(NOMINAL_BATCH, context)


def _nominal(conversation: Conversation, hardware: Hardware) -> float:
    total, before = 0.0, 0
    for turn in conversation.turns:
        resident = min(before, turn.prompt_tokens)
        total += turn.gap_s + _service(hardware, turn.prompt_tokens - resident, resident, turn.output_tokens)
        total += max((_nominal(fork, hardware) for fork in turn.forks), default=0.0)
        before = turn.prompt_tokens
    return total


def _lognormal(random: Random, median: float, sigma: float) -> float:
    return random.lognormvariate(math.log(median), sigma)


def _geometric(random: Random, mean: float) -> int:
    """At least 1."""
    return 1 + int(math.log(1.0 - random.random()) / math.log(1.0 - 1.0 / mean)) if mean > 1 else 1


def _key(session: str) -> bytes:
    return blake2b(session.encode(), digest_size=16).digest()


def _fingerprint(name: str, turn: int) -> int:
    """Not 0, which means unknown; equal in every run."""
    return xxh3_64_intdigest(f"{name}/{turn}".encode()) or 1
