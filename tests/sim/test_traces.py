"""Recorded traffic: what is read from each format, how it is played, and what is said of files that are none."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import registry
from policies.types import OUTCOMES, Cause, Phase, Replica, Request, Usage
from sim import machine, traces
from sim.fleet import Fleet, Group
from sim.measure import Measure
from sim.traces import Session, Step, Trace, TraceWorkload
from sim.traces.trace import Grower, count, cut, length, runs
from sim.work import Limits
from sim.workload import Conversation, Patience, Turn, load_recorded
from sim.world import World
from tests.fakes.journal import journaled
from tests.fakes.process import ROOT

DATA = Path(__file__).parent / "data"
SHARED = ROOT.parent / "shared" / "data"
"""Whole traces, where somebody has put them."""
PAGE = 64


def load(name: str, format: str | None = None) -> Trace:
    return traces.load(DATA / name, format)


def steps(trace: Trace) -> list[Step]:
    return [step for session in trace.sessions for step in session.steps]


def all_turns(conversations: list[Conversation]) -> list[Turn]:
    """In order, with those of the forks."""
    found = []
    for conversation in conversations:
        for turn in conversation.turns:
            found += [turn, *all_turns(list(turn.forks))]
    return found


def played(trace: Trace, page: int = PAGE, **how: Any) -> list[tuple[float, Conversation]]:
    return list(TraceWorkload(trace, page, 1).replay(**how))


# Formats


def test_claude_codes_sessions_with_their_sub_agents() -> None:
    trace = load("claude_code.jsonl")
    assert (trace.format, trace.block_tokens, trace.timed, trace.requests) == ("claude_code", 64, False, 10)
    first, second = trace.sessions
    assert [(s.prompt_tokens, s.output_tokens) for s in first.steps[:2]] == [(17_209, 275), (22_038, 162)]
    (fork,) = first.steps[0].forks
    assert [step.prompt_tokens for step in fork.steps] == [10_183, 12_704, 21_014]
    assert fork.key == first.name, "it goes by the session's key"
    assert fork.steps[0].gap_s == pytest.approx(100.65 - 91.243 - 8.81), "from its parent's answer to its start"
    assert first.steps[1].gap_s == pytest.approx(107.0 - 100.65), "from its end, not from the parent's answer"
    assert length(first.steps[1].blocks) == 344
    broken = second.steps[2]
    assert cut(broken.blocks, 237) == cut(second.steps[1].blocks, 237)
    assert cut(broken.blocks, 238) != cut(second.steps[1].blocks, 238)
    prints = [step.fingerprint for step in second.steps]
    assert prints[0] == prints[1] != prints[2] == prints[3], "what was rewritten begins anew"


def test_both_forms_of_claude_codes_sessions_tell_the_same(tmp_path: Path) -> None:
    reduced = {"tools": 12448, "system": 2882, "turns": [[0.0, 43330, 321, 0], [7.0, 43773, 239, 43328]]}
    path = tmp_path / "reduced.jsonl"
    path.write_text(json.dumps(reduced) + "\n")
    (one,), (_, other) = traces.load(path).sessions, load("claude_code.jsonl").sessions
    for a, b in zip(one.steps, other.steps, strict=False):
        assert (a.prompt_tokens, a.output_tokens, a.gap_s) == (b.prompt_tokens, b.output_tokens, b.gap_s)
        assert cut(a.blocks, 12_448 // 64) == cut(b.blocks, 12_448 // 64), "the same tools"
    assert cut(one.steps[0].blocks, 677) == cut(one.steps[1].blocks, 677)


def test_the_packaged_sessions_are_read_as_the_recorded_workload_reads_them() -> None:
    trace = traces.load(Path(traces.__file__).parents[1] / "data/claude_code_sessions/sessions.jsonl.gz")
    recorded = load_recorded()
    assert len(trace.sessions) == len(recorded)
    for session, other in zip(trace.sessions, recorded, strict=True):
        assert [(s.gap_s, s.prompt_tokens, s.output_tokens) for s in session.steps] == [
            turn[:3] for turn in other.turns
        ]


def test_mooncakes_requests_are_threaded_by_their_prefix() -> None:
    trace = load("mooncake.jsonl")
    assert (trace.format, trace.requests, trace.resolution_s) == ("mooncake", 14, 3.0)
    assert sorted(len(session.steps) for session in trace.sessions) == [1, 1, 1, 3, 4, 4]
    longest = max(trace.sessions, key=lambda session: session.steps[-1].prompt_tokens)
    assert [step.prompt_tokens for step in longest.steps] == [3184, 3378, 4010]
    assert [step.at_s for step in longest.steps] == [21.0, 102.0, 348.0]
    assert [step.gap_s for step in longest.steps] == [0.0, 81.0, 246.0]


def test_hashes_of_single_blocks_are_chained(tmp_path: Path) -> None:
    """Some write them so: the same block behind other ones is another, and never found."""
    path = tmp_path / "a"
    asked = [(1, 2, 3), (2, 3, 4), (2, 2, 2), (1, 2, 3, 4)]
    path.write_text(
        "".join(
            json.dumps({"timestamp": 9_000 * n, "input_length": 512 * len(ids), "output_length": 9, "hash_ids": ids})
            + "\n"
            for n, ids in enumerate(asked)
        )
    )
    trace = traces.load(path)
    assert [len(session.steps) for session in trace.sessions] == [2, 1, 1]
    assert played_at_once(trace).tally().cached_tokens == 3 * 512


def test_of_two_that_continue_one_request_the_second_is_a_fork(tmp_path: Path) -> None:
    path = tmp_path / "fork.jsonl"
    rows = [(0, 1100, [7, 8, 9]), (10, 1600, [7, 8, 20]), (20, 1700, [7, 8, 30, 31]), (30, 2100, [7, 8, 20, 40, 41])]
    asked = [{"timestamp": at, "input_length": n, "output_length": 1, "hash_ids": ids} for at, n, ids in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in asked))
    found = [[step.prompt_tokens for step in session.steps] for session in traces.load(path).sessions]
    assert found == [[1100, 1600, 2100], [1700]]


def test_azures_table_is_of_requests_alone() -> None:
    trace = load("azure.csv")
    assert (trace.format, len(trace.sessions)) == ("table", 20)
    first = steps(trace)[0]
    assert (first.prompt_tokens, first.output_tokens, first.at_s, first.blocks) == (4808, 10, 0.0, ())
    assert steps(trace)[1].at_s == pytest.approx(0.052, abs=0.001)


def test_burstgpts_failures_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "50.5,1,2.0,GPT-4,100,20,120,Conversation log\n"
        "45,2,1.0,ChatGPT,472,18,490,Conversation log\n"
        "60,3,1.0,ChatGPT,300,0,300,API log\n"
    )
    assert [(s.at_s, s.prompt_tokens, s.output_tokens) for s in steps(traces.load(path))] == [
        (0.0, 472, 18),
        (5.5, 100, 20),
    ]


def test_mini_swe_agents_text_becomes_blocks(tmp_path: Path) -> None:
    path = tmp_path / "swe.jsonl"
    task = "".join(f"{word:08}" for word in range(100))  # 800 characters
    rows = [
        {"timestamp": 5_000_000, "input": task, "output": "x" * 40, "session_id": "a"},
        {"timestamp": 5_500_000, "input": "another" * 50, "output": "", "session_id": "b"},
        {"timestamp": 7_000_000, "input": task + "y" * 300, "output": "z" * 4, "session_id": "a"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = traces.load(path)
    assert (trace.format, [session.name for session in trace.sessions]) == ("mini_swe", ["a", "b"])
    first, second = trace.sessions[0].steps
    assert (first.prompt_tokens, first.output_tokens, second.prompt_tokens) == (200, 10, 275)
    assert (second.at_s, second.gap_s) == (2.0, 2.0)
    assert (length(first.blocks), length(second.blocks)) == (3, 4)
    assert cut(second.blocks, 3) == first.blocks
    assert trace.sessions[1].steps[0].blocks != cut(first.blocks, 1)


def test_agents_that_name_each_other_as_parents_are_both_read(tmp_path: Path) -> None:
    request = {"request_received_ms": 1, "input_tokens": 9, "output_tokens": 1, "total_time_ms": 0}
    request["replay"] = {"trace_block_size": 16, "input_sequence_hashes": []}  # type: ignore[assignment]
    event = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request}
    contexts = [{"session_id": one, "parent_session_id": other} for one, other in ("ab", "ba", "cc")]
    path = tmp_path / "a"
    path.write_text("".join(json.dumps({"event": {**event, "agent_context": each}}) + "\n" for each in contexts))
    assert sorted(session.name for session in traces.load(path).sessions) == ["a", "b", "c"]


def test_dynamos_agents_keep_their_tree() -> None:
    trace = load("dynamo.jsonl")
    assert (trace.format, trace.block_tokens, trace.requests, trace.timed) == ("dynamo", 16, 11, True)
    (root,) = trace.sessions
    assert [len(step.forks) for step in root.steps] == [0, 3, 0, 0, 0]
    forks = root.steps[1].forks
    assert {fork.parent for fork in forks} == {root.name}
    assert len({fork.name for fork in forks} | {root.name}) == 4
    assert [len(fork.steps) for fork in forks] == [2, 2, 2]
    assert forks[0].steps[0].gap_s == pytest.approx(34.811 - 22.520 - 11.505, abs=0.001)
    last = max((step.at_s or 0.0) for fork in forks for step in fork.steps)
    assert root.steps[2].gap_s < (root.steps[2].at_s or 0.0) - last, "the root waits for them"


def journal(path: Path, policy: str) -> Trace:
    """Two sessions, one with a fork under its own key, and a request that a replica failed."""

    async def run() -> None:
        with journaled(path, registry.make(policy)) as (balancer, _):
            for name in "ab":
                balancer.join(Replica(name), 0.0)
            wants_blocks = policy == "prefix_aware"

            def ask(at: float, key: bytes, blocks: int, fingerprint: int = 0, fail: bool = False) -> None:
                hashes = tuple(range(1, 1 + blocks)) if wants_blocks else ()
                request = Request(key * 16, None, fingerprint, 1024 * blocks + 100, hashes)
                if fail:
                    failed = balancer.acquire(request, at)
                    failed.finish(OUTCOMES[Cause.UPSTREAM, Phase.CONNECT], None, at + 0.1)
                    request.failed += (failed.replica,)
                lease = balancer.acquire(request, at + 0.2)
                lease.first_token(at + 1.0)
                lease.finish(OUTCOMES[Cause.DONE, Phase.BODY], Usage(512 * blocks + 50, None, 30), at + 2.0)

            ask(10.0, b"s", 4)
            ask(20.0, b"s", 6, fail=True)
            ask(21.0, b"t", 4)
            ask(40.0, b"s", 3)
            balancer.acquire(Request(b"u" * 16, None, 0, 0, turn=False), 50.0)

    asyncio.run(run())
    return traces.load(path)


@pytest.mark.parametrize("policy", ["prefix_aware", "least_loaded"])
def test_a_routers_journal_is_a_trace(policy: str, tmp_path: Path) -> None:
    trace = journal(tmp_path / "j", policy)
    assert (trace.format, trace.requests, trace.timed) == ("journal", 4, True)
    one, other = sorted(trace.sessions, key=lambda session: -len(session.steps))
    assert [step.prompt_tokens for step in one.steps] == [2098, 3122, 1586], "as the engine says"
    assert {step.output_tokens for step in one.steps} == {30}
    assert [step.at_s for step in one.steps] == pytest.approx([0.0, 9.8, 30.0])
    assert [step.gap_s for step in one.steps] == pytest.approx([0.0, 8.0, 18.2]), "from the end of the answer before"
    assert trace.block_tokens == 512, "half the tokens that were estimated"
    assert cut(one.steps[1].blocks, 4) == one.steps[0].blocks
    shared = cut(other.steps[0].blocks, 4) == one.steps[0].blocks
    assert shared == (policy == "prefix_aware"), "across sessions only where blocks were told"
    rewritten = cut(one.steps[2].blocks, 3) == cut(one.steps[1].blocks, 3)
    assert rewritten == (policy == "prefix_aware"), "a shorter prompt is taken to be a new one where they were not"


def test_turns_whose_fingerprint_nobody_needed_go_on_with_the_conversation_that_they_share_blocks_with(
    tmp_path: Path,
) -> None:
    """The router parses a body only in doubt, so that most turns of a session are journalled without a fingerprint."""

    async def run() -> None:
        with journaled(tmp_path / "j", registry.make("session_affinity")) as (balancer, _):
            balancer.join(Replica("a"), 0.0)
            main, title = tuple(range(1, 100)), tuple(range(501, 600))
            asked = [(main[:20], 7), (title[:8], 9), (main[:28], 0), (title[:12], 0), (main[:36], 0)]
            for n, (blocks, fingerprint) in enumerate(asked):
                now = 10.0 * n
                lease = balancer.acquire(Request(b"s" * 16, None, fingerprint, 1024 * len(blocks), blocks), now)
                lease.first_token(now + 1.0)
                lease.finish(OUTCOMES[Cause.DONE, Phase.BODY], Usage(1024 * len(blocks), None, 30), now + 2.0)

    asyncio.run(run())
    sessions = traces.load(tmp_path / "j").sessions
    assert sorted([step.prompt_tokens // 1024 for step in session.steps] for session in sessions) == [
        [8, 12],
        [20, 28, 36],
    ]


def test_an_answer_of_no_tokens_is_short_and_one_that_nobody_counted_is_like_the_others(tmp_path: Path) -> None:
    async def run() -> None:
        with journaled(tmp_path / "j", registry.make("random")) as (balancer, _):
            balancer.join(Replica("a"), 0.0)
            for number, told in enumerate([300, 300, 0, None]):
                lease = balancer.acquire(Request(bytes([number]) * 16, None, 0, 1024), float(number))
                lease.finish(OUTCOMES[Cause.DONE, Phase.BODY], Usage(1024, None, told), number + 0.5)

    asyncio.run(run())
    assert [step.output_tokens for step in steps(traces.load(tmp_path / "j"))] == [300, 300, 1, 300]


# Detection and errors


@pytest.mark.parametrize("name", ["claude_code.jsonl", "mooncake.jsonl", "azure.csv", "dynamo.jsonl"])
def test_packed_files_are_told_by_their_beginning(name: str, tmp_path: Path) -> None:
    packed = tmp_path / "a file"
    packed.write_bytes(gzip.compress((DATA / name).read_bytes()))
    assert traces.load(packed) == load(name)


@pytest.mark.parametrize(
    ("text", "format", "words"),
    [
        ("", None, "a: no request is in it: write one JSON object a line"),
        ("a,b\n1,2\n", None, "a, line 2: the keys 'a', 'b' are of no known format: name it, one of claude_code, "),
        ('{"x": 1}\n', None, "a, line 1: the keys 'x' are of no known format"),
        ('{"x": 1}\n', "mooncake", "a, line 1: hash_ids is missing: the line has x"),
        ('{"x": 1}\n', "weka", "format must be one of claude_code, .*, journal, got 'weka'"),
        ('\n{"timestamp": 0, "input_length": -4, "output_length": 1, "hash_ids": []}\n', None,
         "a, line 2: input_length is -4: write a number, 0 or more"),
        ('{"timestamp": 0, "input_length": 4, "output_length": 1.5, "hash_ids": []}\n', None,
         "a, line 1: output_length is 1.5: write a whole number, 0 or more"),
        ('{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": ["f"]}\n', None,
         r"a, line 1: hash_ids is \['f'\]: write whole numbers"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", None,
         "a, line 2: TIMESTAMP is 'yesterday': write a number"),
        ('{"tools": 1, "system": 2, "turns": [[1, 2]]}\n', None, "a, line 1: turns is .*: write .gap, input, "),
        ('{"timestamp": 0, "input": 3, "output": "", "session_id": ""}\n', None, "a, line 1: input is 3: write a text"),
        ('[1]\n', "mooncake", "a, line 1: .* is no JSON object"),
        ('[1]\n', None, "a, line 1: .* is no JSON object"),
        ('[\n{}\n]\n', None, "a, line 1: no JSON: .*: write one object a line"),
        ('5\n', None, "a: no request is in it: write one JSON object a line, or a head and"),
        ('{"timestamp": 0, "input": "\\ud800", "output": "", "session_id": ""}\n', None,
         r"a, line 1: input is '\\ud800': write text"),
        ('{"id": "\\ud800", "tool_tokens": 1, "requests": []}\n', None, r"a, line 1: id is '\\ud800': write text"),
        (f"{'x' * 500},2\n1,2\n", None, r"a, line 2: the keys 'x{76}\.\.\., '2' are of no known format"),
        ('{"call": "journal", "format": 3, "version": "7"}\n', None, "a, line 1: format is 3: read it with"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,0\n", None, "a: no request is in it"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused(text: str, format: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        traces.load(path, format)


def test_two_sessions_of_one_id_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text((DATA / "claude_code.jsonl").read_text() * 2)
    with pytest.raises(ValueError, match="a, line 3: id is 'trace_0010': a line before has it, too: leave one out"):
        traces.load(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    packed = gzip.compress((DATA / "mooncake.jsonl").read_bytes())
    for raw in (b"\xff\xfe\x00", packed[:-30], packed[:20] + b"\xff" * 20 + packed[40:]):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match="a: cannot be read"):
            traces.load(path)
    with pytest.raises(ValueError, match=r"b: cannot be read: .*No such file"):
        traces.load(tmp_path / "b")


def test_a_pipe_is_refused_as_a_trace_is_read_more_than_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(ValueError, match=r"a: is a pipe or a device, .* save it to a file"):
        traces.load(tmp_path / "a")


@pytest.mark.parametrize("name", ["mooncake.jsonl", "azure.csv"])
def test_a_byte_order_mark_and_other_line_ends_are_passed_over(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    raw = b"\xef\xbb\xbf" + (DATA / name).read_bytes().replace(b"\n", b"\r\n")
    for written in (raw, gzip.compress(raw)):
        path.write_bytes(written)
        assert traces.load(path) == load(name)


@pytest.mark.parametrize("name", ["mooncake.jsonl", "azure.csv"])
def test_empty_lines_are_passed_over(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("\n\n" + (DATA / name).read_text().replace("\n", "\n\n"))
    assert traces.load(path) == load(name)


def test_a_table_whose_field_has_no_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n0,{'9' * 200_000},1\n")
    with pytest.raises(ValueError, match="a, line 1: no CSV: field larger than field limit"):
        traces.load(path)


@pytest.mark.parametrize(
    ("times", "apart"),
    [
        (("2024-05-10 00:00:00+00:00", "2024-05-10 02:00:01.5+02:00"), 1.5),
        (("2024-05-10 00:00:00", "2024-05-10 00:00:01.5+00:00"), 1.5),
        (("10400101", "10400103"), 2.0),  # seconds, and no days of the year 1040
        (("10400101.12", "10400103.62"), 2.5),
    ],
)
def test_times_of_a_table_are_what_they_say(times: tuple[str, str], apart: float, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{time},5,1\n" for time in times))
    assert [step.at_s for step in steps(traces.load(path))] == [0.0, pytest.approx(apart)]


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})


@given(data=st.data())
def test_a_damaged_file_is_refused_or_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One value anywhere in it becomes another: nothing but a ValueError may come of it."""
    name = data.draw(st.sampled_from(["claude_code.jsonl", "mooncake.jsonl", "dynamo.jsonl"]))
    rows = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(rows)
    node, key = data.draw(st.sampled_from(places))
    node[key] = data.draw(VALUES)
    path = tmp_path_factory.mktemp("damaged") / "a"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with suppress(ValueError):
        assert traces.load(path).requests > 0


