"""A worker's part of settings that are given for all workers together."""

from __future__ import annotations

from typing import Any

from pydantic import SecretStr

from router.settings import AdmissionSettings, KeysSettings, Settings

CAPS = ("max_running", "max_running_per_replica", "max_tokens", "max_tokens_per_replica", "max_waiting")
"""Of admission. Each worker counts its own."""


def part_of(settings: Settings, number: int, count: int, secret: str) -> Settings:
    """For worker `number` of `count`, rounded up: a cap below the number of workers holds for each.

    Without an `identity.secret` of the settings it is `secret`. Each has a journal of its own.
    """
    limits, retries, journal = settings.limits, settings.retries, settings.journal
    memory = max(limits.body_bytes, _share(limits.body_memory_bytes, count))
    burst = retries.budget_burst / count
    update: dict[str, Any] = {
        "admission": _admission(settings.admission, count),
        "limits": limits.model_copy(update={"body_memory_bytes": memory}),
        "retries": retries.model_copy(update={"budget_burst": max(burst, min(1.0, retries.budget_burst))}),
        "keys": _keys(settings.keys, count),
    }
    if not settings.identity.secret.get_secret_value():
        update["identity"] = settings.identity.model_copy(update={"secret": SecretStr(secret)})
    if journal.path:
        update["journal"] = journal.model_copy(update={"path": f"{journal.path}.w{number}"})
    return settings.model_copy(update=update)


def _share(total: int, count: int) -> int:
    return -(-total // count)


def _admission(settings: AdmissionSettings, count: int) -> AdmissionSettings:
    return settings.model_copy(update={key: _share(getattr(settings, key), count) for key in CAPS})


def _keys(settings: KeysSettings, count: int) -> KeysSettings:
    accept = {
        name: key
        if key.max_in_flight is None
        else key.model_copy(update={"max_in_flight": _share(key.max_in_flight, count)})
        for name, key in settings.accept.items()
    }
    return settings.model_copy(update={"accept": accept, "max_in_flight": _share(settings.max_in_flight, count)})
