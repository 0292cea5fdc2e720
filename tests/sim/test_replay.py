"""A journal's calls made again give the same choices, whatever the calls were."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import registry
from policies.balancer import NoReplica
from policies.directory import condense
from policies.lease import Lease
from policies.responses import PREFIX, issued
from policies.sharing import Note
from policies.types import OUTCOMES, Cause, Load, Phase, Replica, Request, State, Usage
from router.journaled import JournaledBalancer
from sim import journal
from sim.replay import main, replay
from tests.fakes.journal import journaled

POLICIES = sorted(registry.POLICIES)


def hashes(session: int, blocks: int) -> tuple[int, ...]:
    """Of the beginning of a session's body."""
    random = Random(session)
    return tuple(random.getrandbits(64) for _ in range(blocks))


@dataclass
class Driver:
    """Makes calls of a Balancer that are told by small numbers."""

    balancer: JournaledBalancer
    now: float = 0.0
    open: list[Lease] = field(default_factory=list)
    choices: int = 0

    def ask(self, a: int, b: int) -> Request:
        """One of eight sessions, or none; a body that begins as all of that session's do."""
        session = a % 9
        blocks = hashes(session, b % 40)
        key = b"%016d" % session if session else None
        parent = b"%016d" % (session // 2) if session % 3 == 1 else None
        response = self.response(a) if b % 4 == 3 else None
        return Request(key, parent, 1 + a % 2, 1 + 800 * (b % 40), blocks, turn=b % 11 != 0, response=response)

    def response(self, a: int) -> bytes:
        return PREFIX + b"%016d" % (a % 7)

    def acquire(self, a: int, b: int) -> None:
        request = self.ask(a, b)
        if b % 7 == 0 and self.balancer.ready:
            request.proposed = self.balancer.propose(request, self.now)
        for _ in range(2):
            try:
                lease = self.balancer.acquire(request, self.now)
            except NoReplica:
                return
            self.choices += 1
            if b % 5:
                self.open.append(lease)
                return
            lease.finish(OUTCOMES[Cause.UPSTREAM, Phase.CONNECT], None, self.now)
            request.failed += (lease.replica,)

    def explain(self, a: int, b: int) -> None:
        if self.balancer.ready:
            (self.balancer.explain if b % 2 else self.balancer.propose)(self.ask(a, b), self.now)

    def first_token(self, a: int, b: int) -> None:
        if self.open:
            self.open[a % len(self.open)].first_token(self.now)

    def finish(self, a: int, b: int) -> None:
        if self.open:
            lease = self.open.pop(a % len(self.open))
            lease.timed = b % 4 != 0
            prompt = lease.request.prompt_tokens
            usage = None if b % 3 == 0 else Usage(prompt + b, min(prompt, 700 * b), b)
            lease.finish(OUTCOMES[(Cause.DONE, Cause.CLIENT)[b % 2], Phase.BODY], usage, self.now)

    def join(self, a: int, b: int) -> None:
        self.balancer.join(Replica("abcde"[a % 5], weight=1.0 + b % 3), self.now)

    def leave(self, a: int, b: int) -> None:
        if len(self.balancer.replicas) > 1:
            self.balancer.leave(sorted(self.balancer.replicas)[a % len(self.balancer.replicas)], self.now)

    def replica(self, a: int) -> Replica:
        return self.balancer.replicas[sorted(self.balancer.replicas)[a % len(self.balancer.replicas)]]

    def set_state(self, a: int, b: int) -> None:
        self.balancer.set_state(self.replica(a), list(State)[b % 3], self.now)

    def report(self, a: int, b: int) -> None:
        speed = 9_000.0 / 7 * b if b else None
        load = Load(self.now - 0.05, b % 7, b % 3, 100 * b, None, 50_000 + 1000 * b, None, speed)
        self.balancer.report(self.replica(a), load, self.now)

    def hear(self, a: int, b: int) -> None:
        """Another router's word for a turn that might have come here."""
        request = self.ask(a, b)
        if request.key is not None:
            size = request.prompt_tokens if b % 4 else 0
            chain, name = condense(request.blocks), "abcde"[b % 5]
            note = Note(request.key, request.fingerprint, chain, b % 3 == 0, 1.0 + b / 50, name, "", size, size // 2)
            self.balancer.hear(note, self.now)

    def issue(self, a: int, b: int) -> None:
        """A replica has answered with a response."""
        self.balancer.hear(issued(self.response(a), self.replica(b)), self.now)

    def hear_load(self, a: int, b: int) -> None:
        self.balancer.hear_load(self.replica(a), b % 5, 1_000 * (b % 7), 0.3 * (b % 7), self.now)

    def cache_cleared(self, a: int, b: int) -> None:
        self.balancer.cache_cleared(self.replica(a), self.now)

    def switch(self, a: int, b: int) -> None:
        self.balancer.switch(registry.make(POLICIES[a % len(POLICIES)]), self.now)

    def wait(self, a: int, b: int) -> None:
        self.now += a * b


CALLS = ["acquire"] * 6 + ["first_token"] * 3 + ["finish"] * 3 + ["report", "set_state", "join", "leave"]
CALLS += ["hear"] * 3 + ["issue"] * 2 + ["hear_load", "cache_cleared", "switch", "explain", "wait"]


def drive(path: Path, policy: str, calls: list[tuple[str, int, int]], max_bytes: int) -> int:
    """Make the calls; returns how many choices were made."""

    async def run() -> int:
        with journaled(path, registry.make(policy), max_bytes=max_bytes, max_sessions=6) as (balancer, written):
            driver = Driver(balancer)
            for replica in range(3):
                driver.join(replica, 0)
            for call, a, b in calls:
                driver.now += 0.137
                getattr(driver, call)(a, b)
                if a % 8 == 0:
                    written.flush()
            return driver.choices

    return asyncio.run(run())


@pytest.mark.parametrize("policy", POLICIES)
@given(
    st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 99), st.integers(0, 99)), min_size=20, max_size=120),
    st.sampled_from([2_000, 1 << 20]),
)
@settings(max_examples=15, deadline=None)
def test_every_choice_is_the_same_again(policy: str, calls: list[tuple[str, int, int]], max_bytes: int) -> None:
    """Also when the journal is begun anew in between."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "j")
        choices = drive(path, policy, calls, max_bytes)
        found = replay(path)
        assert (found.different, found.differences) == (0, [])
        assert (found.choices, found.whole, found.skipped) == (choices, True, 0)


SOME = [(call, a, b) for b in range(40) for a, call in enumerate(["acquire"] * 4 + ["first_token", "finish", "finish"])]


def test_a_choice_that_was_another_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "j"
    drive(path, "session_affinity", SOME, 1 << 20)
    lines = path.read_text().splitlines()
    number = max(n for n, line in enumerate(lines) if json.loads(line)["call"] == "acquire")
    changed = json.loads(lines[number])
    changed["replica"] = (changed["replica"] + 1) % 3
    path.write_text("\n".join([*lines[:number], json.dumps(changed), *lines[number + 1 :]]) + "\n")
    found = replay(path)
    assert found.different == 1
    assert f"line {number + 1}: recorded {'abc'[changed['replica']]} (" in found.differences[0]
    assert main([str(path)]) == 1
    assert json.loads(capsys.readouterr().out)["different"] == 1


def test_another_policy_is_asked_for_every_request(tmp_path: Path) -> None:
    path = tmp_path / "j"
    choices = drive(path, "session_affinity", SOME, 2_000)
    same = replay(path, "session_affinity").beside
    assert (same["choices"], same["same_replica"]) == (choices, choices)
    other = replay(path, "random", {"seed": 3}).beside
    assert other["choices"] == choices
    assert 0 < int(str(other["same_replica"])) < choices
    assert replay(path, "random", {"seed": 3}).different == 0, "the recorded policy decides as before"


def test_what_another_policy_wants_to_know_and_the_journal_does_not_tell_is_said(tmp_path: Path) -> None:
    path = tmp_path / "j"
    drive(path, "random", SOME, 1 << 20)
    text = path.read_text()
    path.write_text(re.sub(r'"(blocks|fingerprint)":"[^"]*",?', "", text).replace(",}", "}"))
    assert replay(path, "prefix_aware").beside["untold"] == ["blocks"]
    assert replay(path, "rendezvous").beside["untold"] == []
    path.write_text(text)
    assert replay(path, "prefix_aware").beside["untold"] == []


def test_what_the_policy_in_charge_looked_for_and_did_not_find_is_told(tmp_path: Path) -> None:
    """Prompts shorter than a block: a journal of another run would have no blocks either."""
    path = tmp_path / "j"
    drive(path, "prefix_aware", SOME, 1 << 20)
    path.write_text(re.sub(r'"blocks":"[^"]*",?', "", path.read_text()).replace(",}", "}"))
    assert replay(path, "prefix_aware").beside["untold"] == []


def test_files_that_are_gone_are_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "j"
    drive(path, "session_affinity", SOME, 4_000)
    numbers = sorted(int(each.suffix[1:]) for each in tmp_path.glob("j.*"))
    assert len(numbers) > 3
    path.with_name(f"j.{numbers[-1]}").unlink()
    found = replay(path)
    assert not found.whole
    assert found.skipped, "of requests placed before"


def test_behind_a_gap_the_fleet_is_as_the_header_says(tmp_path: Path) -> None:
    path = tmp_path / "j"
    drive(path, "session_affinity", SOME, 1 << 20)
    lines = path.read_text().splitlines()
    fleet = [json.loads(line) for line in lines if '"join"' in line]
    header = {**json.loads(lines[0]), "lost": 40, "replicas": fleet}
    half = len(lines) // 2
    path.write_text("\n".join([*lines[:half], json.dumps(header), *lines[half + 40 :]]) + "\n")
    found = replay(path)
    assert (found.whole, found.lost) == (False, 40)
    assert found.skipped, "of requests placed before"
    assert replay(path, "random").beside["choices"] == found.choices


def test_one_other_policy_is_asked_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["j", "--policy", "random,sticky"]) == 2
    assert "name one policy" in capsys.readouterr().err


HEADER = (
    '{"call": "journal", "format": 1, "part": 0, "lost": 0, "at": 1, "policy": {"name": "random", "parameters": {}}, '
    '"directory": {"max_sessions": 1, "idle_s": 1}, "replicas": []}'
)


JOIN = '{"call": "join", "at": 1, "replica": 0, "id": "a", "weight": 1, "state": "ready"}'
LEAVE = '{"call": "leave", "at": 2, "replica": 0}'


def test_lines_that_a_full_disk_or_a_crash_has_cut_off_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "j"
    behind_a_gap = HEADER.replace('"lost": 0', '"lost": 3')
    text = f"{HEADER}\n{JOIN}\n{LEAVE[:20]}\n\n{behind_a_gap}\n{JOIN}\n"
    for end in range(len(text) - len(JOIN), len(text)):  # as far as it is written by now
        path.write_text(text[:end])
        found = replay(path)
        assert (found.lost, found.whole) == (3, False)
        assert found.calls == 3 + (end == len(text) - 1)


def test_a_journal_may_be_rotated_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.with_name("j.1").write_text(f"{HEADER}\n{JOIN}\n")
    path.write_text(HEADER.replace('"part": 0', '"part": 1') + "\n" + LEAVE + "\n")
    found = []
    for row in journal.calls(path):
        found.append(row.values["call"])
        if len(found) == 1:
            path.with_name("j.1").unlink()
            path.rename(path.with_name("j.1"))
            path.write_text(HEADER.replace('"part": 0', '"part": 2') + "\n")
    assert found == ["journal", "join", "journal", "leave"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"call": "acquire", "at": 1}', "line 1: call is 'acquire': a journal's file begins with a call 'journal'"),
        ('{"call": "journal", "format": 2, "version": "9.9"}', "format is 2: read it with the version 9.9"),
        ("{", "line 1: no JSON"),
        (f'{HEADER}\n{{"call": "leave", "at": 1, "replica": 7}}', "line 2: replica is 7: no such replica has joined"),
        (f'{HEADER}\n{{"call": "dance", "at": 1}}', "line 2: call is 'dance': read the journal with the version"),
        (f'{HEADER}\n{{"call": "acquire", "at": -1}}', "line 2: at is -1: write a number, 0 or more"),
        ('{"call": "journal", "format": 1}', "line 1: part is missing"),
        (HEADER.replace("random", "moon"), "line 1: policy is 'moon': unknown policy"),
        (HEADER.replace('"max_sessions": 1', '"max_sessions": 0'), "line 1: directory is .*: max_sessions must be"),
        (f'{HEADER}\n{{"call": "acquire", "at": 1, "failed": ["x"]}}', "line 2: replica is 'x': write a number"),
        (f"{HEADER}\n{JOIN}\n{LEAVE}\n{LEAVE}", "line 4: replica is 0: it has left before: the journal lacks lines"),
        (f'{HEADER}\n{{"call": "jo\n{JOIN}', "line 2: no JSON"),
        ("", "j: no call is in it: name the newest file of a router's journal"),
    ],
)
def test_what_is_no_journal_is_refused(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=words):
        replay(path)


def test_no_hash_of_a_body_is_in_it_as_it_was(tmp_path: Path) -> None:
    """They are made without a key: who has one can tell whether a prompt was sent."""
    path = tmp_path / "j"
    drive(path, "prefix_aware", SOME, 1 << 20)
    given = {number for session in range(9) for number in hashes(session, 40)}
    read = [journal.request(row) for row in journal.calls(path) if row.values["call"] == "acquire"]
    written = {block for request in read for block in request.blocks}
    assert len(written) > 20
    assert not written & given
    assert not {request.fingerprint for request in read} & {1, 2}
