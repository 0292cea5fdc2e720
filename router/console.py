"""What the command asks of a running router, through its admin port."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

TIMEOUT_S = 5.0


class Unreachable(Exception):
    """The admin port did not answer as one. The message names the URL and the remedy."""


class Refused(Exception):
    """The router answered that it cannot. The message is its own; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def ask(admin: str, path: str, *, method: str = "GET", query: dict[str, str] | None = None, body: Any = None) -> Any:
    """What the admin port at the URL `admin` answers. `body` is sent as JSON. Raises Unreachable or Refused."""
    url = admin.rstrip("/") + path
    try:
        content = None if body is None else json.dumps(body)
        response = httpx.request(method, url, params=query, content=content, timeout=TIMEOUT_S, trust_env=False)
        if response.is_error and (told := _error_in(response)) is not None:
            raise Refused(response.status_code, told)
        response.raise_for_status()
        return response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise Unreachable(f"{url}: {error}: is warmroute running, and is --admin its admin port?") from None


def _error_in(response: httpx.Response) -> str | None:
    """The message of an error that is told as the admin port tells it."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, TypeError, KeyError):
        return None
    return message if isinstance(message, str) else None


def replicas_table(replicas: list[dict[str, Any]]) -> str:
    """The answer of `/replicas` as a table for people."""
    rows = [("REPLICA", "STATE", "IN FLIGHT", "OTHERS", "WAIT", "WAITING", "KV USED", "KV BELIEVED", "WHY")]
    for replica in replicas:
        load = replica["load"] or {}
        rows.append(
            (
                replica["id"],
                replica["state"],
                str(replica["in_flight"]),
                str(replica["others_in_flight"]),
                f"{replica['expected_wait_s']:.1f}s",
                _known(load.get("waiting")),
                f"{_known(load.get('used_tokens'))}/{_known(load.get('capacity_tokens'))}",
                f"{replica['resident_tokens']}/{replica['capacity_tokens']}",
                replica["why"],
            )
        )
    return _table(rows)


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
        lines.append(_table(rows))
        lines.append("")
    lines.append(f"{told['policy']}, {told['reason']}: {told['prompt_tokens']} prompt tokens")
    lines.append(told["sentence"])
    return "\n".join(lines)


def policy(told: dict[str, Any]) -> str:
    """The answer of `/policy` for people."""
    lines = [f"policy {told['policy']}", *_parameters(told["parameters"])]
    if (shadow := told["shadow"]) is not None:
        lines += [f"in its shadow {shadow['name']}", *_parameters(shadow["parameters"]), ""]
        lines.append(f"{shadow['same_replica']} of {shadow['choices']} choices were of the same replica")
        if shadow["pairs"]:
            rows = [("CHOICES", "REPLICA", "REASON", "SHADOW'S REASON")]
            for pair in shadow["pairs"]:
                where = "same" if pair["same_replica"] else "another"
                rows.append((str(pair["choices"]), where, pair["reason"], pair["shadow_reason"]))
            lines.append(_table(rows))
    return "\n".join(lines)


def switched(told: dict[str, Any]) -> str:
    """The answer to a change of policy for people."""
    return f"{_named(told['old'])} -> {_named(told['new'])}"


def _named(policy: dict[str, Any] | None) -> str:
    if policy is None:
        return "none"
    given = " ".join(f"{key}={value}" for key, value in policy["parameters"].items())
    return f"{policy['name']} {given}".rstrip()


def _parameters(parameters: dict[str, Any]) -> list[str]:
    return [f"    {key} = {value}" for key, value in parameters.items()]


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _known(value: object) -> str:
    return "?" if value is None else str(value)


def _decimal(value: float | None) -> str:
    """None stands for what no number is: a replica that may not be chosen."""
    return "-" if value is None else f"{value:.3f}"
