"""The `warmroute` command."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from importlib import metadata
from typing import Any

import uvloop
import yaml

from policies import registry
from router import console
from router.app import CannotListen, Router
from router.configuration import ConfigError, load, masked
from router.settings import Settings

EXIT_CONFIG = 2
"""As argparse's own: the command line or the configuration cannot be used."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit."""
    _open_standard_files()
    try:
        try:
            given = _parser().parse_args(arguments)
            sys.exit(given.run(given))
        finally:
            sys.stdout.flush()  # that nobody reads it any more shows only here
    except ConfigError as error:
        sys.exit(_fail(str(error)))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered is written once more at exit
        sys.exit(0)


def _open_standard_files() -> None:
    """Descriptors 0 to 2 that a supervisor closed would become sockets, and libuv aborts when it closes one of them."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest free one, which is this
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute",
        description="A session-affinity router for LLM inference: a session stays where its KV cache is.",
    )
    parser.add_argument("--version", action="version", version=f"warmroute {metadata.version('warmroute')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the router")
    _add_settings(serve)
    serve.set_defaults(run=_serve)
    check = commands.add_parser("check-config", help="validate the configuration and print what would be in force")
    _add_settings(check)
    check.set_defaults(run=_check_config)
    replicas = commands.add_parser("replicas", help="show a running router's replicas")
    replicas.add_argument(
        "--admin", metavar="URL", default="http://127.0.0.1:8081", help="its admin port (%(default)s)"
    )
    replicas.add_argument("--json", action="store_true", help="as JSON")
    replicas.set_defaults(run=_replicas)
    policies = commands.add_parser("policies", help="list the policies with their parameters and defaults")
    policies.add_argument("--json", action="store_true", help="as JSON")
    policies.set_defaults(run=_policies)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Everything else is set in the file, or in the environment as WARMROUTE_KEY or WARMROUTE_KEY__KEY. "
        "Flags win over the environment, the environment over the file."
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
    parser.add_argument("--host", help="address to serve on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to serve on (8080)")
    parser.add_argument("--admin-host", metavar="HOST", help="address of the admin port (127.0.0.1)")
    parser.add_argument("--admin-port", metavar="PORT", type=int, help="the admin port (8081)")
    parser.add_argument(
        "--replica", metavar="URL", action="append", help="a replica, as in http://10.0.0.1:30000; may be repeated"
    )
    parser.add_argument("--policy", metavar="NAME", help=f"one of {', '.join(registry.POLICIES)} (session_affinity)")
    parser.add_argument("--log-format", choices=["auto", "json", "text"], help="auto: text on a terminal, else json")


def _settings(given: argparse.Namespace) -> Settings:
    flags: dict[str, Any] = {
        "host": given.host,
        "port": given.port,
        "admin": _present({"host": given.admin_host, "port": given.admin_port}),
        "replicas": given.replica,
        "policy": given.policy,
        "log": _present({"format": given.log_format}),
    }
    return load(given.config, _present(flags))


def _present(flags: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flags.items() if value not in (None, {})}


def _serve(given: argparse.Namespace) -> int:
    settings = _settings(given)
    _log_to_stderr(settings)
    try:
        return uvloop.run(_run(settings))
    except CannotListen as error:
        _fail(str(error))
        return 1


async def _run(settings: Settings) -> int:
    return await Router(settings).run()


def _check_config(given: argparse.Namespace) -> int:
    print(yaml.safe_dump(masked(_settings(given)), sort_keys=False), end="")
    return 0


def _replicas(given: argparse.Namespace) -> int:
    try:
        replicas = console.ask(given.admin, "/replicas")["replicas"]
    except console.Unreachable as error:
        _fail(str(error))
        return 1
    print(json.dumps(replicas) if given.json else console.replicas_table(replicas))
    return 0


def _policies(given: argparse.Namespace) -> int:
    known = {name: registry.parameters(name) for name in registry.POLICIES}
    if given.json:
        print(json.dumps([{"policy": name, "parameters": parameters} for name, parameters in known.items()]))
        return 0
    for name, parameters in known.items():
        first = (registry.POLICIES[name].__doc__ or "").split("\n", 1)[0]
        print(f"{name}: {first}")
        for key, default in parameters.items():
            print(f"    {key} = {default}")
    return 0


def _fail(message: str) -> int:
    for line in message.splitlines():
        print(f"warmroute: {line}", file=sys.stderr)
    return EXIT_CONFIG


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Stderr(logging.Handler):
    """Writes from a thread: a reader of standard error that stops reading must not stop the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[bytes] = queue.Queue(1024)
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):  # dropped, never waited for
            self._lines.put_nowait(self.format(record).encode(errors="replace") + b"\n")

    def flush(self) -> None:
        """Wait a second at most: called at exit."""
        end = time.monotonic() + 1
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)

    def _write(self) -> None:
        while True:
            data = self._lines.get()
            with contextlib.suppress(OSError):
                while data:
                    data = data[os.write(2, data) :]
            self._lines.task_done()


def _log_to_stderr(settings: Settings) -> None:
    handler = _Stderr()
    as_json = settings.log.format == "json" or (settings.log.format == "auto" and not sys.stderr.isatty())
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    text.converter = time.localtime
    handler.setFormatter(_JsonLines() if as_json else text)
    logging.basicConfig(level=settings.log.level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


if __name__ == "__main__":
    main()