# Blocks


@given(st.lists(st.integers(0, 20)))
def test_runs_are_the_names_in_order(names: list[int]) -> None:
    assert [name for run in runs(names) for name in run] == names
    assert length(runs(names)) == len(names)
    for kept in range(len(names) + 2):
        assert [name for run in cut(runs(names), kept) for name in run] == names[:kept]


def test_what_is_not_shared_has_names_of_its_own() -> None:
    grower = Grower(64, 7)
    first = grower.grow((), 0, 640)
    second = grower.grow(first, 320, 1000)
    assert cut(second, 5) == cut(first, 5)
    assert not {name for run in second for name in run} & set(range(first[0].start + 5, first[0].stop))


@given(
    st.integers(1, 40),
    st.sampled_from([16, 48, 64, 100, 512]),
    st.sampled_from([16, 64, 96, 256, 512]),
    st.integers(0, 40),
    st.integers(0, 500),
)
def test_pages_are_equal_just_where_their_blocks_are(
    blocks: int, block: int, page: int, common: int, more: int
) -> None:
    """Two prompts that share their first blocks share the pages that end in them, and no other."""
    common = min(common, blocks)
    prompt = blocks * block + more
    one = Step(prompt, 1, at_s=0.0, blocks=(range(100, 100 + blocks),))
    other = Step(prompt, 1, at_s=0.0, blocks=(range(100, 100 + common), range(900, 900 + blocks - common)))
    trace = Trace("t", block, (Session("a", (one,)), Session("b", (other,))))
    first, second = (turn.pages for turn in all_turns([each for _, each in played(trace, page)]))
    assert len(first) == len(second) == prompt // page
    same = [a == b for a, b in zip(first, second, strict=True)]
    assert same == [(number + 1) * page <= common * block for number in range(len(same))]
    assert len(set(first)) == len(first)


