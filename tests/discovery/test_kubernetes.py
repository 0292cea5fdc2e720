"""The Kubernetes client, before an API server that lists, watches, forgets and fails."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme

from router.discovery import api as discovery_api
from router.discovery import feed as discovery_feed
from router.discovery import kubernetes
from router.discovery.kubernetes import KubernetesSource, Times
from router.discovery.slices import naming
from router.settings import KubernetesSettings
from tests.discovery.followed import Followed, followed
from tests.fakes.kubernetes import KubernetesApi, Scripted, endpoint_slice, pod
from tests.fakes.logged import logged
from tests.fakes.process import free_port
from tests.fakes.wire import LIMIT_S, eventually

QUICK = Times(least_s=0.05, settle_s=0.0, held_s=0.05)
"""As it is, but that nothing waits for decency's sake."""


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    server = KubernetesApi()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever failed is asked again soon."""
    monkeypatch.setattr(KubernetesSource, "longest_pause_s", 0.2)
    monkeypatch.setattr(discovery_feed, "FIRST_PAUSE_S", 0.05)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """By which feeds tell how long a set has been empty: it stands still."""
    now = [1000.0]
    monkeypatch.setattr(discovery_feed, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    return now


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("token-1\n")
    return file


def exchange(token: Path) -> None:
    """What the kubelet does now and then."""
    token.write_text("token-2")


def source(api: KubernetesApi, token: Path, times: Times = QUICK, **given: Any) -> KubernetesSource:
    tree = {"namespace": "default", "url": api.url, "token_file": str(token)} | given
    if "selector" not in tree:
        tree.setdefault("service", "sglang")
    settings = KubernetesSettings(**tree)
    return KubernetesSource(settings, naming(settings, [settings]), times)


def following(
    api: KubernetesApi, token: Path, times: Times = QUICK, **given: Any
) -> AbstractAsyncContextManager[Followed]:
    return followed(source(api, token, times, **given))


def kinds(api: KubernetesApi) -> list[str]:
    return [each.kind for each in api.asked]


# What goes well


async def test_pods_are_listed_and_then_watched(api: KubernetesApi, token: Path) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1"), pod("b", "10.0.0.2")]))
    api.put(endpoint_slice("other", [pod("x", "10.0.9.9")], service="other"))
    async with following(api, token) as seen:
        first = await seen.ids("a", "b")
        assert (first["a"].url, first["a"].uid, first["a"].drains) == ("http://10.0.0.1:30000", "uid-of-a", "")
        await eventually(lambda: api.watches)
        api.put(endpoint_slice("s-1", [pod("b", "10.0.0.2")]), endpoint_slice("s-2", [pod("c", "10.0.0.3")]))
        await seen.ids("b", "c")
        api.delete("s-1")
        await seen.ids("c")
        api.put(endpoint_slice("s-2", [pod("c", "10.0.0.3", ready=False)]))
        await seen.until(lambda: seen.last["c"].drains, "c is not ready")
        assert kinds(api) == ["list", "watch"], "all that in one watch"


async def test_a_list_comes_in_pages(api: KubernetesApi, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "PAGE_SLICES", 2)
    names = [f"p{number}" for number in range(5)]
    api.put(*(endpoint_slice(f"s-{name}", [pod(name, f"10.0.0.{at + 1}")]) for at, name in enumerate(names)))
    async with following(api, token) as seen:
        await seen.ids(*names)
        assert kinds(api)[:3] == ["list"] * 3
        assert len(seen.sets) == 1, "half a list is none"


async def test_a_list_that_is_forgotten_between_two_pages_is_read_anew(
    api: KubernetesApi, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "PAGE_SLICES", 1)
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]), endpoint_slice("s-2", [pod("b", "10.0.0.2")]))
    first = {"metadata": {"resourceVersion": "7", "continue": "7.1"}, "items": [endpoint_slice("gone", [])]}
    api.scripted += [Scripted("list", 200, json.dumps(first).encode()), Scripted("list", 410, b"{}")]
    async with following(api, token) as seen:
        await seen.ids("a", "b")
        assert [each.query.get("continue") for each in api.asked[:3]] == [None, "7.1", None]
        assert not seen.feed.faults


async def test_a_watch_that_has_ended_goes_on_from_the_last_version(api: KubernetesApi, token: Path) -> None:
    """Told by an event or by a bookmark."""
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        api.put(endpoint_slice("s-1", [pod("b", "10.0.0.1")]))
        await seen.ids("b")
        api.bookmark()
        marked = str(api.version)
        api.end()
        await eventually(lambda: kinds(api) == ["list", "watch", "watch"])
        assert api.asked[-1].query["resourceVersion"] == marked
        assert api.asked[-1].query["allowWatchBookmarks"] == "true"
        await eventually(lambda: api.watches)
        api.cut()
        api.put(endpoint_slice("s-1", [pod("c", "10.0.0.1")]))
        await seen.ids("c")
        assert "list" not in kinds(api)[1:], "what it missed is told by the next watch"
        assert not seen.feed.faults


@pytest.mark.parametrize("by_status", [False, True])
async def test_a_version_that_is_forgotten_is_listed_anew(api: KubernetesApi, token: Path, by_status: bool) -> None:
    api.gone_by_status = by_status
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]), endpoint_slice("s-2", [pod("b", "10.0.0.2")]))
    async with following(api, token) as seen:
        await seen.ids("a", "b")
        await eventually(lambda: api.watches)
        await api.stop()
        api.delete("s-1")
        api.put(endpoint_slice("s-3", [pod("c", "10.0.0.3")]))
        api.forget()
        await api.start()
        await seen.ids("b", "c")


@pytest.mark.parametrize("by_status", [False, True])
async def test_a_watch_that_says_410_is_no_fault(api: KubernetesApi, token: Path, by_status: bool) -> None:
    api.gone_by_status = by_status
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        api.put(endpoint_slice("other", [], service="other"))  # of which no bookmark tells
        api.forget()
        api.end()
        await eventually(lambda: kinds(api) == ["list", "watch", "watch", "list", "watch"])
        await eventually(lambda: api.watches)
        api.put(endpoint_slice("s-1", [pod("b", "10.0.0.1")]))
        await seen.ids("b")
        assert not seen.feed.faults


async def test_it_lists_again_now_and_then(api: KubernetesApi, token: Path) -> None:
    """What a watch does not tell, though it should."""
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token, replace(QUICK, relist_s=0.5)) as seen:
        await seen.ids("a")
        api._slices["default", "s-1"] = endpoint_slice("s-1", [pod("b", "10.0.0.1")])
        await seen.ids("b")
        assert not seen.feed.faults


async def test_a_selector_and_a_namespace(api: KubernetesApi, token: Path) -> None:
    api.put(
        endpoint_slice("s-1", [pod("a", "10.0.0.1")]), endpoint_slice("s-2", [pod("b", "10.0.0.2")], namespace="big")
    )
    async with following(api, token, namespace="big", selector="kubernetes.io/service-name=sglang") as seen:
        await seen.ids("b")
        assert {each.namespace for each in api.asked} == {"big"}


async def secure(api: KubernetesApi, ca: trustme.CA) -> None:
    """Have it speak HTTPS."""
    await api.stop()
    api.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(api.tls)
    await api.start()


async def test_a_pod_reads_what_its_service_account_gives(
    api: KubernetesApi, token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = trustme.CA()
    await secure(api, ca)
    ca.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    (tmp_path / "namespace").write_text("mine")
    monkeypatch.setattr(discovery_api.Api.__init__, "__defaults__", (tmp_path,))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")], namespace="mine"))
    settings = KubernetesSettings(service="sglang")
    async with followed(KubernetesSource(settings, naming(settings, [settings]), QUICK)) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        api.put(endpoint_slice("s-1", [pod("b", "10.0.0.1")], namespace="mine"))
        await seen.ids("b")
        assert {(each.namespace, each.token) for each in api.asked} == {("mine", "token-1")}


async def test_an_api_server_of_another_authority_is_not_believed(
    api: KubernetesApi, token: Path, tmp_path: Path
) -> None:
    ca, other = trustme.CA(), trustme.CA()
    await secure(api, ca)
    file = tmp_path / "ca.crt"
    other.cert_pem.write_to_path(str(file))
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token, ca_file=str(file)) as seen:
        await seen.trouble("cannot be heard", "CERTIFICATE_VERIFY_FAILED")
        assert not api.asked, "nor shown the token"
        ca.cert_pem.write_to_path(str(file))
        await seen.ids("a")


# What goes wrong


async def test_when_the_api_server_is_gone_what_it_told_stays(
    api: KubernetesApi, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1"), pod("b", "10.0.0.2")]))
    async with following(api, token) as seen:
        await seen.ids("a", "b")
        told = len(seen.sets)
        await api.stop()
        await seen.trouble("cannot be heard")
        before = seen.feed.faults
        await eventually(lambda: seen.feed.faults > before + 3)
        assert len(seen.sets) == told
        api.put(endpoint_slice("s-1", [pod("b", "10.0.0.2"), pod("c", "10.0.0.3")]))
        await api.start()
        await seen.ids("b", "c")
    lines = [record.message for record in logged(caplog, "warmroute.discovery")]
    assert len([line for line in lines if "cannot be heard" in line]) == 1, "once, however often it is asked"
    assert "the 2 replicas that it told last stay" in lines[0]
    assert "answers again" in lines[-1]


async def test_there_may_be_no_api_server_yet(api: KubernetesApi, token: Path) -> None:
    await api.stop()
    api.port = free_port()
    async with following(api, token) as seen:
        await seen.trouble("cannot be heard")
        assert not seen.feed.heard
        api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
        await api.start()
        await seen.ids("a")


GARBAGE = [
    b"<html>a captive portal</html>",
    b'{"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "x"}, "endpoints": "none"}]}',
    b'{"metadata": {"resourceVersion": "7"}, "items": [',
    b'{"metadata": {}, "items": []}',
    b"[]",
    b"",
    json.dumps(
        {"metadata": {"resourceVersion": "7"}, "items": [endpoint_slice("s", [pod("a", "300.1.2.3")])]}
    ).encode(),
    json.dumps({"metadata": {"resourceVersion": "7"}, "items": [endpoint_slice("s", [pod("a", "a.b/?x")])]}).encode(),
]


@pytest.mark.parametrize("body", GARBAGE, ids=range(len(GARBAGE)))
async def test_a_list_that_makes_no_sense_counts_for_nothing(api: KubernetesApi, token: Path, body: bytes) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token, replace(QUICK, relist_s=0.3)) as seen:
        await seen.ids("a")
        api.scripted += [Scripted("list", 200, body)] * 3
        await seen.trouble()
        await seen.ids("a")
        assert all(set(each) == {"a"} for each in seen.sets)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"type": "ADDED", "object": {"metadata": \n', "cannot be read"),
        (b"\xff\xfe\n", "cannot be read"),
        (b'{"type": "ADDED", "object": {"endpoints": []}}\n', "cannot be read"),
        (b'{"type": "SHOUTED", "object": {"metadata": {"name": "s-1"}}}\n', "an event of type 'SHOUTED'"),
        (b'{"type": "ERROR", "object": {"code": 500, "message": "etcd is away"}}\n', "(500: etcd is away)"),
        (b'{"type": "ERROR", "object": 7}\n', "cannot be read"),
    ],
)
async def test_a_watch_that_makes_no_sense_is_begun_anew(
    api: KubernetesApi, token: Path, line: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        api.say(line)
        await eventually(lambda: kinds(api) == ["list", "watch", "list", "watch"])
        assert why in caplog.text
        api.put(endpoint_slice("s-1", [pod("b", "10.0.0.2")]))
        await seen.ids("b")


async def test_half_a_line_is_not_taken_for_one(api: KubernetesApi, token: Path) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        line = json.dumps({"type": "DELETED", "object": endpoint_slice("s-1", [])}).encode()
        api.say(line)  # whole but for its end
        api.cut()
        await eventually(lambda: kinds(api).count("watch") == 2)
        await eventually(lambda: api.watches)
        assert set(seen.last) == {"a"}
        api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1"), pod("b", "10.0.0.2")]))
        await seen.ids("a", "b")
        assert not seen.feed.faults, "the next watch tells what that was"


async def test_lines_may_come_in_any_pieces(api: KubernetesApi, token: Path) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        events = [{"type": "MODIFIED", "object": endpoint_slice("s-1", [pod(name, "10.0.0.1")])} for name in ("b", "c")]
        data = b"".join(json.dumps(event).encode() + b"\n" for event in events)
        for at in range(0, len(data), 7):
            api.say(data[at : at + 7])
        await seen.ids("c")


@pytest.mark.parametrize("kind", ["list", "watch"])
@pytest.mark.parametrize("status", [429, 500, 503])
async def test_an_api_server_that_fails_is_asked_again(api: KubernetesApi, token: Path, kind: Any, status: int) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    told = json.dumps({"message": "etcdserver: leader changed"}).encode()
    api.scripted += [Scripted(kind, status, told)] * 2
    async with following(api, token) as seen:
        assert f"({status}: etcdserver: leader changed)" in await seen.trouble(str(status))
        await seen.ids("a")


async def test_a_token_that_was_exchanged_is_read_anew(api: KubernetesApi, token: Path) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        api.tokens = {"token-2"}
        api.cut()
        assert "the API server does not know the token in" in await seen.trouble("401")
        exchange(token)
        api.put(endpoint_slice("s-1", [pod("b", "10.0.0.1")]))
        await seen.ids("b")


async def test_a_token_that_was_exchanged_in_time_is_no_fault(api: KubernetesApi, token: Path) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        api.tokens = {"token-2"}
        exchange(token)
        api.cut()
        await eventually(lambda: kinds(api).count("watch") == 2)
        assert api.asked[-1].token == "token-2"
        assert not seen.feed.faults


async def test_what_is_forbidden_is_told_with_the_remedy(api: KubernetesApi, token: Path) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        api.forbidden.add("default")
        api.cut()
        why = await seen.trouble("403")
        assert "give its service account get, list and watch of endpointslices in discovery.k8s.io" in why
        assert 'User "u" cannot' in why, "what the API server says, too"
        assert set(seen.last) == {"a"}


async def test_what_is_missing_is_told_with_the_remedy(
    api: KubernetesApi, token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.groups = False
    async with following(api, token) as seen:
        await seen.trouble("404", "it takes Kubernetes 1.21 or newer")
    async with following(api, tmp_path / "nosuch") as seen:
        await seen.trouble("nosuch", "give a readable text file")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    settings = KubernetesSettings(service="sglang", namespace="default")
    async with followed(KubernetesSource(settings, naming(settings, [settings]), QUICK)) as seen:
        await seen.trouble("KUBERNETES_SERVICE_HOST", "outside of a pod set url, token_file and ca_file")


@pytest.mark.parametrize("kind", ["list", "watch"])
@pytest.mark.parametrize("head", [True, False])
async def test_an_api_server_that_hangs_is_found_out(api: KubernetesApi, token: Path, kind: Any, head: bool) -> None:
    """Before its answer's head or after it."""
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    api.scripted.append(Scripted(kind, 200, b'{"met' * head, "hang"))
    times = replace(QUICK, answer_s=0.5, watch_s=0.5, slack_s=0.5)
    async with following(api, token, times) as seen:
        await seen.until(lambda: seen.feed.faults == 1, "it was found out")
        await seen.ids("a")


