"""A store in Redis or Valkey, for routers on several machines. See docs/decisions/0023-shared-state.md.

Under the prefix and the wire form's version: `s:<key>` is a session, see `router.store.scripts`; `messages` a stream
whose ids end with numbers without a gap; `controls` a hash; `epoch` a text.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
    SlotNotCoveredError,
)
from redis.exceptions import ConnectionError as LostError

from policies.sharing import Note
from router.settings import StoreSettings
from router.store import wire
from router.store.address import Address, parse
from router.store.batches import Batches
from router.store.faults import described
from router.store.scripts import CLAIM, PUT, RESTORE, SAY, Script
from router.store.store import MAX_MESSAGES, MAX_NOTES, Heard, Message, Remembered, StoreError

MAX_CONNECTIONS = 8
"""Of one router, besides the one that hears: enough for 20,000 claims a second, and all that a paused server holds."""
MAX_HEARING = 4
MAX_CLAIMING = 2
"""Batches of claims under way at once: what comes meanwhile shares the next."""
MAX_SESSIONS = 100
"""In one script: the server does nothing else meanwhile, for half a millisecond or so."""
MAX_WAIT_S = 5.0
"""Longest wait of one `hear`: a connection that is dead without a sign is noticed after it."""
KEPT_MS = 10_000
"""Messages are kept for so long: who has not read for longer asks for each session. With thousands of turns a second
they are large, and their number alone is no bound of memory."""
MAX_HEARD = 200
"""Messages in one answer, of up to 70 kB."""

Command = tuple[Any, ...]
_SCRIPTS = {script.sha: script for script in (CLAIM, PUT, RESTORE, SAY)}
_BEGINNING = "0-0"
_GIVEN: dict[str, Any] = {
    # Whole calls are limited instead. With limits of its own the library may not notice that a call is cancelled:
    # asyncio.wait_for of Python 3.11 forgets it when what it waits for is done in the same moment.
    "socket_timeout": None,
    "socket_connect_timeout": None,
    "retry": Retry(NoBackoff(), 0),
    "protocol": 2,  # the same answers from every server, and a round trip less at the start
    "driver_info": None,  # another one less
}
"""To every client."""


class RedisStore:
    """Many routers, one Redis.

    A session unused for `idle_s` is forgotten. Every call is limited by `settings.timeout_s`, to which `hear` adds its
    wait. Nothing is retried here, and a call may be cancelled at any time: its connection is not used again.
    """

    def __init__(self, settings: StoreSettings, idle_s: float = 3600.0) -> None:
        self._address = parse(settings.url)
        self._prefix = settings.prefix
        self._under = f"{settings.prefix}:{wire.VERSION}:"
        self._sessions = self._under + "s:"
        self._ttl_ms = max(1, round(idle_s * 1000))
        self._timeout_s = settings.timeout_s
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
        self._claims = Batches(self._claim, MAX_SESSIONS, MAX_CLAIMING)
        clients = _Clients(self._address, settings)
        self._client = clients.made(MAX_CONNECTIONS)
        self._hearing = clients.made(MAX_HEARING)
        self._close = clients.close

    async def claim(self, note: Note) -> Sequence[Remembered]:
        return await self._claims.ask(note)

    async def _claim(self, notes: Sequence[Note]) -> list[Sequence[Remembered]]:
        """As if each came alone, in their order."""
        sessions = [(note.key, (_home(note), wire.encode_note(note))) for note in notes]
        remembered: list[Sequence[Remembered]] = []
        unreadable = []
        for now, *homes in await self._do(self._scripts(CLAIM, sessions, self._ttl_ms)):
            for known in homes:
                remembered.append(list(_remembered(int(now), known)))
                if known and not remembered[-1]:
                    unreadable.append(notes[len(remembered) - 1])
        if unreadable:
            await self._do(self._puts(PUT, unreadable, [wire.encode_note(note) for note in unreadable]))
        return remembered

    async def tell(self, message: Message) -> None:
        encoded = [wire.encode_note(note) for note in message.notes]
        first = self._puts(PUT, message.notes, encoded)
        controls = self._under + "controls"
        if kept := {name: value for name, value in message.controls.items() if value is not None}:
            first.append(("HSET", controls, *(each for item in kept.items() for each in item)))
        if taken_back := [name for name, value in message.controls.items() if value is None]:
            first.append(("HDEL", controls, *taken_back))
        said = _run(SAY, [self._under + "messages"], MAX_MESSAGES, KEPT_MS, wire.encode_message(message, encoded))
        if first and self._address.kind == "cluster":
            # Its nodes have no common order: who hears of something must find it there.
            await self._do(first)
            first = []
        await self._do([*first, said])

    async def restore(self, notes: Sequence[Note]) -> None:
        if commands := self._puts(RESTORE, notes, [wire.encode_note(note) for note in notes]):
            await self._do(commands)

    async def hear(self, cursor: str, wait_s: float) -> Heard:
        """See `Store`. An answer of nothing may come before `wait_s`, after MAX_WAIT_S."""
        if not cursor:
            cursor = await self._last() or _BEGINNING
        wait_s = min(wait_s, MAX_WAIT_S)
        block = ("BLOCK", max(1, round(wait_s * 1000))) if wait_s > 0 else ()
        command = ("XREAD", "COUNT", MAX_HEARD, *block, "STREAMS", self._under + "messages", cursor)
        [streams] = await self._do([command], self._hearing, wait_s)
        if not streams:
            last = await self._last()
            if _place(last or _BEGINNING) >= _place(cursor):
                return Heard((), cursor)
            return Heard((), _BEGINNING, lost=True)  # it began anew, maybe with a clock behind the one it had
        entries = [(name.decode(), fields) for name, fields in streams[0][1]]
        missing = _place(entries[0][0])[1] != _place(cursor)[1] + 1
        return Heard(list(_messages(fields for _, fields in entries)), entries[-1][0], lost=missing)

    async def controls(self) -> Mapping[str, bytes]:
        given: dict[bytes, bytes] = await self._ask(("HGETALL", self._under + "controls"))
        return {name.decode(errors="replace"): value for name, value in given.items()}

    async def epoch(self, offered: str) -> str:
        key = self._under + "epoch"
        _, epoch = await self._do([("SET", key, offered, "NX"), ("GET", key)])
        return str(epoch.decode(errors="replace"))

    async def close(self) -> None:
        await self._claims.close()
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._close()

    def _puts(self, script: Script, notes: Sequence[Note], encoded: Sequence[bytes]) -> list[Command]:
        sessions: dict[bytes, list[bytes]] = {}
        for note, data in zip(notes, encoded, strict=True):
            sessions.setdefault(note.key, []).extend((_home(note), data if note.tokens else b""))
        counted = [(key, (len(homes) // 2, *homes)) for key, homes in sessions.items()]
        return self._scripts(script, counted, self._ttl_ms, MAX_NOTES)

    def _scripts(self, script: Script, sessions: Sequence[tuple[bytes, Command]], *given: int) -> list[Command]:
        """Commands that run one on sessions: `given` to all, and what goes with each."""
        most = 1 if self._address.kind == "cluster" else MAX_SESSIONS
        commands = []
        for at in range(0, len(sessions), most):
            some = sessions[at : at + most]
            keys = [f"{self._sessions}{key.hex()}" for key, _ in some]
            commands.append(_run(script, keys, *given, *chain.from_iterable(each for _, each in some)))
        return commands

    async def _last(self) -> str:
        """Id of the newest message; empty when there is none."""
        newest = await self._ask(("XREVRANGE", self._under + "messages", "+", "-", "COUNT", 1))
        return str(newest[0][0].decode()) if newest else ""

    async def _ask(self, command: Command) -> Any:
        [answer] = await self._do([command])
        return answer

    async def _do(self, commands: Sequence[Command], client: Any = None, wait_s: float = 0.0) -> list[Any]:
        """Answers to commands that are sent together. Raises StoreError when any of them fails."""
        room = contextlib.nullcontext() if client is self._hearing else self._room
        try:
            async with asyncio.timeout(wait_s + self._timeout_s), room:
                return await self._done(commands, client or self._client)
        except TimeoutError:
            await self._begin_anew(client or self._client)
            raise self._error(f"Timeout: no answer within {wait_s + self._timeout_s:g} s") from None
        except (RedisError, RedisClusterException, OSError, RuntimeError) as error:
            # The last of these is how uvloop refuses to write to a connection that has ended.
            raise self._error(_words(error)) from None

    async def _done(self, commands: Sequence[Command], client: Any) -> list[Any]:
        answers = await _sent(commands, client)
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:  # by this server, until it has seen them once
            for i, answer in zip(unknown, await _sent([_in_full(commands[i]) for i in unknown], client), strict=True):
                answers[i] = answer
        for answer in answers:
            if isinstance(answer, (LostError, SlotNotCoveredError)):
                await self._begin_anew(client)
            if isinstance(answer, Exception):
                raise answer
        return answers

    async def _begin_anew(self, client: Any) -> None:
        """After a fault: what a cluster's nodes have may be elsewhere now, which the library asks only a new client."""
        if self._address.kind == "cluster":
            await client.aclose()

    def _error(self, words: str) -> StoreError:
        return StoreError(described(self._address.url, self._prefix, words))


