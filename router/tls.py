"""TLS towards clients, on either port, and to replicas: contexts made from files, and made anew when these change."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

_OLDEST = ssl.TLSVersion.TLSv1_2
"""Older versions are refused by RFC 8996."""


class ServerTls:
    """What a port shows to its clients, and asks of them.

    `client_ca_file`: only clients with a certificate of that authority are served (mutual TLS).
    Raises ValueError naming file and remedy.
    """

    def __init__(self, cert_file: str, key_file: str, client_ca_file: str = "") -> None:
        self.files = tuple(file for file in (cert_file, key_file, client_ca_file) if file)
        self._given = cert_file, key_file, client_ca_file
        self._current = server_context(*self._given)
        self.context = server_context(*self._given)
        """What the port listens with. Handshakes go on with the newest: what is loaded into a context in use
        cannot be taken back when the rest of it fails, and an authority cannot be removed at all."""
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        """Read the files again, for new connections. Raises ValueError, and what was in force stays."""
        self._current = server_context(*self._given)

    def _choose(self, tls: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        tls.context = self._current


class ReplicaTls:
    """What replicas with an https URL must show, and what they are shown.

    `ca_file`: authorities to trust instead of the system's. `cert_file`, `key_file`: shown when they ask.
    `verify=False`: anyone may answer in a replica's place. Raises ValueError naming file and remedy.
    """

    def __init__(self, ca_file: str = "", cert_file: str = "", key_file: str = "", *, verify: bool = True) -> None:
        self.files = tuple(file for file in (ca_file, cert_file, key_file) if file)
        self._given = ca_file, cert_file, key_file
        self._verify = verify
        self._context: ssl.SSLContext | None = None
        if self.files:
            self.reload()

    @property
    def context(self) -> ssl.SSLContext:
        """For the next connection. One for the whole fleet: each holds all authorities of the system."""
        if self._context is None:
            self._context = replica_context(*self._given, verify=self._verify)
        return self._context

    def reload(self) -> None:
        """Read the files again, for new connections. Raises ValueError, and what was in force stays."""
        self._context = replica_context(*self._given, verify=self._verify)


def server_context(cert_file: str, key_file: str, client_ca_file: str) -> ssl.SSLContext:
    """Raises ValueError naming file and remedy."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _OLDEST
    context.set_alpn_protocols(["http/1.1"])
    _load_chain(context, cert_file, key_file)
    if client_ca_file:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authorities(context, "client_ca_file", client_ca_file)
        # A resumed session is not asked for its certificate again: it would outlive the authority. That can be
        # switched off for TLS 1.3 alone; for 1.2 OpenSSL keeps sessions here even without tickets.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
    return context


def replica_context(ca_file: str, cert_file: str, key_file: str, *, verify: bool) -> ssl.SSLContext:
    """Raises ValueError naming file and remedy."""
    if ca_file:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_authorities(context, "ca_file", ca_file)
    else:
        context = ssl.create_default_context()
    context.minimum_version = _OLDEST
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if cert_file:
        _load_chain(context, cert_file, key_file)
    return context


def _load_chain(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    _readable("cert_file", cert_file)
    _readable("key_file", key_file)
    try:
        context.load_cert_chain(cert_file, key_file, password=_encrypted)
    except _Encrypted:
        raise ValueError(f"key_file {key_file!r} is encrypted: give the key without a passphrase") from None
    except ssl.SSLError as error:
        raise ValueError(
            f"cert_file {cert_file!r} and key_file {key_file!r}: {_why(error)}: "
            "give a certificate chain and its own private key, both as PEM"
        ) from None


def _load_authorities(context: ssl.SSLContext, key: str, file: str) -> None:
    _readable(key, file)
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise ValueError(f"{key} {file!r}: {_why(error)}: give the authorities' certificates as PEM") from None


def _readable(key: str, file: str) -> None:
    """OpenSSL does not say which of the files it could not read."""
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"{key} {file!r}: {error.strerror}: give the path of a readable PEM file") from None


class _Encrypted(Exception):
    """A key that needs a passphrase, for which OpenSSL would ask at the terminal."""


def _encrypted() -> NoReturn:
    raise _Encrypted


def _why(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
