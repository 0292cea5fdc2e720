"""Facts of the KV gate, on a fleet of one replica that is driven past its cliff by hand.

Four sessions of 50,000 tokens take turns on a cache of 150,000: nothing is cached when their turns come, and each waits
for the others. In the simulator it is proven by tests/sim/test_overload.py.
"""

from __future__ import annotations

import pytest

from policies.admission import Admission, AdmissionConfig, Shed, ShedReason, Ticket
from policies.admission.gate import CONTROL_S, FALL, FITS, FLOODED, LEAST_TENURE_S, OPEN_S, STEPS
from policies.admission.line import ABSENT_S
from policies.admission.tenures import IDLE_S
from policies.balancer import Balancer, NoReplica
from policies.lease import Lease
from policies.registry import make
from policies.types import Load, Request, State, Usage
from tests.fakes.fleet import DONE, fleet

PROMPT = 50_000
TURN_S = 12.0
"""From request to answer, of which a prefill takes about three."""
CAPACITY = 150_000


class Scene:
    """Sessions that ask again when they are answered, a second apart. Time goes in seconds."""

    def __init__(
        self, capacity: int | None = CAPACITY, cached: int | None = 1, first_s: float = TURN_S - 1.0, **config: object
    ) -> None:
        self.balancer: Balancer = fleet(make("session_affinity"), "a")
        self.admission = Admission(self.balancer, AdmissionConfig(**config))  # type: ignore[arg-type]
        self.cached = cached
        """Tokens that the engine says were cached; None: it does not say."""
        self.first_s = first_s
        """From request to first token."""
        self.now = 0.0
        self.at_work: dict[str, Lease] = {}
        self.waiting: dict[str, Ticket] = {}
        self.again_at: dict[str, float] = {}
        self.turns: dict[str, int] = {}
        self.ended_at: dict[str, float] = {}
        self.longest_s = 0.0
        """Between the ends of two turns of a session."""
        self.shed: list[Shed] = []
        self.sessions: list[str] = []
        if capacity is not None:
            self.balancer.report(self.balancer.replicas["a"], Load(0.0, capacity_tokens=capacity), 0.0)

    def ask(self, name: str, parent: str | None = None) -> Lease | Ticket:
        request = Request(key=name.encode(), prompt_tokens=PROMPT, parent=parent.encode() if parent else None)
        return self.admission.enter(request, self.now)

    def run(self, seconds: float, *sessions: str) -> None:
        """These are at work, and those from before; a client that is refused comes again when it was told to."""
        self.sessions += [name for name in sessions if name not in self.sessions]
        for _ in range(int(seconds)):
            self.now += 1.0
            for name, lease in list(self.at_work.items()):
                if self.now - lease.opened_at >= self.first_s:
                    lease.first_token(self.now)
                if self.now - lease.opened_at >= TURN_S:
                    lease.finish(DONE, Usage(PROMPT, self.cached, 50), self.now)
                    del self.at_work[name]
                    self.turns[name] = self.turns.get(name, 0) + 1
                    self.longest_s = max(self.longest_s, self.now - self.ended_at.get(name, self.now))
                    self.ended_at[name] = self.now
            for name in self.sessions:
                if name not in self.at_work and name not in self.waiting and self.now >= self.again_at.get(name, 0.0):
                    try:
                        self._take(name, self.ask(name))
                    except Shed as shed:
                        self._refused(name, shed)
            for ticket in self.admission.due(self.now):
                name = (ticket.request.key or b"").decode()
                self.waiting.pop(name, None)
                if ticket.lease is not None:
                    self._take(name, ticket.lease)
                else:
                    assert isinstance(ticket.error, Shed)
                    self._refused(name, ticket.error)

    def _refused(self, name: str, shed: Shed) -> None:
        self.shed.append(shed)
        self.again_at[name] = self.now + shed.retry_after_s

    def _take(self, name: str, entered: Lease | Ticket) -> None:
        if isinstance(entered, Lease):
            self.at_work[name] = entered
        else:
            self.waiting[name] = entered


