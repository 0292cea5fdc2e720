"""/generate, SGLang's own endpoint, for one prompt."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sim.emulator import body as bodies
from sim.emulator import errors, streams, tokens
from sim.emulator.answer import Answer, Generation
from sim.emulator.chat import END_TOKEN, weight_metadata
from sim.emulator.engine import Engine
from sim.emulator.errors import ApiError
from sim.replica import QueueFull


async def generate(request: Request) -> Response:
    """POST /generate. A stream's headers come at once."""
    engine: Engine = request.app.state.engine
    body = await bodies.read(request, "generate_request")
    prompt = _prompt(body)
    wanted = bodies.sampling({**(body.get("sampling_params") or {}), "stream": body.get("stream")}, "max_new_tokens")
    try:
        answer = bodies.submit(engine, request, body, prompt, wanted)
    except QueueFull:
        if wanted.stream:
            return streams.EventStream(engine, _refusal())
        raise errors.queue_full() from None
    if wanted.stream:
        return streams.EventStream(engine, _events(answer), answer)
    await streams.attended(request, answer, answer.done())
    generation = answer.generations[0]
    return JSONResponse(_state(answer, generation, generation.work.produced))


def _prompt(body: dict[str, Any]) -> bytes:
    text, ids = body.get("text"), body.get("input_ids")
    if isinstance(text, str) and text:
        return tokens.units(text)
    if isinstance(ids, list) and ids and isinstance(ids[0], int):
        return tokens.from_ids(ids)
    raise ApiError(400, "Either text or input_ids should be provided, for one prompt: batches are not emulated.")


async def _events(answer: Answer) -> AsyncIterator[bytes]:
    last = answer.generations[0].work.output_tokens - 1
    async for _, generation, index in answer.tokens():
        if index is not None and index < last:
            yield streams.data(_state(answer, generation, index + 1))
        elif index is None:
            yield streams.data(_state(answer, generation, generation.work.produced))
    yield streams.DONE


async def _refusal() -> AsyncIterator[bytes]:
    yield streams.queue_full(retryable=False)
    yield streams.DONE


def _state(answer: Answer, generation: Generation, produced: int) -> dict[str, Any]:
    """The whole text so far, as every event carries it."""
    words = generation.words[:produced]
    return {
        "text": "".join(words),
        "output_ids": tokens.ids("".join(words).encode()),
        "meta_info": _meta(answer, generation, produced),
    }


def _meta(answer: Answer, generation: Generation, produced: int) -> dict[str, Any]:
    engine, work = answer.engine, generation.work
    ended = generation.ended and produced == work.produced
    started, first = engine.epoch(work.started), engine.epoch(work.first_token)
    rank = generation.scheduler.rank if engine.config.dp_size > 1 else None
    meta = {
        "id": generation.rid,
        "finish_reason": _finish_reason(generation) if ended else None,
        "prompt_tokens": work.prompt_tokens,
        "weight_version": "default",
        "num_retractions": 0,
        "storage_prefetch_wait": 0.0,
        "storage_staging_wait": 0.0,
        "forward_entry_time": started,
        "prefill_finished_time": first,
        "queue_time": None if work.started is None else (work.started - work.arrived) * engine.scale,
        "reasoning_tokens": 0,
        "completion_tokens": produced,
        "cached_tokens": work.cached_tokens,
    }
    if ended:
        meta["weight_versions"] = weight_metadata(work.produced)["weight_versions"]
    meta |= {"cached_tokens_details": {"device": work.cached_tokens, "host": 0}, "dp_rank": rank}
    if ended:
        meta |= _timing(answer, generation)
    elif produced == 1:
        meta["response_sent_to_client_ts"] = time.time()
    return meta


def _timing(answer: Answer, generation: Generation) -> dict[str, Any]:
    engine, work = answer.engine, generation.work
    assert work.finished is not None
    first = work.finished if work.first_token is None else work.first_token
    decoding = (work.finished - first) * engine.scale
    sent = {"response_sent_to_client_ts": time.time()}
    end = {
        "request_finished_ts": engine.epoch(work.finished),
        "decode_throughput": work.produced / decoding if decoding else 0.0,
    }
    return {
        "e2e_latency": (work.finished - work.arrived) * engine.scale,
        "request_received_ts": answer.created,
        "first_token_latency": (first - work.arrived) * engine.scale,
        "api_server_dispatch_finish_ts": answer.created,
        # A stream sent something before its end.
        **({**sent, **end} if generation.record.stream else {**end, **sent}),
    }


def _finish_reason(generation: Generation) -> dict[str, Any]:
    reason = generation.finish_reason
    if reason == "length":
        return {"type": "length", "length": generation.work.produced}
    if reason == "stop":
        return {"type": "stop", "matched": END_TOKEN}
    return {"type": "abort", "message": "Aborted"}
