"""What a replica says of itself and of what it was sent; connections."""

from __future__ import annotations

import json

import pytest

from sim.emulator import Emulator, EmulatorConfig
from tests.emulator.asks import CHAT, HELLO, ask, ask_json, begin, connection, raw
from tests.fakes.client import get
from tests.fakes.wire import eventually


async def test_log_keeps_what_tests_ask_for(fast: Emulator) -> None:
    secrets = ["Authorization: Bearer s", "X-Api-Key: s", "Cookie: s"]
    await ask(fast, CHAT, {"messages": HELLO, "rid": "r1"}, "X-Session-Affinity: abc", *secrets)
    await ask(fast, CHAT, {"messages": []})
    first, second = await ask_json(fast, "/_emulator/log")
    assert first.pop("headers").items() >= {"x-session-affinity": "abc"}.items()
    assert not {"authorization", "x-api-key", "cookie"} & fast.log[0].headers.keys()
    assert first == {
        "path": CHAT,
        "rid": "r1",
        "stream": False,
        "prompt_tokens": 57,
        "cached_tokens": 0,
        "completion_tokens": 32,
        "finish_reason": "stop",
        "error": None,
    }
    assert second["error"] == 400


async def test_a_restart_shows(fast: Emulator) -> None:
    times = [(await ask_json(fast, "/server_info"))["startup_time"] for _ in range(2)]
    async with Emulator(EmulatorConfig()) as other:
        times.append((await ask_json(other, "/server_info"))["startup_time"])
    assert times[0] == times[1] != times[2]


async def test_parts_of_the_load(fast: Emulator) -> None:
    core = (await ask_json(fast, "/v1/loads?include=core"))["loads"][0]
    assert "queues" not in core
    assert "memory" not in core
    assert "queues" in (await ask_json(fast, "/v1/loads?include=core,queues"))["loads"][0]
    assert (await ask_json(fast, "/v1/loads?dp_rank=0"))["loads"][0]["dp_rank"] == 0
    assert (await ask(fast, "/v1/loads?include=everything")).status == 400


async def test_the_load_is_published_every_15_steps(slow: Emulator) -> None:
    async with connection(slow) as client:
        begin(client)
        await eventually(lambda: slow.engine.schedulers[0].replica.totals.decode_steps >= 16)
        load = (await ask_json(slow, "/v1/loads"))["loads"][0]
        steps = load["decode_moments"][0]
        assert 0 < steps <= slow.engine.schedulers[0].replica.totals.decode_steps
        assert load["gen_throughput"] > 0


async def test_api_key() -> None:
    async with Emulator(EmulatorConfig(time_scale=0.0001, api_key="k")) as replica:
        open_paths = ("/ready", "/health", "/health_generate", "/metrics")
        assert [(await ask(replica, path)).status for path in open_paths] == [200] * 4
        closed = ("/v1/loads", "/server_info", "/ping", "/v1/models", "/_emulator/log", "/")
        assert [(await ask(replica, path)).status for path in closed] == [401] * 6
        with_key = await ask(replica, CHAT, {"messages": HELLO}, "Authorization: Bearer k")
        assert with_key.status == 200


async def test_small_endpoints(fast: Emulator) -> None:
    assert (await ask_json(fast, "/v1/messages/count_tokens", {"messages": HELLO})) == {"input_tokens": 57}
    one = await ask_json(fast, "/v1/embeddings", {"input": ["a", "b", "a"]})
    vectors = [item["embedding"] for item in one["data"]]
    assert vectors[0] == vectors[2] != vectors[1]
    assert (await ask_json(fast, "/v1/models/emulated"))["id"] == "emulated"
    assert (await ask_json(fast, "/generate", {"input_ids": [1, 2, 3]}))["meta_info"]["prompt_tokens"] == 3
    batch = await ask(fast, "/generate", {"text": ["a", "b"]})
    assert batch.status == 400


async def test_head_is_refused(fast: Emulator) -> None:
    async with connection(fast) as client:
        assert (await client.ask(get("/health", method="HEAD"))).status == 405


async def test_one_connection_serves_many(fast: Emulator) -> None:
    async with connection(fast) as client:
        for streaming in (True, False, True):
            answer = await client.ask(raw(CHAT, {"messages": HELLO, "stream": streaming, "max_tokens": 3}))
            assert answer.status == 200
            assert answer.header("connection") is None


async def test_idle_connections_are_closed() -> None:
    async with (
        Emulator(EmulatorConfig(time_scale=0.0001, keep_alive_seconds=0.05)) as replica,
        connection(replica) as client,
    ):
        await client.ask(get("/ready"))
        assert await client.end() == "eof"


async def test_a_replica_that_cannot_keep_up_starves_nobody() -> None:
    """A time scale far too small for the machine lags behind, but others are answered before the run has ended."""
    async with Emulator(EmulatorConfig(time_scale=1e-9)) as busy, connection(busy) as client:
        begin(client, max_tokens=50_000)
        await eventually(lambda: busy.running)
        assert (await ask(busy, "/ready")).status == 200
        assert busy.running == 1
        assert json.loads((await client.answer()).body)["usage"]["completion_tokens"] == 50_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time_scale": 0}, "time_scale must be above 0, not 0"),
        ({"page_size": -1}, "page_size must be above 0, not -1"),
        ({"max_queued_requests": -1}, "max_queued_requests must be 0 or more, not -1"),
        ({"port": 70_000}, "port must be between 0 and 65535, not 70000"),
        ({"hardware": "abacus"}, "hardware must be one of kimi-int4-tp4-bf16, .*, not 'abacus'"),
        ({"kv_tokens": 8}, "kv_tokens must hold a page of 16 tokens, not 8"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmulatorConfig(**settings)  # type: ignore[arg-type]
