"""A router process before a real API server: what tests/discovery proves with a small one, and what that cannot do."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.discovery.cluster import TIME_SCALE
from tests.discovery.test_processes import (  # noqa: F401 run here again, with the fixture below
    test_a_rollout_fails_no_request_and_moves_only_the_sessions_that_must,
    test_another_pod_behind_the_same_address_is_another_replica,
    test_every_worker_finds_them,
    test_pods_come_and_go_and_sessions_stay_while_they_can,
    test_without_an_api_server_the_fleet_stays_as_it_was,
)
from tests.fakes.kubernetes import endpoint_slice, pod
from tests.fakes.process import Process
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S, eventually
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.server import ControlPlane
from tests.sharing.several import Session

pytestmark = pytest.mark.kubernetes


@pytest.fixture
async def cluster(plane: ControlPlane, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path, plane) as cluster:
        yield cluster


async def test_a_version_that_has_expired_is_listed_anew(cluster: Cluster) -> None:
    """The router stands still, as on a host that is suspended, and finds its watch gone and its version forgotten."""
    await cluster.run("a", "b", "c")
    cluster.tell("a")
    await cluster.serve()
    session = Session("one")
    await session.turn(cluster.router.port)
    await eventually(lambda: cluster.api.watches)
    cluster.tell("c")
    await cluster.states(a="ready", c="ready")  # which the watch has told
    before = len(cluster.api.asked)
    cluster.router.signal(signal.SIGSTOP)
    try:
        await cluster.api.stop()
        cluster.tell("b")
        cluster.withdraw("a")
        cluster.withdraw("c")
        cluster.plane.compact()
        await cluster.api.start()
        cluster.allowed()
    finally:
        cluster.router.signal(signal.SIGCONT)
    await cluster.states(b="ready")
    await eventually(lambda: [each.kind for each in cluster.api.asked[before:]][:2] == ["watch", "list"])
    went_on_from = cluster.api.asked[before].query["resourceVersion"]
    told = cluster.plane.slices(cluster.namespace, query=f"?watch=1&timeoutSeconds=1&resourceVersion={went_on_from}")
    assert (told.status_code, json.loads(told.text.splitlines()[0])["object"]["code"]) == (200, 410)
    assert '"error", "logger": "warmroute.discovery"' not in cluster.router.log.read_text(), "that is no fault"
    await session.turn(cluster.router.port)
    assert session.home == "b"


async def test_a_thousand_pods_are_a_fleet(cluster: Cluster) -> None:
    """One emulated replica is all of them, each at a loopback address of its own."""
    command = [sys.executable, "-m", "sim.emulator", "--host", "0.0.0.0", "--time-scale", str(TIME_SCALE)]
    replica = cluster.runs(Process(command, cluster.folder / "replica.log"))
    line = await asyncio.to_thread(replica.wait_line, lambda line: line.startswith("ready"), LIMIT_S)
    port = int(line.split()[1])

    def tell(at: int) -> None:
        pods = [pod(f"p-{number}", f"127.1.{number // 250}.{number % 250 + 1}") for number in range(at, at + 100)]
        cluster.api.put(endpoint_slice(f"s-{at}", pods, port=port, namespace=cluster.namespace))

    for at in range(0, 900, 100):
        tell(at)
    # What is proved here is how they are found: a thousand engines are looked at by a thousand probes a second.
    seldom = {"health": {"interval_s": 30, "deep_interval_s": 600}, "reports": {"interval_s": 30}}
    await cluster.serve(**seldom)
    tell(900)
    await _ready(cluster, 1000)
    session = Session("one")
    await session.turn(cluster.router.port)
    at = int(session.home.removeprefix("p-")) // 100 * 100
    for other in range(0, 1000, 100):
        if other != at:
            cluster.api.delete(f"s-{other}")
    await _ready(cluster, 100)
    await session.turn(cluster.router.port)
    assert session.home == session.turns[0].replica, "its pod is still there"


async def _ready(cluster: Cluster, count: int) -> None:
    async def states() -> dict[str, int]:
        found = [each["state"] for each in (await cluster.fleet()).values()]
        return {state: found.count(state) for state in found}

    await until(states, lambda found: found == {"ready": count}, LIMIT_S, f"{count} are ready")


async def test_it_asks_for_nothing_but_slices(cluster: Cluster) -> None:
    """What its Role gives is what it uses: every question of its account, as the API server wrote them down."""
    await cluster.run("a", "b")
    cluster.tell("a")
    await cluster.serve()
    cluster.tell("b")
    await cluster.states(a="ready", b="ready")
    user = f"system:serviceaccount:{cluster.namespace}:router"
    asked = [each for each in cluster.plane.routers.asked() if each.user == user and each.agent == "warmroute"]
    assert {(each.kind, each.resource, each.namespace) for each in asked} == {
        ("list", "endpointslices", cluster.namespace),
        ("watch", "endpointslices", cluster.namespace),
    }
    assert {each.status for each in asked} <= {0, 200}