# Playing


def test_open_loop_keeps_the_recorded_times() -> None:
    trace = load("dynamo.jsonl")
    found = played(trace)
    assert [at for at, _ in found] == sorted(at for at, _ in found)
    assert len(found) == trace.requests
    assert len({each.name for _, each in found}) == trace.requests
    assert [at for at, _ in played(trace, speed=4.0)] == [at / 4.0 for at, _ in found]
    keys = Counter(each.key for _, each in found)
    assert sorted(keys.values()) == [2, 2, 2, 5]
    root = keys.most_common(1)[0][0]
    assert {each.parent for _, each in found if each.key != root} == {root}
    assert len({each.estimate for _, each in found if each.key == root}) == 1


@pytest.mark.parametrize("loop", ["open", "closed"])
def test_a_conversation_is_made_when_it_begins(loop: str) -> None:
    """Those of a long trace would not fit into memory."""

    def alive() -> int:
        return sum(isinstance(each, Conversation) for each in gc.get_objects())

    before = alive()
    coming = TraceWorkload(load("azure.csv"), PAGE, 1).replay(loop)  # type: ignore[arg-type]
    first = next(coming)
    assert (first[0], alive() - before) == (0.0, 1)
    assert len(list(coming)) > 1


def test_ticks_are_spread() -> None:
    times = [at for at, _ in played(load("mooncake.jsonl"))]
    assert len({at % 3.0 for at in times}) == len(times)
    assert sum(times) / len(times) == pytest.approx(
        sum(s.at_s or 0.0 for s in steps(load("mooncake.jsonl"))) / 14 + 1.5, abs=1
    )


