"""How many open files the system allows, and so how many clients."""

from __future__ import annotations

import contextlib
import logging
import resource

from router.settings import LimitSettings

log = logging.getLogger("warmroute")


def within_open_files(limits: LimitSettings, replicas: int) -> LimitSettings:
    """The limits, with no more connections than there are descriptors for: every stream takes two.

    Beyond that, clients would be reset without a word, and replicas blamed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # the usual soft limit of 1,024 is soon reached
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = max(1, (allowed - 32 - 4 * replicas) // 2)
    if allowed == resource.RLIM_INFINITY or room >= limits.connections:
        return limits
    if "connections" in limits.model_fields_set:
        log.warning(
            "limits.connections is %d, but the %d open files that the system allows have room for %d: "
            "raise its limit (ulimit -Hn) or lower the setting",
            limits.connections,
            allowed,
            room,
        )
    else:
        log.info("room for %d client connections, with %d open files allowed (ulimit -Hn)", room, allowed)
    return limits.model_copy(update={"connections": room})
