"""Request bodies: read, checked as SGLang checks them, and turned into what the engine needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from sim.emulator import errors, tokens
from sim.emulator.answer import Answer, Record, new_id
from sim.emulator.config import EmulatorConfig
from sim.emulator.engine import Engine
from sim.emulator.errors import ApiError

_RANK = ("routed_dp_rank", "data_parallel_rank")
"""The name of today, and an older one."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many tokens, how often, and how they are to be sent."""

    max_tokens: int | None
    ignore_eos: bool
    n: int
    stream: bool


async def read(request: Request, endpoint: str) -> dict[str, Any]:
    """The JSON object in the body; ApiError as SGLang's request validation words it.

    `endpoint` is the name SGLang's route function has; it shows in messages.
    """
    location = f"\n\n  in {endpoint}\n    {request.method} {request.url.path}"
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        raise errors.validation({"loc": ["header", "content-type"], "msg": message, "type": "value_error"}, "")
    raw = await request.body()
    if not raw:
        detail = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
        raise errors.validation(detail, location)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.validation(_json_detail(raw, error), location) from None
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        detail = {"type": "model_attributes_type", "loc": ("body",), "msg": message, "input": body}
        raise errors.validation(detail, location)
    _check_fields(body, location)
    return body


def require(body: dict[str, Any], key: str, request: Request, endpoint: str) -> Any:
    """The value of a field that must be there."""
    if body.get(key) is None:
        given = dict(body) if body.get("tools") else {**body, "tool_choice": "none"}
        detail = {"type": "missing", "loc": ("body", key), "msg": "Field required", "input": given}
        raise errors.validation(detail, f"\n\n  in {endpoint}\n    {request.method} {request.url.path}")
    return body[key]


def model(body: dict[str, Any]) -> str:
    """The model's name as the answer repeats it: any name is served, an adapter (`name:adapter`) is not."""
    name = str(body.get("model") or "default")
    _, colon, adapter = name.partition(":")
    if colon:
        raise ApiError(
            400,
            f"LoRA adapter '{adapter}' was requested, but LoRA is not enabled. Please launch the server with "
            "--enable-lora flag and preload adapters using --lora-paths or /load_lora_adapter endpoint.",
        )
    return name


def sampling(body: dict[str, Any], *limits: str) -> Sampling:
    """The fields that decide length and form; `limits` are the names the token limit may have, first wins."""
    temperature = body.get("temperature")
    if temperature is not None and float(temperature) < 0:
        raise ApiError(400, f"temperature must be a non-negative finite number, got {float(temperature)}.")
    limit = next((int(body[name]) for name in limits if body.get(name) is not None), None)
    return Sampling(limit, bool(body.get("ignore_eos")), int(body.get("n") or 1), bool(body.get("stream")))


def submit(engine: Engine, request: Request, body: dict[str, Any], prompt: bytes, wanted: Sampling) -> Answer:
    """Checks the lengths and starts the request; ApiError, or QueueFull when the replica takes no more."""
    config = engine.config
    count = tokens.count(prompt)
    length, reason = _length(config, count, wanted)
    if not engine.schedulers[0].replica.fits(count, length):  # the others are as large
        raise ApiError(
            400,
            f"Input length ({count} tokens) exceeds the maximum allowed length ({config.kv_tokens - length} tokens). "
            "Use a shorter input or enable --allow-auto-truncate.",
        )
    rid = str(body.get("rid") or new_id())
    if engine.is_live(rid):
        raise ApiError(400, f"Duplicate request ID detected: {rid}")
    record: Record = request.state.record
    record.rid, record.stream, record.prompt_tokens = rid, wanted.stream, count
    # SGLang joins the two, so that a value in one is the same value in the other.
    salt = f"{body.get('cache_salt') or ''}{body.get('extra_key') or ''}"
    rank = _rank(request, body, config.dp_size)
    return engine.submit(prompt, record=record, length=length, reason=reason, n=wanted.n, salt=salt, rank=rank)


def _rank(request: Request, body: dict[str, Any], ranks: int) -> int | None:
    """The data-parallel rank asked for: by a header, at which /generate does not look, else by the body."""
    named = None if request.url.path == "/generate" else request.headers.get("x-data-parallel-rank")
    rank = next((int(body[name]) for name in _RANK if body.get(name) is not None), None)
    if named is not None:
        try:
            rank = int(named)
        except ValueError:
            message = f"Invalid X-Data-Parallel-Rank header: must be an integer, got '{named}'"
            raise ApiError(400, message, "400") from None
    if rank is not None and not 0 <= rank < ranks:
        raise ApiError(400, f"routed_dp_rank={rank} out of range [0, {ranks})")
    return rank


def _length(config: EmulatorConfig, prompt_tokens: int, wanted: Sampling) -> tuple[int, str]:
    """Output tokens and the reason they end for."""
    context, limit = config.context_length, wanted.max_tokens
    if limit is not None and limit > context:
        raise ApiError(
            400,
            f"max_completion_tokens is too large: {limit}.This model supports at most {context} completion tokens.",
        )
    if prompt_tokens >= context:
        raise ApiError(
            400,
            f"The input ({prompt_tokens} tokens) is longer than the model's context length ({context} tokens).",
        )
    if limit is not None and prompt_tokens + limit > context:
        raise ApiError(
            400,
            f"Requested token count exceeds the model's maximum context length of {context} tokens. "
            f"You requested a total of {prompt_tokens + limit} tokens: {prompt_tokens} tokens from the input messages "
            f"and {limit} tokens for the completion. Please reduce the number of tokens in the input messages or the "
            "completion to fit within the limit.",
        )
    room = context - prompt_tokens
    natural = min(config.output_tokens, room)
    if limit is None:
        return natural, "length" if wanted.ignore_eos or natural == room else "stop"
    if wanted.ignore_eos or limit <= natural:
        return max(limit, 1), "length"
    return natural, "stop"


def _json_detail(raw: bytes, error: Exception) -> dict[str, Any]:
    position, message = 0, str(error)
    try:
        json.loads(raw)
    except json.JSONDecodeError as found:
        position = found.pos
        message = "unexpected end of data" if found.pos >= len(found.doc) else found.msg
    except UnicodeDecodeError:
        message = "str is not valid UTF-8: surrogates not allowed"
    return {
        "type": "json_invalid",
        "loc": ("body", position),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": message},
    }


def _check_fields(body: dict[str, Any], location: str) -> None:
    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", *_RANK):
        value = body.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            continue
        if isinstance(value, str):
            if value.strip().isdigit():
                continue
            kind, message = "int_parsing", "Input should be a valid integer, unable to parse string as an integer"
        else:
            kind, message = "int_type", "Input should be a valid integer"
        raise errors.validation({"type": kind, "loc": ("body", key), "msg": message, "input": value}, location)
    temperature = body.get("temperature")
    if temperature is not None and not isinstance(temperature, (int, float)):
        message = "Input should be a valid number"
        detail = {"type": "float_type", "loc": ("body", "temperature"), "msg": message, "input": temperature}
        raise errors.validation(detail, location)