def test_it_acts_past_the_cliff_and_holds_sessions_as_a_whole() -> None:
    scene = Scene(max_wait_s=3000.0)
    scene.run(300, *"wxyz")
    gate = scene.admission.gate
    assert gate.active
    assert gate.activations == 1
    assert (gate.admitted, gate.held, gate.sent_back) == (2, 2, 2)
    assert gate.tenures.tokens <= gate.limit_tokens < 4 * PROMPT
    before = dict(scene.turns)
    held = set(scene.waiting)
    scene.run(120)
    assert {name for name in "wxyz" if scene.turns[name] == before[name]} >= held
    assert all(scene.turns[name] >= before[name] + 6 for name in set("wxyz") - held)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param({"kv_gate": False}, id="off"),
        pytest.param({"capacity": 220_000}, id="all fits"),
        pytest.param({"capacity": None}, id="no capacity is told"),
        pytest.param({"cached": PROMPT, "first_s": 2.0}, id="nothing is computed again"),
        pytest.param({"cached": None, "first_s": 2.0}, id="engines do not tell what was cached"),
        pytest.param({"cached": None, "capacity": 220_000}, id="flooded, and all fits"),
    ],
)
def test_it_does_not_act_without_all_of_its_reasons(setting: dict[str, object]) -> None:
    scene = Scene(**setting)  # type: ignore[arg-type]
    scene.run(300, *"wxyz")
    assert not scene.admission.gate.active
    assert scene.admission.waiting == 0
    assert not scene.shed


def test_it_acts_on_a_flood_before_anything_is_computed_again() -> None:
    scene = Scene(cached=None)
    scene.run(CONTROL_S - 5, *"wxyz")
    gate = scene.admission.gate
    assert not gate.active  # a burst is over sooner
    scene.run(15)
    assert gate.active
    assert gate.pressure.again == 0.0
    # Nothing tells how far to go: no further than is safe, and not again.
    assert gate.limit_tokens == FITS * 4 * PROMPT
    scene.run(300)
    assert gate.limit_tokens == FITS * 4 * PROMPT
    assert (gate.admitted, gate.held, gate.sent_back) == (3, 1, 1)


def test_a_burst_that_is_over_is_no_flood_though_nothing_has_begun_since() -> None:
    scene = Scene(cached=None)
    scene.run(TURN_S, *"wxyz")
    scene.sessions.clear()
    scene.run(3 * CONTROL_S)
    gate = scene.admission.gate
    assert gate.pressure.ratio > FLOODED  # of those that there were
    assert scene.balancer.pending == gate.activations == 0


def test_one_look_after_a_long_time_without_any_shows_no_flood() -> None:
    scene = Scene(cached=None)
    scene.run(3, *"wxyz")
    scene.now += 2 * CONTROL_S
    scene.run(TURN_S - 3)
    gate = scene.admission.gate
    assert gate.pressure.ratio > FLOODED
    assert not gate.active


def test_new_sessions_are_sent_back_before_old_ones() -> None:
    scene = Scene(cached=None)
    scene.run(10, *"wxy")
    scene.run(50, "z")
    assert set(scene.waiting) == {"z"}


def test_room_is_taken_at_once_however_few_were_let_in_before() -> None:
    scene = Scene(max_hold_s=LEAST_TENURE_S, max_wait_s=30.0)
    scene.run(300, *"wxyz")
    scene.run(3000, *map(str, range(20)))
    assert scene.admission.gate.held > 20
    scene.shed.clear()
    scene.run(60)
    assert scene.shed  # at the rate of late it would be long
    scene.balancer.report(scene.balancer.replicas["a"], Load(scene.now, capacity_tokens=10**7), scene.now)
    scene.run(CONTROL_S + 61)  # the limit is moved, and clients come again
    assert scene.admission.gate.held == 0


