"""Expected seconds. The one unit in which affinity and load are traded.

First form, kept honest and small: what waits to be prefilled, plus the slow-down by those who decode.
"""

from __future__ import annotations

from policies.types import Replica

PREFILL_TOKENS_PER_S = 15_000.0
"""Prefill speed until an engine's own is measured; design study, table 2.4 (Kimi K2 class on 4xB200)."""

RUNNING_S = 0.2
"""Seconds that one more running request adds to an answer: 0.4 ms a step and neighbour (same table) over 500 tokens."""

REPORT_MAX_AGE_S = 10.0
"""An older report says nothing about now. Past it, only our own requests count."""


def expected_wait(replica: Replica, now: float) -> float:
    """Seconds until a request sent now would be served, not counting its own prefill.

    Our own requests are counted the moment they are sent. The engine's report adds what others sent there:
    what it saw beyond our own at that time. A missing or old report adds nothing and hides nothing.
    """
    running = replica.in_flight
    tokens = replica.prefill_tokens
    load = replica.load
    if load is None:
        return tokens / PREFILL_TOKENS_PER_S + running * RUNNING_S
    speed = load.prefill_tokens_per_s
    if speed is None or not speed > 0.0:
        speed = PREFILL_TOKENS_PER_S
    if now - load.at <= REPORT_MAX_AGE_S:
        others = (load.running or 0) + (load.waiting or 0) - load.own_running
        if others > 0:
            running += others
        others = (load.waiting_tokens or 0) - load.own_tokens
        if others > 0:
            tokens += others
    return tokens / speed + running * RUNNING_S
