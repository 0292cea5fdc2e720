"""Which sessions are at work: a directory remembers a session for an hour, most of them for nothing."""

from __future__ import annotations

from collections import OrderedDict

from policies.residency import LIVE_TAU_S

LIVE_S = LIVE_TAU_S
"""A session is live for so long after a request of it ended."""


class LiveSessions:
    """Keys of the sessions seen lately, at most as many as the directory holds."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ended: OrderedDict[bytes, float] = OrderedDict()

    def ended(self, key: bytes, now: float) -> None:
        """A request of this session has ended."""
        ended = self._ended
        ended[key] = now
        ended.move_to_end(key)
        if len(ended) > self._limit:
            ended.popitem(last=False)

    def count(self, now: float) -> int:
        """Sessions that are live. What is not any more is forgotten."""
        ended = self._ended
        while ended and now - next(iter(ended.values())) > LIVE_S:
            ended.popitem(last=False)
        return len(ended)
