"""Probes over real sockets: what is asked, and what becomes of the answers."""

from __future__ import annotations

import logging
import resource
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from policies.balancer import Balancer
from policies.events import Event, ReplicaChanged
from policies.round_robin import RoundRobin
from policies.types import Load, Replica, State
from router.ask import Asker, Nobody, kind
from router.health import Health
from router.probes import RETRY_UPWARD_S, STATEMENT_S
from router.proxy.upstream import Upstream
from router.settings import HealthSettings
from router.standing import Missing
from tests.fakes.logged import logged
from tests.fakes.process import free_port
from tests.fakes.replica import SILENCE, FakeReplica, Reply
from tests.fakes.wire import eventually

# Quicker than the settings allow; and a fleet of one, in which the panic rule would use whatever is ejected.
SETTINGS = HealthSettings(timeout_s=0.2, panic_share=0.0).model_copy(
    update={"interval_s": 0.02, "deep_interval_s": 0.05, "deep_timeout_s": 0.5}
)
LogCapture = pytest.LogCaptureFixture
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
    assert [record.levelname for record in logged(caplog, "warmroute.health")] == ["WARNING", "INFO"], (
        "one line for each change"
    )
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


class Slips(RoundRobin):
    """Makes a mistake when it hears of a replica that is not what it was."""

    def observe(self, event: Event) -> None:
        if isinstance(event, ReplicaChanged):
            raise ValueError("math domain error")


async def test_a_mistake_of_the_policy_ends_no_probes(watch: Watch, caplog: LogCapture) -> None:
    watched = await watch(FakeReplica(ready=200), SELDOM)
    watched.balancer.switch(Slips(), watched.now)
    watched.fake.say("/ready", Reply(500))
    await watched.becomes(State.EJECTED)
    watched.fake.say("/ready", 200)
    await watched.becomes(State.READY)
    assert [each.levelname for each in logged(caplog, "warmroute.health")].count("ERROR") == 2


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
    watched.health.answered(watched.replica, 200)
    for _ in range(2):
        watched.health.failed(watched.replica, "connect")
    assert watched.replica.state is State.READY
    watched.health.failed(watched.replica, "reset")
    assert watched.replica.state is State.EJECTED
    assert watched.balancer.ready == ()
    assert watched.why == "3 requests in a row failed, the last by reset"


async def test_it_is_on_trial_when_its_time_is_up_and_ready_once_it_answers(watch: Watch) -> None:
    watched = await watch(FakeReplica(ready=200), SELDOM)
    for _ in range(3):
        watched.health.failed(watched.replica, "reset")
    await watched.fake.asked_for("/ready", 4)
    assert watched.replica.state is State.EJECTED, "though its probes pass"
    watched.now += SELDOM.open_s
    await watched.becomes(State.HALF_OPEN)
    assert watched.balancer.ready == (watched.replica,)
    watched.health.answered(watched.replica, 503)
    assert watched.replica.state is State.HALF_OPEN, "a full queue speaks neither for it nor against it"
    watched.health.answered(watched.replica, 200)
    assert (watched.replica.state, watched.why) == (State.READY, "ready")


@pytest.mark.parametrize("status", [200, 400, 404, 422, 429, 499, 501, 503, 505])
async def test_answers_that_speak_of_the_request_or_of_a_queue_are_no_failures(status: int, watch: Watch) -> None:
    watched = await watch(FakeReplica(ready=200), SELDOM)
    for _ in range(100):
        watched.health.answered(watched.replica, status)
    assert watched.replica.state is State.READY


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_errors_of_its_own_are(status: int, watch: Watch) -> None:
    watched = await watch(FakeReplica(ready=200), SELDOM)
    for _ in range(SELDOM.error_fail_after):
        assert watched.replica.state is State.READY
        watched.health.answered(watched.replica, status)
    assert watched.replica.state is State.EJECTED
    assert watched.why == f"5 requests in a row failed, the last by a {status}"


async def test_an_operators_drain_outlives_probes_that_pass(watch: Watch) -> None:
    watched = await watch(FakeReplica(ready=200), SELDOM)
    watched.health.order(watched.replica, State.FINISHING, "drained by 10.0.0.9")
    await watched.fake.asked_for("/ready", 4)
    assert (watched.replica.state, watched.why) == (State.FINISHING, "drained by 10.0.0.9")
    watched.fake.say("/ready", 500)
    await watched.becomes(State.EJECTED)
    watched.fake.say("/ready", 200)
    await watched.becomes(State.FINISHING)
    watched.health.order(watched.replica, None)
    assert (watched.replica.state, watched.why) == (State.READY, "ready")


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


async def test_an_older_engine_is_on_trial_as_soon_as_its_time_is_up(watch: Watch) -> None:
    """It is asked seldom while it is ready, and only then."""
    watched = await watch(FakeReplica(ready=404, health=200), SELDOM)
    await eventually(lambda: watched.health.probed)
    for _ in range(SETTINGS.passive_fail_after):
        watched.health.failed(watched.replica, "reset")
    assert watched.replica.state is State.EJECTED
    watched.now += SETTINGS.open_s
    await watched.becomes(State.HALF_OPEN)


