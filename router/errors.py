"""Answers that the router gives by itself: each with a status, a closed reason and a remedy."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from http import HTTPStatus

RETRY_AFTER_S = 2
"""What a client is told to wait when nothing can serve: about two probe rounds. Agents hammer a 503 without it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that the router answers itself."""

    status: int
    reason: str
    """Machine-readable: body `code`, header `x-warmroute-reason`, metric label and log field."""
    message: str
    retry_after_s: int | None = None


def unavailable(reason: str, message: str) -> Refusal:
    """503 with `retry-after`. Not 429: Codex gives up on that one at once."""
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, reason, message, RETRY_AFTER_S)


NO_REPLICA = {
    "no_replicas": unavailable(
        "no_replicas",
        "No replica that could serve this is configured. Add one with --replica URL or in `replicas`, in its pool "
        "where there are several.",
    ),
    "all_draining": unavailable(
        "all_draining", "Every replica that could serve this is draining or not ready. Try again shortly."
    ),
    "all_ejected": unavailable(
        "all_ejected", "No replica that could serve this is healthy. See /replicas on the admin port."
    ),
    "all_failed": unavailable("all_failed", "Every replica that could serve this failed. Try again shortly."),
}
"""By the reason of policies.balancer.NoReplica."""

TRIES_EXHAUSTED = unavailable("tries_exhausted", "The replicas tried could not serve this request. Try again shortly.")
BUDGET_EXHAUSTED = unavailable("retry_budget", "A replica failed and too many requests are being retried already.")
QUEUE_FULL = unavailable("queue_full", "The queues of the replicas tried are full. Try again shortly.")
MEMORY = unavailable("body_memory", "Too many large requests are being received at once. Try again shortly.")
CONNECTIONS = unavailable("connections", "Too many open connections. Try again shortly.")

SHED = {
    "room_full": "As many requests wait already as may (admission.max_waiting). Try again later.",
    "wait_too_long": "No place became free in time (admission.max_wait_s), or none would have. Try again later.",
    "kv_full": "The replicas' KV caches are full of other live sessions; this one is held back. Try again later.",
}
"""By policies.admission.ShedReason."""

INTERNAL = Refusal(500, "internal", "The router failed on this request; its own log says how.")
UPSTREAM_CLOSED = Refusal(502, "upstream_closed", "The replica closed the connection without an answer.")
UPSTREAM_INVALID = Refusal(502, "upstream_invalid", "The replica's answer is not valid HTTP/1.1.")
FIRST_BYTE_TIMEOUT = Refusal(504, "first_byte_timeout", "The replica did not begin to answer in time.")

HEADER_TIMEOUT = Refusal(408, "header_timeout", "The request's headers did not arrive in time.")
BODY_TIMEOUT = Refusal(408, "body_timeout", "The request's body did not arrive in time.")
HEADERS_TOO_LARGE = Refusal(431, "headers_too_large", "The request's headers are larger than limits.header_bytes.")
BODY_TOO_LARGE = Refusal(413, "body_too_large", "The request's body is larger than limits.body_bytes.")
BAD_VERSION = Refusal(505, "http_version", "Only HTTP/1.1 and HTTP/1.0 are spoken here.")
BAD_EXPECT = Refusal(417, "expectation", "Only `expect: 100-continue` is understood.")
BAD_HOST = Refusal(400, "host", "An HTTP/1.1 request must carry exactly one host header.")
BAD_TARGET = Refusal(400, "target", "The request target must be a path that begins with a slash.")
BAD_CODING = Refusal(400, "transfer_encoding", "The only transfer coding understood is `chunked`, in HTTP/1.1.")
UPGRADE = Refusal(501, "upgrade", "Upgrade is not supported: no WebSocket and no HTTP/2 over this port.")
LOOP = Refusal(508, "loop", "This request has been here before: a replica leads back to this router.")
CONNECT = Refusal(405, "connect", "CONNECT is refused: this is not a forward proxy.")
FOREIGN_HOST = Refusal(421, "foreign_host", "The absolute-form target names another host: this is not a forward proxy.")
ADMIN_PATH = Refusal(
    403, "admin_path", "Engine administration is not passed on. Call the replica itself, or set admin_paths.allow."
)
UNKNOWN_POOL = Refusal(400, "unknown_pool", "The header x-warmroute-pool names no pool that there is.")
PRIORITY = Refusal(400, "priority", "The priority header's value must be high, normal or low.")
MISSING_KEY = Refusal(401, "missing_api_key", "An API key is required: send it as `authorization: Bearer KEY`.")
INVALID_KEY = Refusal(401, "invalid_api_key", "The API key is not known here.")
KEY_IN_FLIGHT = Refusal(
    429, "key_in_flight", "This API key has as many requests in flight as it may have.", RETRY_AFTER_S
)


def shed(reason: str, retry_after_s: int) -> Refusal:
    """A request that found no place, with the seconds after which one is likely."""
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, reason, SHED[reason], retry_after_s)


def unknown_pool(known: Iterable[str]) -> Refusal:
    """A request that names a pool by header, with the names that there are."""
    return replace(UNKNOWN_POOL, message=f"{UNKNOWN_POOL.message} Name one of {', '.join(known)}, or leave it out.")


def malformed(detail: str) -> Refusal:
    """A request that cannot be parsed safely; the connection is closed after it."""
    return Refusal(400, "malformed", f"Malformed HTTP/1.1 request: {detail}.")


_KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    502: "api_error",
    503: "overloaded_error",
    504: "api_error",
}
"""Anthropic's types of error; OpenAI's clients go by the status."""


def render(refusal: Refusal, *, close: bool, head_only: bool, request_id: bytes, extra: bytes = b"") -> bytes:
    """The whole answer as bytes, with `extra` header lines. The body suits OpenAI's and Anthropic's clients alike."""
    kind = _KINDS.get(refusal.status, "invalid_request_error")
    error = {"message": refusal.message, "type": kind, "param": None, "code": refusal.reason}
    body = json.dumps({"type": "error", "error": error}).encode()
    lines = [
        f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-warmroute-reason: {refusal.reason}",
    ]
    if refusal.status == 401:
        lines.append("www-authenticate: Bearer")
    if refusal.status == 405:
        lines.append("allow: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")
    if refusal.retry_after_s is not None:
        lines.append(f"retry-after: {refusal.retry_after_s}")
    if close:
        lines.append("connection: close")
    head = "\r\n".join(lines).encode() + b"\r\n"
    if request_id:
        head += b"x-request-id: " + request_id + b"\r\n"
    return head + extra + b"\r\n" + (b"" if head_only else body)
