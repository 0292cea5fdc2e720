"""Router processes that share a real store, before emulated replicas, and sessions that have turns over sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from sim.emulator import tokens
from tests.fakes.client import RawClient, post
from tests.fakes.process import Process, Router
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S, Ended
from tests.store.servers import NEEDED, Server, binaries

REPLICAS = 4
TIME_SCALE = 0.02
FIRST_TOKENS, TURN_TOKENS = 6_000, 500
"""Of a session's first prompt, and what each turn adds."""
PATIENT_S = 0.5
"""Of waiting for a claim: on a machine that is busy with other things one may take longer than the default allows."""
PAGE_TOKENS = 16
CHAT = "/v1/chat/completions"
THERE = "the store is there"
TROUBLE = ("the store does not do its work", "the store is not there")


@contextmanager
def emulators(log: Path, *flags: str) -> Iterator[list[str]]:
    """URLs of replicas, all in one process."""
    command = [sys.executable, "-m", "sim.emulator", "--time-scale", str(TIME_SCALE)]
    for _ in range(REPLICAS):
        command += ["--port", "0"]
    with Process([*command, "--page-size", str(PAGE_TOKENS), "--keep-alive-seconds", "60", *flags], log) as process:
        process.wait_line(lambda _: len(process.lines) >= REPLICAS, LIMIT_S)
        yield [f"http://127.0.0.1:{line.split()[1]}" for line in process.lines]


@dataclass(slots=True)
class Turn:
    """An answer that came whole."""

    replica: str
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Session:
    """A conversation; each of its answers is checked word by word."""

    name: str
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    output_tokens: int = 20
    model: str = "emulated"

    @property
    def home(self) -> str:
        """Where its last whole answer came from."""
        return self.turns[-1].replica

    async def turn(self, port: int) -> Turn:
        """The next one, over a connection of its own. Raises Ended when it is broken off, and keeps nothing of it."""
        size = TURN_TOKENS if self.messages else FIRST_TOKENS
        text = f"{self.name}, turn {len(self.turns)}: ".ljust(size * tokens.UNIT, "x")
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "stream": True, "max_tokens": self.output_tokens}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        client = await RawClient.connect(port)
        try:
            client.send(post(CHAT, json.dumps(body).encode(), f"x-session-affinity: {self.name}"))
            answer = await client.answer()
        finally:
            client.transport.abort()
        assert answer.status == 200, f"{self.name} was answered {answer.status}: {answer.body[:300]!r}"
        replica = answer.header("x-warmroute-replica")
        assert replica is not None
        said, usage = _read(answer.body)
        words = tokens.answer(tokens.conversation((m["role"], m["content"]) for m in messages), self.output_tokens)
        assert said == "".join(words), f"{self.name}: a wrong answer"
        turn = Turn(replica, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
        self.turns.append(turn)
        self.messages = [*messages, {"role": "assistant", "content": said}]
        return turn

    def warm(self) -> bool:
        """Whether the engine had all of the prompt before in its last turn, but for its last page."""
        return self.turns[-1].cached_tokens > self.turns[-2].prompt_tokens - PAGE_TOKENS


def _read(body: bytes) -> tuple[str, Any]:
    """Text and usage of a whole event stream."""
    assert body.endswith(b"data: [DONE]\n\n"), body[-200:]
    text, usage = "", None
    for event in body.split(b"\n\n")[:-2]:
        said = json.loads(event.removeprefix(b"data: "))
        assert "error" not in said, said
        text += "".join(choice["delta"].get("content") or "" for choice in said["choices"])
        usage = said.get("usage") or usage
    return text, usage


class Several:
    """Routers, by and by; what they are called is their place in the order of their starts."""

    def __init__(self, folder: Path, replicas: Sequence[str], server: Server) -> None:
        self.folder = folder
        self.server = server
        self.routers: list[Router] = []
        self._replicas = replicas
        self.pools: Sequence[str] = ()
        """Of models by which routers that start from now on have pools of replicas, by turns."""

    def _config(self, url: str, wait_s: float) -> Path:
        """A file of settings, with the store there."""
        tree: dict[str, Any] = {
            "replicas": [{"id": f"r{number}", "url": each} for number, each in enumerate(self._replicas)],
            # What is known decides here: how long others wait there, on a machine busy with other things, does not.
            "policy": {"name": "session_affinity", "parameters": {"hysteresis_s": 600}},
            "response_headers": True,
            "identity": {"secret": "the same for all"},
            "store": {"url": url, "wait_s": wait_s, "timeout_s": 1.0},
            "drain": {"delay_s": 1.0},
        }
        if self.pools:
            tree["pools"] = [{"name": f"of-{model}", "models": [model]} for model in self.pools]
            for number, replica in enumerate(tree["replicas"]):
                replica["pool"] = f"of-{self.pools[number % len(self.pools)]}"
        file = self.folder / f"config-{len(self.routers)}.yaml"
        file.write_text(yaml.safe_dump(tree))
        return file

    async def start(
        self, count: int = 1, *, says: Sequence[str] = (THERE,), url: str = "", wait_s: float = PATIENT_S
    ) -> list[Router]:
        """More of them, at once, when they are ready and have said what they think of the store, which is at `url`."""
        config = str(self._config(url or self.server.url, wait_s))
        logs = [self.folder / f"router-{len(self.routers) + number}.log" for number in range(count)]
        started = [Router([], log, "--config", config) for log in logs]
        self.routers += started
        await asyncio.gather(
            *(asyncio.to_thread(each.wait_ok, f"{each.admin_url}/readyz", LIMIT_S) for each in started)
        )
        for each in started:
            await self.says(each, *says)
        return started

    async def says(self, router: Router, *texts: str, times: int = 1) -> None:
        """Wait until a router's log has one of these texts, or so many."""

        async def count() -> int:
            log = router.log.read_text()
            return sum(log.count(text) for text in texts)

        await until(count, lambda said: said >= times, LIMIT_S, f"the log says one of {texts}, {times} times")

    async def stored(self, sessions: Sequence[Session]) -> None:
        """Wait until the store knows as many sessions."""

        async def count() -> int:
            return len(await asyncio.to_thread(self.server.ask, "KEYS", "warmroute:*:s:*"))

        await until(count, lambda known: known >= len(sessions), LIMIT_S, f"{len(sessions)} sessions are stored")

    async def stop(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(each.stop) for each in self.routers))


