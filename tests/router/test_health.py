"""Probes over real sockets: what is asked, and what becomes of the answers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest

from policies.balancer import Balancer
from policies.round_robin import RoundRobin
from policies.types import Replica, State
from router.ask import Asker
from router.health import RETRY_UPWARD_S, STATEMENT_S, Health
from router.proxy.upstream import Upstream
from router.settings import HealthSettings
from tests.fakes.replica import SILENCE, FakeReplica, Reply
from tests.fakes.wire import eventually

SETTINGS = HealthSettings(interval_s=0.02, timeout_s=0.2, deep_interval_s=0.05, deep_timeout_s=1.5)
SELDOM = SETTINGS.model_copy(update={"deep_interval_s": 3600.0})


class Watched:
    """One fake replica under watch; the clock is the test's."""

    def __init__(self, fake: FakeReplica, settings: HealthSettings) -> None:
        self.fake = fake
        self.balancer = Balancer(RoundRobin())
        self.replica = Replica("r")
        self.now = 1000.0
        self.health = Health(self.balancer, settings, lambda: self.now)

    async def start(self) -> None:
        await self.fake.start()
        self.balancer.join(self.replica, self.now)
        self._asker = Asker(Upstream(self.fake.url, connect_s=2, idle_s=3))
        self.health.watch(self.replica, self._asker)

    async def stop(self) -> None:
        await self.health.forget(self.replica)
        await self.fake.stop()

    async def becomes(self, state: State) -> None:
        await eventually(lambda: self.replica.state is state, f"{state}; it is {self.replica.state}: {self.why}")

    @property
    def why(self) -> str:
        return self.health.why(self.replica)

    async def serves_on(self, path: str = "/ready", questions: int = 6) -> None:
        """It is still ready after so many questions more."""
        await self.fake.asked_for(path, questions)
        assert self.replica.state is State.READY, self.why


class Watch:
    """Starts watching; ends it all after the test."""

    def __init__(self) -> None:
        self.started: list[Watched] = []

    async def __call__(self, fake: FakeReplica, settings: HealthSettings = SETTINGS) -> Watched:
        watched = Watched(fake, settings)
        self.started.append(watched)
        await watched.start()
        return watched


@pytest.fixture
async def watch() -> AsyncIterator[Watch]:
    watch = Watch()
    yield watch
    for watched in watch.started:
        await watched.stop()


async def test_ready_before_and_after_the_first_probe(watch: Watch) -> None:
    watched = await watch(FakeReplica(ready=200), SELDOM)
    assert watched.balancer.ready == (watched.replica,), "a router that starts refuses nothing"
    assert not watched.health.probed
    await eventually(lambda: watched.health.probed)
    await watched.serves_on()
    assert watched.why == "ready"
    assert set(watched.fake.asked) == {"/ready"}


