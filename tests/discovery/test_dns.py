"""Replicas by DNS, asked of a server that answers over UDP and TCP."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any

import pytest

from router.discovery import dns as discovery_dns
from router.discovery import feed as discovery_feed
from router.discovery.dns import DnsSource
from router.hosts import in_url
from router.settings import DnsSettings
from tests.discovery.followed import Followed, followed
from tests.discovery.nameserver import Nameserver
from tests.fakes.logged import logged
from tests.fakes.wire import LIMIT_S, eventually

NAME = "sglang.default.svc.cluster.local"
SRV = f"_http._tcp.{NAME}"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_feed, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(DnsSource, "longest_pause_s", 0.1)
    monkeypatch.setattr(DnsSource, "empty_after_s", LIMIT_S)


@pytest.fixture
async def server() -> AsyncIterator[Nameserver]:
    server = Nameserver()
    await server.start()
    yield server
    await server.stop()


def following(server: Nameserver, least_s: float = 0.02, **given: Any) -> AbstractAsyncContextManager[Followed]:
    return followed(DnsSource(DnsSettings(**{"name": NAME, "server": server.address} | given), least_s))


# Addresses


async def test_the_addresses_of_a_name_are_replicas(server: Nameserver) -> None:
    server.give(NAME, "A", "10.0.0.2", "10.0.0.1")
    async with following(server, port=30000) as seen:
        first = await seen.ids("10.0.0.1:30000", "10.0.0.2:30000")
        assert first["10.0.0.1:30000"].url == "http://10.0.0.1:30000"
        server.give(NAME, "A", "10.0.0.2", "10.0.0.10")
        await seen.ids("10.0.0.2:30000", "10.0.0.10:30000")
        assert ("AAAA" in {kind for _, kind in server.asked}) is False


async def test_each_rank_of_an_engine_is_a_replica(server: Nameserver) -> None:
    server.give(NAME, "A", "10.0.0.1")
    async with following(server, port=30000, ranks=2) as seen:
        first = await seen.ids("10.0.0.1:30000@0", "10.0.0.1:30000@1")
        assert {each.url for each in first.values()} == {"http://10.0.0.1:30000"}


async def test_ipv6_where_there_is_no_other(server: Nameserver) -> None:
    server.give(NAME, "AAAA", "fd00::2", "fd00::1")
    async with following(server, port=30000, scheme="https") as seen:
        first = await seen.ids("[fd00::1]:30000", "[fd00::2]:30000")
        assert first["[fd00::1]:30000"].url == "https://[fd00::1]:30000"
        server.give(NAME, "A", "10.0.0.1")
        await seen.ids("10.0.0.1:30000")


async def test_more_addresses_than_a_datagram_holds(server: Nameserver) -> None:
    addresses = [f"10.0.{number // 250}.{number % 250}" for number in range(600)]
    server.give(NAME, "A", *addresses)
    async with following(server, port=80) as seen:
        await seen.ids(*(f"{address}:80" for address in addresses))
        assert server.by_tcp >= 1


async def test_a_name_that_leads_to_another(server: Nameserver) -> None:
    server.give("real.example", "A", "10.0.0.1")
    server.give(NAME, "CNAME", "real.example.")
    async with following(server, port=80) as seen:
        await seen.ids("10.0.0.1:80")


# SRV records


async def test_srv_records_name_the_replicas_and_their_ports(server: Nameserver) -> None:
    server.give(SRV, "SRV", f"0 50 30000 p-0.{NAME}.", f"0 50 31000 p-1.{NAME}.")
    server.give(f"p-0.{NAME}", "A", "10.0.0.1")
    server.give(f"p-1.{NAME}", "AAAA", "fd00::2")
    async with following(server) as seen:
        first = await seen.ids(f"p-0.{NAME}:30000", f"p-1.{NAME}:31000")
        assert [each.url for each in first.values()] == ["http://10.0.0.1:30000", "http://[fd00::2]:31000"]
        assert {each.weight for each in first.values()} == {1.0}
        server.give(f"p-0.{NAME}", "A", "10.0.0.7")
        await seen.until(lambda: seen.last[f"p-0.{NAME}:30000"].url == "http://10.0.0.7:30000", "another pod")
        server.give(SRV, "SRV", f"0 50 30000 p-0.{NAME}.")
        await seen.ids(f"p-0.{NAME}:30000")
        server.give(SRV, "SRV", "0 0 0 .")
        await seen.trouble("it tells no replica")


async def test_a_record_may_be_named_whole(server: Nameserver) -> None:
    server.give("_api._tcp.x", "SRV", "0 0 80 host.example.")
    server.give("host.example", "A", "10.0.0.1")
    async with following(server, name="_api._tcp.x") as seen:
        await seen.ids("host.example:80")


async def test_a_target_without_an_address_freezes_what_is_known(server: Nameserver) -> None:
    server.give(SRV, "SRV", "0 0 80 a.example.")
    server.give("a.example", "A", "10.0.0.1")
    async with following(server) as seen:
        await seen.ids("a.example:80")
        server.give(SRV, "SRV", "0 0 80 a.example.", "0 0 80 b.example.")
        await seen.trouble("b.example, which", "has no address")
        assert set(seen.last) == {"a.example:80"}
        server.give("b.example", "A", "10.0.0.2")
        await seen.ids("a.example:80", "b.example:80")


# Time to live


@pytest.mark.parametrize(("ttl_s", "asks_after_s"), [(0, 5.0), (7, 7.0), (86_400, 60.0)])
async def test_an_answer_counts_for_as_long_as_it_says_within_bounds(
    server: Nameserver, ttl_s: int, asks_after_s: float
) -> None:
    server.give(NAME, "A", "10.0.0.1", ttl_s=ttl_s)
    source = DnsSource(DnsSettings(name=NAME, server=server.address, port=80))
    targets, told_s = await source.ask()
    assert [each.id for each in targets] == ["10.0.0.1:80"]
    assert told_s == asks_after_s


# What goes wrong


@pytest.mark.parametrize(
    ("fault", "why"),
    [("fail", "SERVFAIL"), ("refuse", "REFUSED"), ("hang", "no DNS server has answered"), ("garbage", "DNS")],
)
async def test_a_server_that_does_not_answer_changes_nothing(
    server: Nameserver, fault: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery_dns, "ANSWER_S", 0.5)
    server.give(NAME, "A", "10.0.0.1")
    async with following(server, port=80) as seen:
        await seen.ids("10.0.0.1:80")
        server.fault = fault
        await seen.trouble(why)
        assert set(seen.last) == {"10.0.0.1:80"}
        server.fault = ""
        server.give(NAME, "A", "10.0.0.2")
        await seen.ids("10.0.0.2:80")


@pytest.mark.parametrize("exists", [True, False])
async def test_a_name_that_has_nothing_any_more_is_believed_when_it_stays_so(
    server: Nameserver, exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is there without addresses, or not there at all."""
    server.give(NAME, "A", "10.0.0.1")
    async with following(server, port=80) as seen:
        await seen.ids("10.0.0.1:80")
        server.give(NAME, "A")
        if exists:
            server.give(NAME, "TXT", "here")
        await seen.trouble("it tells no replica")
        before = seen.feed.faults
        await eventually(lambda: seen.feed.faults >= before + 3)
        assert set(seen.last) == {"10.0.0.1:80"}, "asked again and again"
        monkeypatch.setattr(DnsSource, "empty_after_s", 0.1)
        await seen.ids()
        server.give(NAME, "A", "10.0.0.2")
        await seen.ids("10.0.0.2:80")


