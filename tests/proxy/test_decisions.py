"""What the data path notes of its decisions."""

from __future__ import annotations

from policies.types import State
from router.decisions import Decision
from tests.fakes.client import get, post
from tests.fakes.proxied import Proxied
from tests.fakes.upstream import REFUSING, always, ok
from tests.proxy.conftest import Warm

USAGE = ok(b'{"usage": {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 15}, "completion_tokens": 1}}')


def noted(router: Proxied) -> list[Decision]:
    """The oldest first."""
    return [made for _, made in router.proxy.decisions.latest()][::-1]


async def test_a_request_that_went_well(warm: Warm) -> None:
    router = await warm(always(USAGE))
    client = await router.client()
    await client.ask(post("/v1/chat/completions", b'{"messages": []}'))
    (made,) = noted(router)
    assert (made.replica, made.reason, made.tries, made.cause, made.failed) == ("a", "rotation", 1, "done", "")
    assert (made.cached_tokens, made.told_prompt_tokens) == (15, 20)
    assert 0 <= made.first_byte_s < 10


async def test_a_redispatch_is_two_decisions_and_a_client_that_asks_for_nonsense_none(warm: Warm) -> None:
    router = await warm(REFUSING, always(ok(b"b")))
    client = await router.client()
    await client.ask(post("/unknown", b"body"))
    await client.ask(get("/flush_cache"))
    first, second = noted(router)
    assert (first.replica, first.failed, first.cause) == ("a", "connect", "")
    assert (second.replica, second.failed, second.tries, second.cause) == ("b", "", 2, "done")


async def test_a_request_that_nobody_serves_is_refused(warm: Warm) -> None:
    router = await warm(REFUSING)
    client = await router.client()
    await client.ask(post("/unknown", b"body"))
    first, refused = noted(router)
    assert (first.replica, first.failed) == ("a", "connect")
    assert (refused.replica, refused.reason, refused.tries) == ("", "all_failed", 1)
    router.balancer.set_state(router.replica("a"), State.EJECTED, 0.0)
    await client.ask(post("/unknown", b"body"))
    assert (noted(router)[-1].replica, noted(router)[-1].reason) == ("", "all_ejected")


async def test_every_second_is_a_sample_of_the_rates(warm: Warm) -> None:
    router = await warm(always(ok(b"a")))
    client = await router.client()
    await router.passed(0.1)
    await client.ask(get("/v1/models"))
    await router.ended("done/body")
    await router.passed(0.1)
    assert sum(router.proxy.rates.series) > 0
