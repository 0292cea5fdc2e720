"""/metrics: the gauges and counters a router or a dashboard looks at, with SGLang's names and labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from sim.emulator.engine import Engine


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    text = "".join(_lines(request.app.state.engine))
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _lines(engine: Engine) -> Iterator[str]:
    config, replica, load = engine.config, engine.replica, engine.loads()
    cache, totals = replica.cache, replica.totals
    model = f'engine_type="unified",model_name="{config.model}"'
    rank = f'{model},moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    page = config.page_size
    gauges = {
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
    for name, value in gauges.items():
        yield from _family(name, "gauge", {rank: value})
    phases = {phase: seconds for phase, seconds in engine.startup_times.items() if isinstance(seconds, float)}
    yield from _family("startup_time_seconds", "gauge", {f'{model},phase="{key}"': s for key, s in phases.items()})
    modes = {"input": totals.prefill_tokens, "device_hit": totals.cached_tokens, "host_hit": 0, "storage_hit": 0}
    effective = {f'{rank},mode="{mode}"': value for mode, value in modes.items()}
    yield from _family("prefill_effective_tokens_total", "counter", effective)
    works = {
        "prefill_compute": totals.prefill_tokens,
        "decode": totals.output_tokens,
        "prefill_cache": totals.cached_tokens,
    }
    realtime = {f'{rank},mode="{mode}"': value for mode, value in works.items()}
    yield from _family("realtime_tokens_total", "counter", realtime)
    for name, counts in engine.served.items():
        by_stream = {f'{model},is_streaming="{str(stream).lower()}"': count for stream, count in counts.items()}
        yield from _family(name, "counter", by_stream)
    # These two do not exist before they are first counted.
    if totals.cached_tokens:
        source = f'cache_source="device",{model}'
        yield from _family("cached_tokens_total", "counter", {source: totals.cached_tokens})
    if totals.aborted:
        yield from _family("num_aborted_requests_total", "counter", {model: totals.aborted})


def _family(name: str, kind: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# TYPE sglang:{name} {kind}\n"
    for labels, value in values.items():
        yield f"sglang:{name}{{{labels}}} {float(value)}\n"
