"""Changing the configuration of a running router: what changes, what stays, and what is refused."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from router.app import Router
from router.changes import changes
from router.configuration import ConfigError, load
from router.proxy.upstream import Upstream
from router.reload import APPLIED, RESTART
from router.settings import Settings
from router.source import Source
from tests.fakes.client import RawClient, get, post
from tests.fakes.operated import LIMIT_S, Operated
from tests.fakes.process import start_router
from tests.fakes.waiting import until

CHAT = "/v1/chat/completions"

# Every setting


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key, as a path with dots."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def fixed(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in RESTART)


def test_every_setting_is_either_reloaded_or_said_to_take_a_restart() -> None:
    keys = set(leaves(Settings))
    reloaded = {key for key in keys if key.split(".")[0] in APPLIED and not fixed(key)}
    assert {key for key in keys if fixed(key)} == keys - reloaded
    assert all(any(key == name or key.startswith(f"{name}.") for key in keys) for name in RESTART), "each exists"
    assert set(APPLIED) == {key.split(".")[0] for key in reloaded}, "none of the table is wholly fixed"


def upstream(router: Router) -> Upstream:
    (replica,) = router.balancer.replicas.values()
    assert isinstance(replica.address, Upstream)
    return replica.address


def poll(router: Router) -> Any:
    (poll,) = router.reports._polls.values()
    return poll.settings


def watch(router: Router) -> Any:
    (watch,) = router.health._watches.values()
    return watch.probes._settings


EFFECTS: dict[str, tuple[Callable[[Router], Any], Any]] = {
    "replicas: [{url: 'http://127.0.0.1:9', weight: 3}]": (lambda r: [x.weight for x in r.balancer.ready], [3]),
    "pools: [{name: large}, {name: small, models: [m]}]": (
        lambda r: (r.fleet.pools.names, r.proxy.pools.of_model("m")), (("large", "small"), "small")
    ),
    "discovery: {file: nosuch.yaml}": (lambda r: [feed.name for feed in r.discovery.feeds], ["file:nosuch.yaml"]),
    "policy: {name: random, shadow: sticky}": (
        lambda r: (r.balancer.policy.name, r.balancer.shadow.name), ("random", "sticky")
    ),
    "identity: {rules: [{header: x-mine}]}": (lambda r: b"x-mine" in r.proxy.identity.header_names, True),
    "limits: {body_bytes: 99}": (lambda r: r.proxy.limits.body_bytes, 99),
    "admission: {max_running: 7, priority_header: X-P}": (
        lambda r: (r.proxy.room.admission.config.max_running, r.proxy.priority_header), (7, b"x-p")
    ),
    "timeouts: {header_s: 7, connect_s: 8}": (lambda r: (r.proxy.timeouts.header_s, upstream(r).connect_s), (7, 8)),
    "retries: {tries: 9, budget_burst: 1}": (
        lambda r: (r.proxy.tries, r.proxy.budget._burst, r.proxy.budget._tokens), (9, 1, 1)
    ),
    "pool: {idle_s: 2}": (lambda r: upstream(r).idle_s, 2),
    "health: {fail_after: 9}": (lambda r: watch(r).fail_after, 9),
    "reports: {interval_s: 9}": (lambda r: poll(r).interval_s, 9),
    "drain: {grace_s: 5}": (lambda r: r.settings.drain.grace_s, 5),
    "reload: {interval_s: 9}": (lambda r: r.settings.reload.interval_s, 9),
    "admin_paths: {allow: [/flush_cache/]}": (lambda r: r.proxy.allows("flush_cache"), True),
    "response_headers: true": (lambda r: r.proxy.response_headers, True),
    "log: {level: error, sample: 0.5}": (
        lambda r: (logging.getLogger().level, r.access_log.sample), (logging.ERROR, 0.5)
    ),
    "headers: {response: {deny: [x-secret]}}": (lambda r: r.proxy.response_drop is not None, True),
    "cors: {origins: ['https://a.example']}": (lambda r: r.proxy.cors is not None, True),
    "admin: {open_metrics: true, token: 0123456789abcdef0123456789abcdef}": (
        lambda r: r.guard._token is not None and r.guard._token.matches(b"0123456789abcdef0123456789abcdef"), True
    ),
    "keys: {accept: {ann: {hash: 'sha256:%s'}}}" % ("ab" * 32): (lambda r: list(r.proxy.keys.holders), ["ann"]),
}  # fmt: skip
"""A configuration, what shows that it is in force, and what that is then."""


def test_all_sections_are_tried() -> None:
    assert {key for text in EFFECTS for key in yaml.safe_load(text)} == set(APPLIED)


@pytest.fixture
def level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


@pytest.mark.parametrize("text", EFFECTS)
async def test_each_section_comes_into_force(text: str, tmp_path: Path, level: None) -> None:
    """In a router that does not listen: what the parts that use a setting hold of it."""
    before = {"replicas": ["http://127.0.0.1:9"]}
    effect, wanted = EFFECTS[text]
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(before))
    router = Router(load(str(file)), Source(str(file), lambda: load(str(file))))
    router.fleet.join(router.settings.replicas[0])
    router.proxy.loop = asyncio.get_running_loop()
    try:
        assert effect_of(effect, router) != wanted, "not yet"
        file.write_text(yaml.safe_dump(before | yaml.safe_load(text)))
        changed, waiting = await router.reload.reload("a test")
        assert effect_of(effect, router) == wanted
        assert changed
        assert not waiting
        assert await router.reload.reload("a test") == ([], []), "equal to what is in force"
        assert effect_of(effect, router) == wanted
    finally:
        await router.fleet.close()
        router.access_log.close()


def effect_of(effect: Callable[[Router], Any], router: Router) -> Any:
    try:
        return effect(router)
    except AttributeError:
        return None  # what it would be of is not there


# Replicas


async def test_streams_homes_and_counters_survive_and_what_left_ends_naturally(operated: Operated) -> None:
    await operated.start()
    home = await operated.where("s")
    (other,) = {"a", "b"} - {home}
    operated.hold()
    streams = [await operated.stream(f"stream {number}") for number in range(6)]
    assert {at for _, at in streams} == {"a", "b"}
    kept = await operated.stream("s")
    await operated.add("c")
    operated.write(ids=home + "c", limits={"body_bytes": 5000})
    told = (await operated.reload()).json()
    keys = {change["key"] for change in told["changed"]}
    assert keys == {f"replicas.{other}", "replicas.c", "limits.body_bytes"}
    fleet = (await operated.admin.get("/replicas")).json()
    assert [each["id"] for each in fleet["replicas"]] == sorted([home, "c"])
    assert [each["id"] for each in fleet["leaving"]] == [other]
    operated.replicas["c"].finish.clear()
    new = [await operated.stream(f"new {number}") for number in range(4)]
    assert "c" in {at for _, at in new}
    operated.let_go()
    assert all([await operated.ends_whole(client) for client, _ in [*streams, *new, kept]]), "not one was cut"
    assert kept[1] == home
    assert await operated.where("s") == home

    async def leaving() -> list[Any]:
        return list((await operated.admin.get("/replicas")).json()["leaving"])

    await until(leaving, lambda left: not left, LIMIT_S, "nothing runs any more on what left")


async def test_a_known_id_at_another_url_is_another_replica(operated: Operated) -> None:
    await operated.start("a")
    assert await operated.where("s") == "a"
    operated.hold()
    stream, _ = await operated.stream("t")
    first, operated.replicas["first"] = operated.replicas["a"], operated.replicas["a"]
    await operated.add("a")
    operated.write(ids="a")
    (change,) = (await operated.reload()).json()["changed"]
    assert (change["key"], change["old"]["url"]) == ("replicas.a", first.upstream.url)
    headers = await operated.chat("s")
    assert headers["x-warmroute-reason"] == "home_lost", "its cache stayed at the other address"
    first.finish.set()
    assert await operated.ends_whole(stream)


async def test_weights_change_in_place(operated: Operated) -> None:
    await operated.start()
    home = await operated.where("s")
    urls = {name: replica.upstream.url for name, replica in operated.replicas.items()}
    operated.write(
        replicas=[{"id": name, "url": url, "weight": 0 if name == home else 1} for name, url in urls.items()]
    )
    (change,) = (await operated.reload()).json()["changed"]
    assert (change["key"], change["new"]["weight"]) == (f"replicas.{home}", 0)
    assert (await operated.fleet())[home]["weight"] == 0
    assert {await operated.where(f"new {number}") for number in range(4)} == {"a", "b"} - {home}
    assert await operated.where("s") == home, "its cache is still there"


async def test_who_waited_starts_when_all_of_the_new_configuration_is_in_force(operated: Operated) -> None:
    """Not when caps are, and keys are not yet: it would be sent with the client's key and with the router's."""
    await operated.start("a", admission={"max_running": 1})
    operated.hold()
    running, _ = await operated.stream("s")
    waiting = await RawClient.connect(operated.router.port)
    operated.clients.append(waiting)
    waiting.send(post(CHAT, b"{}", "x-session-affinity: t", "authorization: Bearer the-clients-own"))

    async def waits() -> bool:
        return "warmroute_waiting_requests 1.0" in (await operated.admin.get("/metrics")).text

    await until(waits, bool, LIMIT_S, "it waits")
    models = await RawClient.connect(operated.router.port)
    operated.clients.append(models)
    assert (await models.ask(get())).status == 404, "and leaves a connection to the replica, to be sent on at once"
    operated.write(keys={"credential": "replace", "replica_key": "the-routers"})
    assert (await operated.reload()).status_code == 200
    assert (await waiting.head()).status == 200
    chats = [each for each in operated.replicas["a"].upstream.requests if each.target == CHAT]
    assert chats[-1].values("authorization") == ["Bearer the-routers"]
    operated.let_go()
    assert await operated.ends_whole(running)


# Faults


async def test_a_fault_changes_nothing_and_is_told_with_key_value_and_remedy(operated: Operated) -> None:
    await operated.start(policy="round_robin")
    await operated.add("c")
    for settings, told in (
        ({"limits": {"body_bytes": "x"}}, "limits.body_bytes: "),
        ({"polcy": "random"}, "polcy: unknown key, set to 'random': did you mean 'policy'?"),
        ({"policy": {"name": "random", "parameters": {"sed": 1}}}, "unknown parameter 'sed'; known parameters: seed"),
        ({"replicas": ["a:1"]}, "replicas.0: 'a:1' is not a replica's URL: write it as in http://"),
    ):
        operated.write(**({"policy": "sticky"} | settings))
        answer = await operated.reload()
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_config")
        assert told in answer.json()["error"]["message"]
        (line,) = [line for line in (await operated.logged(told)).splitlines() if told in line]
        assert "and nothing is changed: " in line
        assert set(await operated.fleet()) == {"a", "b"}, "c is in none of the files that were refused"
        assert (await operated.admin.get("/policy")).json()["policy"] == "round_robin"
    done = await operated.run("reload")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("warmroute: Nothing was changed. replicas.0: ")
    operated.config.unlink()
    assert "No such file" in (await operated.reload()).json()["error"]["message"]


async def test_what_takes_a_restart_is_named_and_stays_and_secrets_are_masked(operated: Operated) -> None:
    await operated.start(identity={"secret": "hush"})
    await operated.chat("s")
    changed = {
        "identity": {"secret": "louder"},
        "keys": {"credential": "replace", "replica_key": "k" * 30},
        "journal": {"path": "/x"},
        "tls": {},
    }
    operated.write(**changed, directory={"max_sessions": 7})
    told = (await operated.reload()).json()
    assert [change["key"] for change in told["changed"]] == ["keys.credential", "keys.replica_key"]
    assert [change["key"] for change in told["takes_restart"]] == [
        "directory.max_sessions",
        "identity.secret",
        "journal.path",
    ]
    text = await operated.logged("takes a restart: directory.max_sessions: 200000 -> 7; identity.secret: ")
    assert not [secret for secret in ("hush", "louder", "k" * 30) if secret in text + str(told)]
    assert (await operated.admin.get("/sessions/s")).status_code == 200, "digested as before"
    again = (await operated.reload()).json()
    assert (again["changed"], len(again["takes_restart"])) == ([], 3), "it still does"
    done = await operated.run("reload")
    assert done.stdout.splitlines()[:4] == [
        "nothing has changed",
        "",
        "takes a restart:",
        "  directory.max_sessions: 200000 -> 7",
    ]


async def test_environment_and_flags_win_over_a_file_that_changed(
    operated: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_RETRIES__TRIES", "5")
    await operated.start("a", "--policy", "round_robin")
    operated.write(policy="random", retries={"tries": 9, "budget_burst": 4})
    told = (await operated.reload()).json()
    assert [change["key"] for change in told["changed"]] == ["retries.budget_burst"]
    assert (await operated.admin.get("/policy")).json()["policy"] == "round_robin"


async def test_a_reload_makes_the_policy_that_of_the_file_again(operated: Operated) -> None:
    await operated.start("a", policy="round_robin")
    await operated.admin.put("/policy", json={"name": "random", "parameters": {"seed": 4}})
    (name, seed) = (await operated.reload()).json()["changed"]
    assert name == {"key": "policy.name", "old": "random", "new": "round_robin"}
    assert seed == {"key": "policy.parameters.seed", "old": 4, "new": None}
    assert (await operated.admin.get("/policy")).json()["policy"] == "round_robin"


async def test_without_a_file_there_is_nothing_to_reload(tmp_path: Path, operated: Operated) -> None:
    await operated.start("a")
    router = await asyncio.to_thread(start_router, [operated.replicas["a"].upstream.url], tmp_path / "other.log")
    try:
        operated.router, first = router, operated.router
        done = await operated.run("reload")
        operated.router = first
    finally:
        await asyncio.to_thread(router.stop)
    assert (done.returncode, done.stdout) == (2, "")
    assert "start the router with --config FILE" in done.stderr


# What sets it off


async def test_sighup_reloads(operated: Operated) -> None:
    await operated.start("a")
    operated.write(policy="random")
    operated.router.signal(signal.SIGHUP)
    text = await operated.logged("reloaded the configuration, asked by SIGHUP: policy.name: ")
    assert '\\"session_affinity\\" -> \\"random\\"' in text


async def test_a_changed_file_is_seen_through_links_as_kubernetes_swaps_them(operated: Operated) -> None:
    mounted = operated.folder / "mounted"
    for name, policy in (("..1", "round_robin"), ("..2", "random")):
        (mounted / name).mkdir(parents=True)
        operated.config = mounted / name / "c.yaml"
        operated.write(policy=policy, ids="", reload={"interval_s": 0.1})
    (mounted / "..data").symlink_to("..1")
    operated.config = operated.folder / "c.yaml"
    operated.config.symlink_to(mounted / "..data" / "c.yaml")
    await operated.serve(wait_for="/livez")
    (mounted / "..data_tmp").symlink_to("..2")
    os.rename(mounted / "..data_tmp", mounted / "..data")
    await operated.logged(f"reloaded the configuration, asked by a change of {operated.config}: ")
    assert (await operated.admin.get("/policy")).json()["policy"] == "random"


async def test_a_fault_in_a_changed_file_is_told_once_and_mended_by_the_next_change(operated: Operated) -> None:
    await operated.start("a", reload={"interval_s": 0.1})
    operated.config.write_text("policy: nosuch")
    await operated.logged("and nothing is changed: policy: unknown policy 'nosuch'")
    operated.write(reload={"interval_s": 0.1}, policy="random")
    text = await operated.logged("asked by a change of ")
    assert text.count("nothing is changed") == 1


def test_what_can_be_read_only_once_is_refused() -> None:
    """Its content would be gone when it is read to see whether it has changed, and the defaults be in force."""
    with pytest.raises(ConfigError, match=r"--config /dev/null: a pipe or device, .*: give a file"):
        Source("/dev/null", Settings).read()


def test_a_file_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\n")
    source = Source(str(file), Settings)
    source.read()
    assert not source.changed()
    file.write_text("port: 1\nhost")
    assert not source.changed(), "it has only just changed"
    file.write_text("port: 1\nhost: a\n")
    assert not source.changed(), "and again"
    assert source.changed(), "it has not changed since"
    source.read()
    assert not source.changed()
    os.utime(file, (1, 1))
    assert [source.changed() for _ in range(2)] == [False, False], "the same content is no news"
    file.unlink()
    assert [source.changed() for _ in range(2)] == [False, False], "what is not there cannot be read"
    file.write_text("port: 2\n")
    assert [source.changed() for _ in range(2)] == [False, True]


def test_changes_name_replicas_by_id_and_show_no_secret() -> None:
    empty = Settings()
    full = Settings(
        replicas=["http://a:1", {"id": "b", "url": "http://b:1", "weight": 2}],  # type: ignore[list-item]
        identity={"secret": "hush"},  # type: ignore[arg-type]
        log={"level": "debug"},  # type: ignore[arg-type]
    )
    assert [str(change) for change in changes(empty, full)] == [
        'identity.secret: "***" -> "***"',
        'log.level: "info" -> "debug"',
        'replicas.http://a:1: none -> {"url": "http://a:1", "weight": 1.0}',
        'replicas.b: none -> {"url": "http://b:1", "weight": 2.0}',
    ]
    assert [change.new for change in changes(full, empty) if change.key.startswith("replicas")] == [None, None]
    assert changes(full, full) == []
