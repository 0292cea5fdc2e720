"""API keys of the data port: who may send requests, and how many at once.

Only hashes are kept. A plain SHA-256 is right for them: it has to withstand guessing, and a key of 128 random bits
cannot be guessed however fast the hash; slow ones (bcrypt, Argon2) are for passwords that people choose, and here
they would let anyone keep the event loop busy with wrong keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING

from router import errors
from router.errors import Refusal
from router.files import text_of
from router.identity import CREDENTIALS

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange
    from router.settings import KeysSettings

MIN_KEY_CHARS = 22
"""Fewer hold less than 128 bits even in base64. A shorter key is never accepted, whatever its hash."""
MAX_KEY_CHARS = 512
"""What is longer is no key, and is not hashed."""

_HASH = re.compile(r"sha256:[0-9a-f]{64}")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Of a holder."""
_PREFIX_BYTES = 8

_MAKE = "make one with `openssl rand -hex 32` and hash it with `printf %s KEY | sha256sum`"


@dataclass(slots=True)
class Holder:
    """Whom a key was given to."""

    name: str
    tenant: bytes
    """The name again: sessions of holders are kept apart by it."""
    in_flight: int = 0
    """Requests being received, waited for or answered."""
    requests: int = 0
    """Ever let in."""


class Keys:
    """The keys that are accepted, by their hashes."""

    def __init__(
        self, hashes: Mapping[str, Sequence[str]], limits: Mapping[str, int], before: Keys | None = None
    ) -> None:
        """`hashes`: checked ones, by holder. `limits`: requests in flight at most, likewise; 0 is without limit.

        Who was there `before` keeps their counts: requests under way end where they began.
        Raises ValueError when two holders have the same key.
        """
        self.holders: dict[str, Holder] = {}
        self._by_prefix: dict[bytes, tuple[bytes, Holder, int]] = {}
        for name, given in hashes.items():
            holder = before.holders.get(name) if before is not None else None
            if holder is None:
                holder = Holder(name, name.encode())
            self.holders[name] = holder
            for each in given:
                digest = bytes.fromhex(each.removeprefix("sha256:"))
                if digest[:_PREFIX_BYTES] in self._by_prefix:
                    other = self._by_prefix[digest[:_PREFIX_BYTES]][1].name
                    raise ValueError(f"{name} and {other} have the same key: {_MAKE}, one for each")
                self._by_prefix[digest[:_PREFIX_BYTES]] = digest, holder, limits[name]

    def admit(self, exchange: Exchange) -> Refusal | None:
        """Let a request in whose head has been read, or say why not. Who is let in counts until the exchange ends."""
        missing = True
        for name in CREDENTIALS:
            value = exchange.known.get(name)
            if not value:
                continue
            missing = False
            if name == b"authorization":
                scheme, _, value = value.partition(b" ")
                if scheme.lower() != b"bearer":
                    continue
            known = self._known(value.strip())
            if known is None:
                continue
            _, holder, limit = known
            exchange.holder = holder
            if limit and holder.in_flight >= limit:
                return errors.KEY_IN_FLIGHT
            holder.in_flight += 1
            holder.requests += 1
            exchange.has_place = True
            return None
        return errors.MISSING_KEY if missing else errors.INVALID_KEY

    def _known(self, key: bytes) -> tuple[bytes, Holder, int] | None:
        """The digest, the holder and the limit of a key that is accepted.

        The look-up goes by a part of the key's own hash, which who guesses can neither steer nor see, and the whole is
        compared in constant time: how long it takes tells nothing of the keys there are.
        """
        if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
            return None
        digest = sha256(key).digest()
        known = self._by_prefix.get(digest[:_PREFIX_BYTES])
        return known if known is not None and compare_digest(known[0], digest) else None


def made(settings: KeysSettings, before: Keys | None = None) -> Keys | None:
    """The keys that settings tell of, None when none are asked for. Raises ValueError."""
    if not settings.on:
        return None
    hashes = {name: list(each.hash) for name, each in settings.accept.items()}
    for name, given in (read(settings.file) if settings.file else {}).items():
        hashes.setdefault(name, []).extend(given)
    limits = dict.fromkeys(hashes, settings.max_in_flight)
    for name, each in settings.accept.items():
        if each.max_in_flight is not None:
            limits[name] = each.max_in_flight
    return Keys(hashes, limits, before)


def credential_line(settings: KeysSettings) -> bytes:
    """The header line by which replicas know the router; empty when it has no key of theirs."""
    key = settings.replica_key.get_secret_value().encode()
    return b"authorization: Bearer %b\r\n" % key if key else b""


def checked_name(name: str) -> str:
    """The name of a holder, fit for logs and metric labels. Raises ValueError."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a key: use up to 64 letters, digits, dots, hyphens and underscores")
    return name


def checked_hash(text: str) -> str:
    """A key's hash. Raises ValueError that does not show what was given: it may be the key itself."""
    if not _HASH.fullmatch(text):
        raise ValueError(f"expected `sha256:` and 64 hexadecimal digits in lower case (not shown here): {_MAKE}")
    return text


def read(file: str) -> dict[str, list[str]]:
    """The hashes in a file by holder: a line `NAME:sha256:...` each; empty lines and those with # at first are none.

    A name may have several lines: the old key and the new one, say. Raises ValueError naming file, line and remedy.
    """
    found: dict[str, list[str]] = {}
    for number, line in enumerate(map(str.strip, text_of(file).splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        name, colon, text = line.partition(":")
        try:
            if not colon:
                raise ValueError("expected NAME:sha256:... (not shown here)")
            found.setdefault(checked_name(name.strip()), []).append(checked_hash(text.strip()))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{file} holds no key: add a line NAME:sha256:..., or leave the file out")
    return found
