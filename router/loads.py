"""An engine's word on its load, in any of the forms in which SGLang gives it, made into one.

Field names are those of SGLang 0.5.23 (`/v1/loads`), of older versions (`/get_load`), and of its metrics under both
prefixes it has had. Whatever is missing, of the wrong type, negative or not finite is unknown, never zero.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from policies.types import Load

MAX_COUNT = 1 << 50
"""Larger numbers are not believed."""


@dataclass(slots=True)
class Report:
    """A load, and what else came with it."""

    load: Load
    prefilled_tokens: int | None = None
    """Tokens prefilled since the engine started, over all ranks."""
    prefill_busy_us: int | None = None
    """Microseconds spent on that."""


def from_loads(body: bytes, now: float) -> Report:
    """From `/v1/loads`, summed over data-parallel ranks. Raises ValueError when it is not such an answer.

    `Load.at` is when the oldest rank's numbers were taken: the engine goes on answering with old ones when its
    scheduler hangs. Their age is the difference of two of the engine's own times, so that its clock need not be ours.
    """
    said = _object(body)
    ranks = said.get("loads")
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
        raise ValueError("no loads in it")
    load = Load(at=now - _age(said.get("timestamp"), ranks))
    load.running = _sum(ranks, "num_running_reqs")
    load.waiting = _sum(ranks, "num_waiting_reqs")
    load.waiting_tokens = _sum(ranks, "num_waiting_uncached_tokens")
    load.used_tokens = _sum(ranks, "num_used_tokens")
    load.capacity_tokens = _sum(ranks, "max_total_num_tokens") or None
    return Report(load, _sum(ranks, "total_prefill_uncached_tokens"), _sum(ranks, "total_prefill_busy_us"))


def from_get_load(body: bytes, now: float) -> Report:
    """From the older `/get_load`. Raises ValueError when it is not such an answer."""
    try:
        ranks = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if isinstance(ranks, dict):
        ranks = [ranks]
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
        raise ValueError("no loads in it")
    total, waiting = _sum(ranks, "num_reqs"), _sum(ranks, "num_waiting_reqs")
    running = max(0, total - waiting) if total is not None and waiting is not None else total
    if running is None and waiting is None:
        raise ValueError("no counts in it")
    return Report(Load(at=now, running=running, waiting=waiting, used_tokens=_sum(ranks, "num_tokens")))


def from_metrics(body: bytes, now: float) -> Report:
    """From `/metrics`. Raises ValueError when there is nothing of an engine in it."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(body.decode("utf-8", "replace").replace("sglang:", "sglang_")):
            for sample in family.samples:
                if sample.name.startswith("sglang_") and isfinite(sample.value):
                    name = sample.name.removeprefix("sglang_")
                    found[name] = found.get(name, 0.0) + sample.value
    except ValueError:
        raise ValueError("not Prometheus' text format") from None
    if "num_running_reqs" not in found and "num_queue_reqs" not in found:
        raise ValueError("no engine's load in it")
    pick = {name: _count(found.get(name)) for name in ("num_running_reqs", "num_queue_reqs", "num_used_tokens")}
    load = Load(at=now, running=pick["num_running_reqs"], waiting=pick["num_queue_reqs"])
    load.used_tokens = pick["num_used_tokens"]
    load.capacity_tokens = _count(found.get("max_total_num_tokens")) or None
    load.host_capacity_tokens = _count(found.get("hicache_host_total_tokens")) or None
    return Report(load)


def startup_mark(body: bytes) -> str | None:
    """What in `/server_info` differs from start to start: the durations of its start. None when it is not told."""
    try:
        mark = _object(body).get("startup_time")
    except ValueError:
        return None
    return None if mark is None else json.dumps(mark, sort_keys=True)[:1000]


def _object(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(said, dict):
        raise ValueError("not a JSON object")
    return said


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return int(value) if 0 <= value <= MAX_COUNT else None


def _sum(ranks: list[dict[str, Any]], name: str) -> int | None:
    """The sum over the ranks; None when any of them does not tell."""
    total = 0
    for rank in ranks:
        count = _count(rank.get(name))
        if count is None:
            return None
        total += count
    return total


def _age(asked: object, ranks: list[dict[str, Any]]) -> float:
    """Seconds between the taking of the oldest numbers and the answer; 0 when it cannot be told."""
    try:
        answered = datetime.fromisoformat(str(asked)).timestamp()
    except (ValueError, OverflowError):
        return 0.0
    ages = []
    for rank in ranks:
        taken = rank.get("timestamp")
        if isinstance(taken, int | float) and not isinstance(taken, bool) and isfinite(taken) and taken > 0:
            ages.append(answered - taken)
    return max(0.0, *ages) if ages else 0.0
