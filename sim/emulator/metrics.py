"""/metrics: the gauges and counters a router or a dashboard looks at, with SGLang's names and labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from sim.emulator.config import EmulatorConfig
from sim.emulator.engine import Engine
from sim.replica import Replica, Totals


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    text = "".join(_lines(request.app.state.engine))
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _lines(engine: Engine) -> Iterator[str]:
    config = engine.config
    model = f'engine_type="unified",model_name="{config.model}"'
    gauges: dict[str, dict[str, float]] = {}
    counters: dict[str, dict[str, float]] = {}
    for scheduler, load in zip(engine.schedulers, engine.loads(), strict=True):
        which = f'dp_rank="{scheduler.rank}",' if config.dp_size > 1 else ""
        rank = f'{which}{model},moe_ep_rank="0",pp_rank="0",tp_rank="0"'
        for name, value in _gauges(config, scheduler.replica, load).items():
            gauges.setdefault(name, {})[rank] = value
        for (name, mode), tokens in _tokens(scheduler.replica.totals).items():
            counters.setdefault(name, {})[f'{rank},mode="{mode}"'] = tokens
    for name, values in gauges.items():
        yield from _family(name, "gauge", values)
    phases = {phase: seconds for phase, seconds in engine.startup_times.items() if isinstance(seconds, float)}
    yield from _family("startup_time_seconds", "gauge", {f'{model},phase="{key}"': s for key, s in phases.items()})
    for name, values in counters.items():
        yield from _family(name, "counter", values)
    for name, counts in engine.served.items():
        by_stream = {f'{model},is_streaming="{str(stream).lower()}"': count for stream, count in counts.items()}
        yield from _family(name, "counter", by_stream)
    # These two do not exist before they are first counted.
    totals = [scheduler.replica.totals for scheduler in engine.schedulers]
    if cached := sum(each.cached_tokens for each in totals):
        yield from _family("cached_tokens_total", "counter", {f'cache_source="device",{model}': cached})
    if aborted := sum(each.aborted for each in totals):
        yield from _family("num_aborted_requests_total", "counter", {model: aborted})


def _gauges(config: EmulatorConfig, replica: Replica, load: Mapping[str, float]) -> dict[str, float]:
    cache, page = replica.cache, config.page_size
    return {
        "num_running_reqs": load["num_running_reqs"],
        "num_queue_reqs": load["num_waiting_reqs"],
        "num_grammar_queue_reqs": 0,
        "num_used_tokens": load["num_used_tokens"],
        "kv_used_tokens": load["num_used_tokens"],
        "kv_available_tokens": cache.free_pages * page,
        "kv_evictable_tokens": cache.evictable_pages * page,
        "token_usage": load["token_usage"],
        "full_token_usage": load["token_usage"],
        "max_total_num_tokens": config.kv_tokens,
        "page_size": page,
        "num_pages": cache.capacity_pages,
        "context_len": config.context_length,
        "gen_throughput": load["gen_throughput"],
        "cache_hit_rate": 0.0,
        "decode_sum_seq_lens": sum(work.context_tokens for work in replica.running if work.produced),
        "utilization": 0.0,
    }


def _tokens(totals: Totals) -> dict[tuple[str, str], float]:
    """Counted tokens by family and mode."""
    effective, realtime = "prefill_effective_tokens_total", "realtime_tokens_total"
    return {
        (effective, "input"): totals.prefill_tokens,
        (effective, "device_hit"): totals.cached_tokens,
        (effective, "host_hit"): 0,
        (effective, "storage_hit"): 0,
        (realtime, "prefill_compute"): totals.prefill_tokens,
        (realtime, "decode"): totals.output_tokens,
        (realtime, "prefill_cache"): totals.cached_tokens,
    }


def _family(name: str, kind: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# TYPE sglang:{name} {kind}\n"
    for labels, value in values.items():
        yield f"sglang:{name}{{{labels}}} {float(value)}\n"
