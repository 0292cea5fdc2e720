"""The fake of the Kubernetes API server is as the real one where the client depends on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.fakes.kubernetes import KubernetesApi, Scripted, endpoint_slice, pod
from tests.fakes.wire import LIMIT_S, eventually

SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    server = KubernetesApi()
    await server.start()
    server.put(*(endpoint_slice(f"s-{number}", [pod(f"p{number}", "10.0.0.1")]) for number in range(3)))
    yield server
    await server.stop()


@pytest.fixture
async def client(api: KubernetesApi) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": "Bearer token-1"}
    async with httpx.AsyncClient(base_url=api.url, headers=headers, trust_env=False, timeout=LIMIT_S) as client:
        yield client


async def watched(client: httpx.AsyncClient, since: int | str, for_s: int = 1) -> list[dict[str, Any]]:
    """All that a watch tells until it ends by itself."""
    params = {"watch": "1", "resourceVersion": str(since), "timeoutSeconds": str(for_s)}
    answer = await client.get(SLICES, params=params)
    assert answer.status_code == 200
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_pages_are_of_one_version(api: KubernetesApi, client: httpx.AsyncClient) -> None:
    first = (await client.get(SLICES, params={"limit": "2"})).json()
    api.delete("s-2")
    rest = (await client.get(SLICES, params={"limit": "2", "continue": first["metadata"]["continue"]})).json()
    assert [each["metadata"]["name"] for each in first["items"] + rest["items"]] == ["s-0", "s-1", "s-2"]
    assert first["metadata"]["resourceVersion"] == rest["metadata"]["resourceVersion"]
    assert "continue" not in rest["metadata"]
    api.forget()
    again = await client.get(SLICES, params={"limit": "2", "continue": first["metadata"]["continue"]})
    assert (again.status_code, again.json()["code"]) == (410, 410)


async def test_a_watch_tells_what_happened_since_a_version(api: KubernetesApi, client: httpx.AsyncClient) -> None:
    since = (await client.get(SLICES)).json()["metadata"]["resourceVersion"]
    api.put(endpoint_slice("s-0", []), endpoint_slice("s-9", []), endpoint_slice("x", [], namespace="other"))
    api.delete("s-1")
    told = await watched(client, since)
    assert [(each["type"], each["object"]["metadata"]["name"]) for each in told] == [
        ("MODIFIED", "s-0"),
        ("ADDED", "s-9"),
        ("DELETED", "s-1"),
    ]
    versions = [int(each["object"]["metadata"]["resourceVersion"]) for each in told]
    assert versions == sorted(versions)
    assert versions[0] > int(since)


async def test_a_watch_tells_what_happens_and_is_marked(api: KubernetesApi, client: httpx.AsyncClient) -> None:
    asking = asyncio.create_task(watched(client, api.version, for_s=60))
    await eventually(lambda: api.watches)
    api.put(endpoint_slice("s-0", []))
    api.bookmark()
    api.end()
    modified, bookmark = await asking
    assert modified["type"] == "MODIFIED"
    assert bookmark == {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(api.version)}}}


async def test_a_version_that_is_forgotten_is_told_in_a_line_or_by_a_status(
    api: KubernetesApi, client: httpx.AsyncClient
) -> None:
    since = api.version
    api.put(endpoint_slice("s-0", []))
    api.forget()
    (told,) = await watched(client, since)
    assert (told["type"], told["object"]["code"]) == ("ERROR", 410)
    api.gone_by_status = True
    assert (await client.get(SLICES, params={"watch": "1", "resourceVersion": str(since)})).status_code == 410


async def test_labels_tokens_and_rights(api: KubernetesApi, client: httpx.AsyncClient) -> None:
    params = {"labelSelector": "kubernetes.io/service-name=other"}
    assert (await client.get(SLICES, params=params)).json()["items"] == []
    assert (await client.get(SLICES, headers={"authorization": "Bearer x"})).status_code == 401
    assert (await client.post(SLICES)).status_code == 404
    api.forbidden.add("default")
    assert (await client.get(SLICES)).status_code == 403
    api.groups = False
    assert (await client.get(SLICES)).status_code == 404


async def test_what_is_scripted_is_told_once(api: KubernetesApi, client: httpx.AsyncClient) -> None:
    api.scripted += [Scripted("list", 500, b"no"), Scripted("list", 200, b'{"half', "cut")]
    answer = await client.get(SLICES)
    assert (answer.status_code, answer.text) == (500, "no")
    with pytest.raises(httpx.RemoteProtocolError):
        await client.get(SLICES)
    assert len((await client.get(SLICES)).json()["items"]) == 3


async def test_it_can_be_cut_off_and_come_back(api: KubernetesApi, client: httpx.AsyncClient) -> None:
    asking = asyncio.create_task(watched(client, api.version, for_s=60))
    await eventually(lambda: api.watches)
    api.cut()
    with pytest.raises(httpx.TransportError):
        await asking
    await api.stop()
    with pytest.raises(httpx.ConnectError):
        await client.get(SLICES)
    await api.start()
    assert len((await client.get(SLICES)).json()["items"]) == 3
