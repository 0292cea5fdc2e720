"""The cluster of tests/discovery with a real API server, and a service account that may read slices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Self

from tests.discovery import cluster
from tests.fakes.process import Process
from tests.kubernetes.server import Asked, ControlPlane, Tree, path_of

ACCOUNT = "router"


class Api:
    """Does what tests.fakes.kubernetes.KubernetesApi does, for one namespace."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._plane = plane
        self.namespace = namespace
        self.url = plane.routers.url

    async def start(self) -> None:
        """Until it is ready."""
        self._plane.routers.start()
        await asyncio.to_thread(self._plane.ready, self._plane.routers)

    async def stop(self) -> None:
        """As when its process is killed. What is stored can be changed by others all the same."""
        await asyncio.to_thread(self._plane.routers.kill)

    def put(self, *slices: Tree) -> None:
        """Create or replace them."""
        for given in slices:
            self._plane.apply(given, "controller")

    def delete(self, name: str) -> None:
        self._plane.told("DELETE", path_of(_named(name, self.namespace)))

    def stored(self, name: str) -> Tree:
        """One of them, as it was put."""
        found = self._plane.told("GET", path_of(_named(name, self.namespace)))
        metadata = {key: found["metadata"][key] for key in ("name", "namespace", "labels")}
        return {**found, "metadata": metadata}

    @property
    def asked(self) -> list[Asked]:
        """By routers, in this namespace."""
        every = self._plane.routers.asked()
        return [each for each in every if each.namespace == self.namespace and each.agent == "warmroute"]

    @property
    def watches(self) -> list[Asked]:
        """Those that are under way, or were when the server was killed."""
        return [each for each in self.asked if each.kind == "watch" and not each.status]


class Cluster(cluster.Cluster):
    """Pods are emulated replicas, and tests write what controllers would: there are no controllers here."""

    api: Any

    def __init__(self, folder: Path, plane: ControlPlane) -> None:
        super().__init__(folder)
        self.plane = plane
        self.namespace = plane.namespace()
        self.api = Api(plane, self.namespace)
        self.ca_file = str(plane.ca_file)

    async def __aenter__(self) -> Self:
        for manifest in access(self.namespace):
            self.plane.apply(manifest)
        (self.folder / "token").write_text(self.plane.token(self.namespace, ACCOUNT))
        self.allowed()
        return self

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        if self.plane.routers.process is None:
            await self.api.start()

    def allowed(self) -> None:
        """Wait until the API server has read the role."""
        token = (self.folder / "token").read_text()
        self.plane.until(lambda: self.plane.slices(self.namespace, token).is_success, "the role is in force")

    def runs(self, process: Process) -> Process:
        """To be stopped in the end."""
        self._stack.callback(process.stop)
        return process


def access(namespace: str, account: str = ACCOUNT) -> list[Tree]:
    """A service account, and what it may do."""
    named = {"name": account, "namespace": namespace}
    rbac = "rbac.authorization.k8s.io"
    verbs = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    role = {"apiGroup": rbac, "kind": "Role", "name": account}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": named},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": named, "rules": [verbs]},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": named,
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", **named}],
        },
    ]


def _named(name: str, namespace: str) -> Tree:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace},
    }
