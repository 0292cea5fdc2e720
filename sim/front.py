"""The routers in front of a fleet, each with a Balancer of its own, and what they tell each other.

Sharing is modelled as messages of plain values, as a store with subscriptions would carry them (Redis): where a turn
was placed and what it left behind, some time after it happened, and now and then how much each router has under way on
each replica. The store keeps what was said last of each session, for a router that starts anew.

Not shared: which conversations are under way elsewhere, learned speeds, corrections of capacities. Engines are watched
by every router for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from random import Random

from policies.admission import Admission, AdmissionConfig, Ticket
from policies.balancer import Balancer
from policies.directory import MAX_BRANCHES, Directory
from policies.lease import Lease
from policies.policy import Policy
from policies.sharing import Note, Own, note_of, total
from policies.types import Load, Request, State
from policies.types import Replica as View
from sim.engine import Engine
from sim.routers import Routers, Sharing, Spread
from sim.server import Server

STORED_SESSIONS = 200_000
"""As many as a Directory remembers."""


class Router:
    """One of them."""

    def __init__(self, balancer: Balancer, admission: Admission) -> None:
        self.balancer = balancer
        self.admission = admission
        self.published: dict[Server, Own] = {}
        """What it last told the others of."""
        self.others: dict[Router, dict[Server, Own]] = {}
        """What the others told it."""

    def view(self, server: Server) -> View | None:
        """Its own object for a replica; None when that has left."""
        return self.balancer.replicas.get(server.id)

    def others_tell(self, server: Server, now: float) -> None:
        """Adds up what the others told it of a replica."""
        view = self.view(server)
        if view is None:
            return
        told = [others[server] for others in self.others.values() if server in others]
        self.balancer.hear_load(view, *total(told), now)


class Front:
    """All routers of a world."""

    def __init__(
        self, plan: Routers, policy: Callable[[], Policy], admission: AdmissionConfig, engine: Engine, random: Random
    ) -> None:
        self.plan = plan
        self.policy = policy
        self.admission = admission
        self.routers = [self._router() for _ in range(plan.count)]
        self._engine = engine
        self._random = random
        self._shares = plan.count > 1 and plan.sharing is Sharing.DIRECTORY
        self._store: OrderedDict[bytes, dict[tuple[int, bool, str], Note]] = OrderedDict()
        if self._shares:
            for router in self.routers:
                router.balancer.on_home = partial(self._tell, router)
                engine.after(random.random() * plan.publish_s, self._publish, router)

    def _router(self) -> Router:
        balancer = Balancer(self.policy())
        return Router(balancer, Admission(balancer, self.admission))

    # The fleet

    def join(self, server: Server) -> None:
        for router in self.routers:
            router.balancer.join(View(server.id, address=server), self._engine.now)

    def leave(self, server: Server) -> None:
        for router in self.routers:
            router.balancer.leave(server.id, self._engine.now)
            for others in router.others.values():
                others.pop(server, None)
            router.published.pop(server, None)

    def set_state(self, server: Server, state: State) -> None:
        for router in self.routers:
            router.balancer.set_state(router.balancer.replicas[server.id], state, self._engine.now)

    def cache_cleared(self, server: Server) -> None:
        for router in self.routers:
            router.balancer.cache_cleared(router.balancer.replicas[server.id], self._engine.now)

    def report(self, server: Server, load: Load) -> None:
        for number, router in enumerate(self.routers):
            if (view := router.view(server)) is not None:
                own = replace(load) if number else load  # a Balancer notes its own requests in it
                router.balancer.report(view, own, self._engine.now)

    # Requests

    def route(self, key: bytes | None) -> Router:
        """The router that a request of this session comes to."""
        if len(self.routers) == 1:
            return self.routers[0]
        if self.plan.spread is Spread.BY_SESSION and key is not None:
            return self.routers[int.from_bytes(key[:8], "big") % len(self.routers)]
        return self._random.choice(self.routers)

    def enter(self, router: Router, request: Request) -> Lease | Ticket:
        """A lease of that router, or a place in its wait room. Raises Shed and NoReplica."""
        return router.admission.enter(request, self._engine.now)

    def due(self, router: Router) -> list[Ticket]:
        """Who has waited there, and now has a lease or is refused."""
        return router.admission.due(self._engine.now)

    def acquire(self, router: Router, request: Request) -> Lease:
        """A lease of that router for a request that had one before. Raises NoReplica."""
        return router.balancer.acquire(request, self._engine.now)

    # What happens to routers

    def switch(self, policy: Callable[[], Policy]) -> None:
        """Another policy takes over from the next request on."""
        self.policy = policy
        for router in self.routers:
            router.balancer.switch(policy(), self._engine.now)

    def restart(self, index: int | None, servers: Iterable[Server]) -> None:
        """New routers take over for one or all, which end what they have. They know what the store knows."""
        now = self._engine.now
        for i in range(len(self.routers)) if index is None else (index,):
            router, fresh = self.routers[i], self._router()
            router.balancer, router.admission = fresh.balancer, fresh.admission
            if self._shares:
                router.balancer.on_home = partial(self._tell, router)
            for server in servers:
                view = View(server.id, address=server)
                router.balancer.join(view, now)
                if not server.up:
                    router.balancer.set_state(view, State.EJECTED, now)
                elif server.leaving:
                    router.balancer.set_state(view, State.DRAINING, now)
            for notes in self._store.values():
                for note in notes.values():
                    router.balancer.hear(note, now)

    def lose_store(self) -> None:
        """All homes are forgotten, in the store and in every router."""
        self._store.clear()
        for router in self.routers:
            router.balancer.directory = Directory()
            for view in router.balancer.replicas.values():
                view.cache.clear()

    # Messages

    def _tell(self, router: Router, lease: Lease) -> None:
        """The others of what a lease has made known."""
        note = note_of(lease)
        if note is not None:
            self._engine.after(self.plan.share_delay_s, self._told, router, note)

    def _told(self, sender: Router, note: Note) -> None:
        notes = self._store.setdefault(note.key, {})
        self._store.move_to_end(note.key)
        at = (note.fingerprint, note.fork, note.replica)
        notes.pop(at, None)
        if note.tokens:
            notes[at] = note
            if len(notes) > MAX_BRANCHES:
                del notes[next(iter(notes))]
        if len(self._store) > STORED_SESSIONS:
            self._store.popitem(last=False)
        for router in self.routers:
            if router is not sender:
                router.balancer.hear(note, self._engine.now)

    def _publish(self, router: Router) -> None:
        """A router's load, as far as it has changed."""
        self._engine.after(self.plan.publish_s, self._publish, router)
        changed = {}
        for view in router.balancer.replicas.values():
            server, load = view.address, (view.in_flight, view.prefill_tokens, view.pending_s)
            assert isinstance(server, Server)
            if router.published.get(server, (0, 0, 0.0)) != load:
                router.published[server] = changed[server] = load
        if changed:
            self._engine.after(self.plan.share_delay_s, self._published, router, changed)

    def _published(self, sender: Router, changed: dict[Server, Own]) -> None:
        now = self._engine.now
        for router in self.routers:
            if router is sender:
                continue
            router.others.setdefault(sender, {}).update(changed)
            for server in changed:
                router.others_tell(server, now)
