"""The command line."""

from __future__ import annotations

import json

import pytest

from sim import study

QUICK = ["--replicas", "2", "--warm-up", "10", "--measured", "30"]


def lines(text: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in text.splitlines()]
    for line in found:
        del line["wall_s"]
    return found


def test_one_line_for_every_run_whatever_the_processes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--policy", "rendezvous,round_robin", "--scenario", "r80", "--seed", "3..4", "--load", "0.5", *QUICK]
    assert study.main(arguments) == 0
    alone = lines(capsys.readouterr().out)
    assert [(line["policy"], line["scenario"], line["seed"], line["load"]) for line in alone] == [
        (policy, "r80", seed, 0.5) for seed in (3, 4) for policy in ("rendezvous", "round_robin")
    ]
    assert study.main([*arguments, "--jobs", "2"]) == 0
    assert lines(capsys.readouterr().out) == alone


def test_parameters_reach_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--policy", "random", "--scenario", "r80", *QUICK]
    digests = []
    for seed in (1, 2):
        study.main([*arguments, "--set", f"seed={seed}"])
        (line,) = lines(capsys.readouterr().out)
        assert line["parameters"] == {"seed": seed}
        digests.append(line["digest"])
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scenario", "moon"], "no scenario 'moon'; known: int4"),
        (["--policy", "moon"], "unknown policy 'moon'"),
        (["--set", "moon"], "--set 'moon': must be KEY=VALUE"),
        (["--set", "moon=1"], "unknown parameter 'moon'"),
        (["--seed", "x"], "--seed 'x': must be like"),
    ],
)
def test_what_cannot_be_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        study.main(["--policy", "random", "--scenario", "r80", *arguments])
    assert said in capsys.readouterr().err
