"""Hosts as they are written."""

from __future__ import annotations


def in_url(host: str) -> str:
    """A host before a port: an IPv6 address stands in brackets."""
    return f"[{host}]" if ":" in host else host
