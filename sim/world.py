"""The fleet, the router in front of it, and the clients: all in virtual time.

The router's part is the very `policies.balancer.Balancer`, told of each event in the order in which the live router
tells it: a lease is acquired, the first token comes, the lease is finished with what the engine says it used. What a
policy sees is what a router could know: reports are a second apart and late, prompt sizes are guesses from bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from policies import registry
from policies.balancer import Balancer, NoReplica
from policies.lease import Lease
from policies.policy import Policy
from policies.types import OUTCOMES, Cause, Load, Needs, Phase, Request, State, Usage
from policies.types import Replica as View
from sim.engine import Engine
from sim.hardware import Hardware
from sim.measure import Measure, Served
from sim.replica import Limits, Replica, Stage, Work
from sim.workload import Conversation, Turn

BLOCK_TOKENS = 1024
"""Of the router's chained hashes: 4 KiB of body."""

CLIENT_RETRY_S = 1.0
"""After which a client asks again when its answer broke off or was refused."""

TRIES = 3
"""Replicas that a request is sent to at most: the live router's default."""

_MIN_PREFILL_TOKENS = 256
_SPEED_WEIGHT = 0.3
"""As the live router measures prefill speed between two reports."""

_DONE = OUTCOMES[Cause.DONE, Phase.BODY]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Equal replicas and the way they are watched."""

    replicas: int
    hardware: Hardware
    limits: Limits
    report_interval_s: float = 1.0
    report_delay_s: float = 0.05
    """From the taking of the numbers until the router has them."""


@dataclass(eq=False, slots=True)
class Server:
    """One engine, and what is known of it outside the router."""

    id: str
    born: float
    replica: Replica = field(init=False)
    up: bool = True
    leaving: bool = False
    wake_at: float | None = None
    reported_prefill: tuple[int, float] = (0, 0.0)
    speed: float | None = None
    calls: dict[Work, Call] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Call:
    """A request on its way."""

    thread: Thread
    turn: Turn
    request: Request
    served: Served
    lease: Lease | None = None
    known: int = 0
    """Leading pages of its prompt that had ever been computed when its prefill began."""


@dataclass(eq=False, slots=True)
class Thread:
    """A conversation that is being had."""

    conversation: Conversation
    parent: Thread | None = None
    turns: int = 0
    last: Server | None = None
    """Where its last turn went."""
    waits_for: int = 0
    """Forks not yet ended."""
    fingerprint: int = 0
    """Of its last turn."""
    joined: int = 0
    """Scale-outs that its turns have been looked at for."""


class World:
    """One run. Deterministic: equal arguments, equal course."""

    def __init__(
        self,
        policy: str,
        parameters: Mapping[str, object],
        fleet: Fleet,
        sessions: Iterator[tuple[float, Conversation]],
        random: Random,
        measure: Measure,
    ) -> None:
        self.engine = Engine()
        self.fleet = fleet
        self.measure = measure
        self.servers: list[Server] = []
        self.live = 0
        """Sessions that have begun and not ended."""
        self.balancer = Balancer(registry.make(policy, parameters))
        self._policy: Callable[[], Policy] = lambda: registry.make(policy, parameters)
        self._random = random
        self._sessions = sessions
        self._ever: set[int] = set()
        """Pages that were ever computed anywhere. Chained, so all before a known one are known, too."""
        self._scale_outs: list[float] = []
        self._open: dict[Call, None] = {}
        self._made = 0
        for _ in range(fleet.replicas):
            self._add()
        self._next_session()
        self.engine.at(1.0, self._sample)

    def run(self, until: float) -> None:
        """To that time; more can follow."""
        self.engine.run(until)

    def close(self) -> None:
        """Ends what is under way, as if all clients hung up."""
        for call in tuple(self._open):
            if call.lease is not None:
                call.lease.finish(OUTCOMES[Cause.CLIENT, Phase.HEADERS], None, self.engine.now)
        self._open.clear()

    # The fleet

    def _add(self) -> Server:
        now = self.engine.now
        server = Server(f"r{self._made:03}", now)
        self._boot(server)
        self._made += 1
        self.servers.append(server)
        self.measure.placed[server.id] = 0
        self.balancer.join(View(server.id, address=server), now)
        self.engine.after(self._random.random() * self.fleet.report_interval_s, self._report, server)
        return server

    def _boot(self, server: Server) -> None:
        """Starts its engine, empty."""

        def observer(work: Work, at: float) -> None:
            self._observed(server, work, at)

        server.replica = Replica(self.fleet.hardware, self.fleet.limits, bulk=True, observer=observer)

    def scale_out(self, count: int) -> None:
        """So many new, empty replicas join."""
        self._scale_outs.append(self.engine.now)
        for _ in range(count):
            self._add()

    def scale_in(self, count: int) -> None:
        """The oldest replicas are drained and leave when they are empty."""
        for server in [s for s in self.servers if s.up and not s.leaving][:count]:
            server.leaving = True
            self.balancer.set_state(self._view(server), State.DRAINING, self.engine.now)
            self._gone(server)

    def _gone(self, server: Server) -> None:
        if server.leaving and server in self.servers and not server.calls:
            self.servers.remove(server)
            self.balancer.leave(server.id, self.engine.now)

    def crash(self, down_s: float) -> None:
        """The first replica dies, and is back, empty, after a time."""
        server = next(s for s in self.servers if s.up and not s.leaving)
        now = self.engine.now
        server.up = False
        self._boot(server)
        server.wake_at = None
        server.reported_prefill, server.speed = (0, 0.0), None
        self.balancer.set_state(self._view(server), State.EJECTED, now)
        calls, server.calls = server.calls, {}
        for call in calls.values():
            self._lost(call)
        self.engine.after(down_s, self._back, server)

    def _back(self, server: Server) -> None:
        server.up = True
        view, now = self._view(server), self.engine.now
        self.balancer.cache_cleared(view, now)
        self.balancer.set_state(view, State.READY, now)

    def slow_down(self, factor: float) -> None:
        """The last replica takes `factor` times as long for everything from now on."""
        replica = self.servers[-1].replica
        replica.hardware = self.fleet.hardware.slowed(factor)

    def restart_router(self) -> None:
        """A new router takes over that knows nothing; the old one ends what it has."""
        now = self.engine.now
        self.balancer = Balancer(self._policy())
        for server in self.servers:
            view = View(server.id, address=server)
            self.balancer.join(view, now)
            if not server.up:
                self.balancer.set_state(view, State.EJECTED, now)
            elif server.leaving:
                self.balancer.set_state(view, State.DRAINING, now)

    def switch(self, policy: str, parameters: Mapping[str, object]) -> None:
        """Another policy takes over from the next request on."""
        self._policy = lambda: registry.make(policy, parameters)
        self.balancer.switch(self._policy(), self.engine.now)

    def _view(self, server: Server) -> View:
        return self.balancer.replicas[server.id]

    # Reports and samples

    def _report(self, server: Server) -> None:
        if server not in self.servers:
            return
        self.engine.after(self.fleet.report_interval_s, self._report, server)
        if not server.up:
            return
        now, replica = self.engine.now, server.replica
        replica.settle(now)
        totals, limits = replica.totals, self.fleet.limits
        tokens, seconds = server.reported_prefill
        tokens, seconds = totals.prefill_tokens - tokens, totals.prefill_seconds - seconds
        if tokens >= _MIN_PREFILL_TOKENS and seconds > 0:
            speed = tokens / seconds
            server.speed = speed if server.speed is None else server.speed + _SPEED_WEIGHT * (speed - server.speed)
        server.reported_prefill = (totals.prefill_tokens, totals.prefill_seconds)
        load = Load(
            at=now,
            running=len(replica.running),
            waiting=len(replica.waiting),
            waiting_tokens=replica.waiting_uncached_tokens,
            used_tokens=replica.used_tokens,
            capacity_tokens=limits.kv_tokens,
            host_capacity_tokens=limits.host_tokens or None,
            prefill_tokens_per_s=server.speed,
        )
        self.engine.after(self.fleet.report_delay_s, self._reported, server, load)

    def _reported(self, server: Server, load: Load) -> None:
        view = self.balancer.replicas.get(server.id)
        if view is not None and server.up:
            self.balancer.report(view, load, self.engine.now)

    def _sample(self) -> None:
        now = self.engine.now
        up = [s.replica for s in self.servers if s.up]
        counts = [len(replica.running) + len(replica.waiting) for replica in up]
        self.measure.sample(now, counts, sum(len(replica.running) for replica in up))
        self.engine.after(1.0, self._sample)

    # Clients

    def _next_session(self) -> None:
        for time, conversation in self._sessions:
            self.engine.at(time, self._begin, conversation)
            return

    def _begin(self, conversation: Conversation) -> None:
        self._next_session()
        self.live += 1
        self._go_on(Thread(conversation, joined=len(self._scale_outs)))

    def _go_on(self, thread: Thread) -> None:
        """Sends the conversation's next turn when its time has come, or ends it."""
        turn = next(thread.conversation.turns, None)
        if turn is not None:
            self.engine.after(turn.gap_s, self._ask, thread, turn)
            return
        parent = thread.parent
        if parent is None:
            self.live -= 1
            if thread.last is not None:
                self.measure.placed[thread.last.id] -= 1
        else:
            parent.waits_for -= 1
            if not parent.waits_for:
                self._go_on(parent)

    def _ask(self, thread: Thread, turn: Turn) -> None:
        now, conversation = self.engine.now, thread.conversation
        page = self.fleet.limits.page_size
        needs = self.balancer.policy.needs
        request = Request(
            key=conversation.key,
            fingerprint=turn.fingerprint if Needs.FINGERPRINT in needs else 0,
            prompt_tokens=int(turn.prompt_tokens * conversation.estimate),
            blocks=self._blocks(turn) if Needs.BLOCKS in needs else (),
        )
        known = self._known(turn) * page
        ideal = self.fleet.hardware.prefill.seconds(turn.prompt_tokens - known, known)
        name = f"{conversation.name}#{thread.turns}"
        served = Served(name, now, conversation.main, ideal, turn.prompt_tokens, turn.output_tokens)
        self.measure.served.append(served)
        thread.turns += 1
        self._dispatch(Call(thread, turn, request, served))

    def _blocks(self, turn: Turn) -> tuple[int, ...]:
        """A page's name stands for all before it; spread over 64 bits, as hashes are."""
        page = self.fleet.limits.page_size
        every = max(1, BLOCK_TOKENS // page)
        held = turn.prompt_tokens // page
        return tuple(
            [(name * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF for name in turn.pages[every - 1 : held : every]]
        )

    def _known(self, turn: Turn) -> int:
        """Leading pages of the prompt that were ever computed; the last token's is not counted, as it never hits."""
        pages, ever = turn.pages, self._ever
        low, high = 0, min((turn.prompt_tokens - 1) // self.fleet.limits.page_size, len(pages))
        while low < high:
            middle = (low + high + 1) // 2
            if pages[middle - 1] in ever:
                low = middle
            else:
                high = middle - 1
        return low

    # The router

    def _dispatch(self, call: Call) -> None:
        now, served, thread = self.engine.now, call.served, call.thread
        try:
            lease = self.balancer.acquire(call.request, now)
        except NoReplica:
            self.measure.refused += 1
            self._again(call)
            return
        server = lease.replica.address
        assert isinstance(server, Server)
        call.lease = lease
        self._open[call] = None
        served.tries += 1
        served.replica = server.id
        served.reason = str(lease.choice.reason)
        if thread.conversation.main and served.tries == 1:
            self._placed(thread, call.turn, served, server)
        thread.last = server
        work = Work(call.turn.pages, call.turn.prompt_tokens, call.turn.output_tokens)
        server.calls[work] = call
        server.replica.submit(work, now)
        self._schedule(server)

    def _placed(self, thread: Thread, turn: Turn, served: Served, server: Server) -> None:
        """Whether the main thread has moved, and whether a scale-out made it do so."""
        last = thread.last
        placed = self.measure.placed
        if last is not None:
            served.followed = True
            served.moved = last is not server
            placed[last.id] -= 1
            # One that begins anew (compacted) has nothing but the tools' prefix anywhere.
            if thread.joined < len(self._scale_outs) and turn.fingerprint == thread.fingerprint:
                self._after_scale_out(turn, last, server)
        thread.joined = len(self._scale_outs)
        thread.fingerprint = turn.fingerprint
        placed[server.id] += 1

    def _after_scale_out(self, turn: Turn, last: Server, server: Server) -> None:
        known = self._known(turn)
        if not last.up or last.replica.cache.resident(turn.pages, known) <= known // 2:
            return
        joined = self.measure.joined
        joined.resident += 1
        if server is last or server.replica.cache.resident(turn.pages, known) > known // 2:
            return
        joined.elsewhere += 1
        joined.to_new += server.born >= self._scale_outs[-1]

    def _lost(self, call: Call) -> None:
        """Its replica died. As the live router: another one, if nothing was passed on; else the client asks again."""
        lease, now = call.lease, self.engine.now
        assert lease is not None
        phase = Phase.BODY if lease.begun else Phase.HEADERS
        lease.finish(OUTCOMES[Cause.UPSTREAM, phase], None, now)
        del self._open[call]
        if lease.begun:
            self.measure.broken += 1
            self.engine.after(CLIENT_RETRY_S, self._ask, call.thread, call.turn)
        elif call.served.tries >= TRIES:
            self.measure.refused += 1
            self._again(call)
        else:
            call.request.failed += (lease.replica,)
            self._dispatch(call)

    def _again(self, call: Call) -> None:
        """The client was refused and asks again; its wait goes on."""
        call.request.failed = ()
        self.engine.after(CLIENT_RETRY_S, self._dispatch, call)

    # Engines

    def _schedule(self, server: Server) -> None:
        due = server.replica.next_time
        if due != server.wake_at:
            server.wake_at = due
            if due is not None:
                self.engine.at(due, self._wake, server, due)

    def _wake(self, server: Server, due: float) -> None:
        if server.wake_at == due:
            server.replica.advance(self.engine.now)
            self._schedule(server)

    def _observed(self, server: Server, work: Work, at: float) -> None:
        call = server.calls[work]
        if work.stage is Stage.PREFILL:
            self._prefill_begun(server, call, work)
        elif work.stage is Stage.DECODE:
            call.served.first_token = at
            assert call.lease is not None
            call.lease.first_token(at)
            self._ever.update(work.pages[call.known : work.prompt_tokens // self.fleet.limits.page_size])
        else:
            del server.calls[work]
            self._done(server, call, work, at)

    def _prefill_begun(self, server: Server, call: Call, work: Work) -> None:
        served, page = call.served, self.fleet.limits.page_size
        served.cached_tokens, served.host_tokens = work.cached_tokens, work.host_tokens
        cached, known = work.cached_tokens // page, self._known(call.turn)
        call.known = known
        if known > cached:
            others = [s.replica.cache.resident(work.pages, known) for s in self.servers if s is not server and s.up]
            elsewhere = max(max(others, default=0), cached)
            served.elsewhere_tokens = (elsewhere - cached) * page
            served.evicted_tokens = (known - elsewhere) * page

    def _done(self, server: Server, call: Call, work: Work, at: float) -> None:
        served, thread, lease = call.served, call.thread, call.lease
        assert lease is not None
        served.finished = at
        self._ever.update(work.pages[work.prompt_tokens // self.fleet.limits.page_size :])
        lease.finish(_DONE, Usage(work.prompt_tokens, work.cached_tokens, work.output_tokens), at)
        del self._open[call]
        self._gone(server)
        forks = call.turn.forks
        if not forks:
            # Not at once: the replica is in the middle of its step.
            self.engine.at(at, self._go_on, thread)
            return
        thread.waits_for = len(forks)
        for fork in forks:
            self.engine.at(at, self._go_on, Thread(fork, thread))
