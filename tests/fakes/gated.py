"""A replica whose streams go on until the test lets them end."""

from __future__ import annotations

import asyncio
import json

from tests.fakes.upstream import LAST_CHUNK, SSE_HEAD, Peer, ScriptedUpstream, chunk, ok

PROMPT_TOKENS = 40_000
"""That it says it had of every prompt."""


class Gated:
    """Answers chats with a stream that goes on until it is let go, 10 s at most, and says what was cached."""

    def __init__(self) -> None:
        self.finish = asyncio.Event()
        self.finish.set()
        self.cached = 0
        self.ready = "200 OK"
        """What `/ready` says."""
        self.upstream = ScriptedUpstream(self._script)

    async def _script(self, peer: Peer) -> None:
        while True:
            request = await peer.request()
            if request.target == "/v1/chat/completions":
                peer.send(SSE_HEAD + chunk(b'data: {"id":"1"}\n\n'))
                ended = asyncio.create_task(peer.end())
                await asyncio.wait(
                    [asyncio.create_task(self.finish.wait()), ended], return_when=asyncio.FIRST_COMPLETED
                )
                ended.cancel()
                usage = {
                    "prompt_tokens": PROMPT_TOKENS,
                    "completion_tokens": 20,
                    "prompt_tokens_details": {"cached_tokens": self.cached},
                }
                peer.send(chunk(b'data: {"usage":%b}\n\n' % json.dumps(usage).encode()))
                peer.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
            elif request.target == "/ready":
                peer.send(ok(b"", status=self.ready))
            elif request.target == "/health":
                peer.send(ok(b""))
            else:
                peer.send(ok(b"", status="404 Not Found"))