async def test_503_means_nothing_new_at_once(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.health")
    watched = await watch(FakeReplica(ready=200), SELDOM)
    await eventually(lambda: watched.health.probed)
    since = watched.health.since(watched.replica)
    watched.fake.say("/ready", 503)
    await watched.becomes(State.DRAINING)
    assert watched.why == "/ready says 503: it drains, is paused, or starts"
    assert watched.health.since(watched.replica) != since
    watched.fake.say("/ready", 200)
    await watched.becomes(State.READY)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"], "one line for each change"
    assert "replica r is draining (was ready): /ready says 503" in caplog.text


@pytest.mark.parametrize("trouble", [SILENCE, Reply(500), Reply(502)])
async def test_failed_probes_eject_and_good_ones_readmit(trouble: Reply, watch: Watch) -> None:
    watched = await watch(FakeReplica(ready=200), SELDOM)
    await watched.serves_on()
    watched.fake.say("/ready", trouble)
    await watched.becomes(State.EJECTED)
    assert watched.why.startswith(("/ready says 50", "no answer to /ready within 0.2 s"))
    watched.fake.say("/ready", 200)
    await watched.becomes(State.READY)


async def test_an_engine_that_dies_and_starts_again(watch: Watch) -> None:
    fake = FakeReplica(ready=200)
    watched = await watch(fake, SELDOM)
    await watched.serves_on()
    await fake.down()
    await watched.becomes(State.EJECTED)
    assert "/ready" in watched.why
    fake.say("/ready", 503)
    await fake.up()
    await watched.becomes(State.DRAINING)
    fake.say("/ready", 200)
    await watched.becomes(State.READY)


async def test_failed_requests_eject_before_any_probe_does(watch: Watch) -> None:
    watched = await watch(FakeReplica(ready=200), SELDOM.model_copy(update={"interval_s": 3600.0}))
    for _ in range(2):
        watched.health.failed(watched.replica, "connect")
    watched.health.succeeded(watched.replica)
    for _ in range(2):
        watched.health.failed(watched.replica, "connect")
    assert watched.replica.state is State.READY
    watched.health.failed(watched.replica, "reset")
    assert watched.replica.state is State.EJECTED
    assert watched.balancer.ready == ()
    assert watched.why == "3 requests in a row failed, the last by reset"


async def test_a_replica_unwatched_may_still_be_told_of(watch: Watch) -> None:
    watched = await watch(FakeReplica(ready=200))
    stranger = Replica("stranger")
    for _ in range(5):
        watched.health.failed(stranger, "reset")
    watched.health.succeeded(stranger)
    assert (stranger.state, watched.health.why(stranger)) == (State.READY, "not watched")
    assert watched.health.since(stranger) is None


# Engines without /ready, servers without /health


async def test_an_older_engine_is_judged_by_health(watch: Watch) -> None:
    watched = await watch(FakeReplica(health=200))
    await watched.serves_on("/health", 3)
    watched.fake.say("/health", 503)  # at once: it drains or starts
    await watched.becomes(State.DRAINING)
    watched.fake.say("/health", 200)
    await watched.becomes(State.READY)
    await watched.fake.down()
    await watched.becomes(State.EJECTED)


async def test_an_older_engine_that_hangs(watch: Watch) -> None:
    watched = await watch(FakeReplica(health=200))
    await watched.serves_on("/health", 2)
    watched.fake.say("/health", SILENCE)
    await watched.fake.asked_for("/health")
    watched.now += STATEMENT_S
    await watched.becomes(State.EJECTED)
    assert watched.why == "no answer to /health within 1.5 s: it generates nothing"
    watched.fake.say("/health", 200)
    await watched.becomes(State.READY)


@pytest.mark.parametrize("root", [200, 404, 401])
async def test_a_server_without_health_is_well_when_it_answers(root: int, watch: Watch) -> None:
    watched = await watch(FakeReplica())
    watched.fake.say("/", root)
    await watched.serves_on("/")
    watched.fake.say("/", 500)
    await watched.becomes(State.EJECTED)


async def test_a_gateways_404_is_not_believed_forever(watch: Watch) -> None:
    watched = await watch(FakeReplica(), SELDOM)
    await watched.serves_on("/")
    watched.fake.say("/ready", 503)
    await watched.serves_on("/")
    watched.now += RETRY_UPWARD_S
    await watched.becomes(State.DRAINING)


async def test_another_version_may_come_back(watch: Watch) -> None:
    watched = await watch(FakeReplica(health=200), SELDOM.model_copy(update={"deep_interval_s": 0.05}))
    await watched.serves_on("/health", 2)
    await watched.fake.down()
    await watched.becomes(State.EJECTED)
    watched.fake.say("/ready", 200)
    await watched.fake.up()
    await watched.becomes(State.READY)
    await watched.serves_on("/ready")


# The deep probe


async def test_an_idle_replica_is_asked_to_generate(watch: Watch) -> None:
    watched = await watch(FakeReplica(ready=200, health=200))
    await watched.serves_on("/health", 2)


async def test_one_that_answers_requests_is_not_asked_to_generate(watch: Watch) -> None:
    fake = FakeReplica(ready=200, health=200)
    watched = await watch(fake)
    await fake.asked_for("/health")
    for _ in range(20):
        watched.health.succeeded(watched.replica)
        await fake.asked_for("/ready")
    asked = fake.asked.count("/health")
    for _ in range(20):
        watched.health.succeeded(watched.replica)
        await fake.asked_for("/ready")
    assert fake.asked.count("/health") - asked <= 2


async def test_a_hung_scheduler_behind_a_good_ready(watch: Watch) -> None:
    fake = FakeReplica(ready=200, health=200)
    watched = await watch(fake)
    await watched.serves_on("/health", 1)
    fake.say("/health", SILENCE)
    await fake.asked_for("/health")
    watched.now += 20
    await watched.becomes(State.EJECTED)
    assert watched.why.endswith("it generates nothing")
    await fake.asked_for("/ready", 6)
    assert watched.replica.state is State.EJECTED, "however often /ready says 200"
    fake.say("/health", 200)
    await watched.becomes(State.READY)


async def test_an_answered_request_overrides_a_silent_health(watch: Watch) -> None:
    fake = FakeReplica(ready=200, health=SILENCE)
    watched = await watch(fake)
    await fake.asked_for("/health")
    watched.health.succeeded(watched.replica)
    watched.now += 20
    await watched.serves_on("/health", 1)


async def test_a_health_that_fails_at_once_tells_of_a_start_not_of_silence(watch: Watch) -> None:
    fake = FakeReplica(ready=200, health=503)
    watched = await watch(fake)
    await watched.serves_on("/health", 3)


async def test_a_failed_health_is_asked_again_so_that_ready_recovers(watch: Watch) -> None:
    """SGLang's /ready says 503 after a failed /health until one succeeds, and nobody else may ask."""
    fake = FakeReplica(ready=503, health=200)
    watched = await watch(fake)
    await watched.becomes(State.DRAINING)
    await fake.asked_for("/health", 2)


# The watch itself


async def test_the_end_of_a_watch_ends_its_probes(watch: Watch) -> None:
    fake = FakeReplica(ready=SILENCE, health=SILENCE)
    watched = await watch(fake)
    await fake.asked_for("/ready")
    await watched.health.forget(watched.replica)
    assert watched.health.probed, "nobody is left to wait for"
    await watched.health.forget(watched.replica)  # a second time does nothing
