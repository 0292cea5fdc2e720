"""Asking a replica something off the data path, with every answer bounded in size and time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx

MAX_BYTES = 1 << 20


@dataclass(slots=True)
class Answer:
    status: int
    body: bytes


class Asker:
    """GETs one replica. A few connections of its own, kept apart from those that carry requests."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        limits = httpx.Limits(max_connections=4, max_keepalive_connections=2, keepalive_expiry=3.0)
        self._client = httpx.AsyncClient(trust_env=False, limits=limits, follow_redirects=False)

    async def get(self, path: str, timeout_s: float, max_bytes: int = MAX_BYTES) -> Answer:
        """The answer, its body cut at `max_bytes`. Raises OSError when there is none in time."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream("GET", self._url + path, timeout=None) as response,
            ):
                body = bytearray()
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > max_bytes:
                        del body[max_bytes:]
                        break
                return Answer(response.status_code, bytes(body))
        except TimeoutError:
            raise OSError(f"no answer within {timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise OSError(str(error) or type(error).__name__) from None

    async def close(self) -> None:
        await self._client.aclose()
