"""`warmroute serve` and `warmroute check-config`: what is done with a configuration."""

from __future__ import annotations

import argparse
import json
from typing import Any

import yaml

from policies import registry
from router import stderr
from router.commands.common import EXIT_FAILED, Subparsers, add_command, add_json, fail, present, wants_json
from router.commands.parser import suggest
from router.configuration import load, masked
from router.settings import Settings
from router.source import Source

_MORE = """\
Everything else is set in the file, or in the environment as WARMROUTE_KEY or WARMROUTE_KEY__KEY.
Flags win over the environment, the environment over the file."""


def add(commands: Subparsers[argparse.ArgumentParser]) -> None:
    serve = add_command(
        commands,
        "serve",
        "run the router",
        """
        warmroute serve --replica http://10.0.0.1:30000 --replica http://10.0.0.2:30000
        warmroute serve --config /etc/warmroute.yaml --host 0.0.0.0 --workers 4
        """,
        f"{_MORE}\nExit code: 0 stopped, 1 a port cannot be had or something was cut off, 2 a bad configuration.",
    )
    _add_settings(serve)
    serve.set_defaults(run=_serve)
    check = add_command(
        commands,
        "check-config",
        "validate the configuration and print what would be in force",
        """
        warmroute check-config --config /etc/warmroute.yaml
        warmroute check-config --config new.yaml --json | jq .policy
        """,
        f"{_MORE}\nExit code: 0 it can be used, 2 it cannot.",
    )
    _add_settings(check)
    add_json(check)
    check.set_defaults(run=_check_config)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
    parser.add_argument("--host", help="address to serve on (127.0.0.1)")
    # Numbers are left to the settings to judge, which tell all faults at once.
    parser.add_argument("--port", help="port to serve on (8080)")
    parser.add_argument("--workers", metavar="N", help="processes that share the port (1)")
    parser.add_argument("--admin-host", metavar="HOST", help="address of the admin port (127.0.0.1)")
    parser.add_argument("--admin-port", metavar="PORT", help="the admin port (8081)")
    parser.add_argument(
        "--replica", metavar="URL", action="append", help="a replica, as in http://10.0.0.1:30000; may be repeated"
    )
    for option, meaning in (
        ("--policy", f"one of {', '.join(registry.POLICIES)} (session_affinity)"),
        ("--shadow-policy", "another, asked beside it and never obeyed"),
    ):
        suggest(parser.add_argument(option, metavar="NAME", help=meaning), registry.POLICIES)
    parser.add_argument("--log-format", choices=["auto", "json", "text"], help="auto: text on a terminal, else json")


def _flags(given: argparse.Namespace) -> dict[str, Any]:
    """The tree of settings that the command line gives."""
    flags: dict[str, Any] = {
        "host": given.host,
        "port": given.port,
        "workers": given.workers,
        "admin": present({"host": given.admin_host, "port": given.admin_port}),
        "replicas": given.replica,
        "policy": present({"name": given.policy, "shadow": given.shadow_policy}),
        "log": present({"format": given.log_format}),
    }
    return present(flags)


def _settings(given: argparse.Namespace) -> Settings:
    return load(given.config, _flags(given))


def _serve(given: argparse.Namespace) -> int:
    source = Source(given.config, lambda: _settings(given)) if given.config else None
    settings = _settings(given) if source is None else source.read()
    stderr.begin(settings.log)

    # The router takes a third of a second to import, and no other command needs it.
    import uvloop

    from router.app import Router
    from router.listening import CannotListen
    from router.store.opening import store_of
    from router.workers.supervisor import Supervisor

    async def run() -> int:
        if settings.workers > 1:
            return await Supervisor(settings, source, _flags(given)).run()
        return await Router(settings, source, store_of(settings)).run()

    try:
        return uvloop.run(run())
    except CannotListen as error:
        return fail(str(error), EXIT_FAILED)


def _check_config(given: argparse.Namespace) -> int:
    settings = _settings(given)
    for warning in settings.warnings:
        fail(f"warning: {warning}")
    tree = masked(settings)
    if wants_json(given):
        print(json.dumps(tree))
    else:
        print(yaml.safe_dump(tree, sort_keys=False), end="")
    return 0
