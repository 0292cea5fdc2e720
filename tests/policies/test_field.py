"""The vectors over the candidates: however many change at once, they say the same."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from policies.field import MOST_DIRTY, Field, Rates
from policies.registry import make
from policies.types import Load, Replica, Request
from tests.fakes.fleet import fleet

VECTORS = ("born", "ends", "others", "running", "stall", "factor", "opened", "arrivals", "crowding")


def _lived(seed: int, count: int) -> tuple[list[Replica], dict[Replica, Rates]]:
    """Replicas that differ in all that the vectors tell."""
    random = Random(seed)
    balancer = fleet(make("session_affinity"), "".join(chr(ord("A") + n) for n in range(count)))
    rates: dict[Replica, Rates] = {}
    for n in range(6 * count):
        now = 0.1 * n
        lease = balancer.acquire(Request(b"%d" % (n % 50), prompt_tokens=random.randrange(100_000)), now)
        rates.setdefault(lease.replica, Rates()).add(1.0, 120.0, now)
        if random.random() < 0.5:
            lease.first_token(now)
        replica = random.choice(balancer.ready)
        replica.speed.factor = random.uniform(0.5, 2.0)
        replica.speed.slowness = random.choice((1.0, 2.5))
        balancer.report(replica, Load(now, running=random.randrange(9), waiting_tokens=random.randrange(10**5)), now)
    # Only some were sent anything lately.
    return list(balancer.ready), dict(list(rates.items())[::3])


@pytest.mark.parametrize("seed", range(8))
def test_many_changes_at_once_are_seen_as_one_by_one(seed: int) -> None:
    replicas, rates = _lived(seed, MOST_DIRTY + 8)
    now = 25.0
    whole = Field(replicas, rates, 120.0, now)
    whole.bring_up(now)
    single = Field(replicas, rates, 120.0, now)
    single._dirty.clear()
    for start in range(0, len(replicas), MOST_DIRTY):
        for replica in replicas[start : start + MOST_DIRTY]:
            single.changed(replica)
        single.bring_up(now)
    for name in VECTORS:
        np.testing.assert_array_equal(getattr(whole, name), getattr(single, name), err_msg=name)
    assert len(set(whole.running)) > 3
    assert list(whole.factor) == [replica.speed.factor * replica.speed.slowness for replica in replicas]
    assert whole.others.any()
    assert whole.opened.any()
    later = now + 11.0
    whole.bring_up(later)
    single.bring_up(later)
    np.testing.assert_array_equal(whole.running, single.running)
