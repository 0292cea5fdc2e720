"""A real etcd and two real Kubernetes API servers over it: routers ask the one, and everybody else the other.

Two, as a control plane has them, so that things go on while the one that the routers ask is away.
"""

from __future__ import annotations

import json
import signal
import ssl
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import httpx
import trustme
import yaml

from tests.fakes.process import ROOT, Process, free_port

BINARIES = ROOT / ".kubernetes/bin"
STARTING_S = 180.0
"""An API server takes six seconds of a core until it is ready."""
POLL_S = 0.05
ADMIN = "admin-of-everything"
"""The token of whoever may do anything."""

Tree = dict[str, Any]

# Of Kubernetes 1.20 discovery.k8s.io/v1 is no part: it is switched off there, and defined as others define theirs. So
# the same machinery serves it, lists, watches and all, but what is written is not checked, and no controller writes it.
SLICES: Tree = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "endpointslices.discovery.k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, for tests only"},
    },
    "spec": {
        "group": "discovery.k8s.io",
        "scope": "Namespaced",
        "names": {"plural": "endpointslices", "singular": "endpointslice", "kind": "EndpointSlice"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}

AUDIT: Tree = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
}
"""Of what pods ask, everything is written down."""


class Failed(Exception):
    """The API server refuses what the admin asks for. The message is its answer."""


class Asked:
    """A question, by what the API server wrote down of it last."""

    def __init__(self, event: Tree) -> None:
        what = event.get("objectRef", {})
        self.at: str = event["requestReceivedTimestamp"]
        self.user: str = event["user"]["username"]
        self.agent: str = event.get("userAgent", "")
        self.kind: str = event["verb"]
        self.resource: str = what.get("resource", "")
        self.namespace: str = what.get("namespace", "")
        self.query = {key: values[0] for key, values in parse_qs(urlsplit(event["requestURI"]).query).items()}
        self.status: int = event.get("responseStatus", {}).get("code", 0)
        """0 until the answer is whole."""


