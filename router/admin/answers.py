"""What endpoints share: refusing, reading a body, telling who asked and when something was."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

MAX_BODY_BYTES = 65_536
"""Of what describes a change."""

NAMED = 20
"""Ids told to who asks for one that is not there."""


class Refused(Exception):
    """A request that cannot be served: status, machine-readable code, and a message with the remedy."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


async def refused(_: Request, error: Exception) -> Response:
    """How that is answered."""
    assert isinstance(error, Refused)
    return JSONResponse({"error": {"message": str(error), "code": error.code}}, error.status)


async def body_of(request: Request, limit: int) -> bytes:
    """The whole body. Raises Refused when it is longer than `limit`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise Refused(413, "body_too_large", f"The body is longer than {limit} bytes.")
    return bytes(body)


async def json_of(request: Request, example: str, default: Any = None) -> Any:
    """The value in the body, the default for an empty one if there is one.

    Raises Refused, with the example, when it is not JSON.
    """
    body = await body_of(request, MAX_BODY_BYTES)
    if not body and default is not None:
        return default
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "invalid_json", f"The body is not JSON: {error}. Write it as in {example}.") from None


def number_of(name: str, given: str, least: int, most: int) -> int:
    """A whole number that a query gives as `name`. Raises Refused."""
    if given.isascii() and given.isdigit() and len(given) <= len(str(most)) and least <= int(given) <= most:
        return int(given)
    raise Refused(400, "invalid_query", f"{name} must be a number from {least} to {most}, got {given!r}.")


def no_such_replica(replica_id: str, known: Iterable[str]) -> Refused:
    """What there is instead, as far as a line holds it."""
    names = ", ".join(sorted(known)[:NAMED]) or "none"
    return Refused(404, "unknown_replica", f"There is no replica {replica_id!r}; known are: {names}.")


def who(request: Request) -> str:
    """The address that asked, for the log."""
    return f"{request.client.host}:{request.client.port}" if request.client is not None else "an unknown client"


def wall_clock(seconds: float | None) -> str | None:
    """Seconds since the epoch as a date and time in UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
