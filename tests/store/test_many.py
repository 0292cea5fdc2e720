"""Sentinels and clusters: real ones, of the same server that all else is tested with."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import redis
import uvloop

from router.store import Message
from router.store.faults import ACL, ACL_CLUSTER
from tests.fakes.cable import Cable
from tests.store.conftest import Start
from tests.store.notes import HANGS_S, fault, hear_all, note, opened, works, works_again
from tests.store.servers import Server, eventually, free_port

MASTER = "warm"


def sentinels(start: Start, primary: Server, count: int = 2) -> list[Server]:
    """All must agree on a fail-over, which is quick."""
    text = (
        f"sentinel monitor {MASTER} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {MASTER} 400\n"
        f"sentinel failover-timeout {MASTER} 2000\n"
    )
    watching = [start(port=free_port(), sentinel=text) for _ in range(count)]

    def met() -> bool:
        return all(int(_state(each)["num-other-sentinels"]) == count - 1 for each in watching)

    eventually(met, "Sentinels know each other")
    eventually(lambda: all(int(_state(each)["num-slaves"]) == 1 for each in watching), "Sentinels know the replica")
    return watching


def _state(sentinel: Server) -> dict[str, str]:
    flat = [text.decode() for text in sentinel.ask("SENTINEL", "MASTER", MASTER)]
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def test_a_fail_over_by_sentinels(start: Start) -> None:
    primary = start(port=free_port())
    replica = start("--replicaof", "127.0.0.1", str(primary.port), port=free_port())
    eventually(lambda: replica.ask("INFO", "replication")["master_link_status"] == "up", "the replica is in step")
    watching = sentinels(start, primary)
    dead = free_port()
    hosts = ",".join(f"127.0.0.1:{port}" for port in (dead, *(each.port for each in watching)))
    async with opened(f"redis+sentinel://{hosts}/{MASTER}/0") as store:
        assert await store.epoch("first") == "first"
        cursor = (await store.hear("", 0.0)).cursor
        await works(store, cursor)
        await store.claim(note(5))
        eventually(lambda: replica.ask("DBSIZE") >= primary.ask("DBSIZE"), "the replica has it")
        primary.kill()
        assert MASTER in await fault(store.claim(note(5)))
        await works_again(store)
        assert replica.ask("ROLE")[0] == b"master"
        assert [each.note for each in await store.claim(note(5, "elsewhere"))] == [note(5)]
        assert await store.epoch("second") == "first"


async def test_a_name_that_sentinels_do_not_know(start: Start) -> None:
    primary = start(port=free_port())
    sentinel = start(port=free_port(), sentinel=f"sentinel monitor {MASTER} 127.0.0.1 {primary.port} 1\n")
    async with opened(f"redis+sentinel://127.0.0.1:{sentinel.port}/cold") as store:
        assert "no Sentinel knows a living primary of that name" in await fault(store.claim(note()))
    async with opened(f"redis+sentinel://127.0.0.1:{sentinel.port}/{MASTER}") as store:
        await works_again(store)


def cluster(start: Start) -> list[Server]:
    """Three nodes, a third of the slots each."""
    nodes = [start("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", port=free_port()) for _ in range(3)]
    for i, node in enumerate(nodes):
        node.ask("CLUSTER", "ADDSLOTS", *range(i * 16384 // 3, (i + 1) * 16384 // 3))
        node.ask("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
    for other in nodes[1:]:
        nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", other.port)
    eventually(lambda: all(sound(node) for node in nodes), "the cluster is sound")
    return nodes


def sound(node: Server) -> bool:
    try:
        info = node.ask("CLUSTER", "INFO")
    except redis.ConnectionError:
        return False
    return b"cluster_state:ok" in info and b"cluster_known_nodes:3" in info


async def test_a_cluster(start: Start) -> None:
    nodes = cluster(start)
    url = "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in (free_port(), *(n.port for n in nodes[:2])))
    async with opened(url, timeout_s=2.0) as one, opened(url) as other:
        notes = [note(key) for key in range(60)]
        cursor = (await other.hear("", 0.0)).cursor
        for call in range(2):  # the second time every node knows the scripts
            await one.tell(Message(f"m{call}", notes, controls={"x": b"1"}))
        heard = await hear_all(other, cursor)
        assert [(message.sender, list(message.notes)) for message in heard.messages] == [("m0", notes), ("m1", notes)]
        for key in range(60):
            assert [each.note for each in await other.claim(note(key, "elsewhere"))] == [note(key)]
        assert dict(await other.controls()) == {"x": b"1"}
        sizes = [node.ask("DBSIZE") for node in nodes]
        assert all(sizes), "the sessions are spread over all nodes"
        waiting = asyncio.create_task(other.hear(heard.cursor, 5.0))
        await one.tell(Message("m2", notes))
        assert [message.sender for message in (await waiting).messages] == ["m2"]

        # A node is gone: what it has cannot be had, and then all of it is refused.
        nodes[2].kill()
        assert url in await fault(one.tell(Message("lost", notes)))
        nodes[2].start()
        eventually(lambda: all(sound(node) for node in nodes), "the cluster is sound again")
        for store in (one, other):
            await works_again(store)

        # A node says nothing.
        nodes[1].pause()
        assert url in await fault(one.tell(Message("lost", notes)))
        nodes[1].resume()
        eventually(lambda: all(sound(node) for node in nodes), "the cluster is sound again")
        for store in (one, other):
            await works_again(store)


def test_connections_of_a_cluster_that_are_reset_while_idle(start: Start) -> None:
    """On the loop of production, whose transports refuse to be written to after that in a way of their own."""
    node = start("--cluster-enabled", "yes", port=free_port())
    node.ask("CLUSTER", "ADDSLOTS", *range(16384))
    eventually(lambda: b"cluster_state:ok" in node.ask("CLUSTER", "INFO"), "the cluster is sound")

    async def reset() -> None:
        cable = Cable(node.path)
        port = await cable.start()
        node.ask("CONFIG", "SET", "cluster-announce-port", port)
        try:
            async with asyncio.timeout(HANGS_S), opened(f"redis+cluster://127.0.0.1:{port}") as store:
                await works_again(store)
                last, out = await asyncio.open_connection("127.0.0.1", port)
                out.write(b"PING\r\n")
                await last.readline()
                cable.reset()
                with suppress(ConnectionResetError):
                    await last.read()
                assert "closed the connection" in await fault(store.claim(note()))
                await works_again(store)
        finally:
            await cable.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(reset())


async def test_a_slot_that_moves(start: Start) -> None:
    nodes = cluster(start)
    ids = [node.ask("CLUSTER", "MYID").decode() for node in nodes]
    async with opened(f"redis+cluster://127.0.0.1:{nodes[0].port}", timeout_s=5.0) as store:
        await store.tell(Message("one", [note(key) for key in range(20)]))
        for key in range(20):
            name = f"warmroute:1:s:{note(key).key.hex()}"
            slot = nodes[0].ask("CLUSTER", "KEYSLOT", name)
            [source] = [i for i, node in enumerate(nodes) if node.ask("CLUSTER", "COUNTKEYSINSLOT", slot)]
            target = (source + 1) % 3
            nodes[target].ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
            nodes[source].ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
            nodes[source].ask("MIGRATE", "127.0.0.1", nodes[target].port, name, 0, 5000)
            for node in nodes:
                node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        async with asyncio.timeout(HANGS_S):
            for key in range(20):
                assert [each.note for each in await store.claim(note(key, "elsewhere"))] == [note(key)]
            await store.tell(Message("two", [note(key, "b") for key in range(20)]))


async def test_a_user_of_a_cluster_with_the_documented_rights_and_no_others(start: Start) -> None:
    node = start("--cluster-enabled", "yes", port=free_port())
    node.ask("CLUSTER", "ADDSLOTS", *range(16384))
    eventually(lambda: b"cluster_state:ok" in node.ask("CLUSTER", "INFO"), "the cluster is sound")
    rights = f"{ACL} {ACL_CLUSTER}".replace("PREFIX", "warmroute").split()
    node.ask("ACL", "SETUSER", "router", "on", ">sesame", *rights)
    async with opened(f"redis+cluster://127.0.0.1:{node.port}", username="router", password="sesame") as store:
        await works_again(store)
        await store.tell(Message("one", [note(1), note(2)], controls={"x": b"1", "y": None}))
        await store.restore([note(3)])
        assert dict(await store.controls()) == {"x": b"1"}


async def test_a_cluster_and_one_server_are_told_apart(start: Start) -> None:
    node = start("--cluster-enabled", "yes", port=free_port())
    alone = start(port=free_port())
    async with opened(f"redis+cluster://127.0.0.1:{node.port}") as store:
        assert "slots are served by nobody" in await fault(store.claim(note()))
    async with opened(f"redis://127.0.0.1:{node.port}") as store:
        said = await fault(store.claim(note()))
        assert "slots are served by nobody" in said or "redis+cluster://" in said
    async with opened(f"redis+cluster://127.0.0.1:{alone.port}") as store:
        assert "no node of a cluster" in await fault(store.claim(note()))


async def test_a_cluster_that_is_not_there() -> None:
    async with opened(f"redis+cluster://127.0.0.1:{free_port()}") as store:
        assert "cannot be reached" in await fault(store.claim(note()))
