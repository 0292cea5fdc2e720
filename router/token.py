"""The admin port's token: who shows it may see and change everything."""

from __future__ import annotations

from hashlib import sha256
from hmac import compare_digest

from router.files import text_of
from router.units import counted

MIN_TOKEN_CHARS = 22
"""Fewer hold less than 128 random bits even in base64."""

_MAKE = "make one with `openssl rand -hex 32`"


class Token:
    """A token as given, or from a file that may change. Raises ValueError naming what is wrong and the remedy."""

    def __init__(self, token: str, file: str = "") -> None:
        self.files: tuple[str, ...] = (file,) if file else ()
        self._digest = sha256((read(file) if file else checked(token)).encode()).digest()

    def reload(self) -> None:
        """Read the file again. Raises ValueError, and the token in force stays."""
        for file in self.files:
            self._digest = sha256(read(file).encode()).digest()

    def matches(self, given: bytes) -> bool:
        """In a time that tells nothing of the token, its length included."""
        return compare_digest(sha256(given).digest(), self._digest)


def checked(token: str) -> str:
    """A token that cannot be guessed. Raises ValueError that does not show it."""
    if len(token) < MIN_TOKEN_CHARS:
        raise ValueError(f"has {counted(len(token), 'character')}, fewer than {MIN_TOKEN_CHARS}: {_MAKE}")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ValueError(f"holds other than printable ASCII, or spaces: {_MAKE}")
    return token


def read(file: str) -> str:
    """The token in a file, white space around it left out. Raises ValueError naming the file and the remedy."""
    text = text_of(file)
    try:
        return checked(text.strip())
    except ValueError as error:
        raise ValueError(f"{file!r} {error}") from None
