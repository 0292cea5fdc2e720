"""The command line: `warmroute sim`, `python -m sim`."""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sim import capacity
from sim.capacity import Question
from sim.cli import main
from sim.jobs import Candidate
from tests.fakes.process import ROOT

QUICK = ["--set", "fleet.count=2", "--set", "warm_up_s=10", "--set", "measured_s=30", "--jobs", "1"]

PROMISED = {
    *("policy", "scenario", "seed", "requests", "ttft_p50_s", "ttft_p99_s", "excess_mean_s", "tokens_per_s"),
    *("hit_gpu", "hit_total", "inflight_max_over_mean", "inflight_dispersion", "regretted_prefill_share"),
    *("moved_share", "kv_lost_moves", "kv_lost_moves_to_new"),
}


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_one_line_for_every_run_whatever_the_processes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "r60,r80", "--policies", "rendezvous,round_robin", "--seeds", "3-4", *QUICK, "--json"]
    alone = lines(run(capsys, *arguments))
    assert [(line["scenario"], line["seed"], line["policy"]) for line in alone] == [
        (scenario, seed, policy)
        for scenario in ("r60", "r80")
        for seed in (3, 4)
        for policy in ("rendezvous", "round_robin")
    ]
    assert all(line.keys() >= PROMISED for line in alone)
    assert lines(run(capsys, *arguments, "--jobs", "2")) == alone


def test_a_table_has_means_intervals_and_ratios_to_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "r80", "--policies", "rendezvous,round_robin", "--seeds", "3-4", *QUICK]
    told = run(capsys, *arguments)
    rows = lines(run(capsys, *arguments, "--json"))
    assert told.startswith("r80: 2 replicas, load 0.8, 8 live sessions; seeds 3, 4\n")
    assert re.search(r"^\| +\| rendezvous +\| round_robin +\| ratio +\|$", told, re.M)
    (shown,) = re.findall(r"^\| tokens/s +\| ([\d,]+) ± [\d,]+ +\|", told, re.M)
    of_first = [float(str(row["tokens_per_s"])) for row in rows if row["policy"] == "rendezvous"]
    assert float(shown.replace(",", "")) == pytest.approx(sum(of_first) / 2, abs=0.5)
    assert re.search(r"^\| TTFT p50, s .*\| [\d.]+ \([\d.]+ to [\d.,]+\) +\|$", told, re.M)


def test_csv_has_a_line_for_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, "run", "r80", "--policy", "random:seed=3", "--seeds", "1,2", *QUICK, "--csv")
    rows = list(csv.DictReader(io.StringIO(told)))
    assert [(row["policy"], json.loads(row["parameters"]), row["seed"]) for row in rows] == [
        ("random", {"seed": 3}, "1"),
        ("random", {"seed": 3}, "2"),
    ]


def test_parameters_behind_its_name_reach_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, "compare", "r80", "--policies", "random:seed=1,random:seed=2", "--seeds", "1", *QUICK, "--json")
    first, second = lines(told)
    assert (first["parameters"], second["parameters"]) == ({"seed": 1}, {"seed": 2})
    assert first["digest"] != second["digest"]


