"""Expected seconds. The one unit in which affinity and load are traded."""

from __future__ import annotations

from typing import Final

from policies.speed import HOST_TOKENS_PER_S, PER_PAIR_S, PER_TOKEN_S, REFERENCE_TOKENS
from policies.types import Replica, Resident

REPORT_MAX_AGE_S: Final = 10.0
"""An older report says nothing about now. Past it, only our own requests count."""


def fresh(replica: Replica, now: float) -> bool:
    """Whether the engine's last report still says something."""
    return replica.load is not None and now - replica.load.at <= REPORT_MAX_AGE_S


def told(replica: Replica, now: float) -> bool:
    """Whether what others have there was told lately, by the engine or by other routers."""
    return now - replica.others_at <= REPORT_MAX_AGE_S


def others_s(replica: Replica, now: float) -> float:
    """Prefill seconds that others have waiting there. A missing or old report adds nothing and hides nothing."""
    if not replica.others_tokens or not told(replica, now):
        return 0.0
    return replica.others_tokens * replica.speed.pace * (PER_TOKEN_S + REFERENCE_TOKENS * PER_PAIR_S)


def requests(replica: Replica, now: float) -> int:
    """Requests in flight there: our own as of this moment, others' as of the last reports."""
    return replica.in_flight + (replica.others_running if told(replica, now) else 0)


def expected_wait(replica: Replica, now: float) -> float:
    """Seconds until a prefill sent now would begin.

    Our own are counted the moment they are sent, and set right by each first token. The engine's report adds what
    others sent there: what it saw beyond our own.
    """
    own_s = replica.prefill_ends - now if replica.prefill_ends > now else 0.0
    return own_s + others_s(replica, now)


def prefills_end(replica: Replica, now: float) -> float:
    """When all prefills are done that were sent there and have not begun, ours and other routers', seconds."""
    return now + (replica.pending_s + routers_s(replica, now)) + (replica.speed.overhead_s if replica.pending else 0.0)


def routers_s(replica: Replica, now: float) -> float:
    """What is left of other routers' prefill seconds there: since they were told of, some have been served."""
    if not replica.routers_s:
        return 0.0
    return max(0.0, replica.routers_s - (now - replica.routers_at))


def prefill(replica: Replica, prompt_tokens: int, resident: Resident | None = None) -> float:
    """Seconds to prefill the part of a prompt that is not resident there, and to load back what is in the host tier."""
    if resident is None:
        return replica.speed.prefill_s(prompt_tokens, 0)
    held = resident.tokens if resident.tokens < prompt_tokens else prompt_tokens
    prefill_s = replica.speed.prefill_s(prompt_tokens - held, held)
    if held > resident.gpu_tokens:
        prefill_s += (held - resident.gpu_tokens) / HOST_TOKENS_PER_S
    return prefill_s
