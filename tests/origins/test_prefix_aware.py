"""`prefix_aware` beside its origin: SGLang's router 0.3.2 with `cache_aware`, the package itself, as a process.

Both get the same requests in the same order, with the same ones in flight, and must choose the same replica, request
for request. The replicas are named by the order in which the origin fills an idle fleet, as it registers them in no
fixed order. They are known to differ in three ways, each held by a test at the end:

- Equals. The origin takes the first of the replicas with the fewest in flight, so that a quiet fleet sends every new
  prompt to one of them. We take the one left longest; the runs below send new prompts only while one has the fewest.
- Grain. The origin compares characters; we compare blocks of 4 KiB, so that we tell two holders apart only where they
  differ by a block. The turns below are longer than that, and texts differ from their first character on.
- What is compared. The origin compares the text of the messages, and so knows neither tools nor anything else; we
  compare the raw body from its first byte, and so see a change anywhere in it. The bodies below begin alike.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import count
from pathlib import Path
from random import Random

from policies.balancer import Balancer
from policies.lease import Lease
from policies.registry import make
from policies.types import Reason, Request
from router.identity.fingerprint import chain
from router.proxy.exchange import BYTES_PER_TOKEN
from tests.fakes.fleet import DONE, fleet
from tests.origins.sglang import SglangRouter

KIB = 1024


_marks = map(chr, count(0x4E00))


def text(random: Random, kib: int) -> str:
    """Letters at random after a mark of its own: no two texts have even one character in common at the start."""
    return next(_marks) + "".join(random.choices("abcdefghijklmnopqrstuvwxyz ", k=kib * KIB))


def body(*messages: str, **before: str) -> bytes:
    roles = ("user", "assistant")
    listed = [{"role": roles[n % 2], "content": content} for n, content in enumerate(messages)]
    return json.dumps({**before, "model": "m", "messages": listed}, separators=(",", ":")).encode()


def request(raw: bytes) -> Request:
    """As the router would hand it over."""
    return Request(blocks=chain(raw), prompt_tokens=len(raw) // BYTES_PER_TOKEN)


class Both:
    """The origin and our policy, side by side."""

    def __init__(self, origin: SglangRouter, balancer: Balancer) -> None:
        self.origin, self.balancer = origin, balancer
        self.open: dict[int, Lease] = {}
        self.names: dict[int, str] = {}
        self.reasons: Counter[Reason] = Counter()
        self.now = 0.0

    async def send(self, raw: bytes) -> int:
        """Send one request to both, compare, and leave it in flight."""
        self.now += 1.0
        number, stand_in = await self.origin.send(raw)
        lease = self.balancer.acquire(request(raw), self.now)
        self.open[number] = lease
        self.reasons[lease.choice.reason] += 1
        theirs = self.names.setdefault(stand_in, lease.replica.id)
        loads = {r.id: r.in_flight for r in self.balancer.ready}
        assert theirs == lease.replica.id, f"request {number}: {lease.choice}; in flight {loads}"
        return number

    async def finish(self, number: int) -> None:
        self.now += 1.0
        await self.origin.finish(number)
        self.open.pop(number).finish(DONE, None, self.now)

    def one_has_the_fewest(self) -> bool:
        loads = sorted(r.in_flight for r in self.balancer.ready)
        return loads[0] < loads[1]


async def _side_by_side(folder: Path, flags: dict[str, float], seed: int, steps: int) -> Both:
    """Conversations that begin, go on and branch, some of their requests in flight at any time."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    async with SglangRouter(folder, 3, *options) as origin:
        both = Both(origin, fleet(make("prefix_aware", flags)))
        random = Random(seed)
        systems = [text(random, 32) for _ in range(2)]
        conversations: list[list[str]] = []
        for _ in range(3):  # an idle fleet is filled in order; it gives the stand-ins their names
            conversations.append([text(random, 40)])
            await both.send(body(*conversations[-1]))
        for _ in range(steps):
            roll = random.random()
            if roll < 0.35 and both.open:
                await both.finish(random.choice(sorted(both.open)))
            elif roll < 0.75 and (both.one_has_the_fewest() or not _uneven(both, flags)):
                conversation = random.choice(conversations)
                conversation += [text(random, 8), text(random, 9)]
                await both.send(body(*conversation[:-1]))
            elif roll < 0.85 and both.one_has_the_fewest():  # shares a quarter with others: too little to matter
                conversations.append([random.choice(systems) + text(random, 96)])
                await both.send(body(*conversations[-1]))
            elif roll < 0.95 and both.one_has_the_fewest():  # shares the most part
                conversations.append([random.choice(systems) + text(random, 16)])
                await both.send(body(*conversations[-1]))
            elif both.one_has_the_fewest():
                conversations.append([text(random, 40)])
                await both.send(body(*conversations[-1]))
        for number in sorted(both.open):
            await both.finish(number)
    assert set(both.names.values()) == {"a", "b", "c"}
    return both


