"""A front of deploy/fronts as a process, its addresses and ports alone replaced, and the routers behind it."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

from tests.fakes.process import ROOT, Process, free_port

FILES = {"haproxy": "haproxy.cfg", "nginx": "nginx.conf", "envoy": "envoy.yaml"}
LIMIT_S = 60.0
"""The longest that anything is waited for."""
ROUTERS = 3
"""As many as each file names: 10.0.0.1 to 10.0.0.3, here 127.0.0.1 to 127.0.0.3."""
ENVOY = ROOT / ".fronts/envoy/_bin/envoy"


class Ports:
    """Those that all routers behind a front listen on, each on its own address."""

    def __init__(self) -> None:
        self.data, self.admin = free_port(), free_port()


class Router:
    """A router on the `number`th address (from 1), which can be killed and started again there."""

    def __init__(self, number: int, ports: Ports, replicas: list[str], folder: Path) -> None:
        self.name = f"router{number}"
        self._host, self._ports, self._folder = f"127.0.0.{number}", ports, folder
        folder.mkdir(parents=True, exist_ok=True)
        named = [{"url": url, "id": f"{self.name}-replica{n}"} for n, url in enumerate(replicas)]
        self._config = folder / f"{self.name}.yaml"
        # An answer's x-warmroute-replica begins with the router that it came through.
        self._config.write_text(json.dumps({"replicas": named, "response_headers": True, "drain": {"delay_s": 600}}))
        self.start()

    def start(self) -> None:
        """Start it; `wait_ready` waits until it serves."""
        command: list[str | Path] = [ROOT / ".venv/bin/warmroute", "serve", "--config", self._config]
        command += ["--host", self._host, "--port", str(self._ports.data)]
        command += ["--admin-host", self._host, "--admin-port", str(self._ports.admin)]
        self._process = Process(command, self._folder / f"{self.name}.log")

    def wait_ready(self) -> None:
        self._process.wait_ok(f"http://{self._host}:{self._ports.admin}/readyz", LIMIT_S)

    def drain(self) -> None:
        """Begin to stop: it says so on `/readyz`, and goes on serving for ten minutes."""
        self._process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, with all that is under way."""
        if self._process.alive:
            self._process.signal(signal.SIGKILL)
        self._process.stop()


class Front(Process):
    """One of the proxies, started from its file in deploy/fronts."""

    def __init__(self, name: str, ports: Ports, folder: Path, *, without: int = 0) -> None:
        """`without`: the number of a router that is not in the file."""
        self.name, self.ports = name, ports
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / FILES[name]
        text = (ROOT / "deploy/fronts" / FILES[name]).read_text()
        if without:
            text, found = re.subn(
                rf"(?m)^( *- endpoint:\n)?.*10\.0\.0\.{without}\b.*\n( *health_check_config.*\n)?", "", text
            )
            assert found == 1
        file.write_text(self._placed(text, folder))
        super().__init__(_command(name, file), folder / f"{name}.log")

    def wait_serving(self) -> None:
        """Wait until something answers through it."""
        self.wait_ok(f"{self.url}/v1/models", LIMIT_S)

    def _placed(self, text: str, folder: Path) -> str:
        """The file's text with its addresses and ports replaced, and nginx's files where any user may write."""
        changes: Mapping[str, str] = {
            "haproxy": {"bind 0.0.0.0:8080": f"bind 127.0.0.1:{self.port}"},
            "nginx": {
                "listen 0.0.0.0:8080": f"listen 127.0.0.1:{self.port}",
                "pid /run/nginx.pid;": f"pid {folder}/nginx.pid;",
                "http {": "http {"
                + "".join(
                    f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
                ),
            },
            "envoy": {
                "address: 0.0.0.0, port_value: 8080": f"address: 127.0.0.1, port_value: {self.port}",
                "port_value: 8080": f"port_value: {self.ports.data}",
                "port_value: 8081": f"port_value: {self.ports.admin}",
            },
        }[self.name]
        changes = {
            **changes,
            "10.0.0.": "127.0.0.",
            ":8080": f":{self.ports.data}",
            "port 8081": f"port {self.ports.admin}",
        }
        for old, new in changes.items():
            text = text.replace(old, new)
        return text


def _command(name: str, file: Path) -> list[str | Path]:
    if name == "envoy":
        return [_program(name), "-c", file, "--concurrency", "2", "--disable-hot-restart", "-l", "warning"]
    if name == "nginx":
        return [_program(name), "-c", file, "-e", "stderr", "-g", "daemon off;"]
    return [_program(name), "-db", "-f", file]


def _program(name: str) -> str:
    """Where it is; Debian's sbin folders are not on every user's PATH."""
    found = shutil.which(ENVOY if name == "envoy" else name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    assert found, f"{name} is missing: `make test-fronts` installs it, or says how"
    return found
