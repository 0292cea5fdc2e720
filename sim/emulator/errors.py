"""Errors in the bodies SGLang gives them, which depend on the endpoint."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

QUEUE_FULL = "The request queue is full."


class ApiError(Exception):
    """A refused request. `kind` is the body's `type`, which for errors of the HTTP layer is their status."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "BadRequestError",
        *,
        validation: bool = False,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.validation = validation
        """Found before the endpoint ran; such errors look the same on (nearly) all of them."""
        self.param = param
        """The field or part of the path that is at fault, where the engine names it."""


class ClientGone(Exception):
    """The client left before the answer began."""


class StreamCut(Exception):
    """A fault: the connection ends here."""


def queue_full() -> ApiError:
    """The refusal of a non-streaming request when the queue is full."""
    return ApiError(503, QUEUE_FULL, "503")


def validation(detail: dict[str, Any], location: str) -> ApiError:
    """SGLang's rendering of one pydantic error. The engine adds the source file and line, which are left out here."""
    return ApiError(400, f"1 validation error:\n  {detail}{location} [{detail}]", "Bad Request", validation=True)


def flat(error: ApiError) -> dict[str, Any]:
    """The usual error body."""
    return {
        "object": "error",
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.status,
    }


def anthropic(error: ApiError) -> dict[str, Any]:
    """The error body of the Anthropic endpoints."""
    kinds = {503: "overloaded_error", 429: "rate_limit_error", 401: "authentication_error", 404: "not_found_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def response(path: str, error: ApiError) -> Response:
    """The error as the endpoint at `path` gives it."""
    body: dict[str, Any]
    if path.startswith("/v1/responses"):
        body = {"error": {key: value for key, value in flat(error).items() if key != "object"}}
    elif path.startswith("/v1/messages") and not error.validation:
        body = anthropic(error)
    elif path == "/generate" and error.kind == "BadRequestError":
        body = {"error": {"message": error.message}}
    else:
        body = flat(error)
    return JSONResponse(body, error.status)
