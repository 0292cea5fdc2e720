"""Health, pauses, and faults switched on by a tester."""

from __future__ import annotations

import asyncio
import json

import pytest

from sim.emulator import Emulator, EmulatorConfig
from tests.emulator.asks import CHAT, HELLO, ask, ask_json, begin, connection, raw, stream
from tests.emulator.recorded import parse_event
from tests.fakes.wire import Ended, eventually


async def test_pause_is_not_ready_but_takes_requests(fast: Emulator) -> None:
    await ask(fast, "/pause_generation", {"mode": "in_place"})
    assert [(await ask(fast, path)).status for path in ("/ready", "/ping", "/health")] == [503, 200, 200]
    async with connection(fast) as client:
        client.send(raw(CHAT, {"messages": HELLO}))
        await eventually(lambda: fast.queued == 1)
        load = (await ask_json(fast, "/v1/loads"))["loads"][0]
        assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 1)
        await ask(fast, "/continue_generation", {})
        assert (await client.answer()).status == 200
    assert (await ask(fast, "/ready")).status == 200


async def test_a_hung_scheduler_is_unready_from_the_first_failed_health_check_to_the_next_good_one(
    fast: Emulator,
) -> None:
    fast.fault(hang=True)
    assert (await ask(fast, "/ready")).status == 200
    assert (await ask(fast, "/health")).status == 503
    assert (await ask(fast, "/ready")).status == 503
    fast.fault(hang=False)
    assert (await ask(fast, "/ready")).status == 503
    assert (await ask(fast, "/health")).status == 200
    assert (await ask(fast, "/ready")).status == 200


async def test_a_hung_schedulers_loads_are_stale(slow: Emulator) -> None:
    async with connection(slow) as client:
        begin(client, stream=True)
        await client.head()
        slow.fault(hang=True)
        first = (await ask_json(slow, "/v1/loads"))["loads"][0]
        second = (await ask_json(slow, "/v1/loads"))["loads"][0]
        assert first["timestamp"] == second["timestamp"]
    await eventually(lambda: slow.running == 0)


async def test_health_takes_a_scaled_second() -> None:
    async with Emulator(EmulatorConfig(time_scale=0.05)) as replica:
        begun = asyncio.get_running_loop().time()
        assert (await ask(replica, "/health")).status == 200
        assert asyncio.get_running_loop().time() - begun >= 0.05


async def test_faults_over_http(fast: Emulator) -> None:
    faults = await ask_json(fast, "/_emulator/faults", {"ready": False, "status": 502})
    assert faults == await ask_json(fast, "/_emulator/faults")
    assert faults == {"ready": False, "queue_full": False, "die_mid_stream_after": None, "status": 502, "hang": False}
    assert (await ask(fast, "/ready")).status == 503
    assert (await ask(fast, "/health")).status == 503
    answer = await ask(fast, CHAT, {"messages": HELLO})
    assert (answer.status, json.loads(answer.body)["code"]) == (502, 502)
    assert fast.log[-1].error == 502


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"raedy": False}, "unknown fault 'raedy'; known: die_mid_stream_after, hang, queue_full, ready, status"),
        ({"ready": 1}, "ready must be true or false, not 1"),
        ({"hang": True, "status": 99}, "status must be between 200 and 599, not 99"),
        ({"die_mid_stream_after": "3"}, "die_mid_stream_after must be null or a number from 0, not '3'"),
    ],
)
async def test_bad_faults_change_nothing(fast: Emulator, changes: dict[str, object], message: str) -> None:
    answer = await ask(fast, "/_emulator/faults", changes)
    assert (answer.status, json.loads(answer.body)["message"]) == (400, message)
    assert not (await ask_json(fast, "/_emulator/faults"))["hang"]


async def test_a_queue_that_says_it_is_full(fast: Emulator) -> None:
    fast.fault(queue_full=True)
    assert (await ask(fast, CHAT, {"messages": HELLO})).status == 503
    events = await stream(fast)
    assert [data if data == "[DONE]" else data["error"]["code"] for _, data in events] == [503, "[DONE]"]
    assert fast.rejected == 2


@pytest.mark.parametrize("target", [CHAT, "/v1/messages"])
async def test_a_stream_that_dies(fast: Emulator, target: str) -> None:
    fast.fault(die_mid_stream_after=3)
    async with connection(fast) as client:
        client.send(raw(target, {"messages": HELLO, "stream": True, "max_tokens": 20}))
        await client.head()
        for _ in range(3):
            assert parse_event(await client.chunk())
        with pytest.raises(Ended) as ended:
            await client.chunk()
        assert ended.value.got == b""


async def test_a_crash_resets_connections_and_closes_the_port(slow: Emulator) -> None:
    async with connection(slow) as client:
        begin(client, stream=True)
        await client.head()
        await slow.kill()
        await client.end()
    with pytest.raises(OSError, match="Connect"):
        await ask(slow, "/ready")
