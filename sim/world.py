"""The fleet, the routers in front of it, and the clients: all in virtual time.

A router's part is the very `policies.balancer.Balancer`, told of each event in the order in which the live router
tells it: a lease is acquired, the first token comes, the lease is finished with what the engine says it used. What a
policy sees is what a router could know: reports are a second apart and late, prompt sizes are guesses from bytes.

When several replicas work on a request (see `sim.fleet.Role`), the lease is on the one that the policy picked, from
beginning to end; its first token is there when the last of them has the KV and has begun to decode.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from functools import partial
from math import inf
from random import Random
from typing import Final

from policies import registry
from policies.admission import AdmissionConfig, Shed
from policies.balancer import Balancer, NoReplica
from policies.lease import Lease
from policies.types import OUTCOMES, Cause, Needs, Phase, Request, Usage
from sim.client import Call, Thread
from sim.engine import Engine
from sim.fleet import Fleet, Role
from sim.front import Front, Router
from sim.known import Known
from sim.measure import Measure, Served
from sim.routers import ONE, Routers
from sim.server import Server
from sim.servers import Servers
from sim.work import QueueFull, Stage, Work
from sim.workload import Conversation, Turn

BLOCK_TOKENS: Final = 1024
"""Of the router's chained hashes: 4 KiB of body."""

CLIENT_RETRY_S: Final = 1.0
"""After which a client asks again when its answer broke off or was refused."""

TRIES: Final = 3
"""Replicas that a request is sent to at most: the live router's default."""

MAX_NEW_TOKENS: Final = 32_000
"""`max_tokens` in the recorded requests of Claude Code and Qwen Code."""

NO_ADMISSION = AdmissionConfig(kv_gate=False)
"""Nobody waits, so that a policy is seen at any load."""

