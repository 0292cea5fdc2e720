"""Runs policies over scenarios and seeds: one JSON object a line for every run.

python -m sim.study --policy least_loaded --scenario int4 --load 0.8 --seed 11..18 --jobs 2
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from policies import registry
from sim import scenario as scenarios

Job = tuple[str, dict[str, object], str, dict[str, object], int, Path | None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.study", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", required=True, help="name, or several separated by commas")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a parameter of the policy")
    parser.add_argument("--scenario", required=True, help="name, or several separated by commas")
    parser.add_argument("--seed", default="11", help="11, 11,13 or 11..18")
    parser.add_argument("--load", type=float, help="share of the live sessions that fill the fleet")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--warm-up", type=float, metavar="SECONDS")
    parser.add_argument("--measured", type=float, metavar="SECONDS")
    parser.add_argument("--sessions", type=Path, help="recorded sessions, instead of those packaged")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    given = parser.parse_args(arguments)
    try:
        jobs = _jobs(given)
    except ValueError as error:
        parser.error(str(error))
    if given.jobs > 1:
        with get_context("spawn").Pool(given.jobs) as pool:
            for line in pool.imap(_run, jobs, chunksize=1):
                print(line, flush=True)
    else:
        for job in jobs:
            print(_run(job), flush=True)
    return 0


def _jobs(given: argparse.Namespace) -> list[Job]:
    parameters = dict(_parameter(text) for text in given.set)
    changes = {
        "load": given.load,
        "replicas": given.replicas,
        "warm_up_s": given.warm_up,
        "measured_s": given.measured,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    policies, names = given.policy.split(","), given.scenario.split(",")
    for policy in policies:
        registry.make(policy, parameters)
    for name in names:
        scenarios.find(name)
    return [
        (policy, parameters, name, changes, seed, given.sessions)
        for name in names
        for seed in _seeds(given.seed)
        for policy in policies
    ]


def _run(job: Job) -> str:
    policy, parameters, name, changes, seed, sessions = job
    scenario = replace(scenarios.find(name), **changes)  # type: ignore[arg-type]
    began = time.perf_counter()
    result = scenarios.run(scenario, seed, policy, parameters, sessions)
    about = {
        "policy": policy,
        "parameters": parameters,
        "scenario": name,
        "load": scenario.load,
        "replicas": scenario.replicas,
        "seed": seed,
    }
    return json.dumps({**about, **result, "wall_s": round(time.perf_counter() - began, 2)})


def _parameter(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text!r}: must be KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _seeds(text: str) -> list[int]:
    try:
        if ".." in text:
            first, last = text.split("..")
            return list(range(int(first), int(last) + 1))
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--seed {text!r}: must be like 11, 11,13 or 11..18") from None


if __name__ == "__main__":
    sys.exit(main())
