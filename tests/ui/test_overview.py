"""`/overview` and the pages without a browser: what is asked for is answered, and what cannot be is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from policies.types import Replica, State
from router.admin import Admin
from router.admin.overview import PER_PAGE, natural
from router.app import Router
from router.settings import Settings


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    """One that serves nobody."""
    router = Router(Settings())
    yield router
    router.access_log.close()


@pytest.fixture
async def admin(router: Router) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(Admin(router).app())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def join(router: Router, *names: str) -> list[Replica]:
    replicas = [Replica(name) for name in names]
    for replica in replicas:
        router.balancer.join(replica, router.clock())
    return replicas


async def told(admin: httpx.AsyncClient, query: str = "") -> dict[str, Any]:
    return dict((await admin.get(f"/overview?{query}")).raise_for_status().json())


async def test_replicas_are_in_the_order_asked_for(router: Router, admin: httpx.AsyncClient) -> None:
    r1, r2, r10 = join(router, "r1", "r2", "r10")
    r2.in_flight = 3
    r10.prefill_ends = router.clock() + 60
    router.balancer.set_state(r10, State.DRAINING, router.clock())
    r1.speed.slowness = 2.5
    orders = {"": "r1 r10 r2", "name": "r1 r2 r10", "load": "r2 r1 r10", "wait": "r10 r1 r2", "cache": "r1 r2 r10"}
    for sort, order in orders.items():
        found = await told(admin, f"sort={sort}")
        assert " ".join(each["id"] for each in found["replicas"]) == order, sort
    assert [each["id"] for each in (await told(admin, "state=draining"))["replicas"]] == ["r10"]


async def test_a_verdict_tells_what_is_wrong(router: Router, admin: httpx.AsyncClient) -> None:
    assert (await told(admin))["verdict"]["text"] == "There are no replicas: every request is refused"
    r1, r2, r3 = join(router, "r1", "r2", "r3")
    assert (await told(admin))["verdict"] == {"level": "ok", "text": "All 3 replicas are ready"}
    router.metrics.reloaded(applied=False)
    verdict = (await told(admin))["verdict"]
    assert (verdict["level"], verdict["text"].split(",")[0]) == ("warn", "the configuration was refused")
    router.metrics.reloaded(applied=True)
    r3.speed.slowness = 2.5
    assert (await told(admin))["verdict"] == {"level": "warn", "text": "1 slow of 3 replicas"}
    router.balancer.set_state(r1, State.EJECTED, router.clock())
    router.balancer.set_state(r2, State.HALF_OPEN, router.clock())
    assert (await told(admin))["verdict"] == {"level": "bad", "text": "1 ejected, 1 on trial, 1 slow of 3 replicas"}
    router.balancer.set_state(r3, State.EJECTED, router.clock())
    router.balancer.set_state(r2, State.EJECTED, router.clock())
    assert (await told(admin))["verdict"] == {"level": "bad", "text": "Not ready: no replica is ready"}


async def test_a_large_fleet_is_told_page_by_page(router: Router, admin: httpx.AsyncClient) -> None:
    join(router, *(f"r{number}" for number in range(1, 2 * PER_PAGE + 2)))
    first, last, beyond = [await told(admin, f"page={page}&sort=name") for page in (1, 3, 9)]
    assert (first["pages"], first["found"], len(first["replicas"])) == (3, 2 * PER_PAGE + 1, PER_PAGE)
    assert [each["id"] for each in last["replicas"]] == [f"r{2 * PER_PAGE + 1}"]
    assert beyond["page"] == 3


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("sort=colour", "sort must be one of trouble, name, load, wait, cache, got 'colour'"),
        ("state=asleep", "state must be one of ready"),
        ("page=-1", "page must be a number from 0 to 999999, got '-1'"),
        ("decisions=9999999", "decisions must be a number"),
        ("colour=red", "Unknown parameter 'colour'; known: sort"),
    ],
)
async def test_what_cannot_be_asked_for_is_refused_by_name(admin: httpx.AsyncClient, query: str, named: str) -> None:
    answer = await admin.get(f"/overview?{query}")
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    page = await admin.get(f"/ui?{query}")
    assert page.status_code == 400
    assert "text/html" in page.headers["content-type"]


@pytest.mark.parametrize(
    "path", ["/ui", "/ui/replicas/none", "/ui/sessions/none", "/ui/static/page.js", "/ui/static/no"]
)
async def test_nothing_but_the_router_may_be_asked_by_the_page(admin: httpx.AsyncClient, path: str) -> None:
    headers = (await admin.get(path)).headers
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


async def test_the_page_changes_nothing(admin: httpx.AsyncClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert (await admin.request(method, "/ui")).status_code == 405


def test_numbers_in_names_are_numbers() -> None:
    names = ["r10", "r9", "http://10.0.0.10:1", "http://10.0.0.9:1", "", "9", "a"]
    assert sorted(names, key=natural) == ["", "9", "a", "http://10.0.0.9:1", "http://10.0.0.10:1", "r9", "r10"]
