"""How many agents a replica takes before its cache is too small for them, and how many replicas they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from sim.jobs import Candidate, Job, run
from sim.machine import find_machine
from sim.results import estimate
from sim.scenario import PAGE_TOKENS, Scenario
from sim.scenario_parts import Group
from sim.workload import RecordedWorkload, load_recorded

REPLICAS = 4
"""In the simulated fleet. A session's placing matters less the more sessions there are on each replica."""

MOST_SLO_S = 300.0
"""In the 20 minutes that are measured no request waits for longer than those, so that any number of sessions would keep
to a longer one."""

GAP_CAP_S = 300.0
"""As the recorded workload caps them: who is away for longer is not at work."""


@dataclass(frozen=True, slots=True)
class Question:
    """A kind of replica, and what is asked of it."""

    machine: str
    host_tier: bool
    candidate: Candidate
    slo_ttft_p99_s: float
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a kind of replica takes."""

    question: Question
    cliff: float
    """Live sessions per replica whose contexts fill the larger tier."""
    sessions: int
    """The most per replica at which the time to first token keeps to what is asked; 0 when even one is too many."""
    ttft_p99_s: float
    """With so many; with one when that is too many."""
    hit_total: float
    """With so many."""

    @property
    def gpus(self) -> int:
        """Of a replica."""
        return find_machine(self.question.machine).gpus

    @property
    def alarm_tokens(self) -> int:
        """The live tokens of a replica (`warmroute_live_tokens`) that it should not be above."""
        return round(min(self.sessions, self.cliff) * live_tokens())

    def replicas(self, agents: int) -> int | None:
        """For so many agents at work; None when no number is enough."""
        return ceil(agents / self.sessions) if self.sessions else None


def cache_tokens(machine: str, host_tier: bool) -> int:
    """Tokens that stay cached: of the larger tier, not of both, as the host tier has a copy of everything."""
    found = find_machine(machine)
    return max(found.kv_tokens, found.host_tokens) if host_tier else found.kv_tokens


@cache
def live_tokens() -> float:
    """Mean context of a recorded session that is at work, each turn weighed by the time until the next one."""
    tokens = seconds = 0.0
    for session in RecordedWorkload(load_recorded(), PAGE_TOKENS, 0).sessions:
        for turn, following in zip(session.turns, session.turns[1:], strict=False):
            gap = min(following[0], GAP_CAP_S)
            tokens += turn[1] * gap
            seconds += gap
    return tokens / seconds


def search(question: Question) -> Capacity:
    """Bisects the number of sessions per replica, to within 5 %."""
    cliff = cache_tokens(question.machine, question.host_tier) / live_tokens()
    least = _try(question, 1)
    if least[0] > question.slo_ttft_p99_s:
        return Capacity(question, cliff, 0, *least)
    low, found, high = 1, least, None
    step = max(2, round(cliff))
    while high is None or high - low > max(1, round(0.05 * low)):
        now = _try(question, step)
        if now[0] <= question.slo_ttft_p99_s:
            low, found = step, now
        else:
            high = step
        step = ceil(1.5 * low) if high is None else (low + high) // 2
    return Capacity(question, cliff, low, *found)


def _try(question: Question, sessions: int) -> tuple[float, float]:
    """TTFT p99 and hit rate with so many live sessions per replica."""
    group = Group(question.machine, REPLICAS, host_tier=question.host_tier)
    scenario = Scenario(fleet=(group,), full=float(sessions), load=1.0)
    runs = [run(Job(scenario, question.candidate, seed)) for seed in question.seeds]
    figures = (estimate([each.value(key) for each in runs]).mean for key in ("ttft_p99_s", "hit_total"))
    return next(figures), next(figures)


def table(found: Sequence[Capacity], agents: int) -> Iterator[list[str]]:
    """Rows for people."""
    yield [
        "machine", "host tier", "KV tokens kept", "cliff, sessions", "sessions at SLO", "TTFT p99, s", "hit rate",
        f"replicas for {agents}", "GPUs", "alarm, live tokens",
    ]  # fmt: skip
    for each in found:
        question, replicas = each.question, each.replicas(agents)
        yield [
            question.machine,
            "yes" if question.host_tier else "no",
            f"{cache_tokens(question.machine, question.host_tier):,}",
            f"{each.cliff:.1f}",
            str(each.sessions or "none"),
            f"{each.ttft_p99_s:.1f}",
            f"{each.hit_total:.2f}",
            "-" if replicas is None else str(replicas),
            "-" if replicas is None else str(replicas * each.gpus),
            f"{each.alarm_tokens:,}" if each.sessions else "-",
        ]


def row(each: Capacity, agents: int) -> dict[str, object]:
    """The same for programs."""
    question, replicas = each.question, each.replicas(agents)
    return {
        "machine": question.machine,
        "host_tier": question.host_tier,
        "policy": question.candidate.policy,
        "slo_ttft_p99_s": question.slo_ttft_p99_s,
        "kv_tokens_kept": cache_tokens(question.machine, question.host_tier),
        "cliff_sessions": round(each.cliff, 2),
        "sessions": each.sessions,
        "ttft_p99_s": each.ttft_p99_s,
        "hit_total": each.hit_total,
        "agents": agents,
        "replicas": replicas,
        "gpus": None if replicas is None else replicas * each.gpus,
        "alarm_live_tokens": each.alarm_tokens,
    }
