"""`warmroute policy` and `warmroute policies`: what is in force, how it is changed, and what there is."""

from __future__ import annotations

import argparse
import json
from typing import Any

from policies import registry
from router.catalogue import catalogue
from router.commands.common import Subparsers, add_admin, add_command, add_json, ask, fail, table, wants_json
from router.commands.parser import suggest
from router.configuration import scalar
from router.units import counted


def add(commands: Subparsers[argparse.ArgumentParser]) -> None:
    policy = add_command(
        commands,
        "policy",
        "show or switch a running router's policy",
        """
        warmroute policy
        warmroute policy set session_affinity hysteresis_s=2
        warmroute policy shadow dual_choice
        warmroute policy shadow none
        """,
    )
    add_admin(policy)
    policy.set_defaults(run=_policy)
    changes = policy.add_subparsers(metavar="CHANGE")
    for word, path, meaning, example in (
        ("set", "/policy", "put another policy in charge", "session_affinity hysteresis_s=2"),
        ("shadow", "/policy/shadow", "run another policy in its shadow; `none` ends that", "dual_choice ttft_slo_s=3"),
    ):
        change = add_command(changes, word, meaning, f"warmroute policy {word} {example}")
        name = change.add_argument("name", metavar="NAME", help="see `warmroute policies`")
        suggest(name, [*registry.POLICIES, *(["none"] if word == "shadow" else [])])
        change.add_argument(  # without a default argparse names it as required
            "parameters", metavar="KEY=VALUE", nargs="*", default=[], help="a parameter; the others get defaults"
        )
        add_admin(change)
        change.set_defaults(run=_switch, path=path)
    policies = add_command(
        commands, "policies", "list the policies with their parameters and defaults", "warmroute policies"
    )
    add_json(policies)
    policies.set_defaults(run=_policies)


def _policy(given: argparse.Namespace) -> int:
    return ask(given, policy_text, "/policy")


def _switch(given: argparse.Namespace) -> int:
    if given.name == "none" and given.path.endswith("/shadow") and not given.parameters:
        return ask(given, switched, given.path, method="DELETE")
    parameters: dict[str, Any] = {}
    for pair in given.parameters:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            return fail(f"{pair!r} is not a parameter: write it as KEY=VALUE, as in seed=7")
        if key in parameters:
            return fail(f"the parameter {key!r} is given twice: leave one out")
        parameters[key] = scalar(value)
    return ask(given, switched, given.path, method="PUT", body={"name": given.name, "parameters": parameters})


def _policies(given: argparse.Namespace) -> int:
    policies = catalogue()
    if wants_json(given):
        print(json.dumps(policies))
        return 0
    for policy in policies:
        print(f"{policy['policy']}: {policy['summary']}")
        for key, default in policy["parameters"].items():
            print(f"    {key} = {default}  {policy['meanings'].get(key, '')}".rstrip())
    return 0


def policy_text(told: dict[str, Any]) -> str:
    """The answer of `/policy` for people."""
    lines = [f"policy {told['policy']}{_asked(told)}", *_parameters(told["parameters"])]
    if (shadow := told["shadow"]) is not None:
        lines += [f"in its shadow {shadow['name']}{_asked(shadow)}", *_parameters(shadow["parameters"]), ""]
        lines.append(f"the same replica in {shadow['same_replica']} of {counted(shadow['choices'], 'choice')}")
        if shadow["pairs"]:
            rows = [("CHOICES", "REPLICA", "REASON", "SHADOW'S REASON")]
            for pair in shadow["pairs"]:
                where = "same" if pair["same_replica"] else "another"
                rows.append((str(pair["choices"]), where, pair["reason"], pair["shadow_reason"]))
            lines.append(table(rows))
    return "\n".join(lines)


def switched(told: dict[str, Any]) -> str:
    """The answer to a change of policy for people."""
    return f"{_named(told['old'])} -> {_named(told['new'])}"


def _named(policy: dict[str, Any] | None) -> str:
    if policy is None:
        return "none"
    given = " ".join(f"{key}={value}" for key, value in policy["parameters"].items())
    return f"{policy['name']} {given}".rstrip()


def _asked(told: dict[str, Any]) -> str:
    return f", asked by {told['asked_by']}" if told["asked_by"] else ""


def _parameters(parameters: dict[str, Any]) -> list[str]:
    return [f"    {key} = {value}" for key, value in parameters.items()]