def test_a_sweep_has_a_line_for_each_value_and_policy(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sweep", "r80", "--vary", "load=0.3,0.6", "--vary", "fleet.host_tier=true,false", "--seeds", "1"]
    told = run(capsys, *arguments, "--policies", "random,rendezvous", *QUICK)
    cells = [[cell.strip() for cell in line.split("|")[1:5]] for line in told.splitlines() if line.startswith("| r80")]
    assert cells == [
        ["r80", load, host_tier, policy]
        for load in ("0.3", "0.6")
        for host_tier in ("True", "False")
        for policy in ("random", "rendezvous")
    ]
    rows = lines(run(capsys, *arguments, "--policies", "random", *QUICK, "--json"))
    assert [(row["load"], row["fleet.host_tier"]) for row in rows] == [
        (0.3, True),
        (0.3, False),
        (0.6, True),
        (0.6, False),
    ]


@pytest.mark.parametrize("play", ["open", "closed", "again"])
def test_a_trace_is_replayed(play: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "requests.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0.0,5000,10\n1.5,7000,10\n40.0,9000,10\n")
    fleet = ["--replicas", "2", "--machine", "study-bf16", "--agents", "2", "--play", play, "--jobs", "1"]
    rows = lines(run(capsys, "replay", str(trace), *fleet, "--policies", "random,rendezvous", "--json"))
    assert [(row["policy"], row["scenario"]) for row in rows] == [
        ("random", "requests.csv"),
        ("rendezvous", "requests.csv"),
    ]
    assert all((row["requests"] == 3) == (play != "again") for row in rows)


def test_all_requests_of_the_last_tick_are_sent(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "ticks.jsonl"
    request = {"input_length": 900, "output_length": 1, "hash_ids": []}
    trace.write_text("".join(json.dumps({"timestamp": at, **request}) + "\n" for at in [0, 3000, 6000] * 9))
    (row,) = lines(
        run(capsys, "replay", str(trace), "--replicas", "2", "--policies", "random", "--jobs", "1", "--json")
    )
    assert row["requests"] == 27


def test_capacity_is_the_most_sessions_that_keep_to_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "REPLICAS", 2)
    question = Question("kimi-int4-tp4-bf16", False, Candidate("session_affinity"), 30.0, (1,))
    found = capacity.search(question)
    assert found.sessions >= 1
    assert found.ttft_p99_s <= 30.0 < capacity._try(question, found.sessions + 1)[0]
    assert found.replicas(2 * found.sessions + 1) == 3
    assert found.alarm_tokens <= 346_000
    never = capacity.search(Question("kimi-int4-tp4-bf16", False, Candidate("session_affinity"), 0.01, (1,)))
    assert (never.sessions, never.replicas(10)) == (0, None)


FAULTS = [
    (["compare", "r8O"], "no scenario 'r8O'; did you mean 'r80'?"),
    (["compare", "r80", "--policies", "moon"], "no policy 'moon'; known: "),
    (["compare", "r80", "--policies", "random:sed=1"], "unknown parameter 'sed'"),
    (["compare", "r80", "--policies", "random:seed"], "a parameter is written random:KEY=VALUE, got 'seed'"),
    (["compare", "r80", "--policies", "random,random"], "a policy is named twice: leave one out"),
    (["run", "r80", "--set", "lod=1"], "r80: lod: unknown key, set to 1; did you mean 'load'?"),
    (["run", "r80", "--set", "load"], "--set 'load': write KEY=VALUE"),
    (["run", "r80", "--set", "hysteresis_s=4"], "goes behind its name: session_affinity:hysteresis_s=4"),
    (["run", "r80", "--seeds", "x"], "--seeds 'x': write 31-34, or 31,33"),
    (["run", "r80", "--seeds", "2-1"], "--seeds '2-1': names none"),
    (["run", "r80", "--seeds", "1,1"], "--seeds '1,1': names one twice"),
    (["run", "r80", "--jobs", "0"], "--jobs 0: must be from 1 to 1000"),
    (["run", "r80", "--html", "gone/report.html"], "--html gone/report.html: there is no folder gone: create it"),
    (["run", "r80", "--seeds", "1-99999999999"], "--seeds '1-99999999999': choose at most 10000 seeds"),
    (["run", "r80", "--policy", "random,sticky"], "--policy 'random,sticky': name one policy; `warmroute sim compare`"),
    (["run", "r80", "--policy", "random:seed=1:seed=2"], "seed is given twice: leave one out"),
    (["run", "r80,r80"], "'r80,r80': two scenarios are named 'r80': leave one out, or rename a file"),
    (["run", "r80", "--set", "load=1", "--set", "load=2"], "--set 'load=2': load is given twice: leave one out"),
    (["run", "r80", "--set", "load=1", "--load", "2"], "--set 'load=1': load is given twice: leave one out"),
    (["run", "r80", "--set", "fleet.=1"], "--set 'fleet.=1': write KEY=VALUE"),
    (["run", "r80", "--html", "docs"], "--html docs: is a folder: name a file in it"),
    (["sweep", "r80", "--vary", "load"], "--vary 'load': write KEY=VALUE,VALUE"),
    (["sweep", "r80", "--vary", "load=1,"], "--vary 'load=1,': write KEY=VALUE,VALUE"),
    (["sweep", "r80", "--vary", "load=1,1"], "--vary 'load=1,1': a value is given twice: leave one out"),
    (["sweep", "r80", "--vary", "load=0.3,0.30"], "--vary 'load=0.3,0.30': a value is given twice: leave one out"),
    (["sweep", "r80", "--vary", "load=1", "--vary", "load=2"], "--vary load: a key is given twice: leave one out"),
    (["sweep", "r80", "--vary", "load=1", "--set", "load=2"], "--vary load: a key is given twice: leave one out"),
    (["replay", "gone.jsonl"], "gone.jsonl: cannot be read"),
    (["replay", "pyproject.toml"], "pyproject.toml"),
    (["capacity", "--machine", "abacus"], "no machine 'abacus'; known: "),
    (["replay", "tests/sim/data/azure.csv", "--speed", "1e-300"], "choose a higher --speed, or --play again"),
    (["replay", "tests/sim/data/azure.csv", "--speed", "nan"], "--speed nan: must be above 0 and at most 1,000,000"),
    (["replay", "tests/sim/data/azure.csv", "--replicas", "99999"], "--replicas 99,999: must be above 0 and at most"),
    (["capacity", "--slo-ttft-p99", "0"], "must be above 0"),
    (["capacity", "--slo-ttft-p99", "inf"], "--slo-ttft-p99 inf: must be above 0 and at most 300 seconds"),
    (["capacity", "--agents", "0"], "--agents 0: must be above 0"),
    (["capacity", "--policy", "random,sticky"], "name one policy"),
]


@pytest.mark.parametrize(("arguments", "said"), FAULTS)
def test_what_cannot_be_is_told_in_a_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert not told.out
    (line,) = told.err.splitlines()
    assert line.startswith("warmroute sim: ")
    assert said in line


def test_a_scenarios_key_may_be_named_like_a_policys_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(run(capsys, "run", "r80", "--seeds", "1", *QUICK, "--set", "spread_s=1", "--json"))


def test_a_run_without_requests_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--set", "warm_up_s=0", "--set", "measured_s=0.001", "--set", "spread_s=60"]
    assert main(["run", "r80", "--seeds", "1,2", *short, "--jobs", "1"]) == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("r80: 16 replicas, load 0.8, 64 live sessions: no request came while it was measured")


def test_a_report_that_the_disk_does_not_take_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["run", "r80", "--seeds", "1", *QUICK, "--json", "--html", "/dev/full"]) == 2
    told = capsys.readouterr()
    assert lines(told.out)
    assert told.err == "warmroute sim: /dev/full: No space left on device\n"


