"""What speaks for and against one replica: pure, told of probes and requests, asked for a state."""

from __future__ import annotations

from policies.types import State
from router.settings import HealthSettings


class Standing:
    """Hysteresis between ready and ejected; the replica's own word decides on draining.

    It starts ready: a router that has just come up must not refuse traffic until its first probes are back.
    """

    __slots__ = ("_failures", "_passes", "_request_failures", "_settings", "hung", "state", "successes", "why")

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._failures = 0
        self._passes = 0
        self._request_failures = 0
        self.hung = False
        """The last `/health` was not answered: only one that is, or another process in its place, clears this."""
        self.state = State.READY
        self.why = "not probed yet"
        self.successes = 0
        """Requests it ever answered: evidence of life for whoever remembers an earlier count."""

    @property
    def silent(self) -> bool:
        """Ejected, and as many probes as that takes were not answered since the last that was."""
        return self.state is State.EJECTED and self._failures >= self._settings.fail_after

    def probe_passed(self) -> None:
        """It says that it is ready."""
        self._failures = 0
        if self.hung:
            return
        self._passes += 1
        if self.state is State.READY:
            self.why = "ready"
        elif self.state is State.DRAINING or self._passes >= self._settings.pass_after:
            self._request_failures = 0
            self._set(State.READY, "ready")

    def probe_not_ready(self, why: str) -> None:
        """It answers, and says that it wants nothing new."""
        self._failures = 0
        self._passes = 0
        if not self.hung:
            self._set(State.DRAINING, why)

    def probe_failed(self, why: str) -> None:
        """It does not answer, or answers nonsense."""
        self._passes = 0
        self._failures += 1
        if self._failures >= self._settings.fail_after:
            self.hung = False
            self._set(State.EJECTED, why)

    def deep_probe_passed(self) -> None:
        """It generated a token."""
        self.hung = False

    def deep_probe_failed(self, why: str, successes: int) -> None:
        """It generated nothing for as long as one may wait. `successes`: their count when that wait began.

        An answer to a request meanwhile overrides it: a long prefill can hold up the probe, never all answers.
        """
        if self.successes == successes:
            self.hung = True
            self._passes = 0
            self._set(State.EJECTED, why)

    def request_succeeded(self) -> None:
        """It answered a request."""
        self.successes += 1
        self._request_failures = 0

    def request_failed(self, why: str) -> None:
        """It left a request unanswered, or broke off."""
        self._request_failures += 1
        self._passes = 0
        if self.state is State.READY and self._request_failures >= self._settings.passive_fail_after:
            self._set(State.EJECTED, f"{self._request_failures} requests in a row failed, the last by {why}")

    def _set(self, state: State, why: str) -> None:
        self.state = state
        self.why = why