_DONE: Final = OUTCOMES[Cause.DONE, Phase.BODY]


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
        *,
        routers: Routers = ONE,
        admission: AdmissionConfig = NO_ADMISSION,
    ) -> None:
        self.engine = Engine()
        self.fleet = fleet
        self._decodes_apart = fleet.decodes_apart
        self.measure = measure
        self.live = 0
        """Sessions that have begun and not ended."""
        self.front = Front(routers, partial(registry.make, policy, parameters), admission, self.engine, random)
        self._servers = Servers(fleet, self.engine, self.front, measure, random, self._observed, self._lost)
        self._known = Known(fleet.page_size)
        self._sessions = sessions
        self._page = fleet.page_size
        self._open: dict[Call, None] = {}
        self._waiting: dict[Call, None] = {}
        """Calls with a ticket."""
        self._due_soon: set[Router] = set()
        self._ask_needs()
        self._next_session()
        self.engine.at(1.0, self._sample)
        if admission != NO_ADMISSION:
            for router in self.front.routers:
                self.engine.at(1.0, self._every_second, router)

    @property
    def servers(self) -> list[Server]:
        """All replicas that there are, whatever their role."""
        return self._servers.all

    @property
    def balancer(self) -> Balancer:
        """The first router's."""
        return self.front.routers[0].balancer

    def run(self, until: float) -> None:
        """To that time; more can follow.

        Python's search for cycles rests meanwhile: a run makes none, and looking for them takes a tenth of the time.
        """
        collecting = gc.isenabled()
        gc.disable()
        try:
            self.engine.run(until)
        finally:
            if collecting:
                gc.enable()

    def close(self) -> None:
        """Ends what is under way, as if all clients hung up."""
        for call in tuple(self._open):
            if call.lease is not None:
                call.lease.finish(OUTCOMES[Cause.CLIENT, Phase.HEADERS], None, self.engine.now)
        self._open.clear()

    def gates(self) -> dict[str, object]:
        """What the routers' gates have done and stand at, all together."""
        gates = [router.admission.gate for router in self.front.routers]
        return {
            "gate_activations": sum([gate.activations for gate in gates]),
            "gate_exchanges": sum([gate.exchanges for gate in gates]),
            "gate_sent_back": sum([gate.sent_back for gate in gates]),
            "gate_admitted": sum([gate.admitted for gate in gates]),
            "gate_held": sum([gate.held for gate in gates]),
        }

    # Events

    def scale_out(self, count: int, group: str | None = None) -> None:
        """So many new, empty replicas join, of the first group unless another is named."""
        self._servers.scale_out(count, group)

    def scale_in(self, count: int, group: str | None = None) -> None:
        """The oldest replicas of a group are drained and leave when they are empty."""
        self._servers.scale_in(count, group)

    def crash(self, down_s: float, group: str | None = None) -> None:
        """The first replica of a group dies, and is back, empty, after a time. Nothing when the group has none."""
        self._servers.crash(down_s, group)

    def slow_down(self, factor: float, group: str | None = None) -> None:
        """The last replica of a group takes `factor` times as long for everything from now on."""
        self._servers.slow_down(factor, group)

    def restart_router(self, index: int | None = None) -> None:
        """A new router takes over, or new ones for all; the old ones end what they have, and who waits comes again."""
        changed = self.front.routers if index is None else [self.front.routers[index]]
        for call in tuple(self._waiting):
            if call.router in changed:
                self._leave_room(call)
                self._refused(call)
        self.front.restart(index, self._servers.picked())

    def lose_store(self) -> None:
        """What routers share is lost, and with it all homes."""
        self.front.lose_store()

    def switch(self, policy: str, parameters: Mapping[str, object]) -> None:
        """Another policy takes over from the next request on."""
        self.front.switch(partial(registry.make, policy, parameters))
        self._ask_needs()

    def _ask_needs(self) -> None:
        """What of a request the policy in charge looks at. Not asked at each request, as Python's flags are slow."""
        needs = self.balancer.policy.needs
        self._fingerprints = Needs.FINGERPRINT in needs
        self._chains = Needs.BLOCKS in needs

    def _sample(self) -> None:
        measure, now = self.measure, self.engine.now
        up = [server for server in self._servers.picked() if server.up]
        counts = [len(s.replica.running) + len(s.replica.waiting) for s in up]
        measure.remember(now, [s.id for s in up], counts)
        measure.sample(now, counts, sum([len(s.replica.running) for s in up]))
        measure.retracted = sum([s.replica.totals.retracted for s in self.servers])
        self.engine.after(1.0, self._sample)

    # Clients

    def _next_session(self) -> None:
        for time, conversation in self._sessions:
            self.engine.at(time, self._begin, conversation)
            return

    def _begin(self, conversation: Conversation) -> None:
        self._next_session()
        self.live += 1
        self._go_on(Thread(conversation, joined=len(self._servers.joined_at)))

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
        conversation, prompt = thread.conversation, turn.prompt_tokens
        request = Request(
            key=conversation.key,
            parent=conversation.parent,
            fingerprint=turn.fingerprint if self._fingerprints else 0,
            prompt_tokens=int(prompt * conversation.estimate),
            blocks=self._blocks(thread, turn) if self._chains else (),
        )
        pages = self._known.count(thread, turn)
        known = pages * self._page
        served = Served(
            f"{conversation.name}#{thread.turns}",
            self.engine.now,
            conversation.main,
            self.fleet.hardware.prefill.seconds(prompt - known, known),
            prompt,
            turn.output_tokens,
            conversation.key,
        )
        self.measure.begin(served)
        thread.turns += 1
        call = Call(thread, turn, request, served, pages)
        if turn.patience_s < inf:
            self.engine.after(turn.patience_s, self._give_up, call)
        self._dispatch(call)

    def _blocks(self, thread: Thread, turn: Turn) -> tuple[int, ...]:
        """A page's name stands for all before it; spread over 64 bits, as hashes are."""
        every = max(1, BLOCK_TOKENS // self._page)
        held = turn.prompt_tokens // self._page
        pages, before = turn.pages[every - 1 : held : every], thread.block_pages
        # Most turns go on from the one before, and forks from their parent's: where one page is the same, all before it
        # are.
        kept = min(len(pages), len(before))
        if kept and pages[kept - 1] != before[kept - 1]:
            kept = 0
        new = [(name * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF for name in pages[kept:]]
        thread.block_pages, thread.blocks = pages, thread.blocks[:kept] + tuple(new)
        return thread.blocks

    def _give_up(self, call: Call) -> None:
        """The client has waited long enough."""
        if call.closed:
            return
        at = call.at
        if at is not None:
            at.catch_up()
        if call.closed or (call.lease is not None and call.lease.begun):
            return
        if at is not None and call.work is not None:
            at.abort(call.work)
        if call.lease is not None:
            self._finish(call, Cause.CLIENT, None)
        elif call.ticket is not None:
            self._leave_room(call)
        self.measure.abandoned += 1
        call.served.left = self.engine.now
        self._close(call)
        self._go_on(call.thread)

    def _close(self, call: Call) -> None:
        """Nothing more happens to it."""
        call.closed = True
        self.measure.close(call.served)

    # Routers

    def _dispatch(self, call: Call) -> None:
        if not call.closed:
            call.router = self.front.route(call.thread.conversation.key)
            try:
                entered = self.front.enter(call.router, call.request)
            except (NoReplica, Shed) as error:
                self._refused(call, error)
                return
            if isinstance(entered, Lease):
                self._send(call, entered)
                return
            call.ticket = entered
            entered.context = call
            self._waiting[call] = None

    def _every_second(self, router: Router) -> None:
        self._due(router)
        self.engine.after(1.0, self._every_second, router)

    def _due(self, router: Router) -> None:
        """Those that waited go on."""
        self._due_soon.discard(router)
        for ticket in self.front.due(router):
            call: Call = ticket.context
            call.ticket = None
            del self._waiting[call]
            if ticket.lease is not None:
                self._send(call, ticket.lease)
            elif isinstance(ticket.error, NoReplica | Shed):
                self._refused(call, ticket.error)
            else:
                assert ticket.error is not None
                raise ticket.error

    def _leave_room(self, call: Call) -> None:
        assert call.ticket is not None
        call.ticket.cancel(self.engine.now)
        call.ticket = None
        del self._waiting[call]

    def _again(self, call: Call) -> None:
        """To another replica, as one has failed it."""
        assert call.router is not None
        try:
            lease = self.front.acquire(call.router, call.request)
        except NoReplica as error:
            self._refused(call, error)
            return
        self._send(call, lease)

    def _send(self, call: Call, lease: Lease) -> None:
        """To the replica that the router has picked."""
        served, thread, turn = call.served, call.thread, call.turn
        server = lease.replica.address
        assert isinstance(server, Server)
        call.lease = lease
        self._open[call] = None
        served.tries += 1
        if served.placed is None:
            served.placed = self.engine.now
        served.replica = server.id
        served.reason = str(lease.choice.reason)
        if thread.conversation.main:
            if served.tries == 1:
                self._placed(thread, turn, served, server)
            if thread.last is not None:
                self.measure.placed[thread.last.id] -= 1
            self.measure.placed[server.id] += 1
        thread.last = server
        place, output = server, self._output_of(turn)
        if server.group.role is Role.WARM:
            new = call.request.prompt_tokens - lease.choice.resident_tokens
            cold = self._servers.least(Role.COLD) if new > self.fleet.cold_tokens else None
            if cold is not None:
                place, output = cold, 1
        self._engage(call, server)
        if place is not server:
            self._engage(call, place)
        self._submit(call, place, turn.pages, output)

    def _output_of(self, turn: Turn) -> int:
        """Tokens that whoever the policy picks produces of the answer."""
        return 1 if self._decodes_apart else turn.output_tokens

    def _engage(self, call: Call, server: Server) -> None:
        server.engaged += 1
        server.tokens += call.turn.prompt_tokens
        call.places += (server,)

    def _submit(self, call: Call, server: Server, pages: list[int], output: int, *, transferred: bool = False) -> None:
        """For so many tokens of its answer; when only the first is wanted, the engine is told so."""
        work = Work(
            pages, call.turn.prompt_tokens, output, MAX_NEW_TOKENS if output > 1 else 1, transferred=transferred
        )
        call.work, call.at = work, server
        try:
            server.submit(work, call)
        except QueueFull:
            self._lost(call, server)

    def _finish(self, call: Call, cause: Cause, usage: Usage | None) -> None:
        """Gives back what a call has taken."""
        lease, router = call.lease, call.router
        assert lease is not None
        assert router is not None
        outcome = _DONE if cause is Cause.DONE else OUTCOMES[cause, Phase.BODY if lease.begun else Phase.HEADERS]
        lease.finish(outcome, usage, self.engine.now)
        del self._open[call]
        call.lease = call.work = call.at = None
        places, call.places = call.places, ()
        for server in places:
            server.engaged -= 1
            server.tokens -= call.turn.prompt_tokens
            self._servers.released(server)
        if router.admission.waiting and router not in self._due_soon:
            # Not at once: the replica is in the middle of its step.
            self._due_soon.add(router)
            self.engine.at(self.engine.now, self._due, router)

    def _placed(self, thread: Thread, turn: Turn, served: Served, server: Server) -> None:
        """Whether the main thread has moved, and whether a scale-out made it do so."""
        last = thread.last
        if last is not None:
            served.followed = True
            served.moved = last is not server
            # One that begins anew (compacted) has nothing but the tools' prefix anywhere.
            if thread.joined < len(self._servers.joined_at) and turn.fingerprint == thread.fingerprint:
                self._after_scale_out(thread, turn, last, server)
        thread.joined = len(self._servers.joined_at)
        thread.fingerprint = turn.fingerprint

    def _after_scale_out(self, thread: Thread, turn: Turn, last: Server, server: Server) -> None:
        known = self._known.count(thread, turn)
        if not last.up or last.replica.cache.resident(turn.pages, known) <= known // 2:
            return
        joined = self.measure.joined
        joined.resident += 1
        if server is last or server.replica.cache.resident(turn.pages, known) > known // 2:
            return
        joined.elsewhere += 1
        joined.to_new += server.born >= self._servers.joined_at[-1]

    def _lost(self, call: Call, server: Server) -> None:
        """A replica died or was full. As the live router: another one, if nothing was passed on; else the client asks
        again."""
        lease = call.lease
        assert lease is not None
        begun = lease.begun
        self._finish(call, Cause.UPSTREAM, None)
        if begun:
            self.measure.broken += 1
            self._close(call)
            self.engine.after(CLIENT_RETRY_S, self._ask, call.thread, call.turn)
        elif call.served.tries >= TRIES:
            self._refused(call)
        else:
            if lease.replica.address is server:
                call.request.failed += (lease.replica,)
            self._again(call)

    def _refused(self, call: Call, error: Exception | None = None) -> None:
        """The client asks again when it was told to; its wait goes on."""
        call.request.failed = ()
        if isinstance(error, Shed):
            self.measure.sheds[error.reason] += 1
            self.engine.after(error.retry_after_s, self._dispatch, call)
            return
        self.measure.refused += 1
        self.engine.after(CLIENT_RETRY_S, self._dispatch, call)

    # Engines

    def _observed(self, server: Server, work: Work, at: float) -> None:
        call = server.calls[work]
        if work.stage is Stage.PREFILL:
            if not work.transferred:
                self._prefill_begun(server, call, work)
        elif work.stage is Stage.DECODE:
            if work.output_tokens == call.turn.output_tokens:
                assert call.lease is not None
                call.served.first_token = at
                call.lease.first_token(at)
            if not work.transferred:
                self._known.add(call.thread, work.pages[call.known : work.prompt_tokens // self._page])
        else:
            del server.calls[work]
            call.work = call.at = None
            # Not at once: the replica is in the middle of its step.
            if work.output_tokens < call.turn.output_tokens:
                self.engine.at(at, self._hand_over, call, call.lease, server)
            else:
                self._done(call, work, at)

    def _prefill_begun(self, server: Server, call: Call, work: Work) -> None:
        served = call.served
        served.cached_tokens, served.host_tokens = work.cached_tokens, work.host_tokens
        served.elsewhere_tokens = served.evicted_tokens = 0  # a replica that has died since may have begun it, too
        cached, known = work.cached_tokens // self._page, call.known
        if known < len(work.pages) and self._known.has(call.thread, work.pages[known]):  # by a fork, since it was asked
            call.known = known = self._known.count(call.thread, call.turn)
        if known > cached:
            others = [s.replica.cache.resident(work.pages, known) for s in self.servers if s is not server and s.up]
            elsewhere = max(max(others, default=0), cached)
            served.elsewhere_tokens = (elsewhere - cached) * self._page
            served.evicted_tokens = (known - elsewhere) * self._page

    def _hand_over(self, call: Call, lease: Lease, source: Server) -> None:
        """Sends the KV of a prompt to the replica that is to decode."""
        if call.lease is not lease:  # it has ended meanwhile
            return
        turn, target = call.turn, call.places[0]
        held = 0
        if source is target:
            least = self._servers.least(Role.DECODE)
            if least is None:
                self._lost(call, source)
                return
            target = least
            self._engage(call, target)
        else:
            held = target.replica.cache.resident(turn.pages, turn.prompt_tokens // self._page) * self._page
        seconds = (turn.prompt_tokens - held) * self.fleet.kv_bytes_per_token / self.fleet.link_bytes_per_s
        source.link_free_at = max(source.link_free_at, self.engine.now) + seconds
        boots = source.boots, target.boots
        self.engine.at(source.link_free_at, self._handed, call, lease, source, target, boots)

    def _handed(self, call: Call, lease: Lease, source: Server, target: Server, boots: tuple[int, int]) -> None:
        if call.lease is not lease:  # its client has left
            return
        if (source.boots, target.boots) != boots:
            self._lost(call, target if target.boots != boots[1] else source)
            return
        turn = call.turn
        pages, output = (turn.pages, self._output_of(turn)) if target is call.places[0] else ([], turn.output_tokens)
        self._submit(call, target, pages, output, transferred=True)

    def _done(self, call: Call, work: Work, at: float) -> None:
        served, thread = call.served, call.thread
        served.finished = at
        thread.held = len(work.pages)
        self._known.add(thread, work.pages[work.prompt_tokens // self._page :])
        self._finish(call, Cause.DONE, Usage(served.prompt_tokens, served.cached_tokens, served.output_tokens))
        self._close(call)
        forks = call.turn.forks
        if not forks:
            # Not at once: the replica is in the middle of its step.
            self.engine.at(at, self._go_on, thread)
            return
        thread.waits_for = len(forks)
        for fork in forks:
            begun = Thread(fork, thread, thread.ever)
            begun.block_pages, begun.blocks = thread.block_pages, thread.blocks  # it may share a long beginning
            self.engine.at(at, self._go_on, begun)
