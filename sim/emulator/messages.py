"""/v1/messages and /v1/messages/count_tokens, the Anthropic endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sim.emulator import body as bodies
from sim.emulator import errors, streams, tokens
from sim.emulator.answer import Answer, Generation, new_id
from sim.emulator.engine import Engine
from sim.emulator.errors import ApiError
from sim.replica import QueueFull


async def messages(request: Request) -> Response:
    """POST /v1/messages. A stream's headers come at once, its first event with the first token."""
    engine: Engine = request.app.state.engine
    body = await bodies.read(request, "anthropic_v1_messages")
    prompt = _prompt(body, request, "anthropic_v1_messages")
    model = bodies.model(body)
    wanted = bodies.sampling(body, "max_tokens")
    try:
        # This endpoint takes neither a request id nor a cache salt in the body.
        answer = bodies.submit(engine, request, {}, prompt, wanted)
    except QueueFull:
        if wanted.stream:
            return streams.EventStream(engine, _refusal())
        raise errors.queue_full() from None
    if wanted.stream:
        return streams.EventStream(engine, _events(answer, model), answer)
    await streams.attended(request, answer, answer.done())
    generation = answer.generations[0]
    head = _message(model, [{"type": "text", "text": generation.text}])
    usage = _usage(engine, answer, generation.work.produced)
    return JSONResponse({**head, "stop_reason": _stop_reason(generation), "usage": usage})


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    body = await bodies.read(request, "anthropic_v1_count_tokens")
    return JSONResponse({"input_tokens": tokens.count(_prompt(body, request, "anthropic_v1_count_tokens"))})


def _prompt(body: dict[str, Any], request: Request, endpoint: str) -> bytes:
    given = bodies.require(body, "messages", request, endpoint)
    if not given:
        raise ApiError(400, "Messages cannot be empty.")
    chat = [("system", tokens.text_of(body["system"]))] if body.get("system") else []
    chat += [(str(message.get("role", "user")), tokens.text_of(message.get("content"))) for message in given]
    return tokens.conversation(chat, body.get("tools"))


async def _events(answer: Answer, model: str) -> AsyncIterator[bytes]:
    async for _, generation, index in answer.tokens():
        if index == 0:
            usage = _usage(answer.engine, answer, 0)
            yield streams.named({"type": "message_start", "message": {**_message(model, []), "usage": usage}})
            block = {"type": "text", "text": ""}
            yield streams.named({"type": "content_block_start", "index": 0, "content_block": block})
        if index is not None:
            delta = {"type": "text_delta", "text": generation.words[index]}
            yield streams.named({"type": "content_block_delta", "index": 0, "delta": delta})
        elif generation.work.produced:
            yield streams.named({"type": "content_block_stop", "index": 0})
            stop = {"stop_reason": _stop_reason(generation)}
            usage = {"output_tokens": generation.work.produced}
            yield streams.named({"type": "message_delta", "delta": stop, "usage": usage})
            yield streams.named({"type": "message_stop"})


async def _refusal() -> AsyncIterator[bytes]:
    yield streams.named({**errors.anthropic(errors.queue_full()), "type": "error"})


def _message(model: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    head = {"id": f"msg_{new_id()}", "type": "message", "role": "assistant", "content": content}
    return {**head, "model": model}


def _usage(engine: Engine, answer: Answer, output: int) -> dict[str, Any]:
    """Input tokens are those not found in the cache, when the cache is reported on."""
    if not engine.config.cache_report:
        return {"input_tokens": answer.prompt_tokens, "output_tokens": output}
    cached = answer.cached_tokens
    return {
        "input_tokens": answer.prompt_tokens - cached,
        "output_tokens": output,
        "cache_read_input_tokens": cached,
    }


def _stop_reason(generation: Generation) -> str:
    return "max_tokens" if generation.finish_reason == "length" else "end_turn"
