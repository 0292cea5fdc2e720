"""Changing the configuration of a running router: read anew, compared, and put in force whole or not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from router import stderr
from router.aside import aside
from router.changes import Change, changes, kept
from router.configuration import ConfigError
from router.identity import DEFAULT_RULES, IdentityRules, parse_rules
from router.settings import IdentitySettings, Settings
from router.switching import completed

if TYPE_CHECKING:
    from router.app import Router
    from router.source import Source

log = logging.getLogger("warmroute.reload")

LOGGED_CHANGES = 20
"""Named in a line of the log; the answer of the admin port names them all."""

Commit = Callable[[], None]
"""Puts a section in force. It cannot fail: whatever could has been made before."""


def _replicas(router: Router, settings: Settings) -> Commit:
    put_in_place = router.fleet.prepare(settings)

    def commit() -> None:
        put_in_place()
        router.proxy.choose_pools(router.fleet.pools)

    return commit


def _discovery(router: Router, settings: Settings) -> Commit:
    return router.discovery.prepare(settings.discovery, [pool.name for pool in settings.pools])


def _policy(router: Router, settings: Settings) -> Commit:
    return router.switching.prepare(settings.policy, "a reload")


def _identity(router: Router, settings: Settings) -> Commit:
    identity = identity_rules(settings.identity)

    def commit() -> None:
        router.identity = router.proxy.identity = identity

    return commit


def _limits(router: Router, settings: Settings) -> Commit:
    def commit() -> None:
        before = router.part(router.settings)
        if (settings.limits, settings.replica_count) != (before.limits, before.replica_count):  # it says what it does
            router.fit_open_files(settings)

    return commit


def _timeouts(router: Router, settings: Settings) -> Commit:
    def commit() -> None:
        router.proxy.timeouts = settings.timeouts

    return commit


def _retries(router: Router, settings: Settings) -> Commit:
    def commit() -> None:
        router.proxy.tries = settings.retries.tries
        router.proxy.budget.configure(settings.retries.budget_share, settings.retries.budget_burst)

    return commit


def _health(router: Router, settings: Settings) -> Commit:
    return lambda: router.health.configure(settings.health)


def _reports(router: Router, settings: Settings) -> Commit:
    return lambda: router.reports.configure(settings.reports)


def _admin_paths(router: Router, settings: Settings) -> Commit:
    def commit() -> None:
        router.proxy.allowed_admin_paths = settings.admin_paths.paths

    return commit


def _response_headers(router: Router, settings: Settings) -> Commit:
    def commit() -> None:
        router.proxy.response_headers = settings.response_headers

    return commit


def _log(router: Router, settings: Settings) -> Commit:
    def commit() -> None:
        stderr.set_level(settings.log.level)
        router.access_log.sample = settings.log.sample

    return commit


def _admission(router: Router, settings: Settings) -> Commit:
    config = settings.admission.config()

    def commit() -> None:
        router.proxy.priority_header = settings.admission.priority
        router.proxy.room.configure(config, router.clock())
        router.proxy.room.freed()  # not at once: who waited starts when all of it is in force

    return commit


def _admin(router: Router, settings: Settings) -> Commit:
    settings.admin.check_guarded()  # once more: its address is still the old one
    return router.guard.prepare(settings.admin)


def _keys(router: Router, settings: Settings) -> Commit:
    put_in_place = router.proxy.prepare(settings)

    def commit() -> None:
        put_in_place()
        router.watch_secrets(settings)

    return commit


def _when_used(_: Router, __: Settings) -> Commit:
    """For what is looked up in `Router.settings` whenever it is wanted."""
    return lambda: None


APPLIED: dict[str, Callable[[Router, Settings], Commit]] = {
    "replicas": _replicas,
    "pools": _when_used,  # with the replicas
    "discovery": _discovery,
    "policy": _policy,
    "identity": _identity,
    "limits": _limits,
    "admission": _admission,
    "timeouts": _timeouts,
    "retries": _retries,
    "pool": _when_used,  # with the replicas
    "health": _health,
    "reports": _reports,
    "drain": _when_used,
    "reload": _when_used,
    "admin_paths": _admin_paths,
    "response_headers": _response_headers,
    "log": _log,
    "headers": _when_used,  # with the keys
    "cors": _when_used,
    "admin": _admin,
    "keys": _keys,
}
"""How a section is put in force: makes what is new, or raises ValueError, and returns what puts it in its place. All
are made before the first is put in its place. To do so again changes nothing."""

RESTART = {
    "host",
    "port",
    "admin.host",
    "admin.port",
    "admin.tls",
    "tls",
    "directory",  # a journal is replayed within the bounds that stand at its beginning
    "identity.secret",  # every session would be a stranger
    "log.format",
    "tracing",
    "journal",
    "store",
    "workers",
}
"""What stays as it is until the router is started again: sections, and keys of sections that are in the table."""


def identity_rules(settings: IdentitySettings) -> IdentityRules:
    """The rules that are set, the built-in ones if none are. Raises ValueError."""
    rules = DEFAULT_RULES if settings.rules is None else parse_rules(settings.rules)
    return IdentityRules(rules, settings.secret.get_secret_value().encode())


class NoSource(Exception):
    """There is nothing that could be read anew."""


class Reload:
    """Of one router. Sockets, streams, homes, counters and operators' drains stay."""

    def __init__(self, router: Router, source: Source | None) -> None:
        self._router = router
        self.source = source
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def reload(self, who: str) -> tuple[list[Change], list[Change]]:
        """Read the configuration anew and put it in force.

        Returns what changed, and what takes a restart. Raises ConfigError, and nothing is changed then, and NoSource.
        """
        if self.source is None:
            raise NoSource
        async with self._lock:
            try:
                wanted = await aside(self.source.read)  # YAML of a large fleet takes its time
                return self._apply(wanted, who)
            except (ConfigError, ValueError) as error:
                self._router.metrics.reloaded(False)
                log.error("the configuration was not reloaded, as %s asks, and nothing is changed: %s", who, error)
                raise ConfigError(str(error)) from None

    def _apply(self, wanted: Settings, who: str) -> tuple[list[Change], list[Change]]:
        router = self._router
        settings = kept(router.settings, wanted, RESTART)
        part = router.part(settings)
        commits = [prepare(router, part) for prepare in APPLIED.values()]
        # The policy may have been switched since: what is in force counts, with all parameters on both sides.
        before = router.settings.model_copy(update={"policy": router.switching.in_force()})
        changed = changes(before, settings.model_copy(update={"policy": completed(settings.policy)}))
        waiting = changes(settings, wanted)
        for commit in commits:
            commit()
        router.settings = settings
        router.files.check()
        router.metrics.reloaded(True)
        if changed:
            log.info("reloaded the configuration, asked by %s: %s", who, _listed(changed))
        else:
            log.info("reloaded the configuration, asked by %s: nothing has changed", who)
        if waiting:
            log.warning("takes a restart: %s", _listed(waiting))
        return changed, waiting

    def signal(self) -> None:
        """What SIGHUP does; a fault is in the log."""
        self._tasks.add(task := asyncio.create_task(self._reload("SIGHUP")))
        task.add_done_callback(self._tasks.discard)

    async def _reload(self, who: str) -> None:
        try:
            await self.reload(who)
        except ConfigError:
            pass  # told in the log, and mended by the next reload
        except Exception:
            log.exception("reloading the configuration failed in a way it should not")

    # The file

    def watch(self) -> None:
        """Begin to look now and then whether the file has changed."""
        if self.source is not None:
            self._tasks.add(asyncio.create_task(self._watch(self.source)))

    async def stop(self) -> None:
        """Look no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, source: Source) -> None:
        async for _ in source.changes(lambda: self._router.settings.reload):
            await self._reload(f"a change of {source.file}")


def _listed(found: list[Change]) -> str:
    more = len(found) - LOGGED_CHANGES
    told = [str(change) for change in found[:LOGGED_CHANGES]]
    return "; ".join([*told, f"and {more} more"] if more > 0 else told)
