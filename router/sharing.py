"""What this router tells the others, and hears from them, through a store. Nothing here is needed to serve a request.

A session that this router does not know is claimed in the store before its first request is sent: if another router
has placed it, it goes where that did. All else is told after the fact: where turns were placed and what they left
behind, how much this router has under way on each replica, what operators ordered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from policies.balancer import Balancer
from policies.lease import Lease
from policies.residency import Home
from policies.responses import asked, issued
from policies.sharing import Note, Own, note_of, notes_of, proposed, withdrawn
from policies.types import Replica, Request
from router.metrics import histogram
from router.others import Others
from router.store import Heard, Message, Store, StoreError
from router.units import counted

if TYPE_CHECKING:
    from router.orders import Orders

log = logging.getLogger("warmroute.store")

TELL_S = 0.05
"""Between two messages while there is something to tell."""
IDLE_S = 0.2
"""Between two looks whether there is: a load that only fell is known to the others by then."""
WHOLE_S = 1.0
"""Between two messages that hold all loads, by which the others know that this router lives."""
MAX_UNTOLD = 20_000
"""Homes that wait to be told; beyond, the longest waiting are not: their sessions may be computed again elsewhere."""
MAX_AT_ONCE = 500
"""Homes told in one message."""
HEARD_AT_ONCE = 50
"""Notes taken in before requests get their turn: about a millisecond."""
RETRY_S = 0.5
"""Between two attempts to reach a store that does not answer."""
SLOW_CLAIMS = 3
"""Claims in a row that were not answered in time, after which none is made for `SLOW_S` seconds."""
SLOW_S = 1.0
RESTORED_AT_ONCE = 100
"""Sessions given back at a time to a store that has forgotten them."""

CLAIMS = ("claimed", "adopted", "late", "failed", "not_asked")
"""What comes of a first request: nobody knew its session, another router did; no answer in time, a fault; the store is
away or has been late too often."""
DIRECTIONS = ("told", "heard", "dropped", "restored")
"""Notes to the others, from them, never told for want of room, given back after the store forgot."""
OPS = ("reach", "claim", "tell", "hear", "restore")
"""What the store is asked for."""


class Claim:
    """A place that was proposed to the store for a session that is not known here, until the session has one."""

    __slots__ = ("_given_up", "_sharing", "note", "taken", "task")

    def __init__(self, sharing: Sharing, note: Note) -> None:
        self._sharing = sharing
        self.note = note
        self._given_up = False
        self.taken = False
        """Nobody knew the session, and the store has noted the proposal. Only then: where that is not known, what the
        store has may be another router's word."""
        self.task: asyncio.Task[None] | None = None

    def placed(self, replica: Replica | None) -> None:
        """Where the session was placed; nowhere, when its request has ended before. Not to be asked for any more."""
        if self.task is not None:
            self._given_up = True  # what the store has noted is known when it has answered
        elif self.taken and (replica is None or replica.id != self.note.replica):
            self._sharing.withdraw(self.note)

    def answered(self, then: Callable[[], None]) -> None:
        """By the store, or not in time: go on."""
        self.task = None
        if self._given_up:
            self.placed(None)
        else:
            then()


