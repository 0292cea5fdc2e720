"""The JSON schema by which Helm checks values before it renders anything."""

from __future__ import annotations

from typing import Any

from deploy.chart.values import Part, Values

_TEXT = {"type": "string"}


def schema() -> dict[str, Any]:
    """Of all values. What the router takes in a short form, as a replica by its URL alone, is taken here as well."""
    made = Values.model_json_schema()
    parts = made["$defs"]
    for part in (made, *(parts[each.__name__] for each in Part.__subclasses__() if each is not Values)):
        # Helm takes away what is set to null: what is free to be anything may be nothing, too.
        free = [name for name, field in part["properties"].items() if field.get("type") in ("object", "array")]
        part["required"] = [name for name in part.get("required", ()) if name not in free]
    for name in ("ReplicaSettings", "PolicySettings", "ShadowSettings", "KeySettings"):
        parts[name] = {"anyOf": [_TEXT, parts[name]]}
    hashes = parts["KeySettings"]["anyOf"][1]["properties"]["hash"]
    parts["KeySettings"]["anyOf"][1]["properties"]["hash"] = {"anyOf": [_TEXT, hashes]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_plain(made)}


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
