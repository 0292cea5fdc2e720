"""EndpointSlices as replicas: what the API server sends, and one set of targets made of many slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from ipaddress import ip_address

import msgspec

from router.discovery.targets import Target
from router.settings import KubernetesSettings, normal_url

SERVICE = "kubernetes.io/service-name"
"""Label by which a slice says whose it is."""

NOT_READY = "not ready, says Kubernetes"
TERMINATING = "terminates, says Kubernetes"


class _Object(msgspec.Struct, frozen=True, rename="camel"):
    """What nobody here reads is not decoded."""


class Conditions(_Object, frozen=True):
    """Each may be unknown, which is taken as the API's documentation says."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Reference(_Object, frozen=True):
    """The pod."""

    name: str = ""
    uid: str = ""


class Endpoint(_Object, frozen=True):
    addresses: list[str]
    conditions: Conditions | None = None
    target_ref: Reference | None = None


class Port(_Object, frozen=True):
    name: str | None = None
    port: int | None = None


class Metadata(_Object, frozen=True):
    name: str = ""
    namespace: str = ""
    labels: dict[str, str] | None = None
    resource_version: str = ""


class Slice(_Object, frozen=True):
    metadata: Metadata
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None

    @property
    def service(self) -> str:
        return (self.metadata.labels or {}).get(SERVICE, "")


class ListMetadata(_Object, frozen=True):
    resource_version: str = ""
    next: str | None = msgspec.field(name="continue", default=None)


class Page(_Object, frozen=True):
    """Of a list."""

    metadata: ListMetadata
    items: list[Slice] | None = None


class Event(_Object, frozen=True):
    """A line of a watch."""

    type: str
    object: msgspec.Raw


class Status(_Object, frozen=True):
    """How the API server tells of a fault."""

    code: int | None = None
    message: str = ""


Naming = Callable[[str, str, int], str]
"""From namespace, pod and port to an id."""


def naming(settings: KubernetesSettings, every: Sequence[KubernetesSettings]) -> Naming:
    """Ids of one source beside all others: the pod's name, with namespace and port where those of several may meet.

    Told by the settings alone, so that all routers call a pod the same.
    """
    qualified = len({each.namespace for each in every}) > 1
    ported = len({each.port for each in every if each.namespace == settings.namespace}) > 1

    def id_of(namespace: str, pod: str, port: int) -> str:
        return f"{namespace}/" * qualified + pod + f":{port}" * ported

    return id_of


def targets(slices: Iterable[Slice], port: int | str, scheme: str, id_of: Naming) -> list[Target]:
    """One target for each pod, whatever slices it stands in, in order of id.

    `port` is a number, a name, or empty where slices have one only. Of a service with IPv4 slices only those count: the
    others hold the same pods. Raises ValueError for a port that no slice has, and for what cannot be a replica.
    """
    slices = list(slices)
    four = {(each.metadata.namespace, each.service) for each in slices if each.address_type == "IPv4"}
    found: dict[str, _Pod] = {}
    without: list[str] = []
    for each in slices:
        if each.address_type == "IPv6" and each.service and (each.metadata.namespace, each.service) in four:
            continue
        if not each.endpoints:
            continue
        number = _number(each.ports or [], port)
        if number is None:
            without += (f"{known.name or 'unnamed'} ({known.port})" for known in each.ports or [])
            continue
        for endpoint in each.endpoints:
            if endpoint.addresses:
                pod = _Pod(each, endpoint, number)
                known = found.setdefault(pod.identity, pod)
                if known is not pod:
                    known.add(pod)
    if without and not found:
        there = ", ".join(sorted(set(without)))
        if port == "":
            raise ValueError(f"its slices have several ports, {there}: set port to one of them")
        raise ValueError(f"none of its slices has the port {port}: set port to a name or number of {there}")
    return list(_distinct(pod.target(scheme, id_of) for pod in found.values()))


def _number(ports: Sequence[Port], wanted: int | str) -> int | None:
    """The number of the port wanted; None when it is not among them. No ports at all means every port."""
    if isinstance(wanted, int):
        return wanted if not ports or any(each.port == wanted for each in ports) else None
    numbers = {each.port for each in ports if each.port is not None and (not wanted or each.name == wanted)}
    return next(iter(numbers)) if len(numbers) == 1 else None


class _Pod:
    """What is known of one, from all slices in which it stands."""

    def __init__(self, of: Slice, endpoint: Endpoint, port: int) -> None:
        reference = endpoint.target_ref or Reference()
        conditions = endpoint.conditions or Conditions()
        # A pod's addresses in one endpoint are alike, says the API: the first is as good as any.
        self.place = (of.address_type == "IPv6", endpoint.addresses[0], port)
        self.identity = reference.uid or url_of("http", *self.place[1:])
        self.uid = reference.uid
        self.name = reference.name
        self.namespace = of.metadata.namespace
        self.ready = conditions.ready is not False
        self.serving = self.ready if conditions.serving is None else conditions.serving
        self.terminating = conditions.terminating is True

    def add(self, other: _Pod) -> None:
        """The same in another slice, as while slices are being rearranged: one of them may be older.

        A pod that terminates never comes back; for all else the better news is taken, which probes check.
        """
        self.place = min(self.place, other.place)
        self.name = min(self.name, other.name)
        self.ready |= other.ready
        self.serving |= other.serving
        self.terminating |= other.terminating

    def target(self, scheme: str, id_of: Naming) -> Target:
        _, address, port = self.place
        url = url_of(scheme, address, port)
        drains = TERMINATING if self.terminating else "" if self.ready else NOT_READY
        serving = self.serving if self.terminating else self.ready
        id = id_of(self.namespace, self.name, port) if self.name else url.removeprefix(f"{scheme}://")
        return Target(id, url, uid=self.uid, drains=drains, serving=serving)


def _distinct(found: Iterable[Target]) -> Iterator[Target]:
    """One target for each URL and each id, in order of id.

    An address that was given to a new pod may still stand in a slice for the old one: the better of both is there.
    """
    ids, urls, kept = set(), set(), []
    for target in sorted(found, key=lambda each: (bool(each.drains), not each.serving, each.id, each.uid, each.url)):
        if target.id not in ids and target.url not in urls:
            ids.add(target.id)
            urls.add(target.url)
            kept.append(target)
    yield from sorted(kept, key=lambda each: each.id)


@lru_cache(maxsize=32_768)
def url_of(scheme: str, address: str, port: int) -> str:
    """A replica's URL in its normal form. Raises ValueError."""
    host = f"[{address}]" if ip_address(address).version == 6 else address
    return normal_url(f"{scheme}://{host}:{port}")
