"""`warmroute explain`: where a session's next request would go, and why."""

from __future__ import annotations

import argparse
from typing import Any

from router.commands.common import Subparsers, add_admin, add_command, ask, present, table


def add(commands: Subparsers[argparse.ArgumentParser]) -> None:
    explain = add_command(
        commands,
        "explain",
        "show where a running router would send a session's next request",
        """
        warmroute explain --session my-session
        warmroute explain --session 00112233445566778899aabbccddeeff --prompt-tokens 120000
        """,
    )
    explain.add_argument("--session", metavar="KEY", required=True, help="its own value, or its digest from the log")
    explain.add_argument("--prompt-tokens", metavar="N", help="of the request (what the session's home last held)")
    explain.add_argument("--pool", metavar="NAME", help="as a request to that pool (where the session lives)")
    add_admin(explain)
    explain.set_defaults(run=_explain)


def _explain(given: argparse.Namespace) -> int:
    query = present({"session": given.session, "prompt_tokens": given.prompt_tokens, "pool": given.pool})
    return ask(given, explanation, "/explain", query=query)


def explanation(told: dict[str, Any]) -> str:
    """The answer of `/explain` for people: replicas by the terms of their cost, the chosen one marked, and why."""
    lines = []
    if candidates := told["candidates"]:
        terms = list(candidates[0]["terms"])
        rows: list[tuple[str, ...]] = [("", "REPLICA", "COST", *(term.upper() for term in terms), "RESIDENT")]
        for each in candidates:
            mark = "*" if each["replica"] == told["replica"] else ""
            costs = (_decimal(each["terms"].get(term)) for term in terms)
            rows.append((mark, each["replica"], _decimal(each["cost"]), *costs, str(each["resident_tokens"])))
        lines.append(table(rows))
        lines.append("")
    lines.append(f"{told['policy']}, {told['reason']}: {told['prompt_tokens']} prompt tokens")
    lines.append(told["sentence"])
    return "\n".join(lines)


def _decimal(value: float | None) -> str:
    """None stands for what no number is: a replica that may not be chosen."""
    return "-" if value is None else f"{value:.3f}"
