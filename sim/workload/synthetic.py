"""The distributions of sessions that are made up."""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.workload.forks import Forks


@dataclass(frozen=True, slots=True)
class Breaks:
    """Turns that rewrite the history, so that what lies behind a point of it has to be computed anew.

    Of 44,850 turns of the Claude Code sessions (sim/data/claude_code_sessions) 828 kept less than 90 % of the prefix.
    240 were compactions, which `Synthetic.compact_tokens` makes; 413 kept little more than tools and system prompt at
    the same size, 175 went back to somewhere in the middle.
    """

    share: float = 588 / 44_850
    """Of turns."""
    head: float = 413 / 588
    """Share of them that keep only the system prompt; the others keep a part of the history, all lengths alike."""

    def __post_init__(self) -> None:
        for name, value in (("share", self.share), ("head", self.head)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must be from 0 to 1, got {value}")


NO_BREAKS = Breaks(share=0.0)


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
    breaks: Breaks = NO_BREAKS