def _run(script: Script, keys: Sequence[str], *given: Any) -> Command:
    return ("EVALSHA", script.sha, len(keys), *keys, *given)


def _in_full(command: Command) -> Command:
    return ("EVAL", _SCRIPTS[command[1]].source, *command[2:])


async def _sent(commands: Sequence[Command], client: Any) -> list[Any]:
    """Answers, errors among them. What loses the connection may be raised instead."""
    if len(commands) == 1:
        try:
            return [await client.execute_command(*commands[0])]
        except ResponseError as error:
            return [error]
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    return cast("list[Any]", await pipeline.execute(raise_on_error=False))


def _home(note: Note) -> bytes:
    return f"{note.fingerprint:x}{'+' if note.fork else '.'}{note.replica}".encode()


def _place(cursor: str) -> tuple[int, int]:
    milliseconds, number = cursor.split("-")
    return int(milliseconds), int(number)


def _remembered(now: int, known: Sequence[bytes]) -> Iterable[Remembered]:
    """The latest first; without those that another version has written."""
    for value in sorted(known[1::2], reverse=True):
        with contextlib.suppress(ValueError):
            yield Remembered(wire.decode_note(value[16:]), max(0.0, (now - int(value[:16])) / 1e6))


def _messages(entries: Iterable[Mapping[bytes, bytes]]) -> Iterable[Message]:
    for fields in entries:
        with contextlib.suppress(wire.WireError):
            yield wire.decode_message(fields.get(b"m", b""))


