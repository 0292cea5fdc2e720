"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sim.emulator import body as bodies
from sim.emulator import errors, streams, tokens
from sim.emulator.answer import Answer, Generation
from sim.emulator.engine import Engine
from sim.emulator.errors import ApiError
from sim.replica import QueueFull

END_TOKEN = 2
"""`matched_stop` of an answer that ended by itself: an end-of-text id."""


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions. A stream's headers come with its first token."""
    engine: Engine = request.app.state.engine
    body = await bodies.read(request, "openai_v1_chat_completions")
    messages = bodies.require(body, "messages", request, "openai_v1_chat_completions")
    if not messages:
        raise ApiError(400, "Messages cannot be empty.")
    prompt = tokens.conversation(conversation(messages), body.get("tools"))
    return await _respond(request, engine, body, prompt, _Chat)


async def completions(request: Request) -> Response:
    """POST /v1/completions, for one prompt."""
    engine: Engine = request.app.state.engine
    body = await bodies.read(request, "openai_v1_completions")
    text = bodies.require(body, "prompt", request, "openai_v1_completions")
    if isinstance(text, list) and text and isinstance(text[0], int):
        prompt = tokens.from_ids(text)
    else:
        prompt = tokens.units(tokens.text_of(text))
    if not prompt:
        raise ApiError(400, "Prompt cannot be empty")
    return await _respond(request, engine, body, prompt, _Completion)


def conversation(messages: list[Any]) -> Iterator[tokens.Message]:
    """Roles and texts; tool calls are part of the text."""
    for message in messages:
        text = tokens.text_of(message.get("content"))
        for extra in ("tool_calls", "tool_call_id"):
            if message.get(extra):
                text += tokens.text_of(message[extra])
        yield str(message.get("role", "user")), text


class _Chat:
    """Bodies of the chat endpoint."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    @staticmethod
    def message(choice: int, generation: Generation) -> dict[str, Any]:
        message = {"role": "assistant", "content": generation.text, "reasoning_content": None}
        return {"index": choice, "message": message, **_finish(generation)}

    @staticmethod
    def start(choice: int) -> dict[str, Any] | None:
        return _Chat._delta(choice, {"role": "assistant", "content": ""})

    @staticmethod
    def token(choice: int, generation: Generation, index: int) -> dict[str, Any]:
        return _Chat._delta(choice, {"content": generation.words[index]})

    @staticmethod
    def end(choice: int, generation: Generation) -> dict[str, Any] | None:
        return {"index": choice, "delta": {"reasoning_content": None}, **_finish(generation)}

    @staticmethod
    def usage(usage: dict[str, Any]) -> dict[str, Any]:
        return {**usage, "completion_tokens_details": None}

    @staticmethod
    def _delta(choice: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice, "delta": {"reasoning_content": None, **delta}, **_finish(None)}


class _Completion:
    """Bodies of the text completion endpoint: the last token's chunk says why it ends, and every chunk has a usage."""

    object = chunk_object = "text_completion"

    @staticmethod
    def message(choice: int, generation: Generation) -> dict[str, Any]:
        return {"index": choice, "text": generation.text, **_finish(generation)}

    @staticmethod
    def start(choice: int) -> dict[str, Any] | None:
        return None

    @staticmethod
    def token(choice: int, generation: Generation, index: int) -> dict[str, Any]:
        last = index == generation.work.output_tokens - 1
        return {"index": choice, "text": generation.words[index], **_finish(generation if last else None)}

    @staticmethod
    def end(choice: int, generation: Generation) -> dict[str, Any] | None:
        if generation.finish_reason != "abort":
            return None
        return {"index": choice, "text": "", **_finish(generation)}

    @staticmethod
    def usage(usage: dict[str, Any]) -> dict[str, Any]:
        return usage


Form = type[_Chat] | type[_Completion]


