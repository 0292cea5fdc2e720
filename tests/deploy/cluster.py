"""As much of a Kubernetes API as Helm asks for when it may look things up: kinds, and objects by name."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Mapping
from typing import Any, Self

KINDS = {
    "v1": {"Secret": "secrets", "ConfigMap": "configmaps", "Service": "services", "ServiceAccount": "serviceaccounts"},
    "apps/v1": {"Deployment": "deployments"},
    "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
}


class Cluster:
    """Serves objects, as they would be answered, by their paths."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        answers = _kinds() | dict(objects)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = answers.get(self.path.partition("?")[0])
                missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
                body = json.dumps(missing if found is None else found).encode()
                self.send_response(404 if found is None else 200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _kinds() -> dict[str, Any]:
    """What tells a client which kinds there are."""
    groups = []
    out: dict[str, Any] = {"/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}}
    for version, kinds in KINDS.items():
        listed = [{"name": name, "kind": kind, "namespaced": True, "verbs": ["get"]} for kind, name in kinds.items()]
        group, _, number = version.rpartition("/")
        path = f"/apis/{version}" if group else f"/api/{version}"
        out[path] = {"kind": "APIResourceList", "groupVersion": version, "resources": listed}
        if group:
            known = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [known], "preferredVersion": known})
    out["/api"] = {"kind": "APIVersions", "versions": ["v1"]}
    out["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    return out
