"""Expected seconds. The one unit in which affinity and load are traded."""

from __future__ import annotations

from policies.speed import HOST_TOKENS_PER_S, PER_PAIR_S, PER_TOKEN_S, REFERENCE_TOKENS
from policies.types import Replica, Resident

REPORT_MAX_AGE_S = 10.0
"""An older report says nothing about now. Past it, only our own requests count."""


def fresh(replica: Replica, now: float) -> bool:
    """Whether the engine's last report still says something."""
    return replica.load is not None and now - replica.load.at <= REPORT_MAX_AGE_S


def others_s(replica: Replica, now: float) -> float:
    """Prefill seconds that others have waiting there. A missing or old report adds nothing and hides nothing."""
    if not replica.others_tokens or not fresh(replica, now):
        return 0.0
    return replica.others_tokens * replica.speed.factor * (PER_TOKEN_S + REFERENCE_TOKENS * PER_PAIR_S)


def requests(replica: Replica, now: float) -> int:
    """Requests in flight there: our own as of this moment, others' as of the last reports."""
    return replica.in_flight + (replica.others_running if fresh(replica, now) else 0)


def expected_wait(replica: Replica, now: float) -> float:
    """Seconds until a prefill sent now would begin.

    Our own are counted the moment they are sent, and set right by each first token. The engine's report adds what
    others sent there: what it saw beyond our own.
    """
    return max(0.0, replica.prefill_ends - now) + others_s(replica, now)


def prefill(replica: Replica, prompt_tokens: int, resident: Resident | None = None) -> float:
    """Seconds to prefill the part of a prompt that is not resident there, and to load back what is in the host tier."""
    if resident is None:
        return replica.speed.prefill_s(prompt_tokens, 0)
    held = min(resident.tokens, prompt_tokens)
    return replica.speed.prefill_s(prompt_tokens - held, held) + max(0, held - resident.gpu_tokens) / HOST_TOKENS_PER_S
