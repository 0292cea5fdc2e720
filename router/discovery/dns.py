"""Replicas behind a DNS name: SRV records, or the addresses of a headless service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from ipaddress import ip_address

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver
from dns.rdtypes.IN.SRV import SRV

from router.cutting import cut
from router.discovery.feed import Feed, Trouble, check_size
from router.discovery.slices import url_of
from router.discovery.targets import Target, shared
from router.hosts import in_url
from router.settings import DnsSettings

ANSWER_S = 5.0
"""For an answer, all servers and tries together."""

ALL_S = 60.0
"""For the addresses of all that SRV records name."""

AT_ONCE = 16
"""Questions under way, each with a socket of its own."""

LEAST_S, MOST_S = 5.0, 60.0
"""Between two questions, whatever the answer's time to live is."""

log = logging.getLogger("warmroute.discovery")


class DnsSource:
    """One name. Answers of the resolver that the system is set up with, or of the server in the settings."""

    longest_pause_s = 15.0
    empty_after_s = 30.0
    """A name without records is how a DNS server answers, too, that has only just started."""

    def __init__(self, settings: DnsSettings, least_s: float = LEAST_S) -> None:
        self.name = settings.source
        self.made_of = settings
        self._settings = settings
        self._least_s = least_s
        self._left_out: set[str] = set()
        """Addresses that are no replicas, told once."""

    async def follow(self, feed: Feed) -> None:
        while True:
            targets, again_s = await self.ask()
            feed.tell(shared(targets, self._settings.weight, self._settings.ranks, self._settings.pool))
            await asyncio.sleep(again_s)

    async def ask(self) -> tuple[list[Target], float]:
        """The engines there are, and the seconds for which that counts. Raises Trouble."""
        resolver = _resolver(self._settings)  # made anew, as the system's may have been set up anew
        port = self._settings.port
        targets, ttl_s = await (self._services(resolver) if port is None else self._hosts(resolver, port))
        return targets, min(max(ttl_s, self._least_s), MOST_S)

    async def _hosts(self, resolver: dns.asyncresolver.Resolver, port: int) -> tuple[list[Target], float]:
        """A replica for each address."""
        given = self._settings
        addresses, ttl_s = await _addresses(resolver, given.name)
        addresses = self._usable(addresses)
        return [_target(given.scheme, each, port, f"{in_url(each)}:{port}") for each in addresses], ttl_s

    async def _services(self, resolver: dns.asyncresolver.Resolver) -> tuple[list[Target], float]:
        """A replica for each SRV record, called by its target and reached at the target's address.

        By address, so that connections need no DNS, and that another pod under the same name is another replica.
        A target that is the root says that there is none. Priorities and weights are for clients that choose by them:
        Kubernetes makes them from the number of records.
        """
        given = self._settings
        answer = await _ask(resolver, given.srv_name, "SRV")
        records = [each for each in answer.rrset or () if isinstance(each, SRV) and each.target != dns.name.root]
        places = {(each.target.to_text(omit_final_dot=True).lower(), each.port): each for each in records}
        try:
            check_size(places)
        except ValueError as error:
            raise Trouble(str(error)) from None
        hosts = {name: each.target.to_text() for (name, _), each in places.items()}
        found = await _all_addresses(resolver, hosts)
        for name, (addresses, _) in sorted(found.items()):
            if not addresses:
                raise Trouble(f"{name}, which {given.srv_name} names, has no address")
        usable = set(self._usable([address for addresses, _ in found.values() for address in addresses]))
        targets = []
        for name, port in sorted(places):
            address = next((each for each in found[name][0] if each in usable), None)
            if address is not None:
                targets.append(_target(given.scheme, address, port, f"{name}:{port}"))
        return targets, min([_ttl(answer), *(ttl_s for _, ttl_s in found.values())])

    def _usable(self, addresses: Sequence[str]) -> list[str]:
        """Without those that nobody has, told once: a filter's answer for what it forbids, or a mistake in a zone."""
        usable = [each for each in addresses if _is_hosts(each)]
        left_out = {*addresses} - {*usable}
        if new := sorted(left_out - self._left_out):
            log.warning("%s tells what is no host's address, and is left out: %s", self.name, cut(", ".join(new)))
        self._left_out = left_out
        return usable


def _is_hosts(address: str) -> bool:
    ip = ip_address(address)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return not (ip.is_unspecified or ip.is_multicast or str(ip) == "255.255.255.255")


async def _all_addresses(
    resolver: dns.asyncresolver.Resolver, hosts: dict[str, str]
) -> dict[str, tuple[list[str], float]]:
    """Of each host under its name here, with the seconds for which that counts. Raises Trouble."""
    found: dict[str, tuple[list[str], float]] = {}
    left = list(hosts.items())
    try:
        async with asyncio.timeout(ALL_S):
            while left:
                some, left = left[:AT_ONCE], left[AT_ONCE:]
                told = await asyncio.gather(*(_addresses(resolver, host) for _, host in some))
                found |= {name: each for (name, _), each in zip(some, told, strict=True)}
    except TimeoutError:
        raise Trouble(f"DNS has not told the addresses of {len(hosts)} hosts within {ALL_S:g} s") from None
    return found


async def _addresses(resolver: dns.asyncresolver.Resolver, name: str) -> tuple[list[str], float]:
    """IPv4 addresses, in order; IPv6 where there are none: those of one host must not make two replicas."""
    for kind in ("A", "AAAA"):
        answer = await _ask(resolver, name, kind)
        if answer.rrset:
            return sorted((each.address for each in answer.rrset), key=ip_address), _ttl(answer)
    return [], 0.0


class _Nothing:
    """The answer that a name has no records, or is not there."""

    rrset = None


async def _ask(resolver: dns.asyncresolver.Resolver, name: str, kind: str) -> dns.resolver.Answer | _Nothing:
    """Raises Trouble when nobody knows."""
    try:
        return await resolver.resolve(name, kind, search=True, raise_on_no_answer=False, lifetime=ANSWER_S)
    except dns.resolver.NXDOMAIN:
        return _Nothing()
    except dns.exception.Timeout:
        raise Trouble(f"no DNS server has answered for {name} ({kind}) within {ANSWER_S:g} s") from None
    except (dns.exception.DNSException, OSError) as error:
        raise Trouble(f"DNS does not say what {name} ({kind}) is", str(error)) from None


def _ttl(answer: dns.resolver.Answer | _Nothing) -> float:
    return float(answer.rrset.ttl) if answer.rrset else 0.0


def _target(scheme: str, address: str, port: int, id: str) -> Target:
    try:
        return Target(id, url_of(scheme, address, port))
    except ValueError as error:
        raise Trouble(f"DNS tells what cannot be a replica: {error}") from None


def _resolver(settings: DnsSettings) -> dns.asyncresolver.Resolver:
    """Raises Trouble."""
    if not settings.server:
        try:
            return dns.asyncresolver.Resolver()
        except dns.exception.DNSException as error:
            raise Trouble(f"the system's resolver is not set up: {error}: set server") from None
    host, _, port = settings.server.rpartition(":")
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = [host.strip("[]")]
    resolver.port = int(port)
    return resolver