class ApiServer:
    """One of them, which may be killed and started again on its port."""

    def __init__(self, folder: Path, name: str, etcd: str, authority: trustme.CA) -> None:
        self.folder = folder / name
        self.folder.mkdir()
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.process: Process | None = None
        self._audit = self.folder / "audit.log"
        own = authority.issue_cert("127.0.0.1")
        chain, key = self._file("tls.crt", _pems(own)), self._file("tls.key", own.private_key_pem.bytes().decode())
        tokens = self._file("tokens.csv", f'{ADMIN},admin,1,"system:masters"\n')
        accounts = folder / "accounts.key"
        self._command: list[str | Path] = [
            *(BINARIES / "kube-apiserver", f"--etcd-servers={etcd}", "--bind-address=127.0.0.1"),
            *(f"--secure-port={self.port}", "--insecure-port=0", f"--cert-dir={self.folder}"),
            *(f"--tls-cert-file={chain}", f"--tls-private-key-file={key}"),
            *("--authorization-mode=RBAC", f"--token-auth-file={tokens}"),
            "--service-account-issuer=https://kubernetes.default.svc",
            *(f"--service-account-signing-key-file={accounts}", f"--service-account-key-file={accounts}"),
            # There is nobody who makes the secrets of service accounts, nor endpoints for the API servers themselves.
            *("--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none"),
            *("--service-cluster-ip-range=10.96.0.0/24", "--etcd-compaction-interval=0"),
            "--runtime-config=discovery.k8s.io/v1beta1=false",
            *(f"--audit-policy-file={self._file('policy.yaml', yaml.safe_dump(AUDIT))}", "--audit-log-mode=blocking"),
            f"--audit-log-path={self._audit}",
        ]

    def _file(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.write_text(text)
        return file

    def start(self) -> None:
        """Not waiting until it is ready."""
        assert self.process is None
        self.process = Process(self._command, self.folder / "server.log")

    def kill(self) -> None:
        """At once, its connections with it."""
        if self.process is not None:
            self.process.signal(signal.SIGKILL)
            self.process.stop()
            self.process = None

    def asked(self) -> list[Asked]:
        """What pods have asked of it, in order; also before it was killed."""
        lines = self._audit.read_text().splitlines(keepends=True) if self._audit.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        last = {each["auditID"]: Asked(each) for each in events}
        return sorted(last.values(), key=lambda each: each.at)


class ControlPlane:
    """All of it, for a whole run."""

    def __init__(self, folder: Path) -> None:
        for name in ("etcd", "kube-apiserver"):
            assert (BINARIES / name).exists(), (
                f"there is no {name}: run these tests by make test-kubernetes, or build it"
            )
        self.folder = folder
        authority = trustme.CA()
        self.ca_file = folder / "ca.crt"
        authority.cert_pem.write_to_path(str(self.ca_file))
        (folder / "accounts.key").write_bytes(authority.issue_cert("accounts").private_key_pem.bytes())
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._etcd_url = client
        self.etcd = Process(
            [
                *(BINARIES / "etcd", "--data-dir", folder / "etcd", "--log-outputs", "stderr"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", f"default={peer}"),
            ],
            folder / "etcd.log",
        )
        self.routers = ApiServer(folder, "routers", client, authority)
        """The one that routers ask."""
        self.others = ApiServer(folder, "others", client, authority)
        context = ssl.create_default_context()
        authority.configure_trust(context)
        self._client = httpx.Client(verify=context, trust_env=False, timeout=STARTING_S)
        self._namespaces = 0

    def __enter__(self) -> Self:
        try:
            # One after the other, as both would set up the same things.
            for each in (self.others, self.routers):
                each.start()
                self.ready(each)
            self.apply(SLICES)
            for each in (self.others, self.routers):
                self.until(lambda at=each: self.kinds(at, "discovery.k8s.io/v1"), "slices are served")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.routers.kill()
        self.others.kill()
        self.etcd.stop()
        self._client.close()

    # Waiting

    def until(self, holds: Any, what: str) -> None:
        """Ask until it is so."""
        deadline = time.monotonic() + STARTING_S
        while not holds():
            assert time.monotonic() < deadline, f"not within {STARTING_S:g} s: {what}"
            time.sleep(POLL_S)

    def ready(self, server: ApiServer) -> None:
        """Wait until it serves."""

        def serves() -> bool:
            assert server.process is not None
            assert server.process.alive, server.process.tail()
            try:
                return self.ask("GET", "/readyz", server=server).status_code == 200
            except httpx.TransportError:
                return False

        self.until(serves, f"{server.folder.name} is ready")

    # What the admin does

    def ask(
        self, method: str, path: str, *, token: str = ADMIN, server: ApiServer | None = None, **given: Any
    ) -> httpx.Response:
        """One request. With a token of somebody else it is theirs."""
        headers = {"authorization": f"Bearer {token}", **given.pop("headers", {})}
        return self._client.request(method, (server or self.others).url + path, headers=headers, **given)

    def told(self, method: str, path: str, **given: Any) -> Tree:
        """The answer to the admin. Raises Failed."""
        answer = self.ask(method, path, **given)
        if not answer.is_success:
            raise Failed(answer.text)
        return dict(answer.json())

    def kinds(self, server: ApiServer, version: str) -> set[str]:
        """Names of the resources of a version of a group; none where there is no such version."""
        answer = self.ask("GET", f"/apis/{version}" if "/" in version else f"/api/{version}", server=server)
        return {each["name"] for each in answer.json()["resources"]} if answer.is_success else set()

    def apply(self, manifest: Mapping[str, Any], manager: str = "tests") -> Tree:
        """By server-side apply. What is then there. Raises Failed."""
        return self.told(
            "PATCH",
            f"{path_of(manifest)}?fieldManager={manager}&force=true",
            content=json.dumps(manifest),  # which is YAML, too
            headers={"content-type": "application/apply-patch+yaml"},
        )

    def namespace(self) -> str:
        """A new one."""
        self._namespaces += 1
        name = f"test-{self._namespaces}"
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        return name

    def token(self, namespace: str, account: str) -> str:
        """Such as the kubelet mounts into a pod of this service account."""
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self.told("POST", path, json=asked)["status"]["token"])

    def slices(self, namespace: str, token: str = ADMIN, query: str = "") -> httpx.Response:
        """A list or a watch of them, at the server that routers ask."""
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices{query}"
        return self.ask("GET", path, token=token, server=self.routers)

    def compact(self) -> None:
        """Forget all versions but the newest, as an API server has etcd do every five minutes."""
        newest = self.told("GET", "/api/v1/namespaces")["metadata"]["resourceVersion"]
        url = f"{self._etcd_url}/v3/kv/compaction"
        self._client.post(url, json={"revision": newest, "physical": True}).raise_for_status()


@cache
def _plural(kind: str) -> str:
    """As the API calls them."""
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}es" if name.endswith("s") else f"{name}s"


def path_of(manifest: Mapping[str, Any]) -> str:
    """Where an object is."""
    version, metadata = manifest["apiVersion"], manifest["metadata"]
    where = f"/namespaces/{metadata['namespace']}" if "namespace" in metadata else ""
    return f"/{'apis' if '/' in version else 'api'}/{version}{where}/{_plural(manifest['kind'])}/{metadata['name']}"


def _pems(certificate: trustme.LeafCert) -> str:
    return "".join(each.bytes().decode() for each in certificate.cert_chain_pems)
