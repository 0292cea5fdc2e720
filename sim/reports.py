"""What engines say of themselves, late: as the live router polls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from policies.types import Load
from sim.engine import Engine
from sim.front import Front
from sim.server import Server

_MIN_PREFILL_TOKENS: Final = 256
_SPEED_WEIGHT: Final = 0.3
"""As the live router measures prefill speed between two reports."""


@dataclass(slots=True)
class _Watch:
    """What was last seen of a replica, and the speed that it was seen to prefill with."""

    server: Server
    boots: int
    tokens: int = 0
    seconds: float = 0.0
    speed: float | None = None


class Reports:
    """Reads each replica's numbers once in an interval, and hands them to the routers after a delay."""

    def __init__(self, engine: Engine, front: Front, random: Random, interval_s: float, delay_s: float) -> None:
        self.interval_s = interval_s
        self.delay_s = delay_s
        self._engine = engine
        self._front = front
        self._random = random
        self._watched: set[Server] = set()
        # Made once: most of a large fleet's calls are these.
        self._take_later: Callable[[_Watch], None] = self._take
        self._give_later: Callable[[Server, Load], None] = self._give

    def watch(self, server: Server) -> None:
        """Until it is forgotten; the first report is taken somewhere in the first interval."""
        self._watched.add(server)
        self._engine.after(self._random.random() * self.interval_s, self._take_later, _Watch(server, server.boots))

    def forget(self, server: Server) -> None:
        self._watched.remove(server)

    def _take(self, watch: _Watch) -> None:
        server, engine = watch.server, self._engine
        if server not in self._watched:
            return
        engine.after(self.interval_s, self._take_later, watch)
        if not server.up:
            return
        replica, now = server.replica, engine.now
        # Tokens decoded since the last event are not in: some hundred of as many hundred thousand.
        replica.settle_prefill(now)
        totals, limits = replica.totals, replica.limits
        if watch.boots != server.boots:
            watch.boots, watch.tokens, watch.seconds, watch.speed = server.boots, 0, 0.0, None
        tokens, seconds = totals.prefill_tokens - watch.tokens, totals.prefill_seconds - watch.seconds
        if tokens >= _MIN_PREFILL_TOKENS and seconds > 0:
            measured = tokens / seconds
            watch.speed = measured if watch.speed is None else watch.speed + _SPEED_WEIGHT * (measured - watch.speed)
        watch.tokens, watch.seconds = totals.prefill_tokens, totals.prefill_seconds
        load = Load(
            at=now,
            running=len(replica.running),
            waiting=len(replica.waiting),
            waiting_tokens=replica.waiting_uncached_tokens,
            used_tokens=replica.used_tokens,
            capacity_tokens=limits.kv_tokens,
            host_capacity_tokens=limits.host_tokens or None,
            prefill_tokens_per_s=watch.speed,
        )
        engine.after(self.delay_s, self._give_later, server, load)

    def _give(self, server: Server, load: Load) -> None:
        if server.up and server in self._watched:
            self._front.report(server, load)
