"""Routers without a data path: a Balancer, its Sharing, and requests as the data path would place them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count

from policies.balancer import Balancer
from policies.lease import Lease
from policies.registry import make
from policies.sharing import Note
from policies.types import OUTCOMES, Cause, Phase, Replica, Request, Usage
from router.sharing import Sharing
from router.store import MemoryStore, Remembered, Store

_NUMBERS = count()

REPLICAS = ("r1", "r2", "r3", "r4")


class Held(MemoryStore):
    """Answers claims when it is told to."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.asked: list[Note] = []
        self.held = True
        self.answers = asyncio.Event()

    async def claim(self, note: Note) -> Sequence[Remembered]:
        if self.held:
            self.asked.append(note)
            await self.answers.wait()
        return await super().claim(note)


class Site:
    """One of several routers."""

    def __init__(self, store: Store, name: str, clock: Callable[[], float], policy: str, wait_s: float) -> None:
        self.clock = clock
        self.balancer = Balancer(make(policy))
        for replica in REPLICAS:
            self.balancer.join(Replica(replica), clock())
        self.sharing = Sharing(store, self.balancer, name=name, wait_s=wait_s, timeout_s=1.0, clock=clock)

    async def begin(self, key: bytes, tokens: int = 20_000, fingerprint: int = 7) -> Lease:
        """A turn's place, as it is when the turn is sent."""
        now = self.clock()
        request = Request(key, fingerprint=fingerprint, prompt_tokens=tokens)
        asked = asyncio.Event()
        claim = self.sharing.ask(request, now, asked.set)
        if claim is None:
            return self.balancer.acquire(request, now)
        await asked.wait()
        lease = self.balancer.acquire(request, self.clock())
        claim.placed(lease.replica)
        return lease

    def end(self, lease: Lease) -> None:
        """Its answer is whole."""
        now = self.clock()
        lease.first_token(now)
        tokens = lease.request.prompt_tokens
        lease.finish(OUTCOMES[Cause.DONE, Phase.BODY], Usage(tokens, 0, 100), now)

    async def turn(self, key: bytes, tokens: int = 20_000) -> str:
        """A whole turn; the replica it went to."""
        lease = await self.begin(key, tokens)
        self.end(lease)
        return lease.replica.id


@asynccontextmanager
async def sites(
    *stores: Store,
    clock: Callable[[], float] = time.monotonic,
    policy: str = "session_affinity",
    wait_s: float = 5.0,
) -> AsyncIterator[list[Site]]:
    """A router for each store given."""
    made = [Site(store, f"router-{next(_NUMBERS)}", clock, policy, wait_s) for store in stores]
    for site in made:
        await site.sharing.start()
    try:
        yield made
    finally:
        for site in made:
            await site.sharing.stop()