async def asked(router: Router, method: str, path: str, body: Any = None) -> Any:
    """What the admin port answers."""
    async with httpx.AsyncClient(base_url=router.admin_url, trust_env=False, timeout=LIMIT_S) as client:
        return (await client.request(method, path, json=body)).raise_for_status().json()


def named(what: str, count: int) -> list[Session]:
    return [Session(f"{what} {number}") for number in range(count)]


async def once_more(sessions: Sequence[Session], router: Router) -> list[str]:
    """The next turn of each through one router; those that did not reach their homes, or not their KV."""
    before = [session.home for session in sessions]
    await asyncio.gather(*(session.turn(router.port) for session in sessions))
    return [
        f"{session.name}: {was} to {session.home}, {session.turns[-1]}"
        for session, was in zip(sessions, before, strict=True)
        if session.home != was or not session.warm()
    ]


class Load:
    """Sessions that have one turn after the other until they are told to stop."""

    def __init__(self, sessions: Sequence[Session], port_of: Callable[[Session], int]) -> None:
        """`port_of` says through which router a session's next turn goes."""
        self.sessions = sessions
        self.broken: list[Session] = []
        """Those of which a turn was broken off."""
        self.moved: list[str] = []
        """Turns that did not reach the home of the turn before."""
        self._port_of = port_of
        self._ended = False
        self._tasks = [asyncio.create_task(self._talk(session)) for session in sessions]

    async def _talk(self, session: Session) -> None:
        while not self._ended:
            try:
                await session.turn(self._port_of(session))
            except (Ended, ConnectionError):
                self.broken.append(session)
                continue
            if len(session.turns) > 1 and session.turns[-2].replica != session.home:
                self.moved.append(f"{session.name}: {session.turns[-2].replica} to {session.home}")

    async def turns(self, count: int) -> None:
        """Wait until each session has had so many more."""
        before = [len(session.turns) for session in self.sessions]

        async def fewest() -> int:
            for task in self._tasks:
                if task.done():
                    task.result()
            return min(len(each.turns) - was for each, was in zip(self.sessions, before, strict=True))

        await until(fewest, lambda had: had >= count, LIMIT_S, f"{count} more turns of each session")

    async def end(self) -> None:
        """Let the turns under way end. Raises what went wrong in any."""
        self._ended = True
        await asyncio.gather(*self._tasks)


def kill(router: Router) -> None:
    """At once, without a last word."""
    router.signal(signal.SIGKILL)


@asynccontextmanager
async def made_for(folder: Path, replicas: list[str]) -> AsyncIterator[Several]:
    """No router runs yet, nor does the store; what runs in the end is stopped."""
    found = binaries()
    assert found, NEEDED
    server = Server(next(iter(found.values())))
    several = Several(folder, replicas, server)
    yield several
    await several.stop()
    server.remove()
