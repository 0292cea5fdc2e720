"""`warmroute reload`: a running router's configuration read anew."""

from __future__ import annotations

import argparse
import json
from typing import Any

from router.commands.common import Subparsers, add_admin, add_command, ask


def add(commands: Subparsers[argparse.ArgumentParser]) -> None:
    reload = add_command(
        commands,
        "reload",
        "have a running router read its configuration anew, and show what changed",
        """
        warmroute check-config --config /etc/warmroute.yaml && warmroute reload
        warmroute reload --json | jq .takes_restart
        """,
        "All or nothing: with a fault in it nothing is changed. SIGHUP does the same, and a change of the file does by "
        "itself\nunless `reload.watch` is false.\n"
        "Exit code: 0 it is in force, 1 the router does not answer, 2 the configuration cannot be used.",
    )
    add_admin(reload)
    reload.set_defaults(run=_reload)


def _reload(given: argparse.Namespace) -> int:
    return ask(given, changes_text, "/reload", method="POST")


def changes_text(told: dict[str, Any]) -> str:
    """The answer of `/reload` for people."""
    lines = [_line(change) for change in told["changed"]] or ["nothing has changed"]
    if waiting := told["takes_restart"]:
        lines += ["", "takes a restart:", *(f"  {_line(change)}" for change in waiting)]
    return "\n".join(lines)


def _line(change: dict[str, Any]) -> str:
    old, new = ("none" if value is None else json.dumps(value) for value in (change["old"], change["new"]))
    return f"{change['key']}: {old} -> {new}"
