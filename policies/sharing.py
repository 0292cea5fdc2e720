"""What several routers in front of one fleet tell each other of homes, as plain values: how is their drivers' matter.

A router tells where it placed a turn of a conversation, and again what that left behind. Another takes its word as if
it had placed the turn itself: its directory knows the home, its shadow of the replica's cache holds what is there.
Not shared: which conversations are under way elsewhere, learned speeds, corrections of capacities.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from policies.directory import Branch, Directory, condense, links, shared
from policies.lease import Lease
from policies.lookup import goes_back
from policies.residency import Home
from policies.types import Choice, Replica, Request

Own = tuple[int, int, float]
"""A router's own requests in flight on a replica, their tokens that await prefill, and the seconds these will take."""


def total(told: Iterable[Own]) -> Own:
    """Of several routers."""
    running, tokens, pending_s = 0, 0, 0.0
    for own in told:
        running, tokens, pending_s = running + own[0], tokens + own[1], pending_s + own[2]
    return running, tokens, pending_s


@dataclass(frozen=True, slots=True)
class Note:
    """A turn of a branch was placed on a replica, or has ended there."""

    key: bytes
    fingerprint: int
    chain: bytes
    """Of its last request, see `directory.condense`."""
    fork: bool
    ratio: float
    """Prompt tokens reported for each estimated."""
    replica: str
    """Its id, which all routers know it by."""
    incarnation: str
    """The engine's process, as the router that tells it knows it; empty when it does not."""
    tokens: int
    """Believed to be resident there now; 0 when nothing is."""
    counted: int
    """Those of them that no other home on the replica counts."""


def proposed(request: Request, choice: Choice) -> Note | None:
    """What a lease of that choice would make known, were nothing known of its session; None when nothing."""
    if request.key is None or request.prompt_tokens <= 0:
        return None
    replica, tokens = choice.replica, request.prompt_tokens
    chain = condense(request.blocks)
    return Note(request.key, request.fingerprint, chain, False, 1.0, replica.id, replica.incarnation, tokens, tokens)


def withdrawn(note: Note) -> Note:
    """That there is no such home."""
    return replace(note, tokens=0, counted=0)


def note_of(lease: Lease) -> Note | None:
    """What a lease has made known of its conversation, when it began and when it ended; None when nothing."""
    branch, replica = lease.branch, lease.replica
    if branch is None or not replica.present:
        return None
    home = branch.home_on(replica)
    return _note(branch, home if home is not None and home.resident else Home(replica, 0.0))


def notes_of(branch: Branch) -> list[Note]:
    """All that is known of a conversation's homes, the one used last at the end."""
    return [_note(branch, home) for home in reversed(branch.homes) if home.resident and home.replica.present]


def _note(branch: Branch, home: Home) -> Note:
    replica = home.replica
    return Note(
        branch.key,
        branch.fingerprint,
        branch.chain,
        branch.fork,
        branch.ratio,
        replica.id,
        replica.incarnation,
        home.tokens,
        home.counted,
    )


def hear(directory: Directory, replica: Replica, note: Note, now: float) -> None:
    """Take another router's word for a home on this replica, the one that the note names."""
    if stale(note, replica):
        return
    branch = _branch(directory, note, now)
    if not note.tokens:
        home = branch.home_on(replica)
        if home is not None and not branch.open:
            replica.cache.forget(home)
            branch.homes.remove(home)
        return
    if not branch.open:
        branch.chain, branch.ratio = note.chain or branch.chain, note.ratio
        branch.fingerprint = branch.fingerprint or note.fingerprint
    directory.put(branch, now)
    replica.cache.touch(branch.lead(replica, now), note.tokens, note.counted, now)


def stale(note: Note, replica: Replica) -> bool:
    """Whether the note is of an engine's process that is no more, and what was resident there with it."""
    return bool(note.incarnation and replica.incarnation) and note.incarnation != replica.incarnation


def _branch(directory: Directory, note: Note, now: float) -> Branch:
    """The branch that a note is of; a new one when it is of none that is known.

    The one whose last request begins as the note's does. Where none does, that tells little: clients write what changes
    with every turn before what was said, as Claude Code its billing line. Then as of a request that comes here: the
    latest that is idle, unless the note goes back behind it; else one under way, whose earlier turn this may be.
    """
    alike = [
        branch
        for branch in directory.branches(note.key, now)
        if branch.fork is note.fork and (not note.fingerprint or branch.fingerprint in (0, note.fingerprint))
    ]
    best, most = None, -1
    for branch in alike:
        common = shared(branch.chain, note.chain)
        if common > most and 2 * common >= min(links(branch.chain), links(note.chain)):
            best, most = branch, common
    if best is None:
        idle = (branch for branch in alike if not branch.open and not goes_back(branch, note.tokens))
        best = next(idle, None) or next((branch for branch in alike if branch.open), None)
    return best if best is not None else Branch(note.key, note.fingerprint, note.chain, now, fork=note.fork)
