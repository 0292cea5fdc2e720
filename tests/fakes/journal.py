"""A journaled Balancer without a router around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policies.directory import Directory
from policies.policy import Policy
from router.journal import Journal
from router.journaled import JournaledBalancer
from router.settings import JournalSettings


@contextmanager
def journaled(
    path: Path, policy: Policy, *, max_bytes: int = 1 << 20, files: int = 100, max_sessions: int = 1000
) -> Iterator[tuple[JournaledBalancer, Journal]]:
    """Its journal is on the disk when this ends. To be used in a running loop."""
    journal = Journal(JournalSettings.model_construct(path=str(path), max_bytes=max_bytes, files=files))
    balancer = JournaledBalancer(policy, Directory(max_sessions), journal, b"a secret")
    balancer.start(0.0)
    yield balancer, journal
    journal.close()
    assert journal.dropped == 0
