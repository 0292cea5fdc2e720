"""What the overview says of the sources of replicas."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.app import Router


def found(router: Router) -> list[dict[str, Any]]:
    """Each source in its order: whether it answers, or why not, and how many replicas it told last."""
    now = time.time()
    return [
        {
            "source": feed.name,
            "up": feed.up,
            "why": feed.why or None,
            "heard_s_ago": None if feed.heard_at is None else round(max(0.0, now - feed.heard_at), 1),
            "replicas": len(feed.targets),
            "faults": feed.faults,
        }
        for feed in router.discovery.feeds
    ]
