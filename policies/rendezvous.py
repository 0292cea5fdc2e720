"""A pure hash of the session over the fleet."""

from __future__ import annotations

from collections.abc import Sequence

from policies import hashing
from policies.least_loaded import fewest_in_flight
from policies.policy import Policy
from policies.types import Choice, Needs, Reason, Replica, Request


class Rendezvous(Policy):
    """The replica that ranks first for the session's key: the same on every router, with nothing to remember.

    Blind to load; about 1/n of the sessions move when the n-th replica joins. Requests without a key
    go to the replica with the fewest in flight.
    """

    name = "rendezvous"
    needs = Needs.SESSION

    def pick(self, request: Request, candidates: Sequence[Replica], now: float) -> Choice:
        if request.key is None:
            return Choice(fewest_in_flight(candidates), Reason.NO_SESSION)
        return Choice(hashing.rendezvous(request.key, candidates), Reason.HASH)
