"""The response store of /v1/responses: in memory, without expiry or bound, as SGLang's serving_responses module has it.

Without `--enable-response-store` everything that needs it is refused. Read in the engine's source, not recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sim.emulator.errors import ApiError

if TYPE_CHECKING:
    from sim.emulator.answer import Answer
    from sim.emulator.engine import Engine

_KIND = "invalid_request_error"
_DISABLED = (
    "Response store is disabled. Stateful Responses require --enable-response-store on a standalone server; response "
    "storage is unavailable in PD mode."
)


class ResponseStore:
    """Responses of one engine, and what was said in the conversations that led to them."""

    def __init__(self) -> None:
        self._responses: dict[str, dict[str, Any]] = {}
        self._histories: dict[str, list[Any]] = {}
        self._answers: dict[str, Answer] = {}
        """Those that are made in the background."""
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, response_id: str) -> dict[str, Any]:
        """Raises ApiError as the engine words it."""
        if not response_id.startswith("resp_"):
            message = f"Invalid 'response_id': '{response_id}'. Expected an ID that begins with 'resp'."
            raise ApiError(400, message, _KIND, param="response_id")
        if response_id not in self._responses:
            message = f"Response with id '{response_id}' not found."
            raise ApiError(HTTPStatus.NOT_FOUND, message, _KIND, param="response_id")
        return self._responses[response_id]

    def history(self, response_id: str) -> list[Any]:
        """Input items up to the response and its output. Raises ApiError as `find` does."""
        self.find(response_id)
        return self._histories[response_id]

    def begin(self, response_id: str, history: list[Any]) -> None:
        """A response is being made from these input items."""
        self._histories[response_id] = history

    def put(self, response: dict[str, Any]) -> None:
        """The response is whole; one that was cancelled stays as it is."""
        name = response["id"]
        if self._responses.get(name, response)["status"] != "cancelled":
            self._responses[name] = response
            self._histories[name] = [*self._histories[name], *response["output"]]

    def run(self, queued: dict[str, Any], answer: Answer, complete: Callable[[Answer], dict[str, Any]]) -> None:
        """Let the answer come while nobody waits for it."""
        name = queued["id"]
        self._responses[name] = queued
        self._answers[name] = answer

        async def wait() -> None:
            self._responses[name] = {**queued, "status": "in_progress"}
            await answer.done()
            self.put(complete(answer))
            del self._answers[name]

        task = asyncio.get_running_loop().create_task(wait())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self, response_id: str) -> dict[str, Any]:
        """End one that is being made; another is left as it is. Raises ApiError as `find` does."""
        response = self.find(response_id)
        if response["status"] in ("queued", "in_progress"):
            response = self._responses[response_id] = {**response, "status": "cancelled"}
            self._answers[response_id].abort()
        return response


def check(engine: Engine, body: dict[str, Any]) -> None:
    """Whether the store allows what a request wants. Raises ApiError."""
    if engine.responses is None:
        if body.get("previous_response_id") is not None:
            raise disabled("previous_response_id")
        if body.get("background"):
            raise disabled("background")
    if body.get("background") and not body.get("store", True):
        raise ApiError(400, "background=true requires store=true.", _KIND, param="store")


def disabled(param: str) -> ApiError:
    return ApiError(400, _DISABLED, _KIND, param=param)


async def retrieve(request: Request) -> Response:
    """GET /v1/responses/{id}."""
    return JSONResponse(_store(request).find(request.path_params["response_id"]))


async def cancel(request: Request) -> Response:
    """POST /v1/responses/{id}/cancel."""
    return JSONResponse(_store(request).cancel(request.path_params["response_id"]))


def _store(request: Request) -> ResponseStore:
    engine: Engine = request.app.state.engine
    if engine.responses is None:
        raise disabled("response_id")
    return engine.responses
