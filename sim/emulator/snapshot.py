"""The load of a rank as its scheduler publishes it."""

from __future__ import annotations

import time
from typing import Any

from sim.replica import Replica


def measure(replica: Replica, rank: int, scale: float) -> dict[str, Any]:
    """An entry in `loads` of /v1/loads. Times are wall-clock, so a router that measures speed sees the scaled one."""
    totals = replica.totals
    used = replica.used_tokens
    queued = sum(work.prompt_tokens for work in replica.waiting)
    capacity = replica.limits.kv_tokens
    decoding = [work for work in replica.running if work.produced]
    step = replica.last_step_seconds * scale
    micro = 1e6 * scale
    return {
        "timestamp": time.time(),
        "dp_rank": rank,
        "num_running_reqs": len(replica.running),
        "num_waiting_reqs": len(replica.waiting),
        "num_waiting_uncached_tokens": replica.waiting_uncached_tokens,
        "num_used_tokens": used,
        "num_total_tokens": used + queued,
        "num_active_tokens": used + queued,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": capacity,
        "max_running_requests": replica.limits.max_running,
        "token_usage": round(used / capacity, 4),
        "gen_throughput": round(len(decoding) / step, 2) if decoding and step else 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "total_prefill_uncached_tokens": totals.prefill_tokens,
        "total_prefill_busy_us": int(totals.prefill_seconds * micro),
        "decode_moments": [
            float(totals.decode_steps),
            float(totals.decode_batch),
            float(int(totals.decode_seconds * micro)),
            float(totals.decode_batch_squared),
            float(int(totals.decode_batch_seconds * micro)),
            float(totals.decode_batch),
        ],
    }