async def test_a_silent_watch_that_does_not_end_is_found_out(api: KubernetesApi, token: Path) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    api.scripted.append(Scripted("watch", 200, b"", "hang"))
    async with following(api, token, replace(QUICK, watch_s=0.2, slack_s=0.2)) as seen:
        await seen.ids("a")
        await seen.until(lambda: seen.feed.faults == 1, "it was found out")
        await eventually(lambda: kinds(api)[:4] == ["list", "watch", "list", "watch"])


async def test_no_pod_at_all_is_believed_when_it_stays_so(
    api: KubernetesApi, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KubernetesSource, "empty_after_s", LIMIT_S)
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        api.delete("s-1")
        await seen.trouble("it tells no replica")
        assert set(seen.last) == {"a"}
        monkeypatch.setattr(KubernetesSource, "empty_after_s", 0.2)
        await seen.ids()
        api.put(endpoint_slice("s-1", [pod("b", "10.0.0.1")]))
        await seen.ids("b")


async def test_a_port_that_no_pod_has_freezes_what_is_known(api: KubernetesApi, token: Path) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token, port="http") as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")], ports=[{"name": "api", "port": 30000}]))
        await seen.trouble("none of its slices has the port http", "api (30000)")
        assert set(seen.last) == {"a"}


async def test_too_many_are_refused(api: KubernetesApi, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_feed, "MAX_TARGETS", 2)
    monkeypatch.setattr(kubernetes, "MAX_SLICES", 3)
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1"), pod("b", "10.0.0.2")]))
    async with following(api, token) as seen:
        await seen.ids("a", "b")
        await eventually(lambda: api.watches)
        api.put(endpoint_slice("s-2", [pod("c", "10.0.0.3")]))
        await seen.trouble("it tells 3 replicas, and 2 are the most that are taken")
        api.put(endpoint_slice("s-3", []), endpoint_slice("s-4", []))
        await seen.trouble("there are more than 3 slices")
        assert set(seen.last) == {"a", "b"}


