"""Any order of requests, ends, leaving clients, reloads, switches, and replicas that come, go and are tried: nobody is
lost, no cap is broken, and every count is given back."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.admission import Admission, AdmissionConfig, Priority, Shed, Ticket
from policies.balancer import Balancer, NoReplica
from policies.lease import Lease
from policies.registry import POLICIES, make
from policies.types import TRIALS, Load, Replica, Request, State, Usage
from tests.fakes.fleet import DONE, REFUSED

_keys = st.none() | st.sampled_from([b"u", b"v", b"w", b"x", b"y"])
_Asked = tuple[bytes | None, bytes | None, int, Priority]
_asked = st.tuples(_keys, _keys, st.integers(0, 40_000), st.sampled_from(Priority))
_names = st.sampled_from("abc")
_configs = st.builds(
    AdmissionConfig,
    max_running=st.integers(0, 4),
    max_running_per_replica=st.integers(0, 2),
    max_tokens=st.sampled_from([0, 50_000]),
    max_tokens_per_replica=st.sampled_from([0, 30_000]),
    max_waiting=st.integers(0, 5),
    max_wait_s=st.sampled_from([5.0, 60.0]),
    max_hold_s=st.just(60.0),
)


class AdmissionMachine(RuleBasedStateMachine):
    """Keeps books of its own: who was told to wait, and whose lease is open."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1.0
        self.balancer = Balancer(make("session_affinity"))
        self.admission = Admission(self.balancer, AdmissionConfig(max_running=2))
        self.waiting: dict[Ticket, None] = {}  # in order of coming: an example is the same each time
        self.open: list[Lease] = []
        self.ever: list[Replica] = []
        for name in "ab":
            self.join(name)

    @initialize(asked=st.lists(_asked, max_size=4), config=_configs)
    def begin(self, asked: list[_Asked], config: AdmissionConfig) -> None:
        self.admission.configure(config, self.now)
        self.burst(asked)

    @rule(asked=st.lists(_asked, min_size=1, max_size=4))
    def burst(self, asked: list[_Asked]) -> None:
        for each in asked:
            self.enter(*each)

    def enter(self, key: bytes | None, parent: bytes | None, tokens: int, priority: Priority) -> None:
        request = Request(key=key, parent=parent, prompt_tokens=tokens)
        try:
            entered = self.admission.enter(request, self.now, priority)
        except (Shed, NoReplica) as refusal:
            self._refused(refusal)
        else:
            if isinstance(entered, Ticket):
                assert entered not in self.waiting
                self.waiting[entered] = None
            else:
                self._opened(entered)
        assert request.failed == ()

    def _refused(self, refusal: Shed | NoReplica) -> None:
        if isinstance(refusal, Shed):
            assert 1 <= refusal.retry_after_s <= 60
        else:
            assert not self.balancer.ready

    def _opened(self, lease: Lease) -> None:
        config, tokens = self.admission.config, max(0, lease.request.prompt_tokens)
        self.open.append(lease)
        assert not 0 < config.max_running < self.balancer.in_flight
        assert not 0 < config.max_running_per_replica < lease.replica.in_flight
        assert self.balancer.in_flight_tokens <= config.max_tokens or not config.max_tokens or len(self.open) == 1
        most = config.max_tokens_per_replica
        assert lease.replica.in_flight_tokens <= most or not most or lease.replica.in_flight_tokens == tokens

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        cached=st.none() | st.integers(0, 40_000),
        failed=st.booleans(),
        ratio=st.sampled_from([0.5, 1.0, 2.0]),
    )
    def finish(self, data: st.DataObject, cached: int | None, failed: bool, ratio: float) -> None:
        """The engine may make another number of tokens of a prompt than was estimated."""
        lease = self._ends(data)
        if not failed:
            lease.first_token(self.now)
        usage = Usage(int(ratio * lease.request.prompt_tokens), cached, 10)
        lease.finish(REFUSED if failed else DONE, None if failed else usage, self.now)
        if self.admission.waiting:
            self.due()

    def _ends(self, data: st.DataObject) -> Lease:
        return self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def redispatch(self, data: st.DataObject) -> None:
        """Its replica failed it: elsewhere at once, whatever the caps say."""
        lease = self._ends(data)
        lease.finish(REFUSED, None, self.now)
        lease.request.failed += (lease.replica,)
        try:
            again = self.balancer.acquire(lease.request, self.now)
        except NoReplica:
            assert all(replica in lease.request.failed for replica in self.balancer.ready)
        else:
            assert again.replica is not lease.replica
            self.open.append(again)
        self.due()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.open)).first_token(self.now)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(list(self.waiting)))
        del self.waiting[ticket]
        ticket.cancel(self.now)
        ticket.cancel(self.now)

    @rule(passed=st.sampled_from([0.0, 0.5, 1.0, 7.0, 61.0]))
    def time(self, passed: float) -> None:
        self.now += passed
        self.due()

    def due(self) -> None:
        settled = self.admission.due(self.now)
        if any(ticket.lease is not None for ticket in settled):
            assert not 0 < self.admission.config.max_running < self.balancer.in_flight
        for ticket in settled:
            del self.waiting[ticket]
            assert (ticket.lease is None) is not (ticket.error is None)
            if ticket.lease is not None:
                self.open.append(ticket.lease)
            elif isinstance(ticket.error, NoReplica):
                assert not self.balancer.ready
            else:
                assert isinstance(ticket.error, Shed)
                assert ticket.deadline <= self.now
            ticket.cancel(self.now)
        assert all(ticket.deadline > self.now for ticket in self.waiting)

    @rule(config=_configs)
    def configure(self, config: AdmissionConfig) -> None:
        self.admission.configure(config, self.now)
        self.due()

    @rule(name=_names)
    def join(self, name: str) -> None:
        """A new one, or another in the place of the one before."""
        replica = Replica(name)
        self.ever.append(replica)
        self.balancer.join(replica, self.now)
        self.balancer.report(replica, Load(self.now, capacity_tokens=50_000), self.now)

    @rule(name=_names)
    def go(self, name: str) -> None:
        if name in self.balancer.replicas:
            self.balancer.leave(name, self.now)

    @rule(name=_names, state=st.sampled_from(State))
    def change(self, name: str, state: State) -> None:
        if (replica := self.balancer.replicas.get(name)) is not None:
            self.balancer.set_state(replica, state, self.now)

    @rule(name=st.sampled_from(sorted(POLICIES)))
    def switch(self, name: str) -> None:
        self.balancer.switch(make(name), self.now)

    @rule()
    def drown(self) -> None:
        """What a fleet past its cliff looks like, and the gate acts when the sessions do not fit."""
        pressure = self.admission.gate.pressure
        pressure.cold_s, pressure.wait_s, pressure.again = 1.0, 5.0, 1.0
        self.admission.gate._control_at = self.now
        self.admission.gate._begin(self.now)
        self.due()

    @invariant()
    def the_books_agree(self) -> None:
        admission, balancer = self.admission, self.balancer
        assert admission.waiting == len(self.waiting)
        assert balancer.in_flight == len(self.open) == sum(r.in_flight for r in self.ever)
        tokens = sum(lease._prompt_tokens for lease in self.open)
        assert balancer.in_flight_tokens == tokens == sum(r.in_flight_tokens for r in self.ever)
        assert balancer.pending == sum(not lease.begun for lease in self.open) == sum(r.pending for r in self.ever)
        trials = Counter(lease.replica for lease in self.open if lease.trial)
        assert all(replica.trials == trials[replica] <= TRIALS for replica in self.ever)
        if admission.gate.active:
            assert admission.gate.held >= len({t.session for t in self.waiting if t.held})
        else:
            assert not any(ticket.held for ticket in self.waiting)

    def teardown(self) -> None:
        """With the caps off and the gate open, all that wait are placed or refused."""
        self.join("a")
        self.admission.configure(AdmissionConfig(kv_gate=False), self.now)
        self.due()
        assert not self.waiting
        for lease in self.open:
            lease.finish(DONE, None, self.now)
        self.open.clear()
        self.the_books_agree()
        directory, keys = self.balancer.directory, self.balancer.directory.keys()
        assert not any(branch.open for key in keys for branch in directory.branches(key, 0.0))


AdmissionMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestAdmission = AdmissionMachine.TestCase
