"""A small Kubernetes API server for EndpointSlices, over real sockets: it lists, watches, forgets, fails as told."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

Tree = dict[str, Any]

SERVICE = "kubernetes.io/service-name"


def pod(
    name: str,
    address: str,
    uid: str | None = None,
    *,
    ready: bool | None = True,
    serving: bool | None = None,
    terminating: bool | None = None,
) -> Tree:
    """An endpoint as the EndpointSlice controller writes it."""
    given = {"ready": ready, "serving": ready if serving is None else serving, "terminating": bool(terminating)}
    reference = {"kind": "Pod", "namespace": "default", "name": name, "uid": uid or f"uid-of-{name}"}
    return {"addresses": [address], "conditions": given, "targetRef": reference, "nodeName": "node-1"}


def endpoint_slice(
    name: str,
    endpoints: Iterable[Tree],
    *,
    port: int = 30000,
    ports: list[Tree] | None = None,
    service: str = "sglang",
    namespace: str = "default",
    family: str = "IPv4",
) -> Tree:
    """A slice of a service."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": {SERVICE: service}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": "http", "protocol": "TCP", "port": port}] if ports is None else ports,
    }


@dataclass(slots=True)
class Asked:
    """One question that was heard."""

    kind: Literal["list", "watch"]
    namespace: str
    query: dict[str, str]
    token: str


@dataclass(slots=True)
class Scripted:
    """What is answered instead, once, or for good."""

    kind: Literal["list", "watch"]
    status: int = 200
    body: bytes = b""
    then: Literal["end", "cut", "hang"] = "end"
    """The end of the answer, of the connection, or neither."""
    headers: tuple[str, ...] = ()
    once: bool = True


@dataclass(eq=False, slots=True)
class _Watch:
    writer: asyncio.StreamWriter
    namespace: str
    selector: dict[str, str]
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def sends(self, data: bytes) -> None:
        """A chunk."""
        if not self.writer.is_closing():
            self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))


