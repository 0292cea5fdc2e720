"""Emulated replicas behind the router, and what both say about the requests of one turn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.clients.agents import Session
from tests.fakes.process import ROOT, Process, Router

_START_LIMIT_S = 30
_FAULTLESS = {"ready": True, "queue_full": False, "die_mid_stream_after": None, "status": None, "hang": False}


class Emulator(Process):
    """One emulated replica in a process of its own, a thousand times as fast as the real thing."""

    def __init__(self, log: Path) -> None:
        command: list[str | Path] = [
            ROOT / ".venv/bin/python",
            "-m",
            "sim.emulator",
            "--port",
            "0",
            "--time-scale",
            "0.001",
        ]
        super().__init__(command, log)
        self.url = ""

    def wait_ready(self) -> None:
        """Wait until it serves; `url` is known from then on."""
        ready = self.wait_line(lambda line: line.startswith("ready "), _START_LIMIT_S)
        self.url = f"http://127.0.0.1:{ready.split()[1]}"

    def fault(self, **faults: object) -> None:
        """Switch faults on or off; the others stay as they are."""
        _call("POST", f"{self.url}/_emulator/faults", json=faults)

    def reset(self) -> None:
        """No faults, and nothing in the prefix cache."""
        self.fault(**_FAULTLESS)
        _call("POST", f"{self.url}/flush_cache")

    def requests(self) -> list[dict[str, Any]]:
        """The inference requests it was sent, oldest first."""
        records: list[dict[str, Any]] = _call("GET", f"{self.url}/_emulator/log").json()
        return records


@dataclass(frozen=True)
class Seen:
    """A request as the router logged it and as the replica that served it saw it."""

    rule: str
    session: str
    reason: str
    replica: str
    tries: int
    failed: str
    """Why the last replica before this one failed; empty when none did."""
    prompt_tokens: int
    cached_tokens: int


class Fleet:
    """Replicas and the router in front of them."""

    def __init__(self, replicas: list[Emulator], router: Router) -> None:
        self.replicas = replicas
        self.router = router

    def replica(self, url: str) -> Emulator:
        """The replica that the router calls `url`."""
        return next(replica for replica in self.replicas if replica.url == url)

    def turn(self, session: Session, prompt: str) -> Seen:
        """Run one turn; its main request as last served.

        Agents make side calls (titles, memory) that are smaller than the turn itself in every agent measured, so
        the turn's main request is its largest.
        """
        alive = [replica for replica in self.replicas if replica.alive]
        before = {replica.url: len(replica.requests()) for replica in alive}
        session.turn(prompt)
        records = [
            (record, replica.url)
            for replica in alive
            if replica.alive
            for record in replica.requests()[before[replica.url] :]
            if record["completion_tokens"]
        ]
        assert records, f"no replica has answered {session.agent.name}\n{self.router.tail()}"
        record, url = max(records, key=lambda found: found[0]["prompt_tokens"])
        line: dict[str, Any] = self.router.entry(record["headers"]["x-request-id"])
        assert line["replica"] == url, f"served by {url}, logged as {line}"
        return Seen(
            rule=line["rule"],
            session=line["session"],
            reason=line["reason"],
            replica=line["replica"],
            tries=line["tries"],
            failed=line.get("failed", ""),
            prompt_tokens=record["prompt_tokens"],
            cached_tokens=record["cached_tokens"],
        )


def _call(method: str, url: str, *, json: object = None) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=10) as client:
        return client.request(method, url, json=json).raise_for_status()