def _words(error: Exception) -> str:
    """What a fault says, with its code, which the library takes off."""
    return f"{getattr(error, 'status_code', None) or type(error).__name__} {error}"


class _Clients:
    """Clients of the library, for one address."""

    def __init__(self, address: Address, settings: StoreSettings) -> None:
        self._address = address
        self._credentials = None if settings.credentials() is None else _Credentials(settings)
        self._tls = _tls(settings) if address.tls else {}
        self._made: list[Any] = []
        self._sentinel: Any = None
        if address.kind == "sentinel":
            password = settings.sentinel_password.get_secret_value() or None
            # One that does not answer must leave time to ask another.
            each_s = settings.timeout_s / (1 + len(address.hosts))
            asking = {**_GIVEN, **self._tls, "ssl": address.tls, "password": password}
            asking |= {"socket_connect_timeout": each_s, "socket_timeout": each_s}
            self._sentinel = cast(Any, Sentinel)(address.hosts, sentinel_kwargs=asking)
            self._made.append(self._sentinel)

    def made(self, max_connections: int) -> Any:
        """A client that does nothing by itself."""
        address = self._address
        given = {
            **_GIVEN,
            **self._tls,
            "max_connections": max_connections,
            "credential_provider": self._credentials,
        }
        if address.kind == "cluster":
            nodes = [ClusterNode(host, port) for host, port in address.hosts]
            client: Any = RedisCluster(startup_nodes=nodes, ssl=address.tls, **given)
        elif self._sentinel is not None:
            client = self._sentinel.master_for(address.master, db=address.db, ssl=address.tls, **given)
        elif address.kind == "unix":
            client = Redis(unix_socket_path=address.path, db=address.db, **given)
        else:
            host, port = address.hosts[0]
            client = Redis(host=host, port=port, db=address.db, ssl=address.tls, **given)
        self._made.append(client)
        return client

    async def close(self) -> None:
        for client in self._made:
            await client.aclose()


class _Credentials(CredentialProvider):
    """User and password as they are when a connection is made: the file may have changed."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            user, password = self._settings.credentials() or ("", "")
        except ValueError as error:
            raise AuthenticationError(f"store.{error}") from None
        return (user, password) if user else (password,)


def _tls(settings: StoreSettings) -> dict[str, Any]:
    return {
        "ssl_ca_certs": settings.ca_file or None,
        "ssl_certfile": settings.cert_file or None,
        "ssl_keyfile": settings.key_file or None,
        "ssl_cert_reqs": "required" if settings.verify else "none",
        "ssl_check_hostname": settings.verify,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
    }
