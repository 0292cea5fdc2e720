"""Replicas behind a DNS name: SRV records, or the addresses of a headless service."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver
from dns.rdtypes.IN.SRV import SRV

from router.discovery.feed import Feed, Trouble
from router.discovery.slices import url_of
from router.discovery.targets import Target, in_ranks
from router.hosts import in_url
from router.settings import DnsSettings

ANSWER_S = 5.0
"""For an answer, all servers and tries together."""

LEAST_S, MOST_S = 5.0, 60.0
"""Between two questions, whatever the answer's time to live is."""


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

    async def follow(self, feed: Feed) -> None:
        while True:
            targets, again_s = await self.ask()
            feed.tell([rank for each in targets for rank in in_ranks(each, self._settings.ranks)])
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
        found = await asyncio.gather(*(_addresses(resolver, each.target.to_text()) for each in places.values()))
        targets = []
        for (name, port), (addresses, _) in sorted(zip(places, found, strict=True)):
            if not addresses:
                raise Trouble(f"{name}, which {given.srv_name} names, has no address")
            targets.append(_target(given.scheme, addresses[0], port, f"{name}:{port}"))
        return targets, min([_ttl(answer), *(ttl_s for _, ttl_s in found)])


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
