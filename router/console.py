"""What the command asks of a running router, through its admin port."""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT_S = 5.0

_REMEDY = "is warmroute running, and is --admin its admin port?"


@dataclass(frozen=True, slots=True)
class Access:
    """Where an admin port is, and what it wants to see."""

    url: str
    token: str = ""
    tls: ssl.SSLContext | None = None
    """For https; None trusts the system's authorities."""


class Unreachable(Exception):
    """The admin port did not answer as one. The message names the URL and the remedy."""


class Refused(Exception):
    """The router answered that it cannot. The message is its own; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def ask(admin: Access, path: str, *, method: str = "GET", query: dict[str, str] | None = None, body: Any = None) -> Any:
    """What an admin port answers. `body` is sent as JSON. Raises Unreachable or Refused."""
    url = admin.url.rstrip("/") + path
    headers = {"authorization": f"Bearer {admin.token}"} if admin.token else {}
    try:
        content = None if body is None else json.dumps(body)
        response = httpx.request(
            method,
            url,
            params=query,
            headers=headers,
            content=content,
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=admin.tls or True,
        )
        if response.is_error:
            told = _error_in(response)
            if told is not None:
                raise Refused(response.status_code, told)
            raise Unreachable(f"{url}: {response.status_code} {response.reason_phrase}: {_REMEDY}")
        return response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise Unreachable(f"{url}: {str(error).rstrip('.')}: {_remedy(error)}") from None


def _remedy(error: Exception) -> str:
    """What to look at."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "name its authority by --ca-file"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) or "[SSL" in str(error):
        return "is it http:// or https://, and does it ask for a certificate (--cert-file, --key-file)?"
    return _REMEDY


def _error_in(response: httpx.Response) -> str | None:
    """The message of an error that is told as the admin port tells it."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, TypeError, KeyError):
        return None
    return message if isinstance(message, str) else None
