"""What speaks for and against one replica: pure, told of probes and requests, asked for a state."""

from __future__ import annotations

from enum import Enum, auto

from policies.types import State
from router.breaker import Breaker, Circuit
from router.settings import HealthSettings

# Taken once: an enum's member is looked up through its metaclass each time it is named, 60 ns in Python 3.11.
_READY, _CLOSED = State.READY, Circuit.CLOSED


PLAINLY_READY = "ready"
"""Why a replica is ready of which there is no more to say."""


class Missing(Enum):
    """What came of a probe that failed."""

    NOTHING = auto()
    """No answer: overload, a hung process, or a host that is gone."""
    NOBODY = auto()
    """Its host refused the connection, or no host has its name: nobody is there."""
    NONSENSE = auto()
    """An answer, but not one that it is well."""


class Standing:
    """Where probes and requests meet.

    The probes' word goes first: what they eject or find draining is so, and only they bring it back; with that the
    failures of requests are forgotten, since they were of another life. Of what the probes find ready the breaker
    says whether its requests fail; then probes, which passed all the while, bring back nothing: a request on trial
    does.
    It starts ready: a router that has just come up must not refuse traffic until its first probes are back.
    """

    __slots__ = (
        "_failures",
        "_passes",
        "_settings",
        "_successes_then",
        "_unanswered",
        "_why",
        "absent",
        "breaker",
        "hung",
        "probed",
        "successes",
    )

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._failures = 0
        self._unanswered = 0
        self._passes = 0
        self._successes_then = 0
        self._why = "not probed yet"
        self.probed = State.READY
        """What the probes say: ready, draining or ejected."""
        self.breaker = Breaker(settings)
        self.hung = False
        """The last `/health` was not answered: only one that is, or another process in its place, clears this."""
        self.absent = False
        """The last probe found nobody there."""
        self.successes = 0
        """Requests it ever answered: evidence of life for whoever remembers an earlier count."""

    def configure(self, settings: HealthSettings) -> None:
        """From now on by these settings; what was seen until now stands."""
        self._settings = settings
        self.breaker.configure(settings)

    @property
    def state(self) -> State:
        """Whether requests may be sent there."""
        if self.probed is not _READY or self.breaker.state is _CLOSED:
            return self.probed
        return State.HALF_OPEN if self.breaker.state is Circuit.HALF_OPEN else State.EJECTED

    @property
    def why(self) -> str:
        """Why it is in that state."""
        if self.probed is not State.READY or self.breaker.state is Circuit.CLOSED:
            return self._why
        return self.breaker.why

    @property
    def silent(self) -> bool:
        """Ejected, and as many probes as that takes were not answered since the last that was."""
        return self.probed is State.EJECTED and self._unanswered >= self._settings.fail_after

    @property
    def dead(self) -> bool:
        """Nobody is there, or it generated nothing when asked to: what requests would meet with."""
        return self.absent or self.hung

    @property
    def mute(self) -> bool:
        """It answers neither probes nor, since it was ejected for that, requests."""
        return self.silent and self.successes == self._successes_then

    # Told of probes

    def probe_passed(self, now: float, why: str = PLAINLY_READY) -> None:
        """It says that it is ready, or answers at least; `why` tells which."""
        self._failures = self._unanswered = 0
        self.absent = False
        if self.hung:
            return
        self._passes += 1
        if self.probed is State.READY:
            self._why = why
        elif self.probed is State.DRAINING or self._passes >= self._settings.pass_after:
            self.breaker.close(now)
            self._set(State.READY, why)

    def probe_not_ready(self, why: str) -> None:
        """It answers, and says that it wants nothing new."""
        self._failures = self._unanswered = 0
        self.absent = False
        self._passes = 0
        if not self.hung:
            self._set(State.DRAINING, why)

    def probe_failed(self, why: str, missing: Missing = Missing.NOTHING) -> None:
        """It does not answer, or answers nonsense."""
        self._passes = 0
        self._failures += 1
        self._unanswered = 0 if missing is Missing.NONSENSE else self._unanswered + 1
        self.absent = missing is Missing.NOBODY
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

    # Told of requests

    def request_succeeded(self) -> None:
        """It began to answer a request: it lives."""
        self.successes += 1

    def request_answered(self, now: float) -> None:
        """It answered a request to the end, with anything but an error of its own."""
        self.breaker.answered(now)

    def request_failed(self, why: str, now: float, *, answered: bool = False) -> None:
        """It left a request unanswered, broke off, or, as `answered` says, answered with an error of its own."""
        self._passes = 0
        if self.probed is State.READY:
            self.breaker.failed(why, now, answered=answered)

    def tick(self, now: float) -> None:
        """Time went on."""
        self.breaker.tick(now)

    def _set(self, state: State, why: str) -> None:
        if state is State.EJECTED and self.probed is not State.EJECTED:
            self._successes_then = self.successes
        self.probed = state
        self._why = why
