"""The store that settings name."""

from __future__ import annotations

from router.settings import Settings
from router.store.store import Store


def store_of(settings: Settings) -> Store | None:
    """None when they name none. It is not reached yet."""
    if not settings.store.url:
        return None
    from router.store.redis import RedisStore  # a tenth of a second, which those without one need not wait

    return RedisStore(settings.store, settings.directory.idle_s)