class KubernetesApi:
    """`put` and `delete` are what controllers do. It serves on 127.0.0.1, on the same port after a `stop`."""

    def __init__(self) -> None:
        self.tokens = {"token-1"}
        """Those it knows."""
        self.forbidden: set[str] = set()
        """Namespaces that nobody may read."""
        self.groups = True
        """Whether it has discovery.k8s.io/v1 at all."""
        self.gone_by_status = False
        """Whether a version that was forgotten is told as the status of a watch, else in a line of it."""
        self.asked: list[Asked] = []
        self.scripted: deque[Scripted] = deque()
        self.watches: list[_Watch] = []
        """Under way."""
        self.version = 100
        self.port = 0
        self.tls: ssl.SSLContext | None = None
        """Set before the start, it speaks HTTPS."""
        self._slices: dict[tuple[str, str], Tree] = {}
        self._history: list[tuple[int, str, Tree]] = []
        self._compacted = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._snapshots: dict[tuple[int, str, str], list[Tree]] = {}
        """Lists that are being read in pages."""

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As when its process is killed. What it stored stays."""
        if self._server is not None:
            self._server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None

    # What is stored

    def put(self, *slices: Tree) -> None:
        """Create or replace them."""
        for given in slices:
            key = given["metadata"]["namespace"], given["metadata"]["name"]
            self._happened("MODIFIED" if key in self._slices else "ADDED", given)

    def delete(self, name: str, namespace: str = "default") -> None:
        self._happened("DELETED", self._slices[namespace, name])

    def stored(self, name: str, namespace: str = "default") -> Tree:
        """One of them."""
        return self._slices[namespace, name]

    def forget(self) -> None:
        """Compact: what happened until now cannot be watched any more."""
        self._compacted = self.version
        self._history.clear()

    def bookmark(self) -> None:
        """Tell all watches how far they are, after something of no interest has happened."""
        self.version += 1
        event = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}}
        self.say(_line(event))

    def _happened(self, kind: str, given: Tree) -> None:
        self.version += 1
        given = {**given, "metadata": {**given["metadata"], "resourceVersion": str(self.version)}}
        key = given["metadata"]["namespace"], given["metadata"]["name"]
        if kind == "DELETED":
            del self._slices[key]
        else:
            self._slices[key] = given
        self._history.append((self.version, kind, given))
        for watch in self.watches:
            if _selects(watch.namespace, watch.selector, given):
                watch.sends(_line({"type": kind, "object": given}))

    # Faults

    def say(self, data: bytes) -> None:
        """Send this to all watches, whatever it is."""
        for watch in self.watches:
            watch.sends(data)

    def cut(self) -> None:
        """Break off all watches."""
        for watch in self.watches:
            watch.writer.transport.abort()

    def end(self) -> None:
        """End all watches in order."""
        for watch in self.watches:
            watch.ended.set()

    # Questions

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._answer(reader, writer):
                    pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One of them. Whether the connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
        path, query = (
            urlsplit(target).path,
            {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()},
        )
        parts = path.strip("/").split("/")
        wanted = ["apis", "discovery.k8s.io", "v1", "namespaces", "endpointslices"]
        if method != "GET" or parts[:4] + parts[5:] != wanted or not self.groups:
            return await _tell(writer, 404, _status(404, "the server could not find the requested resource"))
        namespace = parts[4]
        kind: Literal["list", "watch"] = "watch" if query.get("watch") in ("1", "true") else "list"
        token = headers.get("authorization", "").removeprefix("Bearer ")
        self.asked.append(Asked(kind, namespace, query, token))
        for scripted in self.scripted:
            if scripted.kind == kind:
                if scripted.once:
                    self.scripted.remove(scripted)
                return await self._scripted(writer, scripted)
        if token not in self.tokens:
            return await _tell(writer, 401, _status(401, "Unauthorized"))
        if namespace in self.forbidden:
            told = f'endpointslices.discovery.k8s.io is forbidden: User "u" cannot {kind} them in "{namespace}"'
            return await _tell(writer, 403, _status(403, told))
        if kind == "list":
            return await self._list(writer, namespace, query)
        await self._watch(reader, writer, namespace, query)
        return False

    async def _scripted(self, writer: asyncio.StreamWriter, scripted: Scripted) -> bool:
        if scripted.then == "end":
            return await _tell(writer, scripted.status, scripted.body, *scripted.headers)
        writer.write(_head(scripted.status, *scripted.headers, "transfer-encoding: chunked"))
        if scripted.body:
            writer.write(b"%x\r\n%b\r\n" % (len(scripted.body), scripted.body))
        await writer.drain()
        if scripted.then == "hang":
            await asyncio.Event().wait()
        return False

    async def _list(self, writer: asyncio.StreamWriter, namespace: str, query: dict[str, str]) -> bool:
        wanted = query.get("labelSelector", "")
        selector = _parsed(wanted)
        found = [each for _, each in sorted(self._slices.items()) if _selects(namespace, selector, each)]
        version, start = self.version, 0
        if token := query.get("continue"):
            version, start = map(int, token.split("."))
            if version < self._compacted:
                return await _tell(writer, 410, _status(410, "The provided continue parameter is too old"))
            found = self._snapshots[version, namespace, wanted]
        self._snapshots[version, namespace, wanted] = found
        limit = int(query.get("limit", "0")) or len(found)
        metadata: Tree = {"resourceVersion": str(version)}
        if start + limit < len(found):
            metadata |= {"continue": f"{version}.{start + limit}", "remainingItemCount": len(found) - start - limit}
        items = found[start : start + limit]
        tree = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "metadata": metadata, "items": items}
        return await _tell(writer, 200, json.dumps(tree).encode())

    async def _watch(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, namespace: str, query: dict[str, str]
    ) -> None:
        since = int(query["resourceVersion"])
        expired = since < self._compacted
        if expired and self.gone_by_status:
            await _tell(writer, 410, _status(410, f"too old resource version: {since}"))
            return
        watch = _Watch(writer, namespace, _parsed(query.get("labelSelector", "")))
        writer.write(_head(200, "transfer-encoding: chunked"))
        if expired:
            status = json.loads(_status(410, f"too old resource version: {since}"))
            watch.sends(_line({"type": "ERROR", "object": status}))
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return
        for version, kind, given in self._history:
            if version > since and _selects(namespace, watch.selector, given):
                watch.sends(_line({"type": kind, "object": given}))
        self.watches.append(watch)
        try:
            left, ended = asyncio.create_task(reader.read()), asyncio.create_task(watch.ended.wait())
            limit_s = float(query["timeoutSeconds"])
            await asyncio.wait((left, ended), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            for task in (left, ended):
                task.cancel()
            await asyncio.gather(left, ended, return_exceptions=True)
        finally:
            self.watches.remove(watch)
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _selects(namespace: str, selector: dict[str, str], given: Tree) -> bool:
    metadata = given["metadata"]
    return metadata["namespace"] == namespace and selector.items() <= metadata["labels"].items()


def _parsed(selector: str) -> dict[str, str]:
    """Of `name=value` alone."""
    return dict(each.split("=") for each in selector.split(",") if each)


def _line(event: Tree) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _status(code: int, message: str) -> bytes:
    return json.dumps({"kind": "Status", "status": "Failure", "code": code, "message": message}).encode()


def _head(status: int, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Told", "content-type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


async def _tell(writer: asyncio.StreamWriter, status: int, body: bytes, *headers: str) -> bool:
    writer.write(_head(status, f"content-length: {len(body)}", *headers) + body)
    await writer.drain()
    return True
