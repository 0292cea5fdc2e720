"""What the command asks of a running router, through its admin port."""

from __future__ import annotations

from typing import Any

import httpx

TIMEOUT_S = 5.0


class Unreachable(Exception):
    """The admin port did not answer as one. The message names the URL and the remedy."""


def ask(admin: str, path: str) -> Any:
    """What the admin port at the URL `admin` answers to GET `path`. Raises Unreachable."""
    url = admin.rstrip("/") + path
    try:
        response = httpx.get(url, timeout=TIMEOUT_S, trust_env=False)
        response.raise_for_status()
        return response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise Unreachable(f"{url}: {error}: is warmroute running, and is --admin its admin port?") from None


def replicas_table(replicas: list[dict[str, Any]]) -> str:
    """The answer of `/replicas` as a table for people."""
    rows = [("REPLICA", "STATE", "IN FLIGHT", "WAIT", "RUNNING", "WAITING", "KV TOKENS", "WHY")]
    for replica in replicas:
        load = replica["load"] or {}
        used, capacity = load.get("used_tokens"), load.get("capacity_tokens")
        rows.append(
            (
                replica["id"],
                replica["state"],
                str(replica["in_flight"]),
                f"{replica['expected_wait_s']:.1f}s",
                _known(load.get("running")),
                _known(load.get("waiting")),
                f"{_known(used)}/{_known(capacity)}",
                replica["why"],
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _known(value: object) -> str:
    return "?" if value is None else str(value)
