"""Which replica issued which response of `/v1/responses`: only there it can be gone on from, asked for or cancelled.

An engine keeps its responses in the memory of its process, and any other answers that there is none. So no policy is
asked where a request names a response whose issuer is known and serves. What is kept is a digest of the id and the name
of a replica: a response has no KV of its own, that is its conversation's, which the directory knows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from policies.sharing import Note
from policies.types import Replica

PREFIX = b"response:"
"""Begins the keys of responses, so that notes on them are told apart from those on sessions."""


class Responses:
    """A bounded table; the response used least recently goes first. One unused for `idle_s` seconds is not known."""

    def __init__(self, max_responses: int, idle_s: float) -> None:
        self.max_responses = max_responses
        self.idle_s = idle_s
        self._issuers: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """By key: the replica's id, and when it was last used, seconds."""

    def __len__(self) -> int:
        return len(self._issuers)

    def put(self, key: bytes, replica_id: str, now: float) -> None:
        """Note the response's issuer, or that the response is used."""
        self._issuers[key] = (replica_id, now)
        self._issuers.move_to_end(key)
        if len(self._issuers) > self.max_responses:
            self._issuers.popitem(last=False)

    def issuer(self, key: bytes, now: float) -> str | None:
        """The id of the replica that has it; None when that is not known."""
        issuer, used_at = self._issuers.get(key, (None, now))
        return issuer if now - used_at <= self.idle_s else None

    def lately(self, since: float) -> Iterator[tuple[bytes, str]]:
        """Those used at `since` or later, the latest first, and their issuers. Not to be used while this changes."""
        for key, (replica_id, used_at) in reversed(self._issuers.items()):
            if used_at < since:
                return
            yield key, replica_id


def issued(key: bytes, replica: Replica) -> Note:
    """That the replica has the response. As a note of a home, it is one of no KV: other routers count none for it."""
    return Note(key, 0, b"", False, 1.0, replica.id, replica.incarnation, 1, 0)


def asked(key: bytes) -> Note:
    """What a store is asked with for the issuer of a response: a home on no replica."""
    return Note(key, 0, b"", False, 1.0, "", "", 1, 0)
