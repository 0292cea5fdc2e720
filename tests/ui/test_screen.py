"""What `warmroute top` draws, at every size and whatever replicas say."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator

import pytest
from rich.cells import cell_len
from rich.console import Console

from policies.types import Replica, State
from router.admin.overview import Overview, View
from router.app import Router
from router.settings import Settings
from router.top.feed import Seen
from router.top.screen import Screen

DECISION = {
    "time": "2026-11-30T01:02:03.004+00:00",
    "session": "00112233445566778899aabbccddeeff",
    "replica": "r1",
    "reason": "home",
    "sentence": "stays on r1: 1.2 s of queue and 0.1 s of prefill there, 6.9 s without its cache",
    "failed": None,
}

HOSTILE = "[red]r1[/red]\x1b]0;title\x07\x1b[2J\r\n"


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    router = Router(Settings())
    for number in range(30):
        router.balancer.join(Replica(f"http://replica-{number}.example:30000"), router.clock())
    yield router
    router.access_log.close()


def drawn(seen: Seen, width: int, height: int = 0) -> str:
    out = io.StringIO()
    Console(file=out, width=width, height=height or 25, force_terminal=False).print(
        Screen(seen, "name", height, "q quits"), end=""
    )
    return out.getvalue()


@pytest.mark.parametrize("width", [20, 48, 60, 80, 100, 120, 300])
@pytest.mark.parametrize("height", [12, 24, 60])
async def test_it_fits(router: Router, width: int, height: int) -> None:
    told = Overview(router).told(View()) | {"decisions": 40 * [DECISION]}
    lines = drawn(Seen(told), width, height).splitlines()
    assert max(map(cell_len, lines)) <= width
    if width >= 48:
        assert len(lines) <= height
        assert sum("replica-" in line for line in lines if "more" not in line) >= 1
    assert lines[-1].startswith("q quits")


async def test_what_is_hidden_is_counted(router: Router) -> None:
    lines = drawn(Seen(Overview(router).told(View())), 100, 20)
    shown = lines.count("replica-")
    assert f"{30 - shown} more, by name" in lines


async def test_nothing_reaches_the_terminal_as_a_command(router: Router) -> None:
    replica = Replica(HOSTILE)
    router.balancer.join(replica, router.clock())
    router.balancer.set_state(replica, State.EJECTED, router.clock())
    told = Overview(router).told(View())
    for text in drawn(Seen(told), 200), drawn(Seen(told, HOSTILE), 200):
        assert not {char for char in text if not char.isprintable()} - {"\n"}
        assert "[red]r1[/red]" in text


def test_without_any_answer_it_says_why() -> None:
    assert "no answer yet" in drawn(Seen(trouble="no answer yet"), 80, 24)
