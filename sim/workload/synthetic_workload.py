"""Makes sessions up from distributions."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from sim.hardware import Hardware
from sim.workload.chance import geometric, lognormal
from sim.workload.conversation import Conversation, Turn, fingerprint_of, key_of
from sim.workload.forks import NO_FORKS, Forks
from sim.workload.pages import Pages
from sim.workload.patience import PATIENT, Patience
from sim.workload.sessions import GAP_CAP_S, Workload, nominal
from sim.workload.synthetic import Synthetic

MOST_TOKENS = 10_000_000
"""Of an answer: more than any replica holds, which is then told."""


class SyntheticWorkload(Workload):
    """Sessions drawn from `Synthetic`."""

    def __init__(
        self,
        parameters: Synthetic,
        page_size: int,
        seed: int,
        *,
        gap_cap_s: float = GAP_CAP_S,
        patience: Patience = PATIENT,
    ) -> None:
        super().__init__(page_size, seed, gap_cap_s=gap_cap_s, patience=patience)
        self.parameters = parameters

    def session(self, index: int, *, initial: bool) -> Conversation:
        name = str(index)
        random = self.random(name)
        return self._conversation(name, key_of(name), self._main(name, random, index, initial), random, True)

    def session_seconds(self, hardware: Hardware) -> float:
        probe = SyntheticWorkload(self.parameters, self.page_size, 0, gap_cap_s=self.gap_cap_s)
        lengths = [nominal(probe.session(i, initial=False), hardware) for i in range(300)]
        return sum(lengths) / len(lengths)

    def _main(self, name: str, random: Random, index: int, initial: bool) -> Iterator[Turn]:
        p = self.parameters
        pages = Pages(self.page_size, index)
        heavy = random.random() < p.heavy_share
        turns = geometric(random, p.turns * (2 if heavy else 1))
        first = random.uniform(110_000, 160_000) if heavy else lognormal(random, p.first_tokens, p.first_sigma)
        tokens = p.system_tokens + int(min(first, p.first_most if not heavy else first))
        if initial:
            tokens += int(random.random() * p.turns * 2_000)
        prefix = pages.common(p.system_tokens, 0)
        return self._turns(name, random, pages, prefix, tokens, turns, p.forks, fingerprint_of(name, 0))

    def _turns(
        self,
        name: str,
        random: Random,
        pages: Pages,
        held: list[int],
        tokens: int,
        turns: int,
        forks: Forks,
        fingerprint: int,
    ) -> Iterator[Turn]:
        p = self.parameters
        gap = 0.0
        breaks = self.random(f"{name}/breaks") if p.breaks.share else None  # so that all else stays as it is without
        for turn in range(turns):
            if tokens > p.compact_tokens:
                tokens = p.system_tokens + p.compacted_tokens
                held = pages.common(p.system_tokens, 0)
                fingerprint = fingerprint_of(name, turn)
            if breaks is not None and turn and breaks.random() < p.breaks.share:
                kept = p.system_tokens
                if breaks.random() < p.breaks.head:
                    fingerprint = fingerprint_of(name, turn)
                else:
                    kept = breaks.randint(kept, max(kept, tokens))
                held = held[: kept // self.page_size]
            output = max(1, int(min(lognormal(random, p.output_tokens, p.output_sigma), MOST_TOKENS)))
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
            tokens += output + max(1, int(lognormal(random, p.input_tokens, p.input_sigma)))
            if random.random() < p.human_share:
                gap = min(lognormal(random, p.human_gap_s, p.human_gap_sigma), self.gap_cap_s)
            else:
                gap = min(lognormal(random, p.tool_gap_s, p.tool_gap_sigma), self.gap_cap_s)

    def _fork(self, name: str, pages: Pages, held: list[int], tokens: int, fingerprint: int) -> Conversation:
        p = self.parameters
        random = self.random(name)
        forks = p.forks
        turns = geometric(random, forks.turns)
        if random.random() < forks.shared:
            start = list(held)
            begin = tokens + max(1, int(lognormal(random, p.input_tokens, p.input_sigma)))
        else:
            start = pages.common(p.system_tokens, 0)
            begin = p.system_tokens + forks.fresh_tokens
            fingerprint = fingerprint_of(name, 0)
        made = self._turns(name, random, pages, start, begin, turns, NO_FORKS, fingerprint)
        return self._conversation(name, key_of(name.split(".")[0]), made, random, False)
