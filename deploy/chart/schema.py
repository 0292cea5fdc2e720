"""The JSON schema by which Helm checks values before it renders anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.chart.values import Part, Values
from policies import registry

_TEXT = {"type": "string"}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}

_HEADER = {"type": "string", "pattern": "^[!#$%&'*+.^_`|~0-9A-Za-z-]+$"}
_OTHER_HEADER = {**_HEADER, "type": ["string", "null"]}
RULE = {
    "type": "object",
    "oneOf": [{"required": ["header"]}, {"required": ["body"]}],
    "if": {"required": ["header"]},
    "then": {
        "properties": {"header": _HEADER, "agent": _OTHER_HEADER, "parent": _OTHER_HEADER},
        "additionalProperties": False,
    },
    "else": {
        "properties": {
            "body": {"type": "string", "pattern": r"^[^.]+(\.[^.]+)?$"},
            "scope": {"enum": ["session", "user"]},
        },
        "additionalProperties": False,
    },
}
"""One of `identity.rules`, as router.identity.parse_rules takes it."""


def schema() -> dict[str, Any]:
    """Of all values. What the router takes in a short form, as a replica by its URL alone, is taken here as well."""
    made = Values.model_json_schema()
    parts = made["$defs"]
    for part in (made, *(parts[each.__name__] for each in Part.__subclasses__() if each is not Values)):
        # Helm takes away what is set to null: what is free to be anything may be nothing, too.
        free = [name for name, field in part["properties"].items() if field.get("type") in ("object", "array")]
        part["required"] = [name for name in part.get("required", ()) if name not in free]
    for name, more in (("PolicySettings", []), ("ShadowSettings", [""])):
        names = {"type": "string", "enum": [*more, *registry.POLICIES]}
        named = parts[name]["properties"]["name"]
        named |= names
        parts[name] = _or(names, {**parts[name], "allOf": list(_parameters(named["default"]))})
    url = parts["ReplicaSettings"]["properties"]["url"]
    parts["ReplicaSettings"] = _or({"type": "string", "pattern": url["pattern"]}, parts["ReplicaSettings"])
    hashes = parts["KeySettings"]["properties"]["hash"]
    parts["KeySettings"]["properties"]["hash"] = _or(_TEXT, hashes)
    parts["KeySettings"] = _or(_TEXT, parts["KeySettings"])
    rules, nothing = parts["IdentitySettings"]["properties"]["rules"]["anyOf"]
    parts["IdentitySettings"]["properties"]["rules"]["anyOf"] = [{**rules, "items": RULE}, nothing]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_closed(_plain(made))}


def _or(short: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """A text as `short` has it, or else what `full` has. Not by `anyOf`: of this Helm tells only what is wrong with the
    form that was meant.
    """
    return {"if": {"type": "string"}, "then": short, "else": full}


def _parameters(default: str) -> Iterator[dict[str, Any]]:
    """Which ones each policy has, and of which type. Their bounds are for the policies to tell."""
    for policy in registry.POLICIES:
        types = {name: {"type": _TYPES[type(value)]} for name, value in registry.parameters(policy).items()}
        yield {
            "if": {"properties": {"name": {"const": policy}}, "required": [] if policy == default else ["name"]},
            "then": {"properties": {"parameters": {"properties": types, "additionalProperties": False}}},
        }


def _closed(tree: Any) -> Any:
    """What has patterns for the names of its properties has no others."""
    if isinstance(tree, list):
        return [_closed(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    closed = {"additionalProperties": False} if "patternProperties" in tree else {}
    return {key: _closed(value) for key, value in tree.items()} | closed


def _plain(tree: Any) -> Any:
    """Without titles, which repeat the keys, and without the defaults of whole sections, which repeat their own."""
    if isinstance(tree, list):
        return [_plain(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key: {name: _plain(each) for name, each in value.items()} if key in ("properties", "$defs") else _plain(value)
        for key, value in tree.items()
        if not (key == "title" and isinstance(value, str)) and not (key == "default" and isinstance(value, dict))
    }