async def _respond(request: Request, engine: Engine, body: dict[str, Any], prompt: bytes, form: Form) -> Response:
    model = bodies.model(body)
    wanted = bodies.sampling(body, "max_completion_tokens", "max_tokens")
    try:
        answer = bodies.submit(engine, request, body, prompt, wanted)
    except QueueFull:
        if wanted.stream:
            return streams.EventStream(engine, _refusal(engine, request.state.record.rid, body, model, form))
        raise errors.queue_full() from None
    if wanted.stream:
        await streams.attended(request, answer, answer.first())
        return streams.EventStream(engine, _events(answer, body, model, form), answer)
    await streams.attended(request, answer, answer.done())
    return JSONResponse(
        {
            "id": answer.id,
            "object": form.object,
            "created": int(answer.created),
            "model": model,
            "choices": [form.message(choice, item) for choice, item in enumerate(answer.generations)],
            "usage": form.usage(usage(engine, answer)),
            "metadata": weight_metadata(answer.generations[0].work.produced),
        }
    )


async def _events(answer: Answer, body: dict[str, Any], model: str, form: Form) -> AsyncIterator[bytes]:
    engine = answer.engine
    options = body.get("stream_options") or {}
    continuous = bool(options.get("continuous_usage_stats"))

    def chunk(rid: str, choices: list[dict[str, Any]], **usage: Any) -> bytes:
        created = int(answer.created)
        head = {"id": rid, "object": form.chunk_object, "created": created, "model": model, "choices": choices}
        return streams.data({**head, **usage})

    silent = {"usage": None} if form is _Completion else {}
    last_id = answer.id
    async for choice, generation, index in answer.tokens():
        if index is None:
            continue
        last_id = generation.rid
        if index == 0 and (start := form.start(choice)):
            yield chunk(generation.rid, [start], **silent)
        counted = {"usage": form.usage(usage(engine, answer, index + 1))} if continuous else silent
        yield chunk(generation.rid, [form.token(choice, generation, index)], **counted)
    # Choices have ids of their own, but SGLang ends all of them at the end, with the id it used last.
    for choice, generation in enumerate(answer.generations):
        if end := form.end(choice, generation):
            yield chunk(last_id, [end], **silent)
    if include_usage(engine, body):
        yield chunk(answer.id, [], usage=form.usage(usage(engine, answer)))
    yield streams.DONE


async def _refusal(engine: Engine, rid: str, body: dict[str, Any], model: str, form: Form) -> AsyncIterator[bytes]:
    answer = Answer(engine, 0)
    yield streams.queue_full()
    if include_usage(engine, body):
        zero = form.usage(usage(engine, answer))
        head = {"id": rid, "object": form.chunk_object, "created": int(answer.created), "model": model}
        yield streams.data({**head, "choices": [], "usage": zero})
    yield streams.DONE


def include_usage(engine: Engine, body: dict[str, Any]) -> bool:
    """Whether a stream ends with a usage chunk: the client's word, else the server's flag."""
    asked = (body.get("stream_options") or {}).get("include_usage")
    return engine.config.default_include_usage if asked is None else bool(asked)


def usage(engine: Engine, answer: Answer, completion: int | None = None) -> dict[str, Any]:
    """Usage so far, or with `completion` output tokens; the cached ones only with the cache report."""
    count = answer.completion_tokens if completion is None else completion
    cached = answer.cached_tokens if answer.generations else 0
    return {
        "prompt_tokens": answer.prompt_tokens,
        "total_tokens": answer.prompt_tokens + count,
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": cached} if engine.config.cache_report else None,
        "reasoning_tokens": 0,
    }


def weight_metadata(produced: int) -> dict[str, Any]:
    """The engine says which weights made which tokens; here they never change."""
    return {"weight_version": "default", "weight_versions": [{"version": "default", "start": 0, "end": produced}]}


def _finish(generation: Generation | None) -> dict[str, Any]:
    reason = None if generation is None else generation.finish_reason
    return {"logprobs": None, "finish_reason": reason, "matched_stop": END_TOKEN if reason == "stop" else None}