async def test_the_systems_resolver_is_asked_where_no_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that goes without touching the system: what cannot be read is told."""

    def without(*_: object, **__: object) -> None:
        raise discovery_dns.dns.resolver.NoResolverConfiguration

    monkeypatch.setattr(discovery_dns.dns.asyncresolver.Resolver, "read_resolv_conf", without)
    async with followed(DnsSource(DnsSettings(name=NAME, port=80))) as seen:
        await seen.trouble("the system's resolver is not set up", "set server")


async def test_emptiness_that_a_fault_interrupts_begins_anew(
    server: Nameserver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    monkeypatch.setattr(discovery_feed, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    monkeypatch.setattr(DnsSource, "empty_after_s", 30.0)
    server.give(NAME, "A", "10.0.0.1")
    async with following(server, port=80) as seen:
        await seen.ids("10.0.0.1:80")
        server.give(NAME, "A")
        await seen.trouble("it tells no replica")
        server.fault = "fail"
        await seen.trouble("SERVFAIL")
        now[0] += 60
        server.fault = ""
        await seen.trouble("it tells no replica")
        before = seen.feed.faults
        await eventually(lambda: seen.feed.faults >= before + 2)
        assert set(seen.last) == {"10.0.0.1:80"}
        now[0] += 30
        await seen.ids()
    (line,) = [each for each in logged(caplog, "warmroute.discovery") if "is believed: 1 leave" in each.message]
    assert line.levelno == logging.WARNING


class WithoutHosts(Nameserver):
    """Says which hosts there are, and is silent about where."""

    def answer(self, data: bytes, most_bytes: int) -> bytes | None:
        answer = super().answer(data, most_bytes)
        return None if self.asked[-1][1] == "A" else answer


async def test_few_hosts_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_dns, "ANSWER_S", 0.5)
    server = WithoutHosts()
    await server.start()
    server.give(SRV, "SRV", *(f"0 0 80 t{number}.example." for number in range(200)))
    async with following(server) as seen:
        await seen.trouble("no DNS server has answered")
        assert seen.feed.faults == 1
        assert 1 <= len({name for name, kind in server.asked if kind == "A"}) <= discovery_dns.AT_ONCE
    await server.stop()


async def test_addresses_of_too_many_are_not_asked_for(server: Nameserver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_feed, "MAX_TARGETS", 3)
    server.give(SRV, "SRV", *(f"0 0 80 t{number}.example." for number in range(4)))
    async with following(server) as seen:
        await seen.trouble("it tells 4 replicas, and 3 are the most that are taken")
        assert {kind for _, kind in server.asked} == {"SRV"}


@pytest.mark.parametrize(
    ("kind", "none", "one"),
    [("A", ["0.0.0.0", "224.0.0.1", "255.255.255.255"], "10.0.0.1"), ("AAAA", ["::", "ff02::1"], "fd00::1")],
)
async def test_addresses_that_no_host_has_are_left_out_and_told_once(
    server: Nameserver, kind: str, none: list[str], one: str, caplog: pytest.LogCaptureFixture
) -> None:
    there = in_url(one)
    server.give(NAME, kind, *none, one)
    async with following(server, port=80) as seen:
        await seen.ids(f"{there}:80")
        await eventually(lambda: len(seen.sets) >= 3)
        server.give(NAME, kind, *none)
        await seen.trouble("it tells no replica")
    (line,) = [each.message for each in logged(caplog, "warmroute.discovery") if "left out" in each.message]
    assert all(each in line for each in none)


async def test_a_host_at_an_address_that_no_host_has_is_left_out(server: Nameserver) -> None:
    server.give(SRV, "SRV", "0 0 80 a.example.", "0 0 80 b.example.")
    server.give("a.example", "A", "0.0.0.0")
    server.give("b.example", "A", "0.0.0.0", "10.0.0.2")
    async with following(server) as seen:
        found = await seen.ids("b.example:80")
        assert found["b.example:80"].url == "http://10.0.0.2"
