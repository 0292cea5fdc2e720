"""Waiting for a fact that only asking again can tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

POLL_S = 0.05

T = TypeVar("T")


async def until(ask: Callable[[], Awaitable[T]], holds: Callable[[T], bool], limit_s: float, what: str) -> T:
    """Ask until the answer holds, and return it. AssertionError naming `what` and the last answer after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        answer = await ask()
        if holds(answer):
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what}; last seen: {answer}")
        await asyncio.sleep(POLL_S)
