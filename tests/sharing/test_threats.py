"""What a reader of the store finds there, and what a writer of nonsense achieves."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
import yaml

from policies.types import State
from router.store import MemoryStore, Message
from sim.emulator import Emulator, EmulatorConfig
from tests.fakes.process import start_router
from tests.fakes.waiting import until
from tests.fakes.wire import LIMIT_S, eventually
from tests.sharing.test_seen import shown
from tests.store.servers import NEEDED, Server, binaries

SECRET, SESSION, PROMPT, HOLDER = "the-secret-of-digests", "raw-session-name", "a secret prompt ", "k" * 64
HASH = f"sha256:{sha256(HOLDER.encode()).hexdigest()}"


async def test_no_prompt_no_answer_no_name_and_no_secret_is_stored(tmp_path: Path) -> None:
    found = list(binaries().values())
    assert found, NEEDED
    server = Server(found[0])
    server.start()
    config = tmp_path / "c.yaml"
    given = {"identity": {"secret": SECRET}, "store": {"url": server.url}, "keys": {"accept": {"me": HASH}}}
    config.write_text(yaml.safe_dump(given))

    async def stored() -> int:
        return len(await asyncio.to_thread(server.ask, "KEYS", "warmroute:*:s:*"))

    try:
        async with Emulator(EmulatorConfig(time_scale=0.01)) as replica:
            router = await asyncio.to_thread(
                start_router, [replica.url], tmp_path / "router.log", "--config", str(config)
            )
            try:
                headers = {"x-session-affinity": SESSION, "authorization": f"Bearer {HOLDER}"}
                body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": PROMPT * 2000}]}
                async with httpx.AsyncClient(base_url=router.url, trust_env=False, headers=headers) as client:
                    answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
                await until(stored, lambda count: count == 1, LIMIT_S, "the session is stored")
            finally:
                await asyncio.to_thread(router.stop)
        held = repr(_all(server))
        assert replica.url in held, "this is what is there"
        said = answer["choices"][0]["message"]["content"].strip()
        for text in (SECRET, SESSION, PROMPT.strip(), HOLDER, said):
            assert text
            assert text not in held
    finally:
        server.remove()


def _all(server: Server) -> list[object]:
    """Every key with what it holds."""
    ask = {b"hash": ("HGETALL",), b"stream": ("XRANGE", "-", "+"), b"string": ("GET",)}
    held = []
    for key in server.ask("KEYS", "*"):
        command, *more = ask[server.ask("TYPE", key)]
        held += [key, server.ask(command, key, *more)]
    return held


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("drain:r1", b"\xff\x00"),
        ("drain:r1", b'{"homes": "burn", "who": "x", "since": 0}'),
        ("drain:r1", b"[]"),
        ("drain:nobody", b"{}"),
        ("policy", b'{"policy": {"name": "os.system", "parameters": {}}, "base": "BASE", "who": "x"}'),
        ("policy", b'{"policy": {"name": "random", "parameters": {"sed": 1}}, "base": "BASE", "who": "x"}'),
        ("policy", b"7"),
        ("policy", b'{"a":' * 100_000),
        ("shadow", b'{"policy": "x", "base": "BASE", "who": "x"}'),
        ("anything", b'{"policy": {"name": "random", "parameters": {}}, "base": "BASE", "who": "x"}'),
    ],
)
async def test_an_order_that_makes_no_sense_changes_nothing(
    name: str, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore(time.monotonic)
    async with shown(store) as (one,):
        base = one.router.orders._base()
        before = await one.told("/policy")
        with caplog.at_level(logging.INFO, "warmroute.orders"):
            await store.tell(Message("forger", controls={name: value.replace(b"BASE", base.encode())}))
            await store.tell(Message("forger", loads={"r2": (5, 0, 0.0)}))
            await eventually(lambda: one.router.balancer.replicas["r2"].others_running == 5, "what came after is heard")
        assert all(each.state is State.READY for each in one.router.balancer.replicas.values())
        after = await one.told("/policy")
        assert (after["policy"], after["shadow"], after["asked_by"]) == (before["policy"], None, None)
        assert one.sharing.up


async def test_an_order_that_cannot_be_read_keeps_no_router_from_starting() -> None:
    store = MemoryStore(time.monotonic)
    await store.tell(Message("forger", controls={"policy": b'{"a":' * 100_000}))
    async with shown(store) as (one,):
        assert one.sharing.up


async def test_an_order_of_a_router_with_another_configuration_is_not_obeyed() -> None:
    store = MemoryStore(time.monotonic)
    async with shown(store) as (one,):
        order = {"policy": {"name": "random", "parameters": {}}, "base": "another", "who": "x"}
        await store.tell(Message("router-of-old", controls={"policy": json.dumps(order).encode()}))
        order = {"homes": "move", "who": "x", "since": time.time()}
        await store.tell(Message("router-of-old", controls={"drain:r1": json.dumps(order).encode()}))
        await eventually(lambda: one.router.balancer.replicas["r1"].state is State.DRAINING, "the drain is heard")
        assert (await one.told("/policy"))["policy"] == "session_affinity"
        (drained,) = (await one.told())["draining"]
        assert drained["drain"]["by"] == "x, at another router"