async def test_an_older_engine_that_hangs(watch: Watch) -> None:
    watched = await watch(FakeReplica(health=200))
    await watched.serves_on("/health", 2)
    watched.fake.say("/health", SILENCE)
    await watched.fake.asked_for("/health")
    watched.now += STATEMENT_S
    await watched.becomes(State.EJECTED)
    assert watched.why == "no answer to /health within 0.5 s: it generates nothing"
    watched.fake.say("/health", 200)
    await watched.becomes(State.READY)


@pytest.mark.parametrize("root", [200, 404, 401])
async def test_a_server_without_health_is_well_when_it_answers(root: int, watch: Watch) -> None:
    watched = await watch(FakeReplica())
    watched.fake.say("/", root)
    await watched.serves_on("/")
    assert watched.why == "it answers 404 to /ready and /health and tells no load: is this an engine?"
    watched.replica.load = Load(running=0, waiting=0, used_tokens=0, capacity_tokens=1000, at=0.0)
    await watched.serves_on("/")
    assert watched.why == "it answers 404 to /ready and /health: is this an engine?"
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


# The panic rule


class Fleet:
    """Replicas of one Health, none of them probed: what is known of each is told by the test."""

    def __init__(self, count: int, share: float = 0.5, small: str = "") -> None:
        """Those of these letters are in a pool of that name."""
        settings = HealthSettings(panic_share=share).model_copy(update={"interval_s": 1e6, "deep_interval_s": 1e6})
        self.balancer = Balancer(RoundRobin())
        self.now = 1000.0
        self.health = Health(self.balancer, settings, lambda: self.now)
        self.replicas = [Replica(name, pool="small" if name in small else "") for name in "abcdefgh"[:count]]
        asker = Asker(Upstream("http://127.0.0.1:1", connect_s=1, idle_s=1))
        for replica in self.replicas:
            self.balancer.join(replica, self.now)
            self.health.watch(replica, asker)

    def fail(self, *ids: str) -> None:
        """Their requests fail."""
        for replica in self._named(ids):
            for _ in range(3):
                self.health.failed(replica, "reset")

    def probed(self, missing: Missing | None, *ids: str) -> None:
        """Their probes fail so, or pass."""
        for replica in self._named(ids):
            watch = self.health._watches[replica]
            for _ in range(3):
                if missing is None:
                    watch.standing.probe_passed(self.now)
                else:
                    watch.standing.probe_failed(str(missing), missing)
            self.health.settle(watch)

    def _named(self, ids: tuple[str, ...]) -> list[Replica]:
        return [replica for replica in self.replicas if replica.id in ids]

    @property
    def ready(self) -> str:
        return "".join(replica.id for replica in self.balancer.ready)

    async def stop(self) -> None:
        for replica in self.replicas:
            await self.health.forget(replica)


@pytest.fixture
async def fleet() -> AsyncIterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(*arguments: object) -> Fleet:
        made.append(Fleet(*arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        await each.stop()


MakeFleet = Callable[..., Fleet]


async def test_half_the_fleet_ejected_is_no_panic_and_more_is(fleet: MakeFleet, caplog: LogCapture) -> None:
    caplog.set_level(logging.INFO, "warmroute.health")
    four = fleet(4)
    four.fail("a", "b")
    assert (four.ready, four.health.panic) == ("cd", False)
    four.fail("c")
    assert (four.ready, four.health.panic) == ("abcd", True)
    assert "panic: 1 well of 4 replicas, draining ones aside, fewer than health.panic_share 0.5" in caplog.text
    assert four.health.why(four.replicas[0]).startswith("panic: used although ejected: 3 requests in a row failed")
    four.now += 5.0
    four.probed(None, "a", "b")
    assert four.ready == "abcd", "on trial is not well: it would take two requests at a time"
    four.health.answered(four.replicas[0], 200)
    assert (four.ready, four.health.panic) == ("abd", False), "b is on trial, c not yet"
    assert four.replicas[1].state is State.HALF_OPEN
    assert "no panic any more: 2 well of 4" in caplog.text
    assert [r.levelname for r in caplog.records if "panic" in r.message].count("INFO") == 1


async def test_a_pool_is_in_panic_by_itself(fleet: MakeFleet, caplog: LogCapture) -> None:
    """One replica of a large fleet is few; all that serve a model are not."""
    five = fleet(5, 0.5, "e")
    five.fail("e")
    assert (five.ready, five.health.panic) == ("abcde", True), "the only one of its pool is used all the same"
    assert "panic: 0 well of 1 replica of pool small" in caplog.text
    five.fail("a")
    assert five.ready == "bcde", "the others' pool is not in panic"
    assert (five.health.well, five.health.counted, five.health.doubted) == (0, 1, 1)


async def test_three_of_four_that_refuse_connections_stay_out(fleet: MakeFleet) -> None:
    """Nobody listens there: a try would cost each request a refusal and the retry budget, and gain nothing."""
    four = fleet(4)
    four.probed(Missing.NOBODY, "a", "b", "c")
    assert (four.ready, four.health.panic) == ("d", True)
    four.probed(Missing.NOBODY, "d")
    assert four.ready == ""


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1%nosuch:1", "Name or service not known"),  # of no zone: the resolver says so by itself
        ("http://127.0.0.1:{port}", "Connect"),
    ],
    ids=["no such name", "refused"],
)
async def test_where_nobody_is_nothing_is_sent_though_every_replica_is_out(url: str, why: str) -> None:
    balancer, replica = Balancer(RoundRobin()), Replica("r")
    balancer.join(replica, 0.0)
    settings = SETTINGS.model_copy(update={"panic_share": 0.5})
    health = Health(balancer, settings, lambda: 0.0)
    health.watch(replica, Asker(Upstream(url.format(port=free_port()), connect_s=2, idle_s=3)))
    try:
        await eventually(lambda: replica.state is State.EJECTED, "it is out although the panic rule holds")
        assert health.panic
        assert why in health.why(replica)
    finally:
        await health.forget(replica)


