"""Prefill that better placement would have spared: what users pay for bad placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.types import Reason

if TYPE_CHECKING:
    from policies.lease import Lease


class Regret:
    """Tokens recomputed although the fleet had them, by the reason of the choice."""

    __slots__ = ("elsewhere", "evicted")

    def __init__(self) -> None:
        self.elsewhere: dict[Reason, int] = {}
        """Another replica was believed to hold them when the request was placed."""
        self.evicted: dict[Reason, int] = {}
        """They were computed once, and no replica held them any more."""

    def add(self, lease: Lease, prompt: int, cached: int) -> None:
        """An answer's report: of `prompt` tokens, `cached` were not recomputed."""
        elsewhere = max(0, min(lease.elsewhere, prompt) - cached)
        evicted = max(0, min(lease.request.once_tokens, prompt) - cached - elsewhere)
        reason = lease.choice.reason
        if elsewhere:
            self.elsewhere[reason] = self.elsewhere.get(reason, 0) + elsewhere
        if evicted:
            self.evicted[reason] = self.evicted.get(reason, 0) + evicted
        lease.replica.regretted_tokens += elsewhere + evicted
