"""Load reports over real sockets: what is asked, what the Balancer is told, and what becomes of trouble."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from policies.balancer import Balancer
from policies.events import CacheCleared, LoadReported
from policies.types import Load, Replica, State
from router.ask import MAX_BYTES, Asker
from router.proxy.upstream import Upstream
from router.reports import RETRY_UPWARD_S, Reports
from router.settings import ReportSettings
from tests.fakes.logged import logged
from tests.fakes.recorder import Recorder
from tests.fakes.replica import SILENCE, FakeReplica, Reply
from tests.fakes.wire import eventually

SETTINGS = ReportSettings(timeout_s=0.5).model_copy(update={"interval_s": 0.02})


class Polled:
    """One fake replica, polled; the clock is the test's."""

    def __init__(self, rank: int | None = None, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.fake = FakeReplica()
        self.policy = Recorder()
        self.balancer = Balancer(self.policy)
        self.replica = Replica("r")
        self.now = 1000.0
        self.reports = Reports(self.balancer, SETTINGS, lambda: self.now)
        self.taken = 0.0

    async def start(self) -> None:
        await self.fake.start()
        self.balancer.join(self.replica, self.now)
        self._asker = Asker(Upstream(self.fake.url, connect_s=2, idle_s=3))
        self.reports.watch(self.replica, self._asker, self.rank, self.ranks)

    async def stop(self) -> None:
        await self.reports.forget(self.replica)
        await self.fake.stop()

    def say(self, *, ranks: int = 1, age_s: float = 0.0, **fields: Any) -> None:
        """Answer `/v1/loads` with this, taken so long before the answer and later than what was said before."""
        self.taken += 0.001
        answered = 1e9 + self.taken
        rank = {"timestamp": answered - age_s, "num_running_reqs": 0, "num_waiting_reqs": 0} | fields
        said = {"timestamp": datetime.fromtimestamp(answered, UTC).isoformat(), "loads": [rank] * ranks}
        self.fake.say("/v1/loads", said)

    @property
    def load(self) -> Load:
        assert self.replica.load is not None
        return self.replica.load

    def told(self, kind: type) -> int:
        return len(self.policy.told(kind))

    async def reported(self, more: int = 2) -> Load:
        """Wait for reports of what is said now: the first of two may have been asked for before."""
        goal = self.told(LoadReported) + more
        await eventually(lambda: self.told(LoadReported) >= goal, f"{goal} reports")
        return self.load


@pytest.fixture
async def polled() -> AsyncIterator[Polled]:
    polled = Polled()
    polled.fake.say("/server_info", {"startup_time": {"e2e": 1.5}})
    polled.say()
    await polled.start()
    yield polled
    await polled.stop()


async def test_what_an_engine_says_is_what_the_balancer_knows(polled: Polled) -> None:
    polled.say(num_running_reqs=3, num_waiting_reqs=2, num_waiting_uncached_tokens=70, max_total_num_tokens=1000)
    load = await polled.reported()
    assert (load.running, load.waiting, load.waiting_tokens, load.capacity_tokens) == (3, 2, 70, 1000)
    assert load.at == polled.now


async def test_a_hung_engine_answers_and_its_report_grows_old(polled: Polled) -> None:
    await polled.reported()
    polled.fake.say(
        "/v1/loads",
        {
            "timestamp": datetime.fromtimestamp(2e9 + 30, UTC).isoformat(),
            "loads": [{"timestamp": 2e9, "num_running_reqs": 0, "num_waiting_reqs": 0}],
        },
    )
    load = await polled.reported()
    assert polled.now - load.at == pytest.approx(30)


async def test_the_same_numbers_again_are_as_old_as_when_they_were_first_seen(polled: Polled) -> None:
    """Also where the answer does not tell when it was made."""
    polled.fake.say("/v1/loads", {"loads": [{"timestamp": 5e8, "num_running_reqs": 1, "num_waiting_reqs": 0}]})
    assert (await polled.reported()).at == 1000.0
    polled.now = 1060.0
    assert (await polled.reported()).at == 1000.0
    polled.fake.say("/v1/loads", {"loads": [{"timestamp": 5e8 + 1, "num_running_reqs": 1, "num_waiting_reqs": 0}]})
    assert (await polled.reported()).at == 1060.0


async def test_prefill_speed_is_measured_between_reports(polled: Polled) -> None:
    polled.say(total_prefill_uncached_tokens=1000, total_prefill_busy_us=1_000_000)
    assert (await polled.reported()).prefill_tokens_per_s is None
    polled.say(total_prefill_uncached_tokens=11_000, total_prefill_busy_us=2_000_000)
    assert (await polled.reported()).prefill_tokens_per_s == pytest.approx(10_000)
    polled.say(total_prefill_uncached_tokens=11_010, total_prefill_busy_us=3_000_000)
    assert (await polled.reported()).prefill_tokens_per_s == pytest.approx(10_000), "10 tokens say nothing"
    polled.say(total_prefill_uncached_tokens=31_010, total_prefill_busy_us=4_000_000)
    assert 10_000 < (await polled.reported()).prefill_tokens_per_s < 20_000, "a moving average"  # type: ignore[operator]


async def test_prefill_speed_of_ranks_side_by_side_adds_up(polled: Polled) -> None:
    polled.say(ranks=4, total_prefill_uncached_tokens=0, total_prefill_busy_us=0)
    await polled.reported()
    polled.say(ranks=4, total_prefill_uncached_tokens=10_000, total_prefill_busy_us=1_000_000)
    assert (await polled.reported()).prefill_tokens_per_s == pytest.approx(40_000)


async def test_prefill_speed_beyond_belief_is_bounded(polled: Polled) -> None:
    polled.say(total_prefill_uncached_tokens=0, total_prefill_busy_us=0)
    await polled.reported()
    polled.say(total_prefill_uncached_tokens=10**12, total_prefill_busy_us=1)
    assert (await polled.reported()).prefill_tokens_per_s == 1e7


@pytest.mark.parametrize("info_due", [False, True])
async def test_a_restart_is_seen_once_whichever_sign_is_seen_first(
    info_due: bool, polled: Polled, caplog: pytest.LogCaptureFixture
) -> None:
    polled.say(total_prefill_uncached_tokens=1000)
    await polled.reported()
    polled.now += 10 if info_due else 1
    at = polled.now
    polled.fake.say("/server_info", {"startup_time": {"e2e": 1.6}})
    polled.say(total_prefill_uncached_tokens=10)
    await polled.reported()
    polled.say(total_prefill_uncached_tokens=20)
    for _ in range(2):
        polled.now += 10
        await polled.fake.asked_for("/server_info")
        await polled.reported()
    assert polled.told(CacheCleared) == 1
    assert polled.replica.since == at
    (message,) = [record.message for record in logged(caplog, "warmroute.reports")]
    assert message.startswith("replica r restarted")


async def test_a_changed_startup_time_means_an_empty_cache(polled: Polled) -> None:
    await polled.reported()
    polled.now += 11
    await polled.fake.asked_for("/server_info")
    assert polled.told(CacheCleared) == 0, "the same"
    polled.fake.say("/server_info", {"other": 1})
    polled.now += 11
    await polled.fake.asked_for("/server_info")
    polled.fake.say("/server_info", {"startup_time": {"e2e": 1.7}})
    polled.now += 11
    await eventually(lambda: polled.told(CacheCleared) == 1)
    assert polled.replica.since == polled.now


async def test_an_engine_that_comes_back_is_asked_at_once(polled: Polled) -> None:
    await polled.reported()
    polled.balancer.set_state(polled.replica, State.EJECTED, polled.now)
    await polled.reported()
    polled.fake.say("/server_info", {"startup_time": {"e2e": 1.8}})
    await polled.reported()
    assert polled.told(CacheCleared) == 0, "not asked again within ten seconds"
    polled.balancer.set_state(polled.replica, State.READY, polled.now)
    await eventually(lambda: polled.told(CacheCleared) == 1)


async def test_old_names_of_server_info() -> None:
    polled = Polled()
    polled.say()
    polled.fake.say("/get_server_info", {"max_total_num_tokens": 777})
    await polled.start()
    await polled.reported()
    assert (await polled.reported()).capacity_tokens == 777, "where the report itself does not tell"
    await polled.stop()


@pytest.mark.parametrize("status", [401, 403, 404, 405, 501])
async def test_fallbacks_one_after_the_other_and_back(status: int, polled: Polled) -> None:
    polled.fake.say("/v1/loads", status)
    polled.fake.say("/get_load", [{"num_reqs": 5, "num_waiting_reqs": 1}])
    assert (await polled.reported()).running == 4
    polled.fake.say("/get_load", 404)
    polled.fake.say("/metrics", Reply(200, b"sglang_num_running_reqs 9.0\n"))
    assert (await polled.reported()).running == 9
    polled.say(num_running_reqs=1)
    assert (await polled.reported()).running == 9, "the better source is not asked all the time"
    polled.now += RETRY_UPWARD_S
    assert (await polled.reported()).running == 1


async def test_an_engine_that_tells_nothing_is_left_alone_for_a_minute(
    polled: Polled, caplog: pytest.LogCaptureFixture
) -> None:
    await polled.reported()
    caplog.set_level(logging.INFO, "warmroute.reports")
    polled.fake.say("/v1/loads", 404)
    await polled.fake.asked_for("/metrics")
    asked = polled.fake.asked.count("/metrics")
    for _ in range(3):  # that it still lives shows in the other question
        polled.now += 11
        await polled.fake.asked_for("/server_info")
    assert polled.fake.asked.count("/metrics") == asked
    polled.now += RETRY_UPWARD_S
    await polled.fake.asked_for("/metrics")
    assert [record.message for record in logged(caplog, "warmroute.reports")] == [
        "replica r tells no load: it has none of /v1/loads, /get_load, /metrics"
    ]


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (Reply(200, b"<html>"), "/v1/loads: not JSON"),
        (Reply(200, b'{"loads": [{}]}'), "/v1/loads: no counts in it"),
        (Reply(500), "/v1/loads says 500"),
        (SILENCE, "load: no answer to /v1/loads within 0.5 s"),
        (Reply(200, b" " * (MAX_BYTES + 1)), "larger than 1048576 bytes"),
    ],
)
async def test_trouble_is_logged_when_it_comes_and_when_it_goes(
    trouble: Reply, told: str, polled: Polled, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "warmroute.reports")
    polled.say(num_running_reqs=7)
    await polled.reported()
    polled.fake.say("/v1/loads", trouble)
    await polled.fake.asked_for("/v1/loads", 4)
    assert polled.load.running == 7, "the last good one stays, and grows old"
    assert polled.load.at == 1000.0
    polled.say(num_running_reqs=2)
    assert (await polled.reported()).running == 2
    messages = [record.message for record in logged(caplog, "warmroute.reports")]
    assert len(messages) == 2, messages
    assert told in messages[0]
    assert messages[1] == "replica r tells its load again"


