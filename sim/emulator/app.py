"""The HTTP surface of one emulated replica."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sim.emulator import admin, control, errors, info, loads, metrics, stored
from sim.emulator.chat import chat, completions
from sim.emulator.engine import Engine
from sim.emulator.errors import ApiError, ClientGone
from sim.emulator.generate import generate
from sim.emulator.messages import count_tokens, messages
from sim.emulator.responses import responses

Handler = Callable[[Request], Awaitable[Response]]
_OPEN_PATHS = frozenset({"/ready", "/health", "/health_generate", "/metrics"})
"""Answered without the API key."""

_SECRET_HEADERS = frozenset({"authorization", "x-api-key", "cookie"})

_INFERENCE: dict[str, Handler] = {
    "/generate": generate,
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/messages": messages,
    "/v1/responses": responses,
    "/v1/embeddings": info.embeddings,
}
_GET: dict[str, Handler] = {
    "/": admin.root,
    "/ready": admin.ready,
    "/health": admin.health,
    "/health_generate": admin.health,
    "/ping": admin.ping,
    "/metrics": metrics.metrics,
    "/model_info": info.model_info,
    "/get_model_info": info.model_info,
    "/server_info": info.server_info,
    "/get_server_info": info.server_info,
    "/v1/models": info.models,
    "/v1/models/{model:path}": info.model,
    "/v1/responses/{response_id}": stored.retrieve,
    "/v1/loads": loads.loads,
    "/_emulator/log": control.log,
}
_POST: dict[str, Handler] = {
    "/v1/messages/count_tokens": count_tokens,
    "/v1/responses/{response_id}/cancel": stored.cancel,
    "/tokenize": info.tokenize,
    "/v1/tokenize": info.tokenize,
    "/abort_request": admin.abort_request,
    "/pause_generation": admin.pause_generation,
    "/continue_generation": admin.continue_generation,
}
_BOTH: dict[str, Handler] = {"/flush_cache": admin.flush_cache, "/_emulator/faults": control.faults}


def make_app(engine: Engine) -> Starlette:
    """The app. Its state holds the engine; the server adds the port it listens on."""
    routes = [_route(path, _inference(handler), "POST") for path, handler in _INFERENCE.items()]
    routes += [_route(path, handler, "GET") for path, handler in _GET.items()]
    routes += [_route(path, handler, "POST") for path, handler in _POST.items()]
    routes += [_route(path, handler, "GET", "POST") for path, handler in _BOTH.items()]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(_ApiKey, key=engine.config.api_key),
            Middleware(
                CORSMiddleware, allow_origins=["*"], allow_credentials=True, allow_methods=["*"], allow_headers=["*"]
            ),
        ],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, ClientGone: _client_gone},
    )
    app.state.engine = engine
    return app


def _route(path: str, handler: Handler, *methods: str) -> Route:
    route = Route(path, handler, methods=list(methods))
    # Starlette adds HEAD to GET; SGLang's framework does not and answers it with 405.
    route.methods = set(methods)
    return route


def _inference(handler: Handler) -> Handler:
    """The handler, with a record of the request; unless a tester has set a status to answer with."""

    async def answer(request: Request) -> Response:
        engine: Engine = request.app.state.engine
        headers = {name: value for name, value in request.headers.items() if name not in _SECRET_HEADERS}
        record = request.state.record = engine.received(request.url.path, headers)
        try:
            if engine.faults.status is not None:
                raise ApiError(engine.faults.status, "An emulated fault.", str(engine.faults.status))
            return await handler(request)
        except ApiError as error:
            record.error = error.status
            raise

    return answer


class _ApiKey:
    """Refuses requests without the key, outside of everything else."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._expected = None if key is None else f"Bearer {key}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._expected is not None and scope["type"] == "http" and not self._allowed(scope):
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if scope["path"] in _OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        return Request(scope).headers.get("authorization") == self._expected


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return errors.response(request.url.path, error)


async def _client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads it."""
    return Response(status_code=499)
