"""/v1/responses. The non-streaming body is SGLang's as recorded; the events follow OpenAI's published sequence."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sim.emulator import body as bodies
from sim.emulator import errors, stored, streams, tokens
from sim.emulator.answer import Answer, Generation, new_id
from sim.emulator.engine import Engine
from sim.emulator.stored import ResponseStore
from sim.replica import QueueFull


async def responses(request: Request) -> Response:
    """POST /v1/responses. A stream's headers and first event come at once."""
    engine: Engine = request.app.state.engine
    body = await bodies.read(request, "v1_responses_request")
    given = bodies.require(body, "input", request, "v1_responses_request")
    stored.check(engine, body)
    store, previous = engine.responses, body.get("previous_response_id")
    history = [] if store is None or previous is None else list(store.history(previous))
    history += [{"role": "user", "content": given}] if isinstance(given, str) else given
    chat = [("system", str(body["instructions"]))] if body.get("instructions") else []
    chat += map(_message, history)
    prompt = tokens.conversation(chat, body.get("tools"))
    model = bodies.model(body)
    wanted = bodies.sampling(body, "max_output_tokens")
    form = _Form(engine, body, model)
    try:
        answer = bodies.submit(engine, request, {**body, "rid": form.id}, prompt, wanted)
    except QueueFull:
        if wanted.stream:
            return streams.EventStream(engine, _refusal(form))
        raise errors.queue_full() from None
    if store is not None and body.get("store", True):
        store.begin(form.id, history)
    else:
        store = None
    if wanted.stream:
        return streams.EventStream(engine, _events(answer, form, store), answer)
    if store is not None and body.get("background"):
        queued = form.response(answer, "queued", [])
        store.run(queued, answer, form.complete)
        return JSONResponse(queued)
    await streams.attended(request, answer, answer.done())
    complete = form.complete(answer)
    if store is not None:
        store.put(complete)
    return JSONResponse(complete)


def _message(item: Any) -> tokens.Message:
    """An input item: messages by their content, calls and their results by their JSON."""
    if isinstance(item, dict) and "content" in item:
        return str(item.get("role", "user")), tokens.text_of(item["content"])
    role = "tool" if isinstance(item, dict) and str(item.get("type")).endswith("_output") else "assistant"
    return role, tokens.text_of(item)


class _Form:
    """Bodies for one request."""

    def __init__(self, engine: Engine, body: dict[str, Any], model: str) -> None:
        self.id = str(body.get("request_id") or f"resp_{new_id()}")
        self.item_id = f"msg_{new_id()}"
        self._engine = engine
        self._body = body
        self._model = model

    def part(self, text: str) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.item_id, "content": content, "role": "assistant", "status": status}
        return {**head, "type": "message", "phase": "final_answer"}

    def complete(self, answer: Answer) -> dict[str, Any]:
        generation = answer.generations[0]
        cut = generation.finish_reason == "length"
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._cached(answer), "cache_write_tokens": 0},
            "output_tokens": generation.work.produced,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + generation.work.produced,
        }
        item = self.item("completed", [self.part(generation.text)])
        details = {"reason": "max_output_tokens"} if cut else None
        return self.response(answer, "incomplete" if cut else "completed", [item], usage, details)

    def response(
        self,
        answer: Answer,
        status: str,
        output: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        incomplete: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(answer.created),
            "model": self._model,
            "output": output,
            "status": status,
            "usage": usage,
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools") or [],
            "error": error,
            "incomplete_details": incomplete,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None},
            "store": body.get("store", True),
            "temperature": body.get("temperature"),
            "text": {"format": {"type": "text"}},
            "top_p": body.get("top_p"),
            "truncation": "disabled",
            "user": body.get("user"),
            "metadata": body.get("metadata") or {},
        }

    def _cached(self, answer: Answer) -> int:
        return answer.cached_tokens if self._engine.config.cache_report else 0


async def _events(answer: Answer, form: _Form, store: ResponseStore | None) -> AsyncIterator[bytes]:
    number = 0

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return streams.named({"type": kind, "sequence_number": number - 1, **fields})

    place = {"item_id": form.item_id, "output_index": 0, "content_index": 0}
    for kind in ("response.created", "response.in_progress"):
        yield event(kind, response=form.response(answer, "in_progress", []))
    async for _, generation, index in answer.tokens():
        if index == 0:
            yield event("response.output_item.added", output_index=0, item=form.item("in_progress", []))
            yield event("response.content_part.added", **place, part=form.part(""))
        if index is not None:
            yield event("response.output_text.delta", **place, delta=generation.words[index], logprobs=[])
        else:
            for kind, fields in _closing(form, generation, place):
                yield event(kind, **fields)
    complete = form.complete(answer)
    if store is not None:
        store.put(complete)
    yield event("response.completed", response=complete)


def _closing(form: _Form, generation: Generation, place: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if not generation.work.produced:
        return []
    text = generation.text
    item = form.item("completed", [form.part(text)])
    return [
        ("response.output_text.done", {**place, "text": text, "logprobs": []}),
        ("response.content_part.done", {**place, "part": form.part(text)}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
    ]


async def _refusal(form: _Form) -> AsyncIterator[bytes]:
    """Not recorded from an engine: the event OpenAI's clients understand as an overloaded server."""
    answer = Answer(form._engine, 0)
    error = {"code": "server_is_overloaded", "message": errors.QUEUE_FULL}
    failed = form.response(answer, "failed", [], error=error)
    yield streams.named({"type": "response.failed", "sequence_number": 0, "response": failed})
