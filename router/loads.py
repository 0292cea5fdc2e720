"""An engine's word on its load, or on that of one of its ranks, in any of the forms in which SGLang gives it, made into
one.

Field names are those of SGLang 0.5.23 (`/v1/loads`), of older versions (`/get_load`), and of its metrics under both
prefixes it has had. Whatever is missing, of the wrong type, negative or not finite is unknown, never zero.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
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
    """Tokens prefilled since the engine started, over all `ranks`."""
    prefill_busy_us: int | None = None
    """Microseconds spent on that, likewise: ranks work side by side."""
    ranks: int = 1
    """How many it is of."""
    taken: float | None = None
    """When the oldest rank's numbers were taken, seconds of the engine's own clock."""


@dataclass(slots=True)
class Info:
    """What an engine says of itself for as long as it runs."""

    mark: str | None = None
    """What differs from start to start: the durations of its start."""
    capacity_tokens: int | None = None
    host_capacity_tokens: int | None = None
    ranks: int | None = None
    """Its data-parallel size."""
    keeps_responses: bool = True
    """Unless it says otherwise."""


def from_loads(body: bytes, now: float, rank: int | None = None) -> Report:
    """From `/v1/loads`, of one rank or summed over all. Raises ValueError when it is not such an answer.

    `Load.at` is when the oldest rank's numbers were taken: the engine goes on answering with old ones when its
    scheduler hangs. Their age is the difference of two of the engine's own times, so that its clock need not be ours.
    """
    said = _object(body)
    ranks = _those_of(said.get("loads"), rank)
    taken = _taken(ranks)
    load = Load(at=now - _age(said.get("timestamp"), taken))
    load.running = _sum(ranks, "num_running_reqs")
    load.waiting = _sum(ranks, "num_waiting_reqs")
    load.waiting_tokens = _sum(ranks, "num_waiting_uncached_tokens")
    load.used_tokens = _sum(ranks, "num_used_tokens")
    load.capacity_tokens = _sum(ranks, "max_total_num_tokens") or None
    if load.running is None and load.waiting is None:
        raise ValueError("no counts in it")
    prefilled, busy_us = _sum(ranks, "total_prefill_uncached_tokens"), _sum(ranks, "total_prefill_busy_us")
    return Report(load, prefilled, busy_us, len(ranks), taken)


def from_get_load(body: bytes, now: float, rank: int | None = None) -> Report:
    """From the older `/get_load`, likewise. Raises ValueError when it is not such an answer."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    ranks = _those_of([said] if isinstance(said, dict) else said, rank)
    total, waiting = _sum(ranks, "num_reqs"), _sum(ranks, "num_waiting_reqs")
    running = max(0, total - waiting) if total is not None and waiting is not None else total
    if running is None and waiting is None:
        raise ValueError("no counts in it")
    return Report(Load(at=now, running=running, waiting=waiting, used_tokens=_sum(ranks, "num_tokens")))


_GAUGES = ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "max_total_num_tokens", "hicache_host_total_tokens")
_PREFIXES = ("sglang:", "sglang_")
_WANTED = tuple(prefix + name for prefix in _PREFIXES for name in _GAUGES)


def from_metrics(body: bytes, now: float, rank: int | None = None) -> Report:
    """From `/metrics`, likewise. Raises ValueError when there is nothing of an engine in it."""
    # Parsing all of it would hold up every stream for 12 ms (88 KB, SGLang 0.5.23).
    text = "\n".join(line for line in body.decode("utf-8", "replace").split("\n") if line.startswith(_WANTED))
    by_rank: dict[str, dict[str, float]] = {}
    try:
        for family in text_string_to_metric_families(text + "\n"):
            for sample in family.samples:
                name = sample.name[len(_PREFIXES[0]) :]
                if name in _GAUGES:
                    ranks = by_rank.setdefault(name, {})
                    label = sample.labels.get("dp_rank", "")
                    # Tensor-parallel ranks may each tell the same.
                    ranks[label] = max(ranks.get(label, sample.value), sample.value)
    except ValueError:
        raise ValueError("not Prometheus' text format") from None
    if rank is not None:
        told = any(by_rank.values())
        by_rank = {name: {"": ranks[str(rank)]} for name, ranks in by_rank.items() if str(rank) in ranks}
        if told and not by_rank:
            raise _no_such(rank)
    found = {name: _sum([{name: value} for value in ranks.values()], name) for name, ranks in by_rank.items()}
    running, waiting = found.get("num_running_reqs"), found.get("num_queue_reqs")
    if running is None and waiting is None:
        raise ValueError("no engine's load in it")
    load = Load(at=now, running=running, waiting=waiting, used_tokens=found.get("num_used_tokens"))
    load.capacity_tokens = found.get("max_total_num_tokens") or None
    load.host_capacity_tokens = found.get("hicache_host_total_tokens") or None
    return Report(load)


def from_server_info(body: bytes, rank: int | None = None) -> Info:
    """From `/server_info` or its old name, with the capacities of one rank or of all.

    Raises ValueError when it is not such an answer. The host tier's size is known only when it is given as a ratio of
    the GPU's, SGLang's default.
    """
    said = _object(body)
    mark = said.get("startup_time")
    info = Info(None if mark is None else json.dumps(mark, sort_keys=True)[:1000])
    info.ranks = _count(said.get("dp_size")) or None
    info.keeps_responses = said.get("enable_response_store") is not False
    per_rank, ranks = _count(said.get("max_total_num_tokens")), info.ranks or 1
    info.capacity_tokens = per_rank * (ranks if rank is None else 1) if per_rank else None
    ratio = _number(said.get("hicache_ratio"))
    if said.get("enable_hierarchical_cache") is True and said.get("hicache_size") == 0:
        info.host_capacity_tokens = _count((ratio or 0) * (info.capacity_tokens or 0)) or None
    return info


def _those_of(told: object, rank: int | None) -> list[dict[str, Any]]:
    """The loads in a list, of all ranks or of one. Raises ValueError when there is none."""
    if not isinstance(told, list) or not all(isinstance(each, dict) for each in told):
        raise ValueError("no loads in it")
    if rank is not None:
        told = [each for each in told if _count(each.get("dp_rank")) == rank]
        if not told:
            raise _no_such(rank)
    if not told:
        raise ValueError("no loads in it")
    return told


def _no_such(rank: int) -> ValueError:
    return ValueError(
        f"the engine tells of no data-parallel rank {rank}: `ranks` is greater than its --dp-size, set it to that"
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(said, dict):
        raise ValueError("not a JSON object")
    return said


def _number(value: object) -> float | None:
    """A number that is neither negative nor beyond belief."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 0 <= value <= MAX_COUNT else None  # false for NaN


def _count(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _sum(ranks: list[dict[str, Any]], name: str) -> int | None:
    """The sum over the ranks; None when any of them does not tell."""
    total = 0
    for rank in ranks:
        count = _count(rank.get(name))
        if count is None:
            return None
        total += count
    return total


def _taken(ranks: list[dict[str, Any]]) -> float | None:
    """When the oldest numbers were taken, seconds of the engine's clock; None when no rank tells."""
    return min(filter(None, (_number(rank.get("timestamp")) for rank in ranks)), default=None)


def _age(answered: object, taken: float | None) -> float:
    """Seconds between the taking of the numbers and the answer; 0 when it cannot be told."""
    if taken is None or not isinstance(answered, str):
        return 0.0
    try:
        at = datetime.fromisoformat(answered)
    except ValueError:
        return 0.0
    if at.tzinfo is None:
        return 0.0  # local time of who knows where
    return max(0.0, at.timestamp() - taken)
