"""`warmroute sessions`: the sessions that a running router knows, and where they live."""

from __future__ import annotations

import argparse
from typing import Any

from router.commands.common import Subparsers, add_admin, add_command, ask, present, table


def add(commands: Subparsers[argparse.ArgumentParser]) -> None:
    sessions = add_command(
        commands,
        "sessions",
        "list the sessions that a running router knows, those used lately first",
        """
        warmroute sessions --limit 20
        warmroute sessions --replica http://10.0.0.1:30000
        warmroute sessions --sort tokens --json | jq -r '.[0].session'
        """,
        "Sessions are told by their digest, as in the log. Tokens are those believed to be in KV caches.",
    )
    sessions.add_argument("--replica", metavar="ID", help="only those that live there")
    sessions.add_argument("--limit", metavar="N", help="so many, up to 1000 (50)")
    sessions.add_argument("--sort", choices=["recent", "tokens"], help="the latest or the largest first (recent)")
    add_admin(sessions)
    sessions.set_defaults(run=_sessions)


def _sessions(given: argparse.Namespace) -> int:
    query = present({"replica": given.replica, "limit": given.limit, "sort": given.sort})
    return ask(given, sessions_table, "/sessions", inside="sessions", query=query)


def sessions_table(sessions: list[dict[str, Any]]) -> str:
    """Part of the answer of `/sessions` as a table for people."""
    rows = [("SESSION", "IDLE", "IN FLIGHT", "CONVERSATIONS", "TOKENS", "HOMES")]
    for session in sessions:
        homes = ", ".join(home["replica"] for home in session["homes"]) or "none"
        numbers = (session["in_flight"], session["conversations"], session["tokens"])
        idle = f"{session['idle_s']:.0f}s"
        rows.append((session["session"], idle, *map(str, numbers), homes))
    return table(rows)