def test_a_look_goes_through_no_more_than_so_many_sessions() -> None:
    scene = Scene()
    known = [f"s{i}".encode() for i in range(4 * STEPS)]
    for key in known:
        scene.balancer.acquire(Request(key=key, prompt_tokens=PROMPT), 1.0).finish(DONE, Usage(PROMPT, None, 1), 1.0)
    scene.now = 1.0
    gate, tenures, seen = scene.admission.gate, scene.admission.gate.tenures, []
    tenures.seek()
    while tenures.find(STEPS, scene.now):
        seen.append(len(tenures))
    assert seen == [STEPS, 2 * STEPS, 3 * STEPS, 4 * STEPS]
    assert tenures.tokens == 4 * STEPS * (PROMPT + 1)
    assert tenures.oldest() is tenures.of(known[0])
    assert gate.admitted == 0  # it does not act yet
    gate.active, gate.limit_tokens, gate._falling = True, 0.0, True
    scene.admission.due(scene.now)
    assert (gate.admitted, gate.sent_back) == (3 * STEPS, STEPS)
    assert tenures.tokens == 3 * STEPS * (PROMPT + 1)


def test_the_limit_falls_no_further_while_sessions_are_still_sent_back_for_it() -> None:
    scene = Scene(max_wait_s=3000.0)
    scene.run(300, *"wxyz")
    gate = scene.admission.gate
    for i in range(100 * STEPS):  # more than go back before it may fall again
        gate.tenures.let_in(b"%d" % i, PROMPT, scene.now)
    gate.limit_tokens, before = 0.2 * gate.tenures.tokens, scene.now
    gate._fall(FALL)
    limit = gate.limit_tokens
    while gate._falling:
        assert gate.limit_tokens == limit
        scene.run(1)
    assert scene.now - before > 2 * CONTROL_S
    scene.run(CONTROL_S)
    assert gate.limit_tokens < limit


def test_when_it_is_switched_off_while_it_counts_nothing_is_kept() -> None:
    scene = Scene()
    for i in range(2 * STEPS):
        scene.balancer.acquire(Request(key=b"%d" % i, prompt_tokens=PROMPT), 0.0)
    gate = scene.admission.gate
    while not len(gate.tenures):
        scene.now += 1.0
        scene.admission.due(scene.now)
    assert not gate.active
    scene.admission.configure(AdmissionConfig(kv_gate=False), scene.now)
    assert not len(gate.tenures)


def test_a_session_that_is_held_too_long_is_refused_with_the_reason_and_keeps_its_place() -> None:
    scene = Scene(max_wait_s=20.0)
    scene.run(300, *"wxyz")
    held = next(name for name in "wxyz" if name not in scene.at_work)
    assert {shed.reason for shed in scene.shed} == {ShedReason.KV_FULL}
    assert all(1 <= shed.retry_after_s <= 60 for shed in scene.shed)
    assert scene.admission.sheds[ShedReason.KV_FULL] == len(scene.shed)
    scene.run(20, "late")
    scene.sessions = [held, "late"]  # the others end their turns and leave
    scene.run(IDLE_S + 40)
    assert scene.turns[held] > 0
    assert scene.turns.get(held, 0) >= scene.turns.get("late", 0)


def test_no_session_is_held_for_ever() -> None:
    scene = Scene(max_hold_s=LEAST_TENURE_S, max_wait_s=30.0)
    scene.run(2400, *"vwxyz")
    gate = scene.admission.gate
    assert gate.exchanges >= 4
    assert min(scene.turns[name] for name in "vwxyz") >= 10
    assert scene.longest_s <= 3 * LEAST_TENURE_S + TURN_S


def test_sub_agents_of_a_session_that_was_let_in_are_not_held() -> None:
    scene = Scene()
    scene.run(300, *"wxyz")
    inside = next(iter(scene.at_work))
    outside = next(iter(scene.waiting))
    child = scene.ask("child", inside)
    assert isinstance(child, Lease)
    assert isinstance(scene.ask("grandchild", "child"), Lease)
    assert isinstance(scene.ask("other", outside), Ticket)
    assert scene.admission.gate.admitted == len(scene.at_work) == 2


