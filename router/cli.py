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
from collections.abc import Callable
from importlib import metadata
from typing import Any

import uvloop
import yaml

from policies import registry
from router import console
from router.app import CannotListen, Router
from router.catalogue import catalogue
from router.configuration import ConfigError, load, masked, scalar
from router.settings import Settings

EXIT_CONFIG = 2
"""As argparse's own: the command line or the configuration cannot be used."""

ADMIN_URL = "http://127.0.0.1:8081"
"""Where a running router's admin port is looked for."""


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
    _add_admin(replicas)
    replicas.set_defaults(run=_replicas)
    explain = commands.add_parser("explain", help="show where a running router would send a session's next request")
    explain.add_argument("--session", metavar="KEY", required=True, help="its own value, or its digest from the log")
    explain.add_argument("--prompt-tokens", metavar="N", help="of the request (what the session's home last held)")
    _add_admin(explain)
    explain.set_defaults(run=_explain)
    policy = commands.add_parser("policy", help="show or switch a running router's policy")
    _add_admin(policy)
    policy.set_defaults(run=_policy)
    changes = policy.add_subparsers(metavar="CHANGE")
    for word, path, meaning in (
        ("set", "/policy", "put another policy in charge"),
        ("shadow", "/policy/shadow", "run another policy in its shadow; `none` ends that"),
    ):
        change = changes.add_parser(word, help=meaning)
        change.add_argument("name", metavar="NAME", help="see `warmroute policies`")
        change.add_argument("parameters", metavar="KEY=VALUE", nargs="*", help="a parameter; the others get defaults")
        _add_admin(change)
        change.set_defaults(run=_switch, path=path)
    policies = commands.add_parser("policies", help="list the policies with their parameters and defaults")
    policies.add_argument("--json", action="store_true", help="as JSON")
    policies.set_defaults(run=_policies)
    return parser


def _add_admin(parser: argparse.ArgumentParser) -> None:
    # What a command does not get it leaves to the one above it: `policy --json set NAME`.
    parser.add_argument("--admin", metavar="URL", default=argparse.SUPPRESS, help=f"its admin port ({ADMIN_URL})")
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON")


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
    parser.add_argument("--shadow-policy", metavar="NAME", help="another, asked beside it and never obeyed")
    parser.add_argument("--log-format", choices=["auto", "json", "text"], help="auto: text on a terminal, else json")


def _settings(given: argparse.Namespace) -> Settings:
    flags: dict[str, Any] = {
        "host": given.host,
        "port": given.port,
        "admin": _present({"host": given.admin_host, "port": given.admin_port}),
        "replicas": given.replica,
        "policy": _present({"name": given.policy, "shadow": given.shadow_policy}),
        "log": _present({"format": given.log_format}),
    }
    return load(given.config, _present(flags))


def _present(flags: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flags.items() if value not in (None, {})}


def _serve(given: argparse.Namespace) -> int:
    settings = _settings(given)
    _log_to_stderr(settings)
    try:
        return uvloop.run(_run(settings, (lambda: _settings(given)) if given.config else None))
    except CannotListen as error:
        _fail(str(error))
        return 1


async def _run(settings: Settings, read: Callable[[], Settings] | None) -> int:
    return await Router(settings, read).run()


def _check_config(given: argparse.Namespace) -> int:
    print(yaml.safe_dump(masked(_settings(given)), sort_keys=False), end="")
    return 0


def _replicas(given: argparse.Namespace) -> int:
    return _ask(given, console.replicas_table, "/replicas", inside="replicas")


def _explain(given: argparse.Namespace) -> int:
    query = _present({"session": given.session, "prompt_tokens": given.prompt_tokens})
    return _ask(given, console.explanation, "/explain", query=query)


def _policy(given: argparse.Namespace) -> int:
    return _ask(given, console.policy, "/policy")


def _switch(given: argparse.Namespace) -> int:
    if given.name == "none" and given.path.endswith("/shadow") and not given.parameters:
        return _ask(given, console.switched, given.path, method="DELETE")
    parameters: dict[str, Any] = {}
    for pair in given.parameters:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            return _fail(f"{pair!r} is not a parameter: write it as KEY=VALUE, as in seed=7")
        if key in parameters:
            return _fail(f"the parameter {key!r} is given twice: leave one out")
        parameters[key] = scalar(value)
    return _ask(given, console.switched, given.path, method="PUT", body={"name": given.name, "parameters": parameters})


def _ask(given: argparse.Namespace, show: Callable[[Any], str], path: str, *, inside: str = "", **asked: Any) -> int:
    """Print what a running router's admin port answers, or what of it is `inside` a key.

    The exit code is 1 when there is no answer, or the router cannot, and 2 when it was asked for what cannot be.
    """
    try:
        told = console.ask(getattr(given, "admin", ADMIN_URL), path, **asked)
    except console.Unreachable as error:
        _fail(str(error))
        return 1
    except console.Refused as error:
        _fail(str(error))
        return EXIT_CONFIG if error.status < 500 else 1
    told = told[inside] if inside else told
    print(json.dumps(told) if getattr(given, "json", False) else show(told))
    return 0


def _policies(given: argparse.Namespace) -> int:
    known = catalogue()
    if given.json:
        print(json.dumps(known))
        return 0
    for policy in known:
        print(f"{policy['policy']}: {policy['summary']}")
        for key, default in policy["parameters"].items():
            print(f"    {key} = {default}  {policy['meanings'].get(key, '')}".rstrip())
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