def test_a_resolver_that_cannot_say_has_not_said_no() -> None:
    """EAI_AGAIN: the trouble is the resolver's, of the moment, and all replicas have it at once."""
    again, unknown = (socket.gaierror(code, "told") for code in (socket.EAI_AGAIN, socket.EAI_NONAME))
    assert (kind(again), kind(unknown)) == (OSError, Nobody)


async def test_the_end_of_a_fleet_is_no_end_of_a_panic(fleet: MakeFleet, caplog: LogCapture) -> None:
    caplog.set_level(logging.INFO, "warmroute.health")
    two = fleet(2)
    two.probed(Missing.NOBODY, "a", "b")
    for replica in two.replicas:
        await two.health.forget(replica)
    assert not two.health.panic
    assert "no panic any more" not in caplog.text


async def test_those_that_answer_no_probe_are_used_only_when_there_is_nothing_else(fleet: MakeFleet) -> None:
    four = fleet(4)
    four.probed(Missing.NOTHING, "a", "b", "c")
    assert four.ready == "d"
    four.probed(Missing.NONSENSE, "a")
    assert four.ready == "ad", "it answers, if nonsense"
    four.probed(Missing.NOBODY, "d")
    assert four.ready == "a"
    four.probed(Missing.NOTHING, "a")
    assert four.ready == "abc", "and never the one that refuses"


async def test_an_overloaded_one_that_answers_requests_but_no_probes_is_used(fleet: MakeFleet) -> None:
    four = fleet(4)
    four.probed(Missing.NOTHING, "a", "b", "c")
    four.health.succeeded(four.replicas[1])
    four.health.settle(four.health._watches[four.replicas[1]])
    assert four.ready == "bd"


async def test_what_drains_is_neither_counted_nor_used(fleet: MakeFleet) -> None:
    four = fleet(4)
    for replica in four.replicas[:2]:
        four.health._watches[replica].standing.probe_not_ready("503")
        four.health.settle(four.health._watches[replica])
    four.fail("c")
    assert (four.ready, four.health.panic) == ("d", False), "one of two"
    four.fail("d")
    assert four.ready == "cd"


@pytest.mark.parametrize(("count", "used"), [(1, "a"), (2, "b")])
async def test_the_smallest_fleets(count: int, used: str, fleet: MakeFleet) -> None:
    """One of two that fails is left to the other; the only one there is goes on being used."""
    small = fleet(count)
    small.fail("a")
    assert small.ready == used


async def test_the_rule_can_be_turned_off(fleet: MakeFleet) -> None:
    four = fleet(4, 0.0)
    four.fail("a", "b", "c", "d")
    assert (four.ready, four.health.panic) == ("", False)


async def test_one_that_leaves_may_end_the_panic(fleet: MakeFleet) -> None:
    three = fleet(3)
    three.fail("a", "b")
    assert three.health.panic
    await three.health.forget(three.replicas[0])
    three.balancer.leave("a", three.now)
    assert (three.ready, three.health.panic) == ("c", False)


# The watch itself


async def test_the_end_of_a_watch_ends_its_probes(watch: Watch) -> None:
    fake = FakeReplica(ready=SILENCE, health=SILENCE)
    watched = await watch(fake)
    await fake.asked_for("/ready")
    await watched.health.forget(watched.replica)
    assert watched.health.probed, "nobody is left to wait for"
    await watched.health.forget(watched.replica)  # a second time does nothing


async def test_a_router_without_descriptors_blames_no_replica(watch: Watch, caplog: LogCapture) -> None:
    watched = await watch(FakeReplica(ready=Reply(200, b"", ["connection: close"])), SELDOM)
    await watched.serves_on()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        refused = SETTINGS.fail_after + 2
        await eventually(lambda: caplog.text.count("cannot probe replica r") >= refused, "probes find no descriptor")
        assert watched.replica.state is State.READY
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await watched.serves_on()
