"""Sessions that were recorded, drawn again and again."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from pathlib import Path
from random import Random

from sim.hardware import Hardware
from sim.workload.chance import geometric, lognormal
from sim.workload.conversation import Conversation, Turn, fingerprint_of, key_of
from sim.workload.forks import NO_FORKS, Forks
from sim.workload.pages import Pages
from sim.workload.patience import PATIENT, Patience
from sim.workload.sessions import GAP_CAP_S, Workload, service


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded session: see sim/data/claude_code_sessions/SOURCE.md."""

    tools: int
    system: int
    turns: tuple[tuple[float, int, int, int], ...]
    """Gap in seconds, prompt tokens, output tokens, prompt tokens shared with the turn before."""


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
        gap_cap_s: float = GAP_CAP_S,
        patience: Patience = PATIENT,
    ) -> None:
        """Sessions with longer prompts than `most_tokens`, the window of Kimi K2, are left out."""
        super().__init__(page_size, seed, gap_cap_s=gap_cap_s, patience=patience)
        self.sessions = [s for s in sessions if max(turn[1] for turn in s.turns) <= most_tokens]
        self.forks = forks
        self.most_tokens = most_tokens
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
        turns = self._turns(name, random, recorded, Pages(self.page_size, index), start)
        return self._conversation(name, key_of(name), turns, random, True)

    def session_seconds(self, hardware: Hardware) -> float:
        total = 0.0
        for session in self.sessions:
            total += self._gaps(session) + 0.5 * len(session.turns)
            for _, prompt, output, shared in session.turns:
                total += service(hardware, prompt - shared, shared, output)
        return total / len(self.sessions)

    def _gaps(self, session: Recorded) -> float:
        return sum(min(turn[0], self.gap_cap_s) for turn in session.turns[1:])

    def _turns(self, name: str, random: Random, recorded: Recorded, pages: Pages, start: int) -> Iterator[Turn]:
        head = recorded.tools + recorded.system
        held = pages.common(recorded.tools, 1 + recorded.tools)
        fingerprint = fingerprint_of(name, 0)
        for turn, (gap, prompt, output, shared) in enumerate(recorded.turns[start:]):
            if turn:
                held = held[: shared // self.page_size]
                if shared < head:
                    fingerprint = fingerprint_of(name, turn)
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
        self, name: str, pages: Pages, held: list[int], tokens: int, recorded: Recorded, fingerprint: int
    ) -> Conversation:
        random = self.random(name)
        if random.random() < self.forks.shared:
            start = list(held)
        else:
            start = pages.common(self.forks.fresh_tokens, 0)
            tokens = self.forks.fresh_tokens + 2_000
            fingerprint = fingerprint_of(name, 0)
        turns = self._fork_turns(random, pages, start, tokens, fingerprint)
        return self._conversation(name, key_of(name.split(".")[0]), turns, random, False)

    def _fork_turns(
        self, random: Random, pages: Pages, held: list[int], tokens: int, fingerprint: int
    ) -> Iterator[Turn]:
        """Log-normal fits of the recorded sub-agents and turns (workloads.md, A1)."""
        for turn in range(geometric(random, self.forks.turns)):
            if tokens > self.most_tokens:  # the model's window: the client gives up
                return
            pages.grow(held, tokens)
            output = max(1, int(lognormal(random, math.exp(5.565), 0.895)))
            gap = min(lognormal(random, 4.0, 1.2), self.gap_cap_s) if turn else random.uniform(0.2, 1.0)
            yield Turn(gap, list(held), tokens, output, fingerprint)
            tokens += output + int(lognormal(random, 2_500.0, 1.2))


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
