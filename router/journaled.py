"""A Balancer that notes every call it gets, so that the same calls can be made again: sim/replay.py does.

What a call says of a request is noted as the Balancer got it: sizes, times, and digests of the session and of what
the body holds. No text of prompts or answers, no header and no address of a client is in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from hashlib import blake2b
from struct import iter_unpack
from typing import TypeVar

from policies.balancer import Balancer, NoReplica
from policies.directory import LINK_BYTES, Directory
from policies.lease import Lease
from policies.policy import Policy
from policies.sharing import Note, stale
from policies.types import Choice, Load, Outcome, Replica, Request, State, Usage
from router.calls import (
    FORMAT,
    Acquire,
    Asked,
    CacheCleared,
    Call,
    Explain,
    Finish,
    FirstToken,
    Header,
    Hear,
    HearLoad,
    Join,
    Leave,
    Report,
    SetState,
    SetWeight,
    Switch,
)
from router.journal import Journal
from router.switching import described
from router.version import VERSION

KNOWN_BLOCKS = 1 << 16
"""Digests of blocks kept ready: a conversation sends the same ones turn after turn."""

_REPORTED = [each.name for each in fields(Load) if not each.name.startswith("own_")]
"""What an engine says; the rest the Balancer adds."""

A = TypeVar("A", bound=Asked)


class JournaledBalancer(Balancer):
    """Writes each call to the journal when it is carried out."""

    def __init__(self, policy: Policy, directory: Directory, journal: Journal, secret: bytes) -> None:
        """`secret` keys the digests of bodies; without one they hold for this process alone."""
        super().__init__(policy, directory)
        self._journal = journal
        self._numbers: dict[Replica, int] = {}
        """Of replicas in the fleet, and of those gone that still have leases."""
        self._joined = 0
        self._leases: dict[Lease, int] = {}
        self._digest = _digest(secret or os.urandom(32))

    def start(self, now: float) -> None:
        """Begin the journal. To be called before anything else."""
        self._now = now
        self._journal.start(self._header)

    def _header(self, part: int, lost: int) -> Header:
        return Header(
            at=self._now,
            format=FORMAT,
            version=VERSION,
            time=time.time(),
            part=part,
            lost=lost,
            policy=described(self.policy),
            directory={"max_sessions": self.directory.max_sessions, "idle_s": self.directory.idle_s},
            replicas=[self._join(replica, replica.since) for replica in self.replicas.values()],
        )

    def _write(self, line: Call, now: float) -> None:
        self._now = now
        self._journal.write(line)

    def _join(self, replica: Replica, at: float) -> Join:
        return Join(at, self._numbers[replica], replica.id, replica.weight, replica.state, replica.pool)

    # The fleet

    def join(self, replica: Replica, now: float) -> None:
        if replica.id in self.replicas:
            self.leave(replica.id, now)  # noted on its own, before
        super().join(replica, now)
        self._numbers[replica] = self._joined
        self._joined += 1
        self._write(self._join(replica, now), now)

    def leave(self, replica_id: str, now: float) -> Replica:
        replica = super().leave(replica_id, now)
        number = self._numbers[replica]
        if not replica.in_flight:
            del self._numbers[replica]
        self._write(Leave(now, number), now)
        return replica

    def set_state(self, replica: Replica, state: State, now: float) -> None:
        super().set_state(replica, state, now)
        if (number := self._numbers.get(replica)) is not None:
            self._write(SetState(now, number, state), now)

    def set_weight(self, replica: Replica, weight: float, now: float) -> None:
        super().set_weight(replica, weight, now)
        if (number := self._numbers.get(replica)) is not None:
            self._write(SetWeight(now, number, weight), now)

    def report(self, replica: Replica, load: Load, now: float) -> None:
        super().report(replica, load, now)
        if (number := self._numbers.get(replica)) is not None:
            self._write(Report(now, number, _reported(load)), now)

    def hear(self, note: Note, now: float) -> None:
        super().hear(note, now)
        replica = self.replicas.get(note.replica)
        if replica is None or stale(note, replica):
            return
        line = Hear(now, self._numbers[replica], note.key.hex(), note.tokens, note.counted)
        if note.fingerprint:
            line.fingerprint = self._digest(note.fingerprint).hex()
        line.chain = b"".join(self._digest(link)[LINK_BYTES:] for (link,) in iter_unpack(">I", note.chain))
        line.fork, line.ratio = note.fork, note.ratio
        self._write(line, now)

    def hear_load(self, replica: Replica, running: int, tokens: int, pending_s: float, now: float) -> None:
        super().hear_load(replica, running, tokens, pending_s, now)
        if (number := self._numbers.get(replica)) is not None:
            self._write(HearLoad(now, number, running, tokens, pending_s), now)

    def cache_cleared(self, replica: Replica, now: float) -> None:
        super().cache_cleared(replica, now)
        if (number := self._numbers.get(replica)) is not None:
            self._write(CacheCleared(now, number), now)

    def switch(self, policy: Policy, now: float) -> None:
        super().switch(policy, now)
        self._write(Switch(now, described(policy)), now)

    # Requests

    def acquire(self, request: Request, now: float) -> Lease:
        line = self._describe(Acquire(now), request)
        if request.proposed is not None:
            line.proposed = self._numbers.get(request.proposed.replica)
        try:
            lease = super().acquire(request, now)
        except NoReplica as none:
            line.refused = none.reason
            self._write(line, now)
            raise
        self._leases[lease] = line.lease = self.leases
        line.replica = self._numbers[lease.replica]
        line.reason = lease.choice.reason
        self._write(line, now)
        return lease

    def _ask(
        self, choose: Callable[[Request, Sequence[Replica], float], Choice], request: Request, now: float
    ) -> Choice:
        line = self._describe(Explain(now), request)
        choice = super()._ask(choose, request, now)
        self._write(line, now)
        return choice

    def begun(self, lease: Lease, now: float) -> None:
        super().begun(lease, now)
        self._write(FirstToken(now, self._leases[lease]), now)

    def ended(self, lease: Lease, outcome: Outcome, usage: Usage | None, now: float) -> None:
        super().ended(lease, outcome, usage, now)
        number = self._leases.pop(lease, None)
        if number is None:
            return  # it came to nothing as it was opened, and nobody has been told of it
        line = Finish(now, number, outcome.cause, outcome.phase, lease.timed)
        if usage is not None:
            line.prompt_tokens = usage.prompt_tokens
            line.cached_tokens = usage.cached_tokens
            line.completion_tokens = usage.completion_tokens
        replica = lease.replica
        if not replica.in_flight and self.replicas.get(replica.id) is not replica:
            del self._numbers[replica]
        self._write(line, now)

    def _describe(self, line: A, request: Request) -> A:
        line.prompt_tokens = _estimate(request)
        line.turn = request.turn
        line.pool = request.pool
        if request.key is not None:
            line.key = request.key.hex()
        if request.parent is not None:
            line.parent = request.parent.hex()
        if request.response is not None:
            line.response = request.response.hex()
        if request.failed:
            line.failed = [self._numbers[replica] for replica in request.failed if replica in self._numbers]
        # Hashes of bodies alone: unkeyed, they would let whoever reads the journal confirm a guess of a prompt.
        if request.fingerprint:
            line.fingerprint = self._digest(request.fingerprint).hex()
        line.blocks = b"".join(map(self._digest, request.blocks))
        return line


def _digest(secret: bytes) -> Callable[[int], bytes]:
    """Makes a function that digests numbers of 64 bits into 8 bytes; the last 4 are of the number's last 4 alone.

    So a chain that another router condensed (`policies.directory.condense`) is digested like the blocks it is made of.
    """
    keyed = blake2b(key=blake2b(secret, digest_size=32, person=b"journal").digest(), digest_size=LINK_BYTES)

    def half(number: int) -> bytes:
        hashed = keyed.copy()
        hashed.update(number.to_bytes(8, "big"))
        return hashed.digest()

    @lru_cache(KNOWN_BLOCKS)
    def digest(number: int) -> bytes:
        return half(number) + half(number & 0xFFFFFFFF)

    return digest


def _estimate(request: Request) -> int:
    """As the driver made it: one that is sent again holds the Balancer's correction by now."""
    return request.prompt_tokens if request.estimate_tokens < 0 else request.estimate_tokens


def _reported(load: Load) -> dict[str, float]:
    values = ((name, getattr(load, name)) for name in _REPORTED)
    return {name: value for name, value in values if value is not None}
