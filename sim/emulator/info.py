"""What a replica says about itself: models, model and server information, tokenising, embeddings."""

from __future__ import annotations

import random
import shlex
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sim.emulator import body as bodies
from sim.emulator import tokens
from sim.emulator.config import EmulatorConfig
from sim.emulator.engine import Engine

VERSION = "0.5.23"
_EMBEDDING_SIZE = 8


async def models(request: Request) -> Response:
    """GET /v1/models."""
    return JSONResponse({"object": "list", "data": [_model(request.app.state.engine.config)]})


async def model(request: Request) -> Response:
    """GET /v1/models/{id}."""
    config: EmulatorConfig = request.app.state.engine.config
    name = request.path_params["model"]
    if name == config.model:
        return JSONResponse(_model(config))
    message = f"The model '{name}' does not exist"
    error = {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    return JSONResponse({"error": error}, 404)


def _model(config: EmulatorConfig) -> dict[str, Any]:
    name, length = config.model, config.context_length
    head = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "sglang"}
    return {**head, "root": name, "parent": None, "max_model_len": length}


async def model_info(request: Request) -> Response:
    """GET /model_info and its old name."""
    name = request.app.state.engine.config.model
    return JSONResponse(
        {
            "model_path": name,
            "served_model_name": name,
            "tokenizer_path": name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "emulated",
            "architectures": ["EmulatedForCausalLM"],
        }
    )


async def server_info(request: Request) -> Response:
    """GET /server_info and its old name: the arguments and facts a router may look at, of over 500 in the real one."""
    engine: Engine = request.app.state.engine
    arguments = _arguments(engine.config, request.app.state.port)
    running = engine.config.max_running_requests
    states = [
        {
            **arguments,
            "effective_max_running_requests_per_dp": running,
            "last_gen_throughput": load["gen_throughput"],
        }
        for load in engine.loads()
    ]
    return JSONResponse(
        {
            **arguments,
            "launch_command": shlex.join(_flags(engine.config, request.app.state.port)),
            "status": "ready",
            "max_total_num_tokens": engine.config.kv_tokens,
            "max_req_input_len": engine.config.context_length - 6,
            "startup_time": engine.startup_times,
            "internal_states": states,
            "version": VERSION,
            "frontend": "python",
        }
    )


def _arguments(config: EmulatorConfig, port: int) -> dict[str, Any]:
    return {
        "model_path": config.model,
        "tokenizer_path": config.model,
        "served_model_name": config.model,
        "context_length": config.context_length,
        "max_running_requests": config.max_running_requests,
        "max_queued_requests": config.max_queued_requests,
        "max_total_tokens": config.kv_tokens,
        "page_size": config.page_size,
        "schedule_policy": "fcfs",
        "radix_eviction_policy": "lru",
        "disable_radix_cache": False,
        "enable_hierarchical_cache": False,
        "enable_cache_report": config.cache_report,
        "stream_response_default_include_usage": config.default_include_usage,
        "enable_response_store": config.response_store,
        "enable_metrics": True,
        "enable_http2": False,
        "disaggregation_mode": "null",
        "kv_events_config": None,
        "tp_size": 4,
        "dp_size": config.dp_size,
        "host": config.host,
        "port": port,
    }


def _flags(config: EmulatorConfig, port: int) -> list[str]:
    flags = ["--model-path", config.model, "--host", config.host, "--port", str(port), "--page-size"]
    flags += [str(config.page_size), "--max-running-requests", str(config.max_running_requests), "--enable-metrics"]
    if config.max_queued_requests is not None:
        flags += ["--max-queued-requests", str(config.max_queued_requests)]
    if config.dp_size > 1:
        flags += ["--dp-size", str(config.dp_size)]
    if config.cache_report:
        flags.append("--enable-cache-report")
    if config.response_store:
        flags.append("--enable-response-store")
    return flags


async def tokenize(request: Request) -> Response:
    """POST /tokenize and /v1/tokenize."""
    body = await bodies.read(request, "tokenize")
    units = tokens.units(tokens.text_of(bodies.require(body, "prompt", request, "tokenize")))
    length = request.app.state.engine.config.context_length
    return JSONResponse({"tokens": tokens.ids(units), "count": tokens.count(units), "max_model_len": length})


async def embeddings(request: Request) -> Response:
    """POST /v1/embeddings: a vector that depends on the text and means nothing."""
    body = await bodies.read(request, "openai_v1_embeddings")
    given = bodies.require(body, "input", request, "openai_v1_embeddings")
    texts = [tokens.units(tokens.text_of(item)) for item in (given if isinstance(given, list) else [given])]
    data = []
    for index, text in enumerate(texts):
        numbers = random.Random(text)
        vector = [numbers.uniform(-1, 1) for _ in range(_EMBEDDING_SIZE)]
        data.append({"object": "embedding", "embedding": vector, "index": index})
    count = sum(tokens.count(text) for text in texts)
    usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
    return JSONResponse({"object": "list", "data": data, "model": bodies.model(body), "usage": usage})
