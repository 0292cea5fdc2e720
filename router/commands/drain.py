"""`warmroute drain` and `warmroute undrain`: emptying a replica of a running router."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any
from urllib.parse import quote

from router import console
from router.commands.common import (
    EXIT_FAILED,
    Subparsers,
    access,
    add_admin,
    add_command,
    ask,
    fail,
    wants_json,
)
from router.units import counted

POLL_S = 1.0


def add(commands: Subparsers[argparse.ArgumentParser]) -> None:
    drain = add_command(
        commands,
        "drain",
        "empty a replica of a running router: nothing new is sent there, streams end naturally",
        """
        warmroute drain http://10.0.0.1:30000 --wait
        warmroute drain r1 --homes finish --wait --timeout 3600
        """,
        "It holds until `warmroute undrain`, whatever the replica's probes say and however often the configuration is "
        "reloaded,\nbut not longer than the router runs. Given again, it changes what becomes of the sessions.\n"
        "Exit code: 0 it drains (with --wait: it is empty), 1 it is not empty in time or the router does not answer,\n"
        "2 there is no such replica.",
    )
    drain.add_argument("replica", metavar="ID", help="see `warmroute replicas`")
    drain.add_argument(
        "--homes",
        choices=["move", "finish"],
        default="move",
        help="sessions that live there go elsewhere with their next turn, or go on there until they end (move)",
    )
    drain.add_argument("--wait", action="store_true", help="until it is empty")
    drain.add_argument("--timeout", metavar="S", type=float, help="wait no longer than so many seconds (for ever)")
    add_admin(drain)
    drain.set_defaults(run=_drain)
    undrain = add_command(
        commands, "undrain", "take a drain back: the replica is used again", "warmroute undrain http://10.0.0.1:30000"
    )
    undrain.add_argument("replica", metavar="ID", help="see `warmroute replicas`")
    add_admin(undrain)
    undrain.set_defaults(run=_undrain)


def _path(given: argparse.Namespace) -> str:
    return f"/replicas/{quote(given.replica, safe='')}/drain"


def _undrain(given: argparse.Namespace) -> int:
    return ask(
        given, lambda replica: f"{replica['id']} is {replica['state']}: {replica['why']}", _path(given), method="DELETE"
    )


def _drain(given: argparse.Namespace) -> int:
    if given.timeout is not None and not given.wait:
        return fail("--timeout is of no use without --wait: add that, or leave this out")
    if given.timeout is not None and not given.timeout >= 0:
        return fail(f"--timeout must be 0 seconds or more, got {given.timeout:g}")
    try:
        admin = access(given)
        replica = console.ask(admin, _path(given), method="POST", body={"homes": given.homes})
        drained = _wait(given, admin, replica) if given.wait else True
    except KeyboardInterrupt:
        return fail("waits no longer; the replica goes on draining", 130)
    if not given.wait:
        print(json.dumps(replica) if wants_json(given) else _progress(replica))
    return 0 if drained else EXIT_FAILED


def _wait(given: argparse.Namespace, admin: console.Access, replica: dict[str, Any]) -> bool:
    """Tell of progress whenever there is some, until the replica is empty. False when it will not be in time."""
    ends = None if given.timeout is None else time.monotonic() + given.timeout
    told = ""
    while True:
        if (text := json.dumps(replica) if wants_json(given) else _progress(replica)) != told:
            print(told := text, flush=True)
        if replica["drain"] is None:
            return not fail(f"{replica['id']} drains no more: someone has taken that back", EXIT_FAILED)
        if replica["drain"]["done"]:
            return True
        if ends is not None and time.monotonic() >= ends:
            return not fail(f"{replica['id']} is not empty after {given.timeout:g} s; it goes on draining", EXIT_FAILED)
        time.sleep(POLL_S if ends is None else max(0.0, min(POLL_S, ends - time.monotonic())))
        replicas = console.ask(admin, "/replicas")["replicas"]
        found = [each for each in replicas if each["id"] == given.replica]
        if not found:
            print(f"{given.replica} has left the fleet", file=sys.stderr)
            return True
        (replica,) = found


def _progress(replica: dict[str, Any]) -> str:
    drain = replica["drain"]
    if drain is None:
        return f"{replica['id']} is {replica['state']}"
    left = f"{counted(drain['in_flight'], 'request')} in flight"
    if drain["homes"] == "finish":
        left += f", {counted(drain['conversations'], 'conversation')} at home there"
    return f"{replica['id']} {'is empty' if drain['done'] else 'drains'}: {left}"
