"""A journal's calls made again: by the same policy, whose choices must be the same, or by another, to compare them.

python -m sim.replay journal.jsonl
python -m sim.replay journal.jsonl --policy session_affinity:beta=0

This is a replay of decisions: what other choices would have led to is not in a journal, and is for the simulator to
tell (`sim.traces`). Another policy is asked for every request with homes, loads and speeds as the choices that were
really made left them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from policies import registry
from policies.balancer import Balancer, NoReplica
from policies.directory import Directory
from policies.lease import Lease
from policies.policy import Policy
from policies.types import OUTCOMES, Cause, Choice, Needs, Phase, Reason, Replica, State, Usage
from sim import journal
from sim.cli import guarded
from sim.jobs import candidates
from sim.lines import Row


@dataclass(slots=True)
class Replayed:
    """What a replay found."""

    calls: int = 0
    choices: int = 0
    """Requests for which a replica was chosen."""
    refusals: int = 0
    """Requests for which there was none."""
    differences: list[str] = field(default_factory=list)
    """The first few choices of the recorded policy that came out otherwise: file, line, and both choices."""
    different: int = 0
    """How many there are."""
    whole: bool = True
    """Whether the journal is there from a router's start on, without gaps. Else choices may differ for want of what
    was known before."""
    lost: int = 0
    """Lines missing from the journal."""
    skipped: int = 0
    """Calls for requests that were placed before the journal begins, or in a gap."""
    beside: dict[str, object] = field(default_factory=dict)
    """Of another policy: how often it agreed, by the reasons of both, and what it goes by that no line of the journal
    tells."""


_MIXED = "the journal lacks lines, or has those of two routers mixed: give the file as one router wrote it"

SHOWN = 20
"""Differences kept."""


def replay(path: Path, policy: str | None = None, parameters: Mapping[str, object] | None = None) -> Replayed:
    """Make the calls of a journal again. With a policy, ask it beside the recorded one, and count where they differ.

    Raises ValueError where the file is no journal, and for a policy or parameters that do not exist.
    """
    if policy is not None:
        registry.make(policy, parameters or {})
    replayer = _Replayer(None if policy is None else lambda: registry.make(policy, parameters or {}))
    for row in journal.calls(path):
        replayer.take(row)
    return replayer.result()


class _Replayer:
    """A Balancer under a journal's calls."""

    def __init__(self, other: Callable[[], Policy] | None) -> None:
        self._other = other
        self._balancer = Balancer(registry.make("random"))
        self._part = -1
        self._lost = 0
        self._replicas: dict[int, Replica] = {}
        self._leases: dict[int, Lease] = {}
        self._found = Replayed()
        self._disagreements: Counter[tuple[str, str, bool]] = Counter()
        self._told = Needs.NOTHING
        """What the journal tells of its requests, or would if they had it: the policy in charge went by it."""

    def result(self) -> Replayed:
        self._keep_disagreements()
        if self._other is not None:
            pairs = self._disagreements
            self._found.beside = {
                "choices": pairs.total(),
                "same_replica": sum(count for (_, _, same), count in pairs.items() if same),
                "untold": [str(need.name).lower() for need in self._other().needs & ~self._told],
                "pairs": [
                    {"reason": reason, "other_reason": other, "same_replica": same, "choices": count}
                    for (reason, other, same), count in pairs.most_common()
                ],
            }
        return self._found

    def take(self, row: Row) -> None:
        """Make one call."""
        self._found.calls += 1
        call = row.text("call")
        if call == "journal":
            self._resume(row)
        elif call == "switch":
            self._balancer.switch(_policy(row.part("policy")), row.number("at"))
        elif call == "join":
            self._join(row)
        elif call in ("leave", "set_state", "set_weight", "report", "cache_cleared", "hear", "hear_load"):
            self._tell(call, row)
        elif call in ("acquire", "explain"):
            self._ask(call, row)
        elif call in ("first_token", "finish"):
            self._go_on(call, row)
        else:
            raise row.error("call", call, "read the journal with the version that wrote it")

    def _resume(self, row: Row) -> None:
        """A file begins, or lines were lost. What is known goes on when it follows the one before without a gap."""
        part, lost = row.count("part"), row.count("lost")
        goes_on = part == self._part + 1 and lost == self._lost and part > 0
        self._found.lost += lost - (self._lost if lost >= self._lost else 0)
        self._part, self._lost = part, lost
        if goes_on:
            return
        self._found.whole &= not part and not lost
        self._keep_disagreements()
        bounds = row.part("directory")
        try:
            directory = Directory(bounds.count("max_sessions"), bounds.number("idle_s"))
        except ValueError as error:
            raise row.error("directory", bounds.values, str(error)) from None
        self._balancer = Balancer(_policy(row.part("policy")), directory)
        if self._other is not None:
            self._balancer.run_shadow(self._other(), row.number("at"))
        self._replicas.clear()
        self._leases.clear()
        for replica in row.parts("replicas"):
            self._join(replica)

    def _keep_disagreements(self) -> None:
        if self._balancer.shadow_fault:
            raise RuntimeError(f"the other policy failed: {self._balancer.shadow_fault}")
        self._disagreements.update(self._balancer.disagreements)

    def _join(self, row: Row) -> None:
        replica = Replica(row.text("id"), row.number("weight"), journal.pool(row), state=row.one_of("state", State))
        self._replicas[row.count("replica")] = replica
        self._balancer.join(replica, row.number("at"))

    def _tell(self, call: str, row: Row) -> None:
        replica = self._replica(row, row.count("replica"))
        now = row.number("at")
        if call == "leave":
            if self._balancer.replicas.get(replica.id) is not replica:
                raise row.error("replica", row.get("replica"), f"it has left before: {_MIXED}")
            self._balancer.leave(replica.id, now)
        elif call == "set_state":
            self._balancer.set_state(replica, row.one_of("state", State), now)
        elif call == "set_weight":
            self._balancer.set_weight(replica, row.number("weight"), now)
        elif call == "report":
            self._balancer.report(replica, journal.load(row), now)
        elif call == "hear":
            self._balancer.hear(journal.note(row, replica.id), now)
        elif call == "hear_load":
            running, tokens, pending_s = row.count("running"), row.count("tokens"), row.number("pending_s")
            self._balancer.hear_load(replica, running, tokens, pending_s, now)
        else:
            self._balancer.cache_cleared(replica, now)

    def _replica(self, row: Row, number: int) -> Replica:
        try:
            return self._replicas[number]
        except KeyError:
            raise row.error("replica", number, f"no such replica has joined: {_MIXED}") from None

    def _ask(self, call: str, row: Row) -> None:
        request, now = journal.request(row), row.number("at")
        self._told |= self._balancer.policy.needs
        self._told |= Needs.SESSION if request.key is not None else Needs.NOTHING
        self._told |= Needs.FINGERPRINT if request.fingerprint else Needs.NOTHING
        self._told |= Needs.BLOCKS if request.blocks else Needs.NOTHING
        if "failed" in row.values:
            request.failed = tuple(
                self._replica(row, row.within("failed", {"replica": number}).count("replica"))
                for number in row.items("failed")
            )
        if call == "explain":
            self._balancer.explain(request, now)
            return
        if "proposed" in row.values:
            reason = row.one_of("reason", Reason) if "reason" in row.values else Reason.NEW
            request.proposed = Choice(self._replica(row, row.count("proposed")), reason)
        try:
            lease = self._balancer.acquire(request, now)
        except NoReplica as none:
            self._found.refusals += 1
            self._compare(row, f"refused: {none.reason}")
            return
        self._found.choices += 1
        self._compare(row, f"{lease.replica.id} ({lease.choice.reason})")
        if "lease" in row.values:
            self._leases[row.count("lease")] = lease

    def _compare(self, row: Row, chosen: str) -> None:
        if "refused" in row.values:
            was = f"refused: {row.text('refused')}"
        else:
            was = f"{self._replica(row, row.count('replica')).id} ({row.text('reason')})"
        if was == chosen:
            return
        self._found.different += 1
        if len(self._found.differences) < SHOWN:
            self._found.differences.append(f"{row.path.name}, line {row.line}: recorded {was}, now {chosen}")

    def _go_on(self, call: str, row: Row) -> None:
        number, now = row.count("lease"), row.number("at")
        lease = self._leases.get(number)
        if lease is None:
            self._found.skipped += 1
        elif call == "first_token":
            lease.first_token(now)
        else:
            del self._leases[number]
            lease.timed = row.values.get("timed") is not False
            tokens = [journal.optional(row, f"{kind}_tokens") for kind in ("prompt", "cached", "completion")]
            usage = Usage(*tokens) if any(count is not None for count in tokens) else None
            lease.finish(OUTCOMES[row.one_of("cause", Cause), row.one_of("phase", Phase)], usage, now)


def _policy(row: Row) -> Policy:
    name, parameters = row.text("name"), dict(row.part("parameters").values)
    try:
        return registry.make(name, parameters)
    except ValueError as error:
        raise row.error("policy", name, str(error)) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every choice is the same again, else 1."""
    parser = argparse.ArgumentParser(prog="python -m sim.replay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("journal", type=Path, help="its newest file; the older ones beside it are read before")
    parser.add_argument("--policy", metavar="NAME[:KEY=VALUE]", help="another policy, asked beside the recorded one")
    given = parser.parse_args(arguments)
    return guarded(partial(_tell, given.journal, given.policy))


def _tell(path: Path, policy: str | None) -> int:
    if policy is None:
        found = replay(path)
    else:
        other, *more = candidates(policy)
        if more:
            raise ValueError(f"--policy {policy!r}: name one policy")
        found = replay(path, other.policy, other.parameters)
    print(json.dumps({name: getattr(found, name) for name in Replayed.__dataclass_fields__}, indent=2))
    return 1 if found.different else 0


if __name__ == "__main__":
    sys.exit(main())
