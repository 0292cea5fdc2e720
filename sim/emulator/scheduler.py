"""One rank of an emulated engine: a replica model of its own, driven in scaled wall-clock time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sim.emulator import snapshot
from sim.emulator.config import EmulatorConfig
from sim.machine import find_machine
from sim.replica import Limits, Replica, Work

_STEPS_PER_PUMP = 256
"""Steps run before other coroutines get a turn: a busy replica at a small time scale must not starve its readers."""
_SNAPSHOT_STEPS = 15
"""Decode steps between two load snapshots: SGLang's --load-snapshot-publish-interval."""


class Scheduler:
    """Queue, running batch and KV cache. Made inside a running event loop, whose clock it scales."""

    def __init__(self, config: EmulatorConfig, rank: int, tell: Callable[[], None]) -> None:
        """`tell` is called when sequences may have got tokens or ended."""
        self.rank = rank
        limits = Limits(config.kv_tokens, config.page_size, config.max_running_requests, config.max_queued_requests)
        self.replica = Replica(find_machine(config.hardware).hardware, limits)
        self._tell = tell
        self._scale = config.time_scale
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._snapshot_steps = 0
        self._snapshot_prefill = 0.0
        self.snapshot = snapshot.measure(self.replica, rank, self._scale)

    def catch_up(self) -> float:
        """Runs the steps that are due; returns the replica's time, which stays behind while it has not caught up."""
        now = (self._loop.time() - self._origin) / self._scale
        if self.replica.advance(now, _STEPS_PER_PUMP):
            self._changed()
        due = self.replica.next_time
        return now if due is None or due > now else due

    def schedule(self) -> None:
        """Sets the clock for the next step: to be called when the replica was given something."""
        due = self.replica.next_time
        self.close()
        if due is not None:
            self._timer = self._loop.call_at(self._origin + due * self._scale, self._pump)

    def abort(self, work: Work) -> None:
        """Ends a sequence and frees its slot now."""
        self.replica.abort(work, self.catch_up())
        self._changed()
        self.schedule()

    def stop(self, stopped: bool) -> None:
        """Lets the replica step or not."""
        now = self.catch_up()
        if stopped:
            self.replica.pause()
        else:
            self.replica.resume(now)
        self.schedule()

    def load(self, *, hangs: bool, paused: bool) -> dict[str, Any]:
        """As last published. Without steps to publish at, as it is now; unless it hangs."""
        self.catch_up()
        if not hangs and (self.replica.idle or paused):
            self._publish()
        return self.snapshot

    def close(self) -> None:
        """Takes no further step by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pump(self) -> None:
        self._timer = None
        self.catch_up()
        self.schedule()

    def _changed(self) -> None:
        self._tell()
        totals = self.replica.totals
        steps = totals.decode_steps - self._snapshot_steps
        if steps >= _SNAPSHOT_STEPS or totals.prefill_seconds != self._snapshot_prefill or self.replica.idle:
            self._publish()

    def _publish(self) -> None:
        totals = self.replica.totals
        self._snapshot_steps = totals.decode_steps
        self._snapshot_prefill = totals.prefill_seconds
        self.snapshot = snapshot.measure(self.replica, self.rank, self._scale)
