"""What stands before the schedulers of an emulated engine: requests, their sequences, and who is told of them."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from typing import Any

from sim.emulator import tokens
from sim.emulator.answer import Answer, Generation, Record, new_id
from sim.emulator.config import EmulatorConfig
from sim.emulator.faults import Faults
from sim.emulator.scheduler import Scheduler
from sim.emulator.stored import ResponseStore
from sim.replica import QueueFull, Work

LOG_LIMIT = 1000


class Engine:
    """One replica's engine. Made inside a running event loop, whose clock it scales."""

    def __init__(self, config: EmulatorConfig) -> None:
        self.config = config
        self.schedulers = [Scheduler(config, rank, self._tell) for rank in range(config.dp_size)]
        """By data-parallel rank."""
        self.faults = Faults()
        self.responses = ResponseStore() if config.response_store else None
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
        self._turn = 0
        """Rank of the next request that names none."""
        self._epoch = time.time()

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

    def submit(
        self,
        prompt: bytes,
        *,
        record: Record,
        length: int,
        reason: str,
        n: int = 1,
        salt: str = "",
        rank: int | None = None,
    ) -> Answer:
        """Starts `n` sequences of `length` tokens on a rank, by default the next in turn; QueueFull when it is full."""
        if rank is None:
            rank, self._turn = self._turn, (self._turn + 1) % len(self.schedulers)
        scheduler = self.schedulers[rank]
        now = scheduler.catch_up()
        answer = Answer(self, tokens.count(prompt))
        words = tokens.answer(prompt, length)
        # The last output token's KV is never computed, so no page can hold it.
        stored = prompt + "".join(words[:-1]).encode()
        pages = tokens.chain(stored, self.config.page_size, salt)
        try:
            if self.faults.queue_full:
                scheduler.replica.totals.rejected += 1
                raise QueueFull
            for choice in range(n):
                work = Work(pages, answer.prompt_tokens, length)
                scheduler.replica.submit(work, now)
                rid = record.rid if choice == 0 else new_id()
                generation = Generation(rid, work, scheduler, words, reason, record)
                answer.generations.append(generation)
                self._live[rid] = (generation, answer)
        except QueueFull:
            answer.abort()
            record.error = 503
            raise
        scheduler.schedule()
        return answer

    def abort(self, generation: Generation) -> None:
        """Ends a sequence and frees its slot now; nothing when it has ended."""
        if not generation.ended:
            generation.scheduler.abort(generation.work)

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
        """Empties the prefix caches; False when a request lives."""
        if not all(scheduler.replica.idle for scheduler in self.schedulers):
            return False
        for scheduler in self.schedulers:
            scheduler.replica.cache.clear()
        return True

    def loads(self) -> list[dict[str, Any]]:
        """The load of each rank as its scheduler last published it."""
        return [scheduler.load(hangs=self.faults.hang, paused=self.paused) for scheduler in self.schedulers]

    def close(self) -> None:
        """Ends everything; the engine is of no use afterwards."""
        self.abort_all()
        for scheduler in self.schedulers:
            scheduler.close()

    def _apply_pause(self) -> None:
        for scheduler in self.schedulers:
            scheduler.stop(self.paused or self.faults.hang)

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
