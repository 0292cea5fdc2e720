"""What the router says of itself: the names of its log's fields and of its admin port are known only here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx

from tests.fakes.process import Router


@dataclass(frozen=True)
class Entry:
    """A request's line in the access log."""

    status: int
    replica: str
    reason: str
    tries: int
    cause: str
    failed: str
    """Why the last replica before this one failed; empty when none did."""
    prompt_tokens: int | None
    cached_tokens: int | None


async def entry(router: Router, request_id: str) -> Entry:
    """The line of a request that has ended, or is about to."""
    line: dict[str, Any] = await asyncio.to_thread(router.entry, request_id)
    return Entry(
        status=line.get("status"),
        replica=line.get("replica", ""),
        reason=line.get("reason", ""),
        tries=line["tries"],
        cause=line["cause"],
        failed=line.get("failed", ""),
        prompt_tokens=line.get("prompt_tokens"),
        cached_tokens=line.get("cached_tokens"),
    )


@dataclass(frozen=True)
class ReplicaView:
    """A replica in GET /replicas."""

    state: str
    running: int | None
    waiting: int | None
    capacity_tokens: int | None


async def replicas(router: Router, client: httpx.AsyncClient) -> dict[str, ReplicaView]:
    """The router's replicas by id, which is the URL of those that were given none."""
    answer = await client.get(f"{router.admin_url}/replicas")
    views: dict[str, ReplicaView] = {}
    for replica in answer.raise_for_status().json()["replicas"]:
        load = replica["load"] or {}
        views[replica["id"]] = ReplicaView(
            replica["state"], load.get("running"), load.get("waiting"), load.get("capacity_tokens")
        )
    return views
