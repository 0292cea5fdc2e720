"""Drives a replica model in scaled wall-clock time."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from typing import Any

from sim.emulator import snapshot, tokens
from sim.emulator.answer import Answer, Generation, Record, new_id
from sim.emulator.config import EmulatorConfig
from sim.emulator.faults import Faults
from sim.machine import find_machine
from sim.replica import Limits, QueueFull, Replica, Work

LOG_LIMIT = 1000
_STEPS_PER_PUMP = 256
"""Steps run before other coroutines get a turn: a busy replica at a small time scale must not starve its readers."""
_SNAPSHOT_STEPS = 15
"""Decode steps between two load snapshots: SGLang's --load-snapshot-publish-interval."""


class Engine:
    """One replica's engine. Made inside a running event loop, whose clock it scales."""

    def __init__(self, config: EmulatorConfig) -> None:
        self.config = config
        self.replica = self._new_replica()
        self.faults = Faults()
        self.log: deque[Record] = deque(maxlen=LOG_LIMIT)
        self.requests = 0
        """Inference requests received."""
        self.paused = False
        self.unhealthy = False
        """A deep health check failed, and none has succeeded since."""
        self.draining = False
        self.startup_times = _startup_times()
        self.served: dict[str, Counter[bool]] = {
            name: Counter() for name in ("prompt_tokens_total", "generation_tokens_total", "num_requests_total")
        }
        """Counters of ended sequences by whether they were streamed, under their names in /metrics."""
        self._live: dict[str, tuple[Generation, Answer]] = {}
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._epoch = time.time()
        self._timer: asyncio.TimerHandle | None = None
        self._snapshot_steps = 0
        self._snapshot_prefill = 0.0
        self.snapshot = snapshot.measure(self.replica, self.config.time_scale)

    @property
    def scale(self) -> float:
        return self.config.time_scale

    @property
    def live(self) -> int:
        """Output sequences that wait or run."""
        return len(self._live)

    def is_live(self, rid: str) -> bool:
        return rid in self._live

    def epoch(self, at: float | None) -> float | None:
        """A time of the replica's clock as seconds since 1970."""
        return None if at is None else self._epoch + at * self.scale

    def received(self, path: str, headers: dict[str, str]) -> Record:
        """Notes an inference request."""
        record = Record(path, headers)
        self.log.append(record)
        self.requests += 1
        return record

    def submit(self, prompt: bytes, *, record: Record, length: int, reason: str, n: int = 1, salt: str = "") -> Answer:
        """Starts `n` sequences of `length` tokens; QueueFull when the replica takes no more."""
        now = self._catch_up()
        answer = Answer(self, tokens.count(prompt))
        words = tokens.answer(prompt, length)
        # The last output token's KV is never computed, so no page can hold it.
        stored = prompt + "".join(words[:-1]).encode()
        pages = tokens.chain(stored, self.config.page_size, salt)
        try:
            if self.faults.queue_full:
                self.replica.totals.rejected += 1
                raise QueueFull
            for choice in range(n):
                work = Work(pages, answer.prompt_tokens, length)
                self.replica.submit(work, now)
                rid = record.rid if choice == 0 else new_id()
                generation = Generation(rid, work, words, reason, record)
                answer.generations.append(generation)
                self._live[rid] = (generation, answer)
        except QueueFull:
            answer.abort()
            record.error = 503
            raise
        self._schedule()
        return answer

    def abort(self, generation: Generation) -> None:
        """Ends a sequence and frees its slot now; nothing when it has ended."""
        if generation.ended:
            return
        self.replica.abort(generation.work, self._catch_up())
        self._tell()
        self._schedule()

    def abort_rid(self, rid: str) -> None:
        """Ends the sequence with this id, if it lives."""
        if rid in self._live:
            self.abort(self._live[rid][0])

    def abort_all(self) -> None:
        for generation, _ in tuple(self._live.values()):
            self.abort(generation)

    def set_faults(self, changes: dict[str, Any]) -> None:
        """Switches faults; ValueError names a key or value that cannot be, and nothing is changed."""
        self.faults.update(changes)
        self._apply_pause()

    def set_paused(self, paused: bool) -> None:
        """Pauses or continues the generation."""
        self.paused = paused
        self._apply_pause()

    def flush_cache(self) -> bool:
        """Empties the prefix cache; False when a request lives."""
        if not self.replica.idle:
            return False
        self.replica.cache.clear()
        return True

    def loads(self) -> dict[str, Any]:
        """The load as the scheduler last published it. Without steps to publish at, as it is now; unless it hangs."""
        self._catch_up()
        if not self.faults.hang and (self.replica.idle or self.paused):
            self._publish()
        return self.snapshot

    def close(self) -> None:
        """Ends everything; the engine is of no use afterwards."""
        self.abort_all()
        if self._timer is not None:
            self._timer.cancel()

    def _new_replica(self) -> Replica:
        config = self.config
        limits = Limits(config.kv_tokens, config.page_size, config.max_running_requests, config.max_queued_requests)
        return Replica(find_machine(config.hardware).hardware, limits)

    def _apply_pause(self) -> None:
        """Lets the replica step or not."""
        now = self._catch_up()
        if self.paused or self.faults.hang:
            self.replica.pause()
        else:
            self.replica.resume(now)
        self._schedule()

    def _now(self) -> float:
        return (self._loop.time() - self._origin) / self.scale

    def _catch_up(self) -> float:
        """Runs the steps that are due; returns the replica's time, which stays behind while it has not caught up."""
        now = self._now()
        if self.replica.advance(now, _STEPS_PER_PUMP):
            self._tell()
        due = self.replica.next_time
        return now if due is None or due > now else due

    def _pump(self) -> None:
        self._timer = None
        self._catch_up()
        self._schedule()

    def _schedule(self) -> None:
        due = self.replica.next_time
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = self._loop.call_at(self._origin + due * self.scale, self._pump)

    def _tell(self) -> None:
        """Wakes the readers of every sequence that changed, and lets go of those that ended."""
        for rid, (generation, answer) in tuple(self._live.items()):
            ended = generation.ended
            if ended or generation.work.produced != generation.seen:
                generation.seen = generation.work.produced
                answer.wake.set()
            if ended:
                del self._live[rid]
                record = generation.record
                record.cached_tokens = generation.work.cached_tokens
                record.completion_tokens += generation.work.produced
                record.finish_reason = generation.finish_reason
                self.served["prompt_tokens_total"][record.stream] += generation.work.prompt_tokens
                self.served["generation_tokens_total"][record.stream] += generation.work.produced
                self.served["num_requests_total"][record.stream] += 1
        totals = self.replica.totals
        steps = totals.decode_steps - self._snapshot_steps
        if steps >= _SNAPSHOT_STEPS or totals.prefill_seconds != self._snapshot_prefill or self.replica.idle:
            self._publish()

    def _publish(self) -> None:
        totals = self.replica.totals
        self._snapshot_steps = totals.decode_steps
        self._snapshot_prefill = totals.prefill_seconds
        self.snapshot = snapshot.measure(self.replica, self.config.time_scale)


def _startup_times() -> dict[str, Any]:
    """How long the phases of starting took. Invented, but different in every start, as the real ones are."""
    graphs = ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend")
    return {
        "load_weight": random.uniform(20, 30),
        "kv_cache_allocation": random.uniform(0.3, 0.5),
        "scheduler_e2e": random.uniform(40, 60),
        "cuda_graph": dict.fromkeys(graphs, 0.0),
        "tokenizer_e2e": random.uniform(60, 80),
    }