def _uneven(both: Both, flags: dict[str, float]) -> bool:
    """Load is so uneven that affinity does not count: then new prompts and old ones alike need one with the fewest."""
    loads = [r.in_flight for r in both.balancer.ready]
    most, fewest = max(loads), min(loads)
    most_apart, times = flags.get("balance_abs_threshold", 64), flags.get("balance_rel_threshold", 1.5)
    return most - fewest > most_apart and most > times * fewest


async def test_the_same_requests_go_to_the_same_replicas_with_the_defaults(tmp_path: Path) -> None:
    both = await _side_by_side(tmp_path, {}, seed=1, steps=120)
    assert both.reasons[Reason.PREFIX] > 30
    assert both.reasons[Reason.LEAST_LOADED] > 10
    assert both.reasons[Reason.SPILLED] == 0


async def test_the_same_requests_go_to_the_same_replicas_when_load_is_uneven(tmp_path: Path) -> None:
    flags = {"cache_threshold": 0.5, "balance_abs_threshold": 2, "balance_rel_threshold": 1.25}
    both = await _side_by_side(tmp_path, flags, seed=2, steps=150)
    assert both.reasons[Reason.PREFIX] > 20
    assert both.reasons[Reason.LEAST_LOADED] > 10
    assert both.reasons[Reason.SPILLED] > 5


async def test_both_leave_the_holder_at_the_same_request(tmp_path: Path) -> None:
    """With the defaults, the 66th in flight of one prompt is the first that goes elsewhere."""
    async with SglangRouter(tmp_path, 2) as origin:
        both, random = Both(origin, fleet(make("prefix_aware"), "ab")), Random(3)
        head = text(random, 12)
        sent = [await both.send(body(head + text(random, 1))) for _ in range(68)]
        assert [both.open[number].replica.id for number in sent] == ["a"] * 65 + ["b", "a", "b"]
    assert sorted(both.names.values()) == ["a", "b"]


# Where they are known to differ


async def test_among_equals_the_origin_takes_the_first_and_we_the_one_left_longest(tmp_path: Path) -> None:
    async with SglangRouter(tmp_path, 3) as origin:
        balancer, random = fleet(make("prefix_aware")), Random(4)
        theirs, ours = [], []
        for n in range(6):
            raw = body(text(random, 8))
            number, stand_in = await origin.send(raw)
            theirs.append(stand_in)
            lease = balancer.acquire(request(raw), float(n))
            ours.append(lease.replica.id)
            await origin.finish(number)
            lease.finish(DONE, None, n + 0.5)
    assert len(set(theirs)) == 1
    assert ours == ["a", "b", "c"] * 2


async def test_the_origin_tells_holders_apart_by_a_character_and_we_by_a_block(tmp_path: Path) -> None:
    async with SglangRouter(tmp_path, 2) as origin:
        both, random = Both(origin, fleet(make("prefix_aware"), "ab")), Random(5)
        head, tail = text(random, 16), text(random, 48)
        await both.send(body(head + "A" * 4 * KIB))
        await both.send(body(head + tail))  # a miss: a quarter is shared; and the first replica has one in flight
        assert sorted(both.names.values()) == ["a", "b"]
        second = body(head + tail[: 2 * KIB] + "B" * KIB)
        _, stand_in = await origin.send(second)
        assert both.names[stand_in] == "b", "it shares 2 KiB more with the second"
        assert both.balancer.explain(request(second), 9.0).replica.id == "a", "the same four blocks, and first there"
        await both.send(body(head + tail[: 9 * KIB] + "C" * KIB))  # with two blocks more, both say the second
        assert both.reasons[Reason.PREFIX] == 1


async def test_the_origin_compares_messages_and_we_the_body_from_its_first_byte(tmp_path: Path) -> None:
    async with SglangRouter(tmp_path, 2) as origin:
        both, random = Both(origin, fleet(make("prefix_aware"), "ab")), Random(6)
        prompt = text(random, 16)
        await both.send(body(prompt, user="one"))
        other = body(prompt, user="two")
        _, stand_in = await origin.send(other)
        assert both.names.get(stand_in) == "a", "the same messages"
        choice = both.balancer.explain(request(other), 9.0)
        assert (choice.replica.id, choice.reason) == ("b", Reason.LEAST_LOADED)
