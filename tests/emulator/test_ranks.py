"""An emulated engine with several data-parallel ranks, as a real SGLang 0.5.23 with `--dp-size 2` was seen to be."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from sim.emulator import Emulator, EmulatorConfig
from tests.emulator.asks import CHAT, HELLO, ask, ask_json, begin, connection
from tests.fakes.wire import eventually


@pytest.fixture
async def two() -> AsyncIterator[Emulator]:
    """Two ranks, so fast that every answer is there at once."""
    async with Emulator(EmulatorConfig(dp_size=2, kv_tokens=4000, time_scale=0.0001)) as emulator:
        yield emulator


async def cached(replica: Emulator, *headers: str, **fields: object) -> int:
    """Tokens of a chat's prompt that were in the cache that it met."""
    told = await ask_json(replica, CHAT, {"messages": HELLO, **fields}, *headers)
    return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_each_rank_has_a_cache_of_its_own(two: Emulator) -> None:
    first, second = "X-Data-Parallel-Rank: 0", "x-data-parallel-rank: 1"
    assert await cached(two, first) == 0
    assert await cached(two, first) > 0
    assert await cached(two, second) == 0
    assert await cached(two, second) > 0


async def test_without_a_rank_each_takes_its_turn(two: Emulator) -> None:
    assert [await cached(two) > 0 for _ in range(4)] == [False, False, True, True]


async def test_the_header_goes_before_the_body(two: Emulator) -> None:
    assert await cached(two, routed_dp_rank=1) == 0
    assert await cached(two, "X-Data-Parallel-Rank: 1", routed_dp_rank=0) > 0
    assert await cached(two, data_parallel_rank=0) == 0


async def test_generate_looks_at_the_body_only(two: Emulator) -> None:
    prompt = {"text": "Say hello to the sea."}
    for rank in (1, 0):
        told = await ask_json(two, "/generate", {**prompt, "routed_dp_rank": rank}, "X-Data-Parallel-Rank: 7")
        assert told["meta_info"]["dp_rank"] == rank


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        ("2", "routed_dp_rank=2 out of range [0, 2)"),
        ("-1", "routed_dp_rank=-1 out of range [0, 2)"),
        ("x", "Invalid X-Data-Parallel-Rank header: must be an integer, got 'x'"),
    ],
)
async def test_a_rank_that_is_none_is_refused(rank: str, message: str, two: Emulator) -> None:
    answer = await ask(two, CHAT, {"messages": HELLO}, f"X-Data-Parallel-Rank: {rank}")
    assert (answer.status, json.loads(answer.body)["message"]) == (400, message)


async def test_each_rank_tells_its_own_load() -> None:
    config = EmulatorConfig(dp_size=2, kv_tokens=20_000, max_running_requests=1, max_queued_requests=1)
    async with Emulator(config) as replica, connection(replica) as busy, connection(replica) as waiting:
        for client in (busy, waiting):
            begin(client, routed_dp_rank=1)
        await eventually(lambda: (replica.running, replica.queued) == (1, 1))
        counts = ("dp_rank", "num_running_reqs", "num_waiting_reqs", "max_total_num_tokens")

        async def told(query: str) -> list[tuple[int, ...]]:
            loads = (await ask_json(replica, f"/v1/loads{query}"))["loads"]
            return [tuple(load[name] for name in counts) for load in loads]

        assert (await told(""))[0] == (0, 0, 0, 20_000)
        assert [rank for rank, *_ in await told("?dp_rank=1")] == [1]
        assert await told("?dp_rank=2") == []
        await eventually(lambda: replica.engine.schedulers[1].snapshot["num_waiting_reqs"] == 1)
        assert await told("?dp_rank=1") == [(1, 1, 1, 20_000)]
        info = await ask_json(replica, "/server_info")
        assert (info["dp_size"], info["max_total_num_tokens"], len(info["internal_states"])) == (2, 20_000, 2)
        text = (await ask(replica, "/metrics")).body.decode()
        assert 'sglang:num_running_reqs{dp_rank="1",engine_type="unified"' in text
        said = (await ask(replica, "/v1/loads?format=prometheus")).body.decode()
        assert 'sglang_num_running_reqs{dp_rank="0"} 0\nsglang_num_running_reqs{dp_rank="1"} 1\n' in said


async def test_a_flush_empties_all_ranks(two: Emulator) -> None:
    for rank in (0, 1):
        await cached(two, routed_dp_rank=rank)
    assert (await ask(two, "/flush_cache")).status == 200
    assert [await cached(two, routed_dp_rank=rank) for rank in (0, 1)] == [0, 0]
