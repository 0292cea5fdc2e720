"""Which policy is in charge and which runs in its shadow, changed while requests are under way."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from policies import registry
from policies.balancer import Balancer
from policies.policy import Policy
from router.settings import PolicySettings, ShadowSettings
from router.units import brief

log = logging.getLogger("warmroute.policy")


class Switching:
    """Of one Balancer. Homes, leases and counters stay."""

    def __init__(self, balancer: Balancer, settings: PolicySettings, clock: Callable[[], float]) -> None:
        self._balancer = balancer
        self._clock = clock
        self.asked_by: dict[str, str] = {}
        """Who asked for the policy in charge (`policy`) and for its `shadow`; nobody for those of the settings."""
        if settings.shadow.name:
            shadow = registry.make(settings.shadow.name, settings.shadow.parameters)
            balancer.run_shadow(shadow, clock())

    def switch(self, policy: Policy, who: str) -> dict[str, Any]:
        """Put another policy in charge. `who` asked for it, for the log. Answers with the old and the new."""
        old = described(self._balancer.policy)
        self._balancer.switch(policy, self._clock())
        self.asked_by["policy"] = who
        return self._changed("policy", old, described(policy), who)

    def run_shadow(self, policy: Policy | None, who: str) -> dict[str, Any]:
        """Run another policy in the shadow of the one in charge; None ends that. Answers likewise."""
        shadow = self._balancer.shadow
        old = None if shadow is None else described(shadow)
        self._balancer.run_shadow(policy, self._clock())
        self.asked_by["shadow"] = who
        return self._changed("shadow policy", old, None if policy is None else described(policy), who)

    def prepare(self, settings: PolicySettings, who: str) -> Callable[[], None]:
        """What puts in force what the settings say, where it differs. Raises ValueError."""
        policy, shadow = _made(settings)

        def commit() -> None:
            if described(policy) != described(self._balancer.policy):
                self.switch(policy, who)
            running = self._balancer.shadow
            if (shadow and described(shadow)) != (running and described(running)):
                self.run_shadow(shadow, who)

        return commit

    @property
    def policy(self) -> dict[str, Any]:
        """The policy in charge, as it is given and shown."""
        return described(self._balancer.policy)

    @property
    def shadow(self) -> dict[str, Any] | None:
        """The one in its shadow likewise."""
        return None if self._balancer.shadow is None else described(self._balancer.shadow)

    def in_force(self) -> PolicySettings:
        """The policies as settings would name them, with all parameters."""
        return _told(self._balancer.policy, self._balancer.shadow)

    def _changed(self, what: str, old: dict[str, Any] | None, new: dict[str, Any] | None, who: str) -> dict[str, Any]:
        log.info("%s switched: %s -> %s, asked by %s", what, json.dumps(old), json.dumps(new), who)
        return {"old": old, "new": new}

    def disagreements(self) -> dict[str, Any]:
        """How the shadow has chosen beside the policy in charge, the most frequent pair of reasons first."""
        counts = self._balancer.disagreements
        ranked = sorted(counts.items(), key=lambda item: -item[1])
        return {
            "choices": sum(counts.values()),
            "same_replica": sum(count for (_, _, same), count in counts.items() if same),
            "pairs": [
                {"reason": reason, "shadow_reason": other, "same_replica": same, "choices": count}
                for (reason, other, same), count in ranked
            ],
        }


def completed(settings: PolicySettings) -> PolicySettings:
    """With the parameters that were not given. Raises ValueError."""
    return _told(*_made(settings))


def _made(settings: PolicySettings) -> tuple[Policy, Policy | None]:
    shadow = settings.shadow
    policy = registry.make(settings.name, settings.parameters)
    return policy, registry.make(shadow.name, shadow.parameters) if shadow.name else None


def _told(policy: Policy, shadow: Policy | None) -> PolicySettings:
    beside = ShadowSettings() if shadow is None else ShadowSettings(**described(shadow))
    return PolicySettings(**described(policy), shadow=beside)


def described(policy: Policy) -> dict[str, Any]:
    """A policy by name and parameters, as it is given and shown."""
    return {"name": policy.name, "parameters": policy.snapshot().parameters}


def parsed(given: object) -> Policy:
    """The policy that `{"name": ..., "parameters": {...}}` describes. Raises ValueError."""
    if not isinstance(given, dict):
        raise ValueError(f'expected an object as {{"name": "random", "parameters": {{"seed": 7}}}}, got {brief(given)}')
    if unknown := sorted(set(given) - {"name", "parameters"}):
        raise ValueError(f"unknown key {unknown[0]!r}; known keys: name, parameters")
    name, parameters = given.get("name"), given.get("parameters", {})
    if not isinstance(name, str):
        raise ValueError(f"name must be one of {', '.join(registry.POLICIES)}, got {brief(name)}")
    if not isinstance(parameters, dict):
        raise ValueError(f"parameters must be an object of parameters by name, got {brief(parameters)}")
    return registry.make(name, parameters)
