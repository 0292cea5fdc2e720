"""What befalls one Redis: every fault is a StoreError that names place and remedy, and is over when it is mended."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import trustme

from router.store import Message
from router.store.faults import ACL, described
from router.store.redis import MAX_CONNECTIONS, MAX_HEARING, RedisStore
from router.store.store import MAX_NOTES
from tests.store.conftest import Start
from tests.store.notes import fault, hear_all, note, opened, works, works_again
from tests.store.servers import Server, behind_tls, eventually, free_port

SOON_S = 0.3
"""A limit for what is not to be answered."""

# Ways to it


async def test_it_is_reached_on_a_port_and_in_a_database_of_its_own(start: Start) -> None:
    server = start(port=free_port())
    async with (
        opened(f"{server.url}/3") as third,
        opened(server.url) as first,
        opened(f"unix://{server.path}?db=3") as same,
    ):
        await third.claim(note())
        assert list(await first.claim(note(replica="b"))) == []
        assert [each.note for each in await same.claim(note())] == [note()]


async def test_prefixes_are_apart_and_begin_every_name(shared_server: Server) -> None:
    async with opened(shared_server.url, prefix="a") as a, opened(shared_server.url, prefix="b") as b:
        for store in (a, b):
            assert list(await store.claim(note())) == []
            await store.tell(Message("one", [note(2)], controls={"x": b"1"}))
            await store.epoch("e")
    with shared_server.admin() as admin:
        names = [name for name in admin.scan_iter() if name.startswith((b"a:", b"b:"))]
        assert len(names) == 10
        assert not [name for name in names if name.startswith(b"a:1:s:") and admin.pttl(name) <= 0]
        assert admin.pttl("a:1:messages") == admin.pttl("a:1:epoch") == admin.pttl("a:1:controls") == -1


async def test_nothing_listens_there(tmp_path: Path) -> None:
    port = free_port()
    for url in (f"redis://127.0.0.1:{port}", f"unix://{tmp_path}/nothing"):
        async with opened(url) as store:
            said = await fault(store.claim(note()))
            assert url in said
            assert "cannot be reached" in said


async def test_what_is_asked_and_told_of_many_sessions_at_once_takes_few_commands(start: Start) -> None:
    server = start()
    async with opened(server.url) as store:
        await works_again(store)
        before = server.ask("INFO", "commandstats")["cmdstat_evalsha"]["calls"]
        asked = [store.claim(note(key, replica)) for key in range(100, 300) for replica in ("a", "b")]
        known = [[each.note.replica for each in answer] for answer in await asyncio.gather(*asked)]
        assert known == [[], ["a"]] * 200, "one session is claimed by the first that asks for it"
        await store.tell(Message("one", [note(key, "c") for key in range(100, 300)]))
        assert [each.note.replica for each in await store.claim(note(299))] == ["c", "a"]
        assert server.ask("INFO", "commandstats")["cmdstat_evalsha"]["calls"] - before < 20


# Faults


async def test_something_else_in_the_place_of_a_session_costs_no_other(start: Start) -> None:
    server = start()
    async with opened(server.url) as store:
        server.ask("SET", f"warmroute:1:s:{note(2).key.hex()}", "x")
        for _ in range(2):
            answers = await asyncio.gather(*(store.claim(note(key)) for key in (1, 2, 3)))
        assert [[each.note for each in answer] for answer in answers] == [[note(1)], [], [note(3)]]
        await store.tell(Message("one", [note(1, "b"), note(2, "b"), note(3, "b")]))
        await store.restore([note(4), note(2), note(5)])
        known = [[each.note.replica for each in await store.claim(note(key))] for key in (1, 2, 3, 4, 5)]
        assert known == [["b", note().replica], [], ["b", note().replica], [note().replica], [note().replica]]
        assert server.ask("GET", f"warmroute:1:s:{note(2).key.hex()}") == b"x", "it is somebody's"


async def test_a_paused_server_holds_nobody_for_longer_than_they_wait(start: Start) -> None:
    server = start()
    async with opened(server.url, timeout_s=SOON_S) as store, opened(server.url) as patient:
        await works_again(store)
        server.pause()
        for _ in range(3):
            claims = [asyncio.wait_for(store.claim(note()), 0.02) for _ in range(50)]
            assert {type(answer) for answer in await asyncio.gather(*claims, return_exceptions=True)} == {TimeoutError}
        assert "does not answer" in await fault(store.tell(Message("one", [note()])))
        assert "does not answer" in await fault(store.hear("0-0", 0.1))
        held = asyncio.create_task(patient.claim(note(5)))
        await fault(store.epoch("e"))
        server.resume()
        await held
        await works_again(store)

        def few() -> bool:
            return server.ask("INFO", "clients")["connected_clients"] <= 2 * (MAX_CONNECTIONS + MAX_HEARING) + 1

        eventually(few, "connections that were given up are gone")


async def test_a_killed_server_is_found_again_and_has_forgotten(start: Start) -> None:
    server = start()
    async with opened(server.url) as store:
        assert await store.epoch("first") == "first"
        cursor = (await store.hear("", 0.0)).cursor
        await store.tell(Message("one", [note()]))
        cursor = (await store.hear(cursor, 0.0)).cursor
        hearing = asyncio.create_task(fault(store.hear(cursor, 5.0)))
        await store.claim(note(2))
        server.kill()
        assert server.url in await hearing
        for call in (store.claim(note()), store.tell(Message("one")), store.controls(), store.restore([note()])):
            assert "cannot be reached" in await fault(call)
        server.start()
        assert await store.epoch("second") == "second"
        assert list(await store.claim(note())) == []
        assert (await store.hear(cursor, 0.0)).lost


async def test_a_flush_is_noticed(start: Start) -> None:
    server = start()
    async with opened(server.url) as store:
        assert await store.epoch("first") == "first"
        await store.tell(Message("a"))
        cursor = (await store.hear("0-0", 0.0)).cursor
        server.ask("FLUSHALL")
        silent = await store.hear(cursor, 0.0)
        assert (list(silent.messages), silent.lost) == ([], True)
        await store.tell(Message("b"))
        await store.tell(Message("c"))
        for after in (cursor, silent.cursor):
            heard = await store.hear(after, 0.0)
            assert [message.sender for message in heard.messages] == ["b", "c"]
            assert heard.lost is (after == cursor)
        assert await store.epoch("second") == "second"


async def test_messages_are_heard_although_the_clock_went_back(start: Start) -> None:
    """As after a fail-over to a host whose clock is behind."""
    server = start()
    async with opened(server.url) as store:
        server.ask("XADD", "warmroute:1:messages", "9999999999999-1", "m", "")
        await store.tell(Message("a"))
        heard = await store.hear("9999999999999-1", 0.0)
        assert ([message.sender for message in heard.messages], heard.lost) == (["a"], False)
        server.ask("FLUSHALL")
        await store.tell(Message("b"))
        silent = await store.hear(heard.cursor, 0.0)
        assert silent.lost
        assert [message.sender for message in (await hear_all(store, silent.cursor)).messages] == ["b"]


async def test_messages_are_kept_for_as_long_as_somebody_may_still_read_them(start: Start) -> None:
    server = start()
    async with opened(server.url) as one, opened(server.url) as other:
        with server.admin() as admin:
            seconds, _ = admin.time()
            for age_s, number in ((3600, 1), (60, 2), (5, 3)):
                admin.xadd("warmroute:1:messages", {"m": b""}, id=f"{(seconds - age_s) * 1000}-{number}")
            cursor = f"{(seconds - 3600) * 1000}-1"
            await one.tell(Message("one"))
            assert admin.xlen("warmroute:1:messages") == 2
        heard = await hear_all(other, cursor)
        assert ([message.sender for message in heard.messages], heard.lost) == (["one"], True)


async def test_a_server_that_has_forgotten_the_scripts_is_given_them_anew(shared_server: Server) -> None:
    async with opened(shared_server.url, prefix="scripts") as store:
        for key in range(3):
            shared_server.ask("SCRIPT", "FLUSH")
            cursor = (await store.hear("", 0.0)).cursor
            await store.tell(Message("one", [note(key), note(key + 10)]))
            assert len((await store.hear(cursor, 0.0)).messages) == 1, "told once"
            shared_server.ask("SCRIPT", "FLUSH")
            assert len(await store.claim(note(key))) == 1


async def test_full_memory(start: Start) -> None:
    server = start("--maxmemory-policy", "noeviction")
    async with opened(server.url) as store:
        await store.claim(note())
        server.ask("CONFIG", "SET", "maxmemory", "1")
        for call in (store.claim(note(2)), store.tell(Message("one", [note()])), store.epoch("e")):
            said = await fault(call)
            assert "raise its maxmemory" in said
            assert "volatile-lru" in said
        await store.hear("", 0.0)
        server.ask("CONFIG", "SET", "maxmemory", "0")
        await works_again(store)


async def test_with_volatile_lru_only_sessions_go_when_memory_is_full(start: Start) -> None:
    server = start("--maxmemory-policy", "volatile-lru")
    async with opened(server.url) as store:
        await store.epoch("e")
        await store.tell(Message("one", controls={"x": b"1"}))
        used = server.ask("INFO", "memory")["used_memory"]
        server.ask("CONFIG", "SET", "maxmemory", used + 600_000)
        for first in range(0, 4000, 100):
            await store.restore([note(key) for key in range(first, first + 100)])
        assert server.ask("INFO", "stats")["evicted_keys"] > 0
        assert server.ask("DBSIZE") > 100, "and not all of them"
        assert await store.epoch("other") == "e"
        assert dict(await store.controls()) == {"x": b"1"}


async def test_a_replica_takes_no_writes(start: Start) -> None:
    server, primary = start(), start(port=free_port())
    async with opened(server.url) as store:
        await store.claim(note())
        server.ask("REPLICAOF", "127.0.0.1", primary.port)
        for call in (store.claim(note()), store.tell(Message("one")), store.epoch("e")):
            assert "name the primary" in await fault(call)
        server.ask("REPLICAOF", "NO", "ONE")
        await works_again(store)


async def test_too_many_clients(start: Start) -> None:
    server = start()
    with server.admin() as admin:
        admin.config_set("maxclients", 1)
        async with opened(server.url) as store:
            assert server.url in await fault(store.claim(note()))  # it may close before it says why
            admin.config_set("maxclients", 100)
            await works_again(store)


async def test_something_else_under_the_same_names(shared_server: Server) -> None:
    async with opened(shared_server.url, prefix="taken") as store:
        shared_server.ask("SET", "taken:1:messages", "x")
        assert "another store.prefix" in await fault(store.tell(Message("one")))


async def test_what_another_version_wrote_is_passed_over(shared_server: Server) -> None:
    async with opened(shared_server.url, prefix="odd") as store:
        await store.tell(Message("a", [note()]))
        session = f"odd:1:s:{note().key.hex()}"
        shared_server.ask("HSET", session, "x", "y", "z", "0123456789012345\xc1")
        assert [each.note for each in await store.claim(note())] == [note()]
        shared_server.ask("DEL", session)
        shared_server.ask("HSET", session, "x", "y")
        assert list(await store.claim(note(replica="b"))) == []
        assert [each.note.replica for each in await store.claim(note())] == ["b"], "it was stored beside"
        milliseconds, number = (await store.hear("", 0.0)).cursor.split("-")
        shared_server.ask("XADD", "odd:1:messages", f"{milliseconds}-{int(number) + 1}", "m", "\xc1")
        shared_server.ask("XADD", "odd:1:messages", f"{milliseconds}-{int(number) + 2}", "other", "")
        await store.tell(Message("b"))
        heard = await hear_all(store, "0-0")
        assert ([message.sender for message in heard.messages], heard.lost) == (["a", "b"], False)


async def test_calls_given_up_at_any_moment_do_not_answer_others(shared_server: Server) -> None:
    async with opened(shared_server.url, prefix="cut") as store:
        await store.tell(Message("one", [note(key) for key in range(200)]))
        for steps in range(200):
            given_up = [asyncio.create_task(store.claim(note(key))) for key in range(100, 110)]
            for _ in range(steps % 40):
                await asyncio.sleep(0)
            for task in given_up:
                task.cancel()
            asked = await asyncio.gather(*(store.claim(note(key)) for key in (steps, 1, 2)))
            assert [[each.note for each in answer] for answer in asked] == [[note(steps)], [note(1)], [note(2)]]
            await asyncio.gather(*given_up, return_exceptions=True)


async def test_hearing_given_up_at_any_moment_is_over(shared_server: Server) -> None:
    async with opened(shared_server.url, prefix="silent") as store:
        for steps in range(30):
            hearing = asyncio.create_task(store.hear("0-0", 5.0))
            for _ in range(steps):
                await asyncio.sleep(0)
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
            assert hearing.cancelled(), steps


# Who may


async def test_a_user_with_the_documented_rights_and_no_others(start: Start) -> None:
    server = start()
    server.ask("ACL", "SETUSER", "router", "on", ">sesame", *ACL.replace("PREFIX", "warmroute").split())
    async with opened(server.url, username="router", password="sesame") as store:
        await works_again(store)
        many = [note(replica=f"r{i}") for i in range(MAX_NOTES + 2)]
        await store.tell(Message("one", many, controls={"x": b"1", "y": None}))
        await store.restore([note(replica="a"), note(2)])
        assert dict(await store.controls()) == {"x": b"1"}
        assert await store.epoch("e") == "again"
        server.ask("SCRIPT", "FLUSH")
        assert len(await store.claim(note())) == MAX_NOTES
    for right in ACL.split()[1:]:
        server.ask("ACL", "SETUSER", "router", right.replace("+", "-"))
        async with opened(server.url, username="router", password="sesame") as store:
            said = await _first_fault(store, server)
            assert ACL.replace("PREFIX", "warmroute") in said, right
            assert "sesame" not in said
        server.ask("ACL", "SETUSER", "router", right)
    async with opened(server.url, username="router", password="sesame", prefix="other") as store:
        assert "~other:*" in await fault(store.claim(note()))


async def _first_fault(store: RedisStore, server: Server) -> str:
    """Of all that a router does with a store."""
    server.ask("SCRIPT", "FLUSH")

    async def everything() -> None:
        await store.epoch("e")
        await store.claim(note(4))
        await store.claim(note(4))
        homes = [note(3, f"r{i}") for i in range(MAX_NOTES + 2)]
        await store.tell(Message("one", homes, controls={"x": b"1", "y": None}))
        await store.restore([note(4)])
        await store.hear("", 0.0)
        await store.controls()

    return await fault(everything())


async def test_wrong_passwords(start: Start, tmp_path: Path) -> None:
    server = start("--requirepass", "sesame")
    async with opened(server.url) as store:
        assert "set store.password_file" in await fault(store.claim(note()))
    file = tmp_path / "password"
    file.write_text("wrong-one\n")
    async with opened(server.url, password_file=str(file)) as store:
        said = await fault(store.claim(note()))
        assert "correct store.username and store.password" in said
        assert "wrong-one" not in said
        file.unlink()
        assert f"password_file '{file}'" in await fault(store.claim(note()))
        file.write_text("sesame\n")
        cursor = (await store.hear("", 0.0)).cursor
        await works(store, cursor)


# TLS


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


async def test_tls(shared_server: Server, authority: trustme.CA, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    async with behind_tls(shared_server.path, context) as port:
        url = f"rediss://127.0.0.1:{port}"
        async with opened(url, ca_file=str(ca)) as store:
            await works_again(store)
        async with opened(url, verify=False) as store:
            await works_again(store)
        async with opened(url) as store:
            assert "set store.ca_file" in await fault(store.claim(note()))
        async with opened(url.replace("127.0.0.1", "localhost"), ca_file=str(ca)) as store:
            assert "set store.ca_file" in await fault(store.claim(note())), "a certificate of another name"
        async with opened(f"redis://127.0.0.1:{port}") as store:
            assert "rediss://" in await fault(store.claim(note()))
        context.verify_mode = ssl.CERT_REQUIRED
        async with opened(url, ca_file=str(ca)) as store:
            said = await fault(store.claim(note()))
            assert "cert_file" in said or "rediss" in said, said
        mine = authority.issue_cert("router")
        mine.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
        mine.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
        files = {"cert_file": str(tmp_path / "cert.pem"), "key_file": str(tmp_path / "key.pem")}
        async with opened(url, ca_file=str(ca), **files) as store:
            await works_again(store)


async def test_tls_to_a_server_without(start: Start) -> None:
    server = start(port=free_port())
    async with opened(f"rediss://127.0.0.1:{server.port}", timeout_s=SOON_S) as store:
        assert "speaks TLS where store.url is rediss://" in await fault(store.claim(note()))


# Words


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("LOADING Redis is loading the dataset in memory", "nothing to do but to wait"),
        ("MISCONF Redis is configured to save RDB snapshots, but it's unable to persist to disk.", "set save ''"),
        ("ResponseError @user_script:3: @user_script: 3: -OOM command not allowed", "raise its maxmemory"),
        ("ResponseError @user_script: 3: -READONLY You can't write against a read only replica.", "name the primary"),
        ("MOVED 123 10.0.0.1:6379", "redis+cluster://"),
        ("MASTERDOWN Link with MASTER is down", "lost its primary"),
        ("DENIED Redis is running in protected mode", "set a password there"),
        ("something that\nnobody knows", "see its log"),
    ],
)
def test_words_of_faults_that_are_hard_to_make(words: str, remedy: str) -> None:
    said = described("redis://h", "warmroute", words)
    assert said.startswith("redis://h: ")
    assert remedy in said
    assert "\n" not in said