def test_a_tree_of_sub_agents_is_let_in_and_ends_as_one() -> None:
    scene = Scene(max_wait_s=3000.0)
    scene.run(300, *"wxyz")
    top = scene.ask("twig", "root")
    deep = scene.ask("leaf", "twig")
    assert isinstance(deep, Ticket)
    assert isinstance(top, Ticket)
    scene.sessions.clear()
    scene.waiting.update(leaf=deep, twig=top)
    for _ in range(int(3 * IDLE_S)):  # those of before leave, then those that were in the line before these
        scene.run(1)
        if deep.lease is not None:
            break
    assert top.lease is not None
    gate = scene.admission.gate
    assert (gate.active, gate.admitted, gate.held) == (True, 1, 0)


def test_what_names_no_session_or_leaves_no_kv_passes() -> None:
    scene = Scene()
    scene.run(300, *"wxyz")
    assert isinstance(scene.admission.enter(Request(prompt_tokens=10), scene.now), Lease)
    assert isinstance(scene.admission.enter(Request(key=b"new", turn=False), scene.now), Lease)
    assert isinstance(scene.ask("new"), Ticket)


def test_nobody_is_held_back_from_a_fleet_that_is_out() -> None:
    scene = Scene()
    scene.run(300, *"wxyz")
    held = next(iter(scene.waiting))
    scene.balancer.set_state(scene.balancer.replicas["a"], State.EJECTED, scene.now)
    with pytest.raises(NoReplica, match="all_ejected"):
        scene.ask(held)


def test_a_held_client_that_leaves_gives_its_place_at_once() -> None:
    scene = Scene()
    scene.run(300, *"wxyz")
    (name, ticket), *_ = scene.waiting.items()
    scene.sessions.remove(name)
    held = scene.admission.gate.held
    ticket.cancel(scene.now)
    ticket.cancel(scene.now)
    assert scene.admission.gate.held == held - 1
    assert scene.admission.waiting == len(scene.waiting) - 1


def test_a_session_that_ends_gives_its_place_and_the_gate_opens_when_nobody_is_held() -> None:
    scene = Scene(max_wait_s=3000.0)
    scene.run(300, *"wxyz")
    ended = set(scene.at_work)
    scene.sessions = [name for name in scene.sessions if name not in ended]
    scene.run(IDLE_S + 60)
    gate = scene.admission.gate
    assert not scene.waiting
    assert gate.held == 0
    scene.run(OPEN_S + 30)
    assert not gate.active
    assert (gate.admitted, gate.held, scene.admission.waiting) == (0, 0, 0)


def test_a_refused_client_that_does_not_come_again_is_forgotten() -> None:
    scene = Scene(max_wait_s=5.0)
    scene.run(300, *"wxyz")
    inside = set(scene.at_work)
    scene.sessions = [name for name in scene.sessions if name in inside]
    scene.run(ABSENT_S + 10)
    assert scene.admission.gate.held == 0


def test_when_it_is_switched_off_all_go_on() -> None:
    scene = Scene()
    scene.run(300, *"wxyz")
    tickets = list(scene.waiting.values())
    scene.admission.configure(AdmissionConfig(kv_gate=False), scene.now)
    assert set(scene.admission.due(scene.now)) == set(tickets) != set()
    assert all(ticket.lease is not None for ticket in tickets)
    assert not scene.admission.gate.active


def test_strangers_cannot_make_the_line_longer_than_the_room() -> None:
    scene = Scene(max_waiting=20, max_wait_s=1.0)
    scene.run(300, *"wxyz")
    reasons = set()
    for i in range(200):
        scene.now += 0.1
        try:
            scene.ask(f"stranger{i}")
        except Shed as shed:
            reasons.add(shed.reason)
        scene.admission.due(scene.now)
    assert ShedReason.ROOM_FULL in reasons
    assert scene.admission.gate.held <= 20
    assert scene.admission.waiting <= 20
