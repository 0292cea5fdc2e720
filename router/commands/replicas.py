"""`warmroute replicas`: a running router's replicas."""

from __future__ import annotations

import argparse
from typing import Any

from router.commands.common import Subparsers, add_admin, add_command, ask, known, table


def add(commands: Subparsers[argparse.ArgumentParser]) -> None:
    replicas = add_command(
        commands,
        "replicas",
        "show a running router's replicas",
        """
        warmroute replicas
        warmroute replicas --admin http://10.0.0.5:8081 --json
        """,
    )
    add_admin(replicas)
    replicas.set_defaults(run=_replicas)


def _replicas(given: argparse.Namespace) -> int:
    return ask(given, replicas_table, "/replicas", inside="replicas")


def replicas_table(replicas: list[dict[str, Any]]) -> str:
    """The answer of `/replicas` as a table for people."""
    pools = any(replica["pool"] for replica in replicas)
    rows: list[tuple[str, ...]] = [
        (
            "REPLICA",
            *["POOL"] * pools,
            "STATE",
            "IN FLIGHT",
            "OTHERS",
            "WAIT",
            "WAITING",
            "KV USED",
            "KV BELIEVED",
            "WHY",
        )
    ]
    for replica in replicas:
        load = replica["load"] or {}
        rows.append(
            (
                replica["id"],
                *[str(replica["pool"])] * pools,
                replica["state"],
                str(replica["in_flight"]),
                str(replica["others_in_flight"]),
                f"{replica['expected_wait_s']:.1f}s",
                known(load.get("waiting")),
                f"{known(load.get('used_tokens'))}/{known(load.get('capacity_tokens'))}",
                f"{replica['resident_tokens']}/{replica['capacity_tokens']}",
                _why(replica),
            )
        )
    return table(rows)


def _why(replica: dict[str, Any]) -> str:
    """With an operator's drain, where the state does not tell of it."""
    if replica["drain"] is None or replica["state"] in ("draining", "finishing"):
        return str(replica["why"])
    return f"{replica['why']}; drained by an operator"