def test_closed_loop_keeps_the_recorded_gaps_and_forks() -> None:
    (at, root), *rest = played(load("dynamo.jsonl"), loop="closed", speed=2.0)
    assert (at, rest) == (0.0, [])
    turns = list(root.turns)
    assert [len(turn.forks) for turn in turns] == [0, 3, 0, 0, 0]
    assert turns[0].gap_s == 0.0
    (session,) = load("dynamo.jsonl").sessions
    assert [turn.gap_s for turn in turns[1:]] == [step.gap_s for step in session.steps[1:]]
    assert not any(fork.main for fork in turns[1].forks)


def test_without_times_only_made_up_arrivals_will_do() -> None:
    workload = TraceWorkload(load("claude_code.jsonl"), PAGE, 1)
    with pytest.raises(ValueError, match="claude_code have no absolute times: set play to again"):
        workload.replay()
    with pytest.raises(ValueError, match="speed must be more than 0"):
        TraceWorkload(load("azure.csv"), PAGE, 1).replay(speed=0.0)
    with pytest.raises(ValueError, match="no session whose prompts all fit 100 tokens"):
        TraceWorkload(load("claude_code.jsonl"), PAGE, 1, most_tokens=100)


def test_sessions_come_again_with_blocks_of_their_own() -> None:
    workload = TraceWorkload(load("claude_code.jsonl"), PAGE, 1, gap_cap_s=50.0)
    first, again = (workload.session(index, initial=False) for index in (1, 3))
    assert first.key != again.key
    one, other = all_turns([first]), all_turns([again])
    assert [turn.prompt_tokens for turn in one] == [turn.prompt_tokens for turn in other]
    assert not {page for turn in one for page in turn.pages} & {page for turn in other for page in turn.pages}
    assert max(turn.gap_s for turn in one) == 50.0
    begun = {len(list(workload.session(2 * lap + 1, initial=True).turns)) for lap in range(20)}
    assert begun == {1, 2, 3, 4}, "somewhere in their life"