async def test_a_forgotten_replica_is_told_nothing_more(polled: Polled) -> None:
    await polled.reported()
    await polled.reports.forget(polled.replica)
    told = polled.told(LoadReported)
    await polled.reports.forget(polled.replica)  # a second time does nothing
    assert polled.told(LoadReported) == told


# Ranks


async def test_of_a_rank_only_its_own_load_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    polled = Polled(rank=3, ranks=4)
    loads = {"loads": [{"dp_rank": 3, "num_running_reqs": 7, "num_waiting_reqs": 0}]}
    polled.fake.say("/v1/loads?dp_rank=3", loads)
    polled.fake.say("/server_info", {"dp_size": 4, "max_total_num_tokens": 500})
    await polled.start()
    load = await polled.reported()
    assert (load.running, load.capacity_tokens) == (7, 500)
    polled.fake.say("/v1/loads?dp_rank=3", {"loads": []})
    await eventually(lambda: logged(caplog, "warmroute.reports"))
    polled.fake.say("/v1/loads?dp_rank=3", loads)
    await polled.reported()
    trouble, well = (record.message for record in logged(caplog, "warmroute.reports"))
    assert trouble.startswith(
        "replica r tells no load: /v1/loads: the engine tells of no data-parallel rank 3: `ranks`"
    )
    assert well == "replica r tells its load again"
    assert "/v1/loads" not in polled.fake.asked
    await polled.stop()