class Sharing:
    """Between one Balancer and one store."""

    def __init__(
        self,
        store: Store,
        balancer: Balancer,
        *,
        name: str,
        wait_s: float,
        timeout_s: float,
        clock: Callable[[], float],
        among_workers: bool = False,
    ) -> None:
        """`wait_s` is how long a request waits for the store at most, `timeout_s` all else.

        `among_workers`: the store is the supervisor's, which nobody configured, and the log is not to puzzle over one.
        """
        self.store = store
        self.name = name
        self.wait_s = wait_s
        self.timeout_s = timeout_s
        self.others = Others(balancer, clock)
        self.orders: Orders | None = None
        """Who carries out what operators ordered elsewhere."""
        self.up = False
        """Whether the store did what it was last asked for."""
        self.why = "not asked yet"
        """What is wrong with it, when it is not up."""
        self.claims = dict.fromkeys(CLAIMS, 0)
        self.waits = histogram.Histogram(histogram.CLAIMS)
        """Seconds that first requests waited for the store, whatever came of it."""
        self.notes = dict.fromkeys(DIRECTIONS, 0)
        self.faults = dict.fromkeys(OPS, 0)
        self._balancer = balancer
        self._clock = clock
        self._among_workers = among_workers
        self._untold: dict[Home, Lease] = {}
        self._untold_orders: dict[str, bytes | None] = {}
        self._withdrawn: deque[Note] = deque(maxlen=MAX_UNTOLD)
        """Homes that were proposed, and came to nothing."""
        self._issued: deque[Note] = deque(maxlen=MAX_UNTOLD)
        """Responses that were issued."""
        self._loads: dict[str, Own] = {}
        """As last told."""
        self._whole_at = -math.inf
        self._cursor = ""
        self._epoch = ""
        self._gap_at = 0.0
        """What was not used since then may have moved unheard."""
        self._late = 0
        self._ask_at = 0.0
        """No claims before."""
        self._restoring: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()

    # Life

    async def start(self) -> None:
        """Reach the store, within `timeout_s` for each question, hear of orders given before; then go on by oneself."""
        self._balancer.on_home = self.tell
        self._gap_at = self._clock()
        try:
            await self._reach()
        except (StoreError, TimeoutError) as error:
            self._trouble("reach", error)
            log.warning("the store is not there: %s; serving by own knowledge until it is", self.why)
        except Exception:
            log.exception("the store was not reached, in a way it should not; serving by own knowledge until it is")
        self._tasks = [
            asyncio.create_task(self._forever(self._tell_next, lambda: "tell" if self.up else "reach")),
            asyncio.create_task(self._forever(self._hear_next, lambda: "hear")),
        ]

    async def stop(self) -> None:
        """Tell what is left, that nothing is under way here any more, and let go of the store."""
        self._balancer.on_home = None
        tasks = [*self._tasks, *([] if self._restoring is None else [self._restoring])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.up:
            try:
                async with asyncio.timeout(self.timeout_s):
                    while self._untold or self._withdrawn or self._issued or self._untold_orders:
                        await self._tell_some()
                    await self.store.tell(Message(self.name, leaving=True))
            except (StoreError, TimeoutError) as error:
                log.warning("the last word to the store was not heard: %s", error)
        await self.store.close()

    async def _forever(self, step: Callable[[], Awaitable[None]], op: Callable[[], str]) -> None:
        """Take one step after the other. After one that failed, at `op`, the store is left alone for a while."""
        while True:
            try:
                await step()
            except (StoreError, TimeoutError) as error:
                self._trouble(op(), error)
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("what is shared was not (%s), in a way it should not", op())
                await asyncio.sleep(RETRY_S)

    # Claims

    def ask(self, request: Request, now: float, then: Callable[[], None]) -> Claim | None:
        """Have the store say whether a request's session is known elsewhere, then call `then`: it can be placed.

        The Balancer has heard by then what is known. If nothing is, the place that it chooses now is taken in the
        store, so that who asks next hears of it, and holds here, too. None when there is nothing to ask, or nobody.
        Of a request that names a response which is not known here, the store is asked who issued that, and no more.
        """
        if request.response is not None and self._balancer.responses.issuer(request.response, now) is None:
            note = asked(request.response) if self._reachable(now) else None
        else:
            note = self._session(request, now)
        if note is None:
            return None
        claim = Claim(self, note)
        claim.task = asyncio.create_task(self._claim(claim, then))
        return claim

    def _session(self, request: Request, now: float) -> Note | None:
        """The place that a session unknown here is to have; None when there is nothing to ask."""
        if not request.turn or not self._unknown(request.key, now):
            return None
        try:
            request.proposed = self._balancer.propose(request, now)
        except Exception:  # NoReplica, or a fault of the policy: placing it meets with the same, and answers
            return None
        return proposed(request, request.proposed)

    def _unknown(self, key: bytes | None, now: float) -> bool:
        """Whether the store may know more of a session than this router does, and can be asked."""
        if key is None:
            return False
        branches = self._balancer.directory.branches(key, now)
        if branches and (branches[0].last_use >= self._gap_at or any(branch.open for branch in branches)):
            return False
        return self._reachable(now)

    def _reachable(self, now: float) -> bool:
        """Whether the store can be asked; it is counted when not."""
        if not self.up or now < self._ask_at:
            self.claims["not_asked"] += 1
            return False
        return True

    async def _claim(self, claim: Claim, then: Callable[[], None]) -> None:
        began = self._clock()
        try:
            async with asyncio.timeout(self.wait_s):
                known = await self.store.claim(claim.note)
            self._late = 0
            claim.taken = not known
            self.claims["adopted" if known else "claimed"] += 1
            for remembered in reversed(known):
                self._balancer.hear(remembered.note, self._clock())
        except TimeoutError:
            self._late += 1
            self.claims["late"] += 1
            if self._late >= SLOW_CLAIMS:
                self._ask_at = self._clock() + SLOW_S
        except StoreError as error:
            self.claims["failed"] += 1
            self._trouble("claim", error)
        except Exception:  # a client must not wait for what will never come
            self.claims["failed"] += 1
            self.faults["claim"] += 1
            log.exception("a session was not claimed, in a way it should not")
        self.waits.observe(self._clock() - began)
        claim.answered(then)

    def withdraw(self, note: Note) -> None:
        """Have it known that there is no such home after all."""
        self._withdrawn.append(withdrawn(note))
        self._wake.set()

    # Telling

    def tell(self, lease: Lease) -> None:
        """Have the others know what a lease has made known of a conversation's homes. At once, but not here."""
        home = lease.home
        if home is None:
            return
        self._untold.pop(home, None)
        self._untold[home] = lease
        if len(self._untold) > MAX_UNTOLD:
            del self._untold[next(iter(self._untold))]
            self.notes["dropped"] += 1
        self._wake.set()

    def tell_issued(self, note: Note) -> None:
        """Have the others know, likewise, which replica issued a response."""
        self._issued.append(note)
        self._wake.set()

    @property
    def untold(self) -> int:
        """Homes that wait to be told."""
        return len(self._untold)

    def order(self, name: str, value: bytes | None) -> None:
        """Have the others do what an operator ordered here, those that start later, too. None takes it back."""
        self._untold_orders[name] = value
        self._wake.set()

    async def _tell_next(self) -> None:
        """Tell what there is by now, or in a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_S):
                await self._wake.wait()
        self._wake.clear()
        self.others.fade()
        if self.up:
            await self._tell_some()
        else:
            await self._reach()
        if self._untold or self._withdrawn or self._issued:
            self._wake.set()
        await asyncio.sleep(TELL_S)

    async def _tell_some(self) -> None:
        """What there is to tell, as far as it fits one message."""
        now = self._clock()
        whole = now - self._whole_at >= WHOLE_S
        loads = self._own_loads()
        changed = loads if whole else _changed(self._loads, loads)
        homes = list(self._untold)[:MAX_AT_ONCE]
        if not (homes or changed or whole or self._untold_orders or self._withdrawn or self._issued):
            return
        withdrawals = [note for note in _some(self._withdrawn) if not self._is_home(note, now)]
        responses = _some(self._issued)
        leases = {home: self._untold.pop(home) for home in homes}
        orders, self._untold_orders = self._untold_orders, {}
        # What is there is told last: it may be where another proposal came to nothing.
        notes = [*withdrawals, *responses, *(note for lease in leases.values() if (note := note_of(lease)) is not None)]
        try:
            async with asyncio.timeout(self.timeout_s):
                if whole:
                    await self._check_epoch()
                await self.store.tell(Message(self.name, notes, changed, whole, orders))
        except BaseException:
            # What was not told waits again, before what came since.
            self._withdrawn.extendleft(reversed(withdrawals))
            self._issued.extendleft(reversed(responses))
            self._untold = {**{h: lease for h, lease in leases.items() if h not in self._untold}, **self._untold}
            self._untold_orders = {**orders, **self._untold_orders}
            raise
        self._loads = loads
        self.notes["told"] += len(notes)
        if whole:
            self._whole_at = now

    def _is_home(self, note: Note, now: float) -> bool:
        """Whether the session lives by now where that note says that it does not: another router's turn went there."""
        branches = self._balancer.directory.branches(note.key, now)
        return any(home.resident and home.replica.id == note.replica for branch in branches for home in branch.homes)

    def _own_loads(self) -> dict[str, Own]:
        return {
            replica.id: (replica.in_flight, replica.prefill_tokens, replica.pending_s)
            for replica in self._balancer.replicas.values()
            if replica.in_flight
        }

    # Hearing

    async def _hear_next(self) -> None:
        """Take in what comes, if anything does."""
        if not self.up:
            await asyncio.sleep(IDLE_S)
            return
        async with asyncio.timeout(WHOLE_S + self.timeout_s):
            heard = await self.store.hear(self._cursor, WHOLE_S)
        await self._take(heard)

    async def _take(self, heard: Heard) -> None:
        if heard.lost and self._cursor:
            log.warning("messages of other routers were lost: the store is asked before the next turn of each session")
            self._gap_at = self._clock()
        taken = 0
        for message in heard.messages:
            own = message.sender == self.name
            if own and not message.controls:
                continue
            try:
                self._obey(message.controls, own)
                if own:
                    continue
                self.others.heard(message)
                for note in message.notes:
                    self._balancer.hear(note, self._clock())
                    taken += 1
                    if taken % HEARD_AT_ONCE == 0:
                        await asyncio.sleep(0)
            except Exception:
                # Those behind it must be heard.
                log.exception("a message of router %s was not taken in, in a way it should not", message.sender)
        self.notes["heard"] += taken
        self._cursor = heard.cursor

    def _obey(self, controls: Mapping[str, bytes | None], own: bool) -> None:
        """Carry out orders as they were told, so that the last holds, whoever was told it.

        One's own are in force already, unless another was heard since, which was told before it.
        """
        if self.orders is None:
            return
        for name, value in controls.items():
            if name in self._untold_orders:
                continue  # what is told later holds
            if not own or self.orders.all().get(name) != value:
                self.orders.carry_out(name, value)

    # The store's own state

    async def _reach(self) -> None:
        """Ask a store that was away, and tell it all: one that takes nothing is none. StoreError, TimeoutError."""
        async with asyncio.timeout(self.timeout_s):
            await self._check_epoch()
            if not self._cursor:
                self._cursor = (await self.store.hear("", 0.0)).cursor
            controls = await self.store.controls()
        if self.orders is not None:
            wanted = {**controls, **self._untold_orders}  # what was taken back here, and not told yet, is no order
            self.orders.reconcile({name: value for name, value in wanted.items() if value is not None})
        self._whole_at = -math.inf
        await self._tell_some()
        self.up, self.why, self._late, self._ask_at = True, "", 0, 0.0
        if self._among_workers:
            log.info("sessions are shared with the other workers")
        else:
            heard = counted(len(self.others), "other router")
            log.info("the store is there: sessions are shared through it; %s heard so far", heard)

    async def _check_epoch(self) -> None:
        """Whether the store still has its memory. What it lost it gets back."""
        epoch = await self.store.epoch(os.urandom(8).hex())
        if self._epoch not in ("", epoch):
            log.warning("the store has forgotten what it knew: it gets back what this router knows")
            self._cursor = ""
            self._gap_at = self._clock()
            if self.orders is not None:
                self._untold_orders = {**self.orders.all(), **self._untold_orders}
            if self._restoring is not None:
                self._restoring.cancel()  # what it has given back is forgotten, too
            self._restoring = asyncio.create_task(self._restore())
        self._epoch = epoch

    async def _restore(self) -> None:
        """Give the store what it has forgotten, the sessions used last first."""
        now = self._clock()
        directory = self._balancer.directory
        keys = [key for key, _ in directory.lately(now - directory.idle_s)]
        for at in range(0, len(keys), RESTORED_AT_ONCE):
            branches = (branch for key in keys[at : at + RESTORED_AT_ONCE] for branch in directory.branches(key, now))
            if not await self._give_back([note for branch in branches for note in notes_of(branch)]):
                return
        responses = self._balancer.responses
        issuers = list(responses.lately(now - responses.idle_s))
        for at in range(0, len(issuers), RESTORED_AT_ONCE):
            some = issuers[at : at + RESTORED_AT_ONCE]
            fleet = self._balancer.replicas
            if not await self._give_back([issued(key, fleet[name]) for key, name in some if name in fleet]):
                return

    async def _give_back(self, notes: Sequence[Note]) -> bool:
        """Whether the store took them."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.store.restore(notes)
        except (StoreError, TimeoutError) as error:
            self._trouble("restore", error)
            self._epoch = "not restored"  # once more when it is there again
            return False
        self.notes["restored"] += len(notes)
        return True

    def _trouble(self, what: str, error: Exception) -> None:
        self.faults[what] += 1
        self.why = str(error) or f"{what}: not answered within {self.timeout_s:g} s"
        if self.up:
            log.warning("the store does not do its work (%s): %s; going on by own knowledge", what, self.why)
        self.up = False


def _some(notes: deque[Note]) -> list[Note]:
    """The first of them, taken out, as many as fit a message."""
    return [notes.popleft() for _ in range(min(len(notes), MAX_AT_ONCE))]


def _changed(before: Mapping[str, Own], now: Mapping[str, Own]) -> dict[str, Own]:
    changed = {name: load for name, load in now.items() if before.get(name) != load}
    changed.update(dict.fromkeys(before.keys() - now.keys(), (0, 0, 0.0)))
    return changed