def test_requests_that_are_too_long_are_left_out_with_a_word(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "requests.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,5000,10\n1,10000000,10\n2,5000,1000000\n3,9,1\n")
    assert main(["replay", str(trace), "--policies", "random", "--jobs", "1", "--json"]) == 0
    told = capsys.readouterr()
    assert lines(told.out)[0]["requests"] == 2
    assert "requests: 4, of which 2 are left out" in told.err


# As processes


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_it_is_a_command_of_warmroute() -> None:
    """Needs the entry point: scripts/setup installs the project anew when pyproject.toml has changed."""
    arguments = ["run", "r80", "--policy", "random", "--seeds", "1", *QUICK, "--json"]
    by_warmroute = call("-m", "router.cli", "sim", *arguments)
    assert by_warmroute.returncode == 0, by_warmroute.stderr
    assert by_warmroute.stdout == call("-m", "sim", *arguments).stdout
    assert not by_warmroute.stderr, "no progress bar where there is no terminal"


def test_the_other_commands_do_not_import_it() -> None:
    said = (
        "import sys; from router.cli import _parser; _parser(['serve']); print([m for m in sys.modules if 'sim' == m])"
    )
    assert call("-c", said).stdout == "[]\n"


def test_the_parsers_import_nothing_slow() -> None:
    said = "import sys, sim.cli; print(sorted({'numpy', 'pydantic', 'matplotlib', 'tqdm'} & set(sys.modules)))"
    assert call("-c", said).stdout == "[]\n"


