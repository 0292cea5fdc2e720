"""What operators order at one router and all obey: replicas drained, and the policy in charge."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

from policies.policy import Policy
from policies.types import Replica
from router.drains import Homes
from router.fleet import Fleet
from router.settings import PolicySettings
from router.switching import Switching, described, parsed

log = logging.getLogger("warmroute.orders")

DRAIN = "drain:"
"""Begins the names of drains; the replica's id follows."""
POLICY, SHADOW = "policy", "shadow"
FORGOTTEN_S = 7 * 86400.0
"""A drain of a replica that nobody has had for so long is taken back when a router comes upon it."""


class Orders:
    """Of one router. Each is carried out here at once, and told to the others if there are any."""

    def __init__(self, fleet: Fleet, switching: Switching, configured: Callable[[], PolicySettings]) -> None:
        """`configured` are the policies of this router's own settings."""
        self._fleet = fleet
        self._switching = switching
        self._configured = configured
        self.share: Callable[[str, bytes | None], None] | None = None
        """Tells the other routers; None when there are none."""
        self._given: dict[str, bytes] = {}
        """In force, as they were told."""

    # Given here

    def drain(self, replica_id: str, homes: Homes, who: str) -> Replica:
        """See `Fleet.drain`."""
        replica = self._fleet.drain(replica_id, homes, who)
        since = self._fleet.drains[replica].since
        self._give(DRAIN + replica_id, {"homes": homes, "who": who, "since": since})
        return replica

    def undrain(self, replica_id: str, who: str) -> Replica:
        """See `Fleet.undrain`."""
        replica = self._fleet.undrain(replica_id, who)
        self._give(DRAIN + replica_id, None)
        return replica

    def switch(self, policy: Policy, who: str) -> dict[str, Any]:
        """See `Switching.switch`."""
        answer = self._switching.switch(policy, who)
        self._give(POLICY, {"policy": described(policy), "base": self._base(), "who": who})
        return answer

    def run_shadow(self, policy: Policy | None, who: str) -> dict[str, Any]:
        """See `Switching.run_shadow`."""
        answer = self._switching.run_shadow(policy, who)
        shadow = None if policy is None else described(policy)
        self._give(SHADOW, {"policy": shadow, "base": self._base(), "who": who})
        return answer

    def _give(self, name: str, value: dict[str, Any] | None) -> None:
        encoded = None if value is None else json.dumps(value).encode()
        self._note(name, encoded)
        if self.share is not None:
            self.share(name, encoded)

    def _note(self, name: str, value: bytes | None) -> None:
        if value is None:
            self._given.pop(name, None)
        else:
            self._given[name] = value

    # Given elsewhere

    def all(self) -> Mapping[str, bytes]:
        """Those in force."""
        return dict(self._given)

    def reconcile(self, stored: Mapping[str, bytes]) -> None:
        """Obey what is stored and nothing else: what was given or taken back while the store could not be heard."""
        for name in self._given.keys() - stored.keys():
            self.carry_out(name, None)
        for name, value in stored.items():
            if self._given.get(name) != value:
                self.carry_out(name, value)

    def carry_out(self, name: str, value: bytes | None) -> None:
        """Do what another router was ordered. What makes no sense here is logged and left."""
        self._note(name, value)
        try:
            order = None if value is None else json.loads(value)
            if name.startswith(DRAIN):
                self._drained(name.removeprefix(DRAIN), order)
            elif order is not None:
                self._switched(name, order)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            told = (value or b"")[:200]
            log.error("an order that another router was given is not understood: %s: %r: %s", name, told, error)

    def joined(self, replica_id: str) -> None:
        """A replica has come: what was ordered of it before holds."""
        value = self._given.get(DRAIN + replica_id)
        if value is not None:
            self.carry_out(DRAIN + replica_id, value)

    def _drained(self, replica_id: str, order: dict[str, Any] | None) -> None:
        if replica_id not in self._fleet.given:
            if order is not None and time.time() - order["since"] > FORGOTTEN_S:
                self._give(DRAIN + replica_id, None)
        elif order is None:
            self._fleet.undrain(replica_id, "an operator at another router")
        else:
            self._fleet.drain(replica_id, Homes(order["homes"]), f"{order['who']}, at another router")

    def _switched(self, name: str, order: dict[str, Any]) -> None:
        if order["base"] != self._base():
            log.info("another router's order of a %s is not obeyed: this one is configured with another policy", name)
            return
        policy = None if order["policy"] is None else parsed(order["policy"])
        who = f"{order['who']}, at another router"
        if name == POLICY and policy is not None:
            if described(policy) != self._switching.policy:
                self._switching.switch(policy, who)
        elif name == SHADOW and (policy and described(policy)) != self._switching.shadow:
            self._switching.run_shadow(policy, who)

    def _base(self) -> str:
        """What the settings say of policies: an order changes it, and ends when they are changed themselves."""
        return blake2b(self._configured().model_dump_json().encode(), digest_size=8).hexdigest()
