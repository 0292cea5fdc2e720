"""/v1/loads."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from sim.emulator.engine import Engine
from sim.emulator.errors import ApiError
from sim.emulator.info import VERSION

_SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
_METRICS_TYPE = "text/plain; version=0.0.4"


async def loads(request: Request) -> Response:
    """GET /v1/loads?dp_rank=&include=&format=."""
    engine: Engine = request.app.state.engine
    query = request.query_params
    include = {part.strip() for part in query.get("include", "all").split(",")}
    unknown = sorted(include.difference(_SECTIONS))
    if unknown:
        raise ApiError(400, f"Invalid include sections: {', '.join(unknown)}. Valid: {', '.join(_SECTIONS)}")
    rank = query.get("dp_rank")
    if rank is not None and not rank.lstrip("-").isdigit():
        raise ApiError(400, f"dp_rank must be an integer, not {rank!r}")
    wanted = [
        _load(load, engine.config.kv_tokens, include)
        for load in engine.loads()
        if rank is None or load["dp_rank"] == int(rank)
    ]
    if query.get("format") == "prometheus":
        return PlainTextResponse("".join(_prometheus(wanted)), media_type=_METRICS_TYPE)
    return JSONResponse(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": VERSION,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": wanted,
        }
    )


def _load(load: dict[str, Any], capacity: int, include: set[str]) -> dict[str, Any]:
    """With the sections asked for."""
    load = dict(load)
    everything = "all" in include
    if everything or "memory" in include:
        load["memory"] = {"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0, "token_capacity": capacity}
    if everything or "disagg" in include:
        queues = ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer", "decode_retracted")
        counts = {f"{queue}_queue_reqs": 0 for queue in queues}
        transfer = {"kv_transfer_speed_gb_s": 0.0, "kv_transfer_latency_ms": 0.0}
        load["disaggregation"] = {"mode": "null", **counts, **transfer}
    if everything or "queues" in include:
        waiting = load["num_waiting_reqs"]
        load["queues"] = {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0}
    return load


def _prometheus(wanted: list[dict[str, Any]]) -> Iterator[str]:
    """A family for each number, with a sample for each rank."""
    families: dict[str, list[str]] = {}
    for load in wanted:
        for key, value in load.items():
            items = {key: value}
            if isinstance(value, dict):
                prefix = "disagg" if key == "disaggregation" else key
                items = {f"{prefix}_{name}": item for name, item in value.items()}
            for name, item in items.items():
                if name != "dp_rank" and isinstance(item, (int, float)):
                    families.setdefault(name, []).append(f'sglang_{name}{{dp_rank="{load["dp_rank"]}"}} {item}\n')
    for name, samples in families.items():
        yield f"# TYPE sglang_{name} gauge\n"
        yield from samples
