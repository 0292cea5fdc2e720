"""A replica as the control plane sees it: a path, an answer, and what was asked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from tests.fakes.upstream import Peer, ScriptedUpstream, ok
from tests.fakes.wire import eventually

PHRASES = {200: "OK", 401: "Unauthorized", 404: "Not Found", 500: "Internal Server Error", 503: "Service Unavailable"}


@dataclass(slots=True)
class Reply:
    """What a path answers. `silent`: nothing, for as long as the asker waits."""

    status: int = 200
    body: bytes = b""
    headers: list[str] = field(default_factory=list)
    silent: bool = False


SILENCE = Reply(silent=True)


class FakeReplica:
    """Answers GETs by path, 404 unless told otherwise; may be changed, taken down and brought back at any time."""

    def __init__(self, **replies: Reply | int | object) -> None:
        self.replies: dict[str, Reply] = {}
        self._upstream = ScriptedUpstream(self._script)
        for name, reply in replies.items():
            self.say(f"/{name}", reply)

    def say(self, path: str, reply: Reply | int | object) -> None:
        """From now on `path` answers with this: a Reply, a bare status, or 200 and a value as JSON."""
        if isinstance(reply, Reply):
            self.replies[path] = reply
        elif isinstance(reply, int):
            self.replies[path] = Reply(reply)
        else:
            self.replies[path] = Reply(200, json.dumps(reply).encode(), ["Content-Type: application/json"])

    @property
    def url(self) -> str:
        return self._upstream.url

    @property
    def asked(self) -> list[str]:
        """Targets in the order in which they were asked for."""
        return [request.target for request in self._upstream.requests]

    async def start(self) -> FakeReplica:
        await self._upstream.start()
        return self

    async def stop(self) -> None:
        await self._upstream.stop()

    async def down(self) -> None:
        """As a process that has ended: its port refuses, its connections are gone."""
        self._upstream.stop_listening()
        for peer in self._upstream.connections:
            peer.transport.abort()
        await eventually(lambda: all(peer.ended for peer in self._upstream.connections))

    async def up(self) -> None:
        """Listen again on the same port."""
        await self._upstream.start()

    async def asked_for(self, path: str, more: int = 1) -> None:
        """Wait until `path` has been asked for so many times more."""
        goal = self.asked.count(path) + more
        await eventually(lambda: self.asked.count(path) >= goal, f"{path} asked {goal} times; {self.asked[-20:]}")

    async def _script(self, peer: Peer) -> None:
        while True:
            request = await peer.request()
            reply = self.replies.get(request.target, Reply(404, b'{"detail":"Not Found"}'))
            if reply.silent:
                await peer.end()
                return
            peer.send(ok(reply.body, *reply.headers, status=f"{reply.status} {PHRASES.get(reply.status, 'Other')}"))
