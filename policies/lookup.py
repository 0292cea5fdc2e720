"""What the directory knows of a request: its branch, and which replicas hold how much of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from policies.directory import Branch, Directory, condense, links, shared
from policies.residency import DEAD_BAND_TOKENS
from policies.types import Replica, Request, Resident, State

BACK_SHARE: Final = 0.95
"""A prompt shorter than this share of its branch, and by more than estimates are off, is not the branch's next turn."""

_READY: Final = State.READY
"""Taken once: an enum's member is looked up through its metaclass each time it is named, 60 ns in Python 3.11."""

_UNKNOWN: Final = 1 << 62
"""Tokens of a prompt of which nothing is known: no less than any home holds."""


class Found:
    """The answer."""

    __slots__ = ("branch", "branches", "chain", "forks", "holders")

    def __init__(self) -> None:
        self.branches: Sequence[Branch] = ()
        """Of its conversation."""
        self.branch: Branch | None = None
        """The one it continues, or forks from."""
        self.forks = False
        """It begins a branch of its own: the other is under way, or has gone on beyond it."""
        self.chain = b""
        self.holders: dict[Replica, Resident] = {}
        """Also those that are no candidates."""


def look_up(directory: Directory, request: Request, now: float) -> Found:
    """Look for the request's conversation, and fill in what the Balancer sets of a Request."""
    request.residents = ()
    request.known = request.lost = request.concurrent = False
    request.last_home = None
    request.once_tokens = 0
    if request.estimate_tokens < 0:
        request.estimate_tokens = request.prompt_tokens
    request.prompt_tokens = request.estimate_tokens
    found = Found()
    if request.key is None:
        return found
    branches = directory.branches(request.key, now)
    request.known = bool(branches)
    if request.blocks:
        found.chain = condense(request.blocks)
    found.branches = _of_conversation(branches, request.fingerprint)
    found.branch = branch = _continued(found.branches, found.chain)
    if branch is not None:
        request.concurrent = branch.open > 0
        request.prompt_tokens = int(request.estimate_tokens * branch.ratio)
        found.forks = request.concurrent or goes_back(branch, request.prompt_tokens)
    elif branches:
        _begin_anew(request, branches)
        return found
    elif request.parent is not None and request.fingerprint:
        # A subagent may begin with its parent's conversation.
        found.branches = _of_conversation(directory.branches(request.parent, now), request.fingerprint)
        request.concurrent = any(other.open for other in found.branches)
    if found.branches:
        _hold(request, found)
    return found


def _begin_anew(request: Request, branches: Sequence[Branch]) -> None:
    """Of a known session's request that continues none of its conversations: where the last was, if none is open."""
    if any(other.open for other in branches):
        return
    homes = [home.replica for other in branches for home in other.homes]
    request.last_home = next((replica for replica in homes if _usable(replica, request)), None)
    request.lost = bool(homes) and request.last_home is None


def unsure(directory: Directory, key: bytes | None, blocks: Sequence[int], now: float) -> bool:
    """Whether a request's fingerprint is needed to tell which conversation it belongs to.

    Not when its session has one branch, idle, that the request visibly continues: then its body need not be parsed.
    """
    if key is None:
        return True
    branches = directory.branches(key, now)
    if len(branches) != 1 or branches[0].open:
        return True
    known, chain = branches[0].chain, condense(blocks)
    if not known and not chain:
        return False  # too short for a link, and so for a mistake to cost anything
    return 2 * shared(known, chain) <= links(known)


def goes_back(branch: Branch, prompt_tokens: int) -> bool:
    """Whether the prompt is so much shorter than the branch that it is no turn of it.

    As a main thread's that comes back after a fork, which began while it was idle, has gone on as if it were the main
    thread; or a client's that went back to an earlier turn.
    """
    return 0 < prompt_tokens < BACK_SHARE * branch.size() - DEAD_BAND_TOKENS


def _hold(request: Request, found: Found) -> None:
    """Which replicas hold how much of the prompt."""
    prompt = request.prompt_tokens if request.prompt_tokens > 0 else _UNKNOWN
    holders, chain = found.holders, found.chain
    residents: list[Resident] = []
    for branch in found.branches:
        own = branch is found.branch
        limit = prompt
        if found.forks or not own:
            if chain and branch.chain:  # it forks off there
                limit = prompt * shared(branch.chain, chain) // links(chain)
            if own and not request.concurrent:  # nor is more its own than was there before the other went on
                limit = min(limit, _most_whole(branch, prompt) or limit)
        for home in branch.homes:
            once = home.whole if home.whole < limit else limit
            if once > request.once_tokens:
                request.once_tokens = once
            tokens = home.tokens if home.tokens < limit else limit
            replica = home.replica
            usable = _usable(replica, request)
            if not home.whole or not usable:  # cleared, or out of reach
                request.lost = True
            if tokens <= 0 or not home.resident:
                continue
            gpu_tokens = 0 if home.on_host and replica.cache.host_tokens else tokens
            resident = Resident(replica, tokens, gpu_tokens, own, home.whole <= prompt)
            better = holders.get(replica)
            if better is not None:
                if (own, tokens) <= (better.own, better.tokens):
                    continue
                if usable:
                    residents.remove(better)
            holders[replica] = resident
            if usable:
                residents.append(resident)
    if len(residents) > 1:
        residents.sort(key=lambda resident: not resident.own)
    request.residents = tuple(residents)


def _most_whole(branch: Branch, prompt_tokens: int) -> int:
    """The most that any home of it had of no more than the prompt; 0 when none had."""
    return max((home.whole for home in branch.homes if home.whole <= prompt_tokens), default=0)


def _usable(replica: Replica, request: Request) -> bool:
    return (
        replica.present and replica.state is _READY and replica.pool == request.pool and replica not in request.failed
    )


def _of_conversation(branches: Sequence[Branch], fingerprint: int) -> Sequence[Branch]:
    """The branches whose beginning is the same; where nobody looked, it may be."""
    if not fingerprint or not branches:
        return branches
    if len(branches) == 1:
        return branches if branches[0].fingerprint in (0, fingerprint) else ()
    return [branch for branch in branches if branch.fingerprint in (0, fingerprint)]


def _continued(branches: Sequence[Branch], chain: bytes) -> Branch | None:
    """The branch that shares most with the request; among equals an idle one, the main one, the latest."""
    if len(branches) <= 1:
        return branches[0] if branches else None
    return _nearest(branches, chain)


def _nearest(branches: Sequence[Branch], chain: bytes) -> Branch:
    return max(branches, key=lambda branch: (shared(branch.chain, chain), not branch.open, not branch.fork))
