"""What the KV gate goes by must not depend on replicas' coming and going."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from policies.admission.pressure import Pressure
from policies.balancer import Balancer
from policies.lease import Lease
from policies.registry import make
from policies.types import Replica, Request, State
from tests.fakes.fleet import DONE, fleet

QUEUE = 40
"""Requests that await their first token all the time."""


def _comes_back(balancer: Balancer, second: int) -> None:
    state = State.EJECTED if 540 <= second < 550 else State.READY
    balancer.set_state(balancer.replicas["a"], state, float(second))


def _leaves(balancer: Balancer, second: int) -> None:
    if second == 540:
        balancer.leave("a", 540.0)


def _is_replaced(balancer: Balancer, second: int) -> None:
    if second == 540:
        balancer.join(Replica("a"), 540.0)


@pytest.mark.parametrize("happens", [_comes_back, _leaves, _is_replaced])
def test_the_wait_is_the_same_whoever_comes_and_goes(happens: Callable[[Balancer, int], None]) -> None:
    balancer, pressure = fleet(make("round_robin"), "ab"), Pressure()
    leases: deque[Lease] = deque()
    seen = []
    for second in range(1, 601):
        now = float(second)
        happens(balancer, second)
        leases.append(balancer.acquire(Request(prompt_tokens=50_000), now))
        if len(leases) > QUEUE:
            lease = leases.popleft()
            lease.first_token(now)
            lease.finish(DONE, None, now)
        pressure.look(balancer, now)
        seen.append(pressure.wait_s)
    lately = seen[530:]
    assert lately == pytest.approx([lately[0]] * len(lately), rel=0.05)


def test_what_waits_at_one_look_is_not_taken_to_have_waited_all_the_time_without_any() -> None:
    balancer, pressure = fleet(make("round_robin"), "ab"), Pressure()
    crowd = [balancer.acquire(Request(prompt_tokens=50_000), 1.0) for _ in range(QUEUE)]
    pressure.look(balancer, 0.0)
    pressure.look(balancer, 3600.0)
    for lease in crowd:
        lease.first_token(3600.0)
    for second in range(3601, 3661):
        balancer.acquire(Request(prompt_tokens=50_000), float(second)).first_token(float(second))
        pressure.look(balancer, float(second))
    assert pressure.wait_s < QUEUE