def test_some_clients_of_a_trace_can_be_impatient() -> None:
    workload = TraceWorkload(load("mooncake.jsonl"), PAGE, 1, patience=Patience(0.5, 7.0))
    turns = all_turns([each for _, each in workload.replay()])
    assert {turn.patience_s for turn in turns} == {7.0, float("inf")}


def test_a_simulated_fleet_serves_a_trace() -> None:
    """Deterministic, and with hits that random placement does not have."""

    def served(policy: str) -> dict[str, object]:
        workload = TraceWorkload(load("mooncake.jsonl"), 256, 1)
        kimi = machine.find_machine("kimi-int4-tp4-bf16")
        fleet = Fleet((Group(4, kimi.hardware, Limits(kimi.kv_tokens, 256)),))
        world = World(policy, {}, fleet, workload.replay(), workload.random("reports"), Measure(0.0, 2000.0))
        world.run(2000.0)
        return world.measure.result()

    kept = served("session_affinity")
    assert kept == served("session_affinity")
    assert kept["requests"] == 14
    assert float(str(kept["hit_total"])) > float(str(served("round_robin")["hit_total"]))


def played_at_once(trace: Trace) -> Measure:
    """All its sessions by one replica, to their ends."""
    workload = TraceWorkload(trace, 256, 1)
    kimi = machine.find_machine("kimi-int4-tp4-bf16")
    fleet = Fleet((Group(1, kimi.hardware, Limits(kimi.kv_tokens, 256)),))
    sessions = ((0.0, workload.session(number, initial=False)) for number in range(len(workload.sessions)))
    world = World("random", {}, fleet, sessions, workload.random("reports"), Measure(0.0, 20_000.0))
    world.run(20_000.0)
    assert world.live == 0
    return world.measure


