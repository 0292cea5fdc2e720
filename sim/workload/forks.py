"""Sub-agents."""

from __future__ import annotations

from dataclasses import dataclass


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

    def __post_init__(self) -> None:
        if self.fewest > self.most:
            raise ValueError(f"fewest must be at most `most` ({self.most}), got {self.fewest}")


NO_FORKS = Forks(probability=0.0)
