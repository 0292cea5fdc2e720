"""The Kubernetes API server, as far as it tells of EndpointSlices: where it is, who asks, and what its faults mean."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec

from router.discovery.feed import Trouble
from router.discovery.slices import Status
from router.files import text_of
from router.hosts import in_url
from router.settings import KubernetesSettings
from router.tls import replica_context

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its service account: `token`, `ca.crt` and `namespace`."""

MAX_FAULT_BYTES = 65_536

_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]
"""A watch may be silent for long: a host that is gone is found out within half a minute."""


class Api:
    """EndpointSlices of one namespace. Made anew whenever something was wrong, so that files are read anew."""

    def __init__(self, settings: KubernetesSettings, connect_s: float, account: Path = ACCOUNT) -> None:
        """Raises Trouble for what is missing."""
        self._own = not settings.url
        url = settings.url or _own_url()
        self._token_file = settings.token_file or (str(account / "token") if self._own else "")
        ca_file = settings.ca_file or (str(account / "ca.crt") if self._own else "")
        try:
            self._namespace = settings.namespace or text_of(str(account / "namespace")).strip()
            verify = replica_context(ca_file, "", "", verify=True) if url.startswith("https://") else False
        except ValueError as error:
            raise Trouble(f"{error}; outside of a pod set namespace, url, token_file and ca_file") from None
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        self._selector = settings.labels
        transport = httpx.AsyncHTTPTransport(verify=verify, socket_options=_KEEPALIVE, trust_env=False)
        timeout = httpx.Timeout(None, connect=connect_s)
        self._client = httpx.AsyncClient(base_url=url, transport=transport, timeout=timeout, trust_env=False)

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def ask(self, query: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        """Its answer to a list or a watch, once its head is there. Raises Trouble for every status but 200 and 410."""
        # The kubelet exchanges a token long before it ends, so it is read for every question.
        headers = {"accept": "application/json", "user-agent": "warmroute"}
        if self._token_file:
            headers["authorization"] = f"Bearer {_token(self._token_file)}"
        params = {"labelSelector": self._selector, **query}
        try:
            async with self._client.stream("GET", self._path, params=params, headers=headers) as response:
                if response.status_code not in (200, 410):
                    told = self._fault(response.status_code, await _start(response))
                    raise Trouble(told, again_s=_seconds(response.headers.get("retry-after", "")))
                yield response
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise Trouble(f"the API server at {self._client.base_url} cannot be heard", why) from None

    def _fault(self, status: int, body: bytes) -> str:
        """What a status means, with the remedy."""
        try:
            said = msgspec.json.decode(body, type=Status).message
        except msgspec.MsgspecError:
            said = body[:200].decode("latin-1")
        said = " ".join(said.split())[:500]
        if status == 401:
            whose = f"the token in {self._token_file}" if self._token_file else "nobody without a token, set token_file"
            told = f"the API server does not know {whose}"
        elif status == 403:
            told = (
                f"it may not read EndpointSlices of namespace {self._namespace}: give its service account get, list "
                "and watch of endpointslices in discovery.k8s.io there, by a Role and a RoleBinding"
            )
        elif status == 404:
            told = "there is no discovery.k8s.io/v1 at this API server: it takes Kubernetes 1.21 or newer"
        else:
            told = "the API server does not answer the question"
        return f"{told} ({status}: {said})"


def _own_url() -> str:
    """Of the cluster that this runs in. Raises Trouble."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise Trouble("KUBERNETES_SERVICE_HOST and _PORT are not set: outside of a pod set url, token_file and ca_file")
    return f"https://{in_url(host)}:{port}"


def _seconds(retry_after: str) -> float:
    """What the header asks for; none where it is a date, which API servers do not send."""
    return float(retry_after) if re.fullmatch(r"[0-9]{1,9}", retry_after) else 0.0


def _token(file: str) -> str:
    try:
        token = text_of(file).strip()
    except ValueError as error:
        raise Trouble(f"the token: {error}") from None
    if not token or not token.isascii() or not token.isprintable():
        raise Trouble(f"the token: {file!r} holds none: put one there")
    return token


async def _start(response: httpx.Response) -> bytes:
    """The beginning of a body."""
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) >= MAX_FAULT_BYTES:
            break
    return bytes(body[:MAX_FAULT_BYTES])
