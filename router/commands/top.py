"""`warmroute top`: a running router, live in the terminal."""

from __future__ import annotations

import argparse
import json
import sys

from router import console
from router.commands.common import Subparsers, access, add_admin, add_command, wants_json
from router.top import live, once
from router.top.feed import Seen
from router.top.top import SORTS


def add(commands: Subparsers[argparse.ArgumentParser]) -> None:
    top = add_command(
        commands,
        "top",
        "watch a running router: replicas, load, decisions",
        """
        warmroute top
        warmroute top --sort wait --admin http://10.0.0.5:8081
        warmroute top --once | head
        """,
        "Keys: q quits; t, n, l, w, c order the replicas by trouble, name, load, wait or cache.",
    )
    top.add_argument("--once", action="store_true", help="print it once, as also where the output is no terminal")
    top.add_argument("--sort", choices=list(SORTS.values()), default="trouble", help="order of replicas (trouble)")
    add_admin(top)
    top.set_defaults(run=_top)


def _top(given: argparse.Namespace) -> int:
    admin = access(given)
    if not (given.once or wants_json(given)) and sys.stdout.isatty():
        live(admin, given.sort)
        return 0
    told = console.ask(admin, "/overview", query={"sort": given.sort})
    if wants_json(given):
        print(json.dumps(told))
    else:
        once(Seen(told), given.sort)
    return 0