@pytest.mark.parametrize(
    ("rank", "ranks", "found", "words"),
    [
        (None, 1, 1, ""),
        (
            None,
            1,
            4,
            "`ranks` says 1: the engine spreads a session's turns over 4 KV caches, and affinity is worth 1/4: ",
        ),
        (0, 4, 2, "`ranks` says 4: what is sent to the ranks that it does not have, it refuses (400): "),
        (0, 2, 4, "`ranks` says 2: nothing is sent to the ranks beyond: "),
        (0, 2, 2, ""),
        (1, 2, 4, ""),
    ],
)
async def test_another_size_than_was_said_is_told_once(
    rank: int | None, ranks: int, found: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    polled = Polled(rank, ranks)
    polled.fake.say("/v1/loads" + (f"?dp_rank={rank}" if rank is not None else ""), 404)
    polled.fake.say("/get_load", {"dp_rank": rank, "num_reqs": 1, "num_waiting_reqs": 0})
    polled.fake.say("/server_info", {"dp_size": found})
    await polled.start()

    async def looked_at() -> list[str]:
        """What was said once it has been looked at three times more."""
        for _ in range(3):
            await polled.reported()
            polled.now += 11
            await polled.fake.asked_for("/server_info")
        await polled.reported()
        return [record.message for record in logged(caplog, "warmroute.reports")]

    said = await looked_at()
    assert len(said) == bool(words), said
    if words:
        assert words + f"set ranks: {found} where" in said[0]
        polled.reports.expect(polled.replica, found)
        assert (await looked_at())[1:] == ["replica r: its engine has as many data-parallel ranks as `ranks` says"], (
            "mended, and told once"
        )
    await polled.stop()