@pytest.mark.parametrize("everybody", [True, False], ids=["Ctrl-C", "kill -INT"])
def test_an_interrupt_ends_it_and_all_its_processes(everybody: bool) -> None:
    command = [sys.executable, "-m", "sim", "compare", "r30", "--seeds", "1-900", "--jobs", "2", "--json"]
    # Who starts the tests in the background may have them, and so it, ignore interrupts.
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=-1, stderr=-1, start_new_session=True, preexec_fn=heeding
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (os.killpg if everybody else os.kill)(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)  # to the end of what all of them had open
    assert process.returncode == 130
    assert err == "warmroute sim: interrupted\n"


def test_in_the_background_no_process_of_it_heeds_an_interrupt() -> None:
    command = [sys.executable, "-m", "sim", "compare", "r30", "--seeds", "1-4", *QUICK, "--jobs", "2", "--json"]
    ignoring = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # as a shell starts it behind an &
    with subprocess.Popen(
        command, cwd=ROOT, bufsize=0, stdout=-1, stderr=-1, start_new_session=True, preexec_fn=ignoring
    ) as process:  # without a buffer, which would keep what came with the first line
        assert process.stdout is not None
        first = process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert (process.returncode, len(lines((first + rest).decode()))) == (0, 8)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_it(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "sim", "compare", "r30", "--seeds", "1-900", "--jobs", "2", "--json"]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        _, err = process.communicate(timeout=60)  # to the end of what all of them had open
    if number is signal.SIGTERM:
        assert (process.returncode, err) == (143, "")


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """With `sim` for a short run of it."""
    short = " ".join(["run", "r80", "--policy", "random", "--seeds", "1,2", *QUICK])
    text = command.replace("sim", f"{sys.executable} -m sim {short}")
    environment = {**os.environ, **environment}
    return subprocess.run(
        ["bash", "-c", text], cwd=ROOT, capture_output=True, timeout=60, check=False, env=environment, encoding="utf-8"
    )


FULL = "warmroute sim: standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("command", "code", "err"),
    [
        ("sim >/dev/full", 2, FULL),
        ("sim --csv >/dev/full", 2, FULL),
        ("sim --json >/dev/full", 2, FULL),
        ("set -o pipefail; sim | true", 0, ""),
        ("sim >&-", 2, "warmroute sim: standard output is closed: leave it open, or redirect it to a file\n"),
        ("sim 2>&-", 0, ""),
    ],
)
def test_what_happens_to_its_streams_is_told_in_a_line(command: str, code: int, err: str) -> None:
    done = shell(command)
    assert (done.returncode, done.stderr) == (code, err)


def test_where_only_ascii_is_known_a_table_has_question_marks() -> None:
    done = shell("sim", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert " ? " in done.stdout


def test_a_process_that_is_killed_is_told() -> None:
    said = (
        "import os, signal; from sim.jobs import run_all\n"
        "if __name__ == '__main__':\n"
        "    try: list(run_all(signal.raise_signal, [signal.SIGKILL] * 2, 2))\n"
        "    except ChildProcessError as error: print(error)\n"
    )
    done = call("-c", said)
    assert done.stdout == "a process was killed, perhaps for want of memory: try fewer --jobs\n"
    assert not done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-m", "sim", "run", "r30", "--seeds", "1-900", "--jobs", "1", "--json"]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0
