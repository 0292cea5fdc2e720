"""Asking a replica something off the data path, with every answer bounded in size and time."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

import httpx

MAX_BYTES = 1 << 20
KEEP_ALIVE_S = 3.0
"""Idle connections are dropped before the engine does, after 5 s in SGLang's uvicorn."""
_HEADERS = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "warmroute"}
"""Not compressed: a small answer must not unfold into a huge one."""


@dataclass(slots=True)
class Answer:
    """What a replica answered."""

    status: int
    body: bytes


class Asker:
    """GETs one replica. A few connections of its own, kept apart from those that carry requests.

    `tls` is the context of an https URL: the same as on the data path, so that both trust the same certificates.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        self._url = url.rstrip("/")
        # The transport alone: a client's cookies, redirects and hooks are of no use here, and a third of its cost.
        self._transport = httpx.AsyncHTTPTransport(
            # Without a context httpx would load all certificates of the system, 15 ms for each replica.
            verify=tls if tls is not None else False,
            trust_env=False,
            limits=httpx.Limits(max_connections=4, max_keepalive_connections=2, keepalive_expiry=KEEP_ALIVE_S),
        )

    async def get(self, path: str, timeout_s: float, max_bytes: int = MAX_BYTES) -> Answer:
        """The answer. Raises OSError when there is none in time, or its body is larger than `max_bytes`."""
        try:
            request = httpx.Request("GET", self._url + path, headers=_HEADERS)
            async with asyncio.timeout(timeout_s):
                response = await self._transport.handle_async_request(request)
                assert isinstance(response.stream, httpx.AsyncByteStream)
                try:
                    body = bytearray()
                    async for piece in response.stream:
                        body += piece
                        if len(body) > max_bytes:
                            raise OSError(f"the answer to {path} is larger than {max_bytes} bytes")
                finally:
                    await response.stream.aclose()
                return Answer(response.status_code, bytes(body))
        except TimeoutError:
            raise OSError(f"no answer to {path} within {timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise OSError(f"{path}: {error}" if str(error) else f"{path}: {type(error).__name__}") from None

    async def close(self) -> None:
        """Close its connections."""
        await self._transport.aclose()
