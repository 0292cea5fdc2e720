"""What differs between two configurations, told key by key, secrets masked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretStr

from router.settings import Settings
from router.units import brief

SHOWN_CHARS = 120
"""Of a value in a message."""


@dataclass(frozen=True, slots=True)
class Change:
    """Of one key; None for what was not there, or is not any more."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_told(self.old)} -> {_told(self.new)}"


def changes(old: Settings, new: Settings) -> list[Change]:
    """From old to new, in the order of the schema."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    keys = list(dict.fromkeys([*before, *after]))
    return [
        Change(key, _shown(before.get(key)), _shown(after.get(key)))
        for key in keys
        if before.get(key) != after.get(key)
    ]


def kept(old: Settings, new: Settings, fixed: Set[str]) -> Settings:
    """The new settings with those of the old that are `fixed`: sections, or keys as in `section.key`."""
    update: dict[str, Any] = {}
    for name in fixed:
        section, _, key = name.partition(".")
        if not key:
            update[section] = getattr(old, section)
        else:
            part = update.get(section, getattr(new, section))
            update[section] = part.model_copy(update={key: getattr(getattr(old, section), key)})
    return new.model_copy(update=update)


def _leaves(tree: BaseModel | Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key as a path with dots, and its value; replicas by id."""
    items = (
        ((name, getattr(tree, name)) for name in type(tree).model_fields)
        if isinstance(tree, BaseModel)
        else tree.items()
    )
    for name, value in items:
        key = f"{prefix}{name}"
        if isinstance(value, BaseModel | Mapping):
            yield from _leaves(value, f"{key}.")
        elif key == "replicas":
            for replica in value:
                more = {"ranks": replica.ranks} if replica.ranks > 1 else {}
                if replica.pool:
                    more["pool"] = replica.pool
                yield f"{key}.{replica.id}", {"url": replica.url, "weight": replica.weight, **more}
        elif isinstance(value, list) and any(isinstance(each, BaseModel) for each in value):
            for number, each in enumerate(value):
                yield f"{key}.{number}", each.model_dump(exclude_defaults=True)
        else:
            yield key, value


def _shown(value: Any) -> Any:
    return "***" if isinstance(value, SecretStr) else value


def _told(value: Any) -> str:
    return "none" if value is None else brief(value, SHOWN_CHARS)
