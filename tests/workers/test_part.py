"""What part of the settings each worker has, and how it gets them."""

from __future__ import annotations

import socket
import threading

import pytest

from router.settings import Settings
from router.workers.assignment import Assignment, encoded, receive
from router.workers.part import CAPS, part_of


def test_caps_are_divided_and_rounded_up_and_none_stays_none() -> None:
    admission = {"max_running": 10, "max_tokens": 1, "max_waiting": 7}
    settings = Settings(admission=admission, keys={"max_in_flight": 3}, retries={"budget_burst": 2})  # type: ignore[arg-type]
    part = part_of(settings, 1, 4, "s")
    assert {key: getattr(part.admission, key) for key in CAPS} == {
        "max_running": 3,
        "max_running_per_replica": 0,
        "max_tokens": 1,
        "max_tokens_per_replica": 0,
        "max_waiting": 2,
    }
    assert part.keys.max_in_flight == 1
    assert part.retries.budget_burst == 1.0, "fewer would be none at all"
    assert part.limits.body_memory_bytes == settings.limits.body_memory_bytes // 4
    assert part_of(settings, 1, 1000, "s").limits.body_memory_bytes == settings.limits.body_bytes


def test_all_workers_have_one_secret_and_each_its_own_journal() -> None:
    parts = [part_of(Settings(journal={"path": "/j"}), number, 2, "made") for number in (1, 2)]  # type: ignore[arg-type]
    assert {part.identity.secret.get_secret_value() for part in parts} == {"made"}
    assert [part.journal.path for part in parts] == ["/j.w1", "/j.w2"]
    given = Settings(identity={"secret": "given"})  # type: ignore[arg-type]
    assert part_of(given, 1, 2, "made").identity.secret.get_secret_value() == "given"


def test_an_assignment_arrives_whole() -> None:
    urls = [f"http://10.0.{i // 250}.{i % 250}:30000" for i in range(2000)]
    settings = Settings(replicas=urls, admin={"token": "x" * 32})  # type: ignore[arg-type]
    given = Assignment(1, 2, settings, "secret", "/a", "/s", [3, 4], "c.yaml", {"port": 0}, b"digest")
    one, other = socket.socketpair()
    with one, other:
        sending = threading.Thread(target=one.sendall, args=(encoded(given) + b"s",))
        sending.start()
        assert receive(other) == given
        assert other.recv(1) == b"s", "what follows is left"
        sending.join()
        one.close()
        with pytest.raises(EOFError):
            receive(other)
