"""What Admission is told to keep to."""

from __future__ import annotations

from dataclasses import dataclass

MOST_WAIT_S = 3600.0
"""A client that has waited for an hour has gone, whatever it says."""

LEAST_HOLD_S = 60.0
"""A session held for a shorter time costs more to fetch back than it waits."""


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Caps are off at 0. Raises ValueError that names key, value and remedy."""

    max_running: int = 0
    """Requests in flight, all replicas of a pool together."""
    max_running_per_replica: int = 0
    max_tokens: int = 0
    """Prompt tokens of requests in flight, all replicas of a pool together, as they were known at placing. One that is
    alone passes, however long."""
    max_tokens_per_replica: int = 0
    max_waiting: int = 1000
    """Requests that wait at most; with 0 nobody waits."""
    max_wait_s: float = 60.0
    """After which a request that waits is refused. Agents' libraries give up on an answer after minutes."""
    kv_gate: bool = True
    """Hold back whole sessions when the live ones do not fit the fleet's KV and it drowns in computing them again."""
    max_hold_s: float = 1200.0
    """After which a session that is held back gets the place of one that was let in."""

    def __post_init__(self) -> None:
        for key in ("max_running", "max_running_per_replica", "max_tokens", "max_tokens_per_replica"):
            self._whole(key, "0 for no limit")
        self._whole("max_waiting", "0 to let nobody wait")
        self._seconds("max_wait_s", 0.1, MOST_WAIT_S)
        self._seconds("max_hold_s", LEAST_HOLD_S, 86_400.0)
        if type(self.kv_gate) is not bool:
            raise ValueError(f"kv_gate must be true or false, got {self.kv_gate!r}")

    def _whole(self, key: str, off: str) -> None:
        value = getattr(self, key)
        if type(value) is not int or value < 0:
            raise ValueError(f"{key} must be a whole number, {off}, got {value!r}")

    def _seconds(self, key: str, least: float, most: float) -> None:
        value = getattr(self, key)
        if type(value) not in (int, float) or not least <= value <= most:
            raise ValueError(f"{key} must be from {least:g} to {most:g} seconds, got {value!r}")

    @property
    def caps(self) -> bool:
        """Whether any is set."""
        return bool(self.max_running or self.max_tokens or self.caps_replicas)

    @property
    def caps_replicas(self) -> bool:
        """Whether one holds for each replica."""
        return bool(self.max_running_per_replica or self.max_tokens_per_replica)