async def test_a_page_larger_than_any_is_not_held(
    api: KubernetesApi, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "MAX_PAGE_BYTES", 2_000)
    monkeypatch.setattr(kubernetes, "MAX_LINE_BYTES", 2_000)
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        api.say(b"x" * 3_000)
        await seen.until(lambda: seen.feed.faults == 1, "a line of a watch is larger")
        await eventually(lambda: kinds(api).count("watch") == 2)
        await api.stop()
        api.put(*(endpoint_slice(f"s-{number}", [pod(f"p{number}", f"10.0.1.{number}")]) for number in range(9)))
        api.forget()
        await api.start()
        await seen.trouble("is larger than 2000 bytes")


WATCHES = {
    "forbidden": Scripted("watch", 403, b'{"message": "no watch for you"}'),
    "too many": Scripted("watch", 429, b'{"message": "slower"}', headers=("retry-after: 0",)),
    "a fault in a line": Scripted(
        "watch", 200, b'{"type": "ERROR", "object": {"code": 500, "message": "no leader"}}\n'
    ),
    "garbage": Scripted("watch", 200, b"xx{\n"),
    "an endless line": Scripted("watch", 200, b"x" * 3_000, "hang"),
}


@pytest.mark.parametrize("name", WATCHES)
async def test_a_list_ends_no_outage_of_which_the_watch_is_a_part(
    api: KubernetesApi, token: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is one outage, told once, and less and less is asked; what the lists tell is in force."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kubernetes, "MAX_LINE_BYTES", 2_000)
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        api.scripted.append(replace(WATCHES[name], once=False))
        api.cut()
        longest_s = KubernetesSource.longest_pause_s
        await seen.until(lambda: seen.feed._pause_s == longest_s, "the pause has grown")
        before = seen.feed.faults
        await seen.until(lambda: seen.feed.faults >= before + 3, "it goes on")
        assert seen.feed._pause_s == longest_s
        assert not seen.feed.up
        api.put(endpoint_slice("s-1", [pod("b", "10.0.0.2")]))
        await seen.until(lambda: set(seen.last) == {"b"}, "the list's pods are used")
        assert len(logged(caplog, "warmroute.discovery")) == 1
        api.scripted.clear()
        await seen.until(lambda: seen.feed.up, "a watch has held")
        assert seen.feed._pause_s == discovery_feed.FIRST_PAUSE_S
        assert "answers again" in logged(caplog, "warmroute.discovery")[-1].message


@pytest.mark.parametrize("kind", ["list", "watch"])
async def test_a_pause_that_the_api_server_asks_for_is_kept(api: KubernetesApi, token: Path, kind: Any) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    api.scripted.append(Scripted(kind, 429, b"{}", headers=("retry-after: 1",)))
    began = time.monotonic()
    async with following(api, token) as seen:
        await seen.until(lambda: seen.feed.faults == 1, "it is asked for")
        asked = len(api.asked)
        await eventually(lambda: len(api.asked) > asked)
        assert time.monotonic() - began >= 1.0
        await seen.ids("a")


async def test_but_not_for_ever(api: KubernetesApi, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_feed, "MAX_ASKED_PAUSE_S", 0.1)
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    api.scripted.append(Scripted("list", 429, b"{}", headers=("retry-after: 86400",)))
    async with following(api, token) as seen:
        await seen.ids("a")


async def test_an_api_server_that_forgets_every_version_at_once_is_in_trouble(api: KubernetesApi, token: Path) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    api.scripted.append(Scripted("watch", 410, b"{}", once=False))
    async with following(api, token, replace(QUICK, held_s=LIMIT_S)) as seen:
        await seen.trouble("has forgotten what it listed as soon as that is watched")
        assert set(seen.last) == {"a"}


async def test_a_list_without_an_end_is_given_up(
    api: KubernetesApi, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "MAX_PAGES", 5)
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    page = {"metadata": {"resourceVersion": "7", "continue": "on"}, "items": [endpoint_slice("s-1", [])]}
    async with following(api, token, replace(QUICK, relist_s=0.3)) as seen:
        await seen.ids("a")
        api.scripted.append(Scripted("list", 200, json.dumps(page).encode(), once=False))
        await seen.trouble("the API server's list does not end within 5 pages")
        assert set(seen.last) == {"a"}


async def test_a_flood_of_bookmarks_is_read_in_pieces(api: KubernetesApi, token: Path) -> None:
    """The API server has to wait, and not the router's streams."""
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token, replace(QUICK, settle_s=LIMIT_S)) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        line = b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "101"}}}\n'
        (watch,) = api.watches
        for _ in range(24):
            api.say(line * ((1 << 20) // len(line)))
        # Client and server have the same loop: without a pause it would have read all of it by then.
        for _ in range(3_000):
            await asyncio.sleep(0)
        assert watch.writer.transport.get_write_buffer_size() > 0
        assert seen.feed.up


async def test_an_empty_list_before_an_outage_and_one_after_it_are_not_told_again_and_again(
    api: KubernetesApi, token: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    api.put(endpoint_slice("s-1", [pod("a", "10.0.0.1")]))
    async with following(api, token) as seen:
        await seen.ids("a")
        await eventually(lambda: api.watches)
        api.put(endpoint_slice("s-1", []))
        await seen.trouble("it tells no replica")
        api.groups = False
        await seen.trouble("404")
        clock[0] += 60
        api.groups = True
        await seen.trouble("it tells no replica")
        before = seen.feed.faults
        await seen.until(lambda: seen.feed.faults >= before + 2, "it is told again")
        assert set(seen.last) == {"a"}
        clock[0] += KubernetesSource.empty_after_s
        await seen.ids()
    (line,) = [each for each in logged(caplog, "warmroute.discovery") if "is believed: 1 leave" in each.message]
    assert line.levelno == logging.WARNING
