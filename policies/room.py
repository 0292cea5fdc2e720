"""Room for KV: how long a request waits because those that run fill the GPU's memory.

An engine takes requests in the order in which they came, each when its KV fits beside that of those that run; what is
merely cached makes room. Until then it waits, resident or not, and everyone behind it.
"""

from __future__ import annotations

from math import inf

from policies import cost
from policies.types import Replica

ANSWER_TOKENS = 6_000
"""Room that each request takes beyond its prompt: its answer so far, and what an engine keeps back for the rest of it
(SGLang: up to 4,096 tokens, `CLIP_MAX_NEW_TOKENS` in managers/schedule_policy.py). 4,000 and 6,000 place alike."""


def others_tokens(replica: Replica, now: float) -> int:
    """Room that requests of others take there: what the engine's last report has in use beyond our own."""
    load, others = replica.load, replica.others_running
    if not others or load is None or load.used_tokens is None or not cost.fresh(replica, now):
        return 0
    return max(0, load.used_tokens - replica.held_tokens) + others * ANSWER_TOKENS


def free_tokens(replica: Replica) -> float:
    """Room that our own requests leave for another's prompt; negative when some of them wait for it. Infinite when the
    capacity is not known."""
    capacity = replica.cache.gpu_tokens
    if capacity is None:
        return inf
    return float(capacity - replica.held_tokens - (replica.in_flight + 1) * ANSWER_TOKENS)


def wait_s(replica: Replica, prompt_tokens: int, now: float) -> float:
    """Expected seconds until a prompt sent there now would have room, whatever of it is cached.

    Each of those that run ends, on average, within a mean answer of any moment, and gives back all that it holds: the
    first of `running` within that part of it, and so many tokens within the part that they are of the capacity.
    """
    over = prompt_tokens - free_tokens(replica) + others_tokens(replica, now)
    if over <= 0.0:
        return 0.0
    running, capacity = cost.requests(replica, now), replica.cache.gpu_tokens
    if not running or not capacity:
        return 0.0
    return replica.speed.answer_s * max(over / capacity, 1.0 / running)
