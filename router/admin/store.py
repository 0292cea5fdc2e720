"""What the overview says of the store through which this router shares what it knows with others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router.app import Router


def shared(router: Router) -> dict[str, Any] | None:
    """Whether the store is up, which routers are heard, and what it was asked; None without one."""
    sharing = router.sharing
    if sharing is None:
        return None
    ages = sorted(sharing.others.ages().items())
    return {
        "kind": _kind(router),
        "url": router.settings.store.url or None,
        "up": sharing.up,
        "why": sharing.why or None,
        "name": sharing.name,
        "routers": [{"name": name, "heard_s_ago": round(age_s, 1)} for name, age_s in ages],
        "claims": dict(sharing.claims),
        "notes": dict(sharing.notes),
        "untold": sharing.untold,
        "faults": dict(sharing.faults),
    }


def _kind(router: Router) -> str:
    """Where it is kept."""
    if router.settings.store.url:
        return "redis"
    return "memory" if router.worker is None else "supervisor"