def test_sessions_are_told_apart_by_their_keys_whatever_they_are_called(tmp_path: Path) -> None:
    dotted = tmp_path / "requests.jsonl"
    row = {"timestamp": 1, "input": "a" * 999, "output": "b"}
    dotted.write_text("".join(json.dumps({**row, "session_id": f"run#1.{number}"}) + "\n" for number in range(3)))
    assert len(played_at_once(traces.load(dotted)).tally().sessions) == 3
    with_sub_agents = load("claude_code.jsonl")
    assert len(played_at_once(with_sub_agents).tally().sessions) == len(with_sub_agents.sessions)


# Whole traces, where they are


@pytest.mark.skipif(not SHARED.is_dir(), reason="the whole traces are not here")
@pytest.mark.parametrize(
    ("name", "sessions", "requests", "reuse"),
    [
        ("claude_code_sessions/sessions.jsonl.gz", 348, 21_798, None),
        ("mooncake_fast25/conversation_trace.jsonl.gz", 8_099, 12_031, 0.37),
        ("azure_llm_2023/AzureLLMInferenceTrace_code.csv.gz", 8_819, 8_819, 0.0),
        ("lmcache_miniswe/miniswe_sessions.jsonl.gz", 20, 402, 0.94),
        ("dynamo_testdata/pi_request_trace.jsonl.gz", 2, 17, None),
        ("dynamo_testdata/mooncake_trace_1000.jsonl.gz", 732, 1_000, None),
    ],
)
def test_a_whole_trace_is_what_its_source_says(name: str, sessions: int, requests: int, reuse: float | None) -> None:
    """The share of blocks that came before is 36.6 % in Mooncake's hour and 93.6 % of mini-swe-agent's characters."""
    trace = traces.load(SHARED / name)
    assert (len(trace.sessions), sum(map(count, trace.sessions))) == (sessions, requests)
    if reuse is None:
        return
    seen: set[int] = set()
    found = total = 0
    for _, conversation in played(trace, 256):
        for turn in conversation.turns:
            found += sum(page in seen for page in turn.pages)
            total += len(turn.pages)
            seen.update(turn.pages)
    assert found / total == pytest.approx(reuse, abs=0.01)
