"""Hosts as they are written."""

from __future__ import annotations


def without_credentials(url: str) -> str:
    """A URL for a message: what stands before its host, which may be a password, is masked."""
    before, at, after = url.rpartition("@")
    scheme, slashes, _ = before.partition("//")
    return f"{scheme}{slashes}***@{after}" if slashes else f"***@{after}" if at else url


def in_url(host: str) -> str:
    """A host before a port: an IPv6 address stands in brackets."""
    return f"[{host}]" if ":" in host else host
