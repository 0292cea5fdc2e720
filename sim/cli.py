"""The command line: `warmroute sim`, or `python -m sim`.

The router finds `add_command` as an entry point (group `warmroute.commands`), so that neither imports the other. Only
the parsers are here: what they run is imported when it is wanted, as it is slow to import.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from io import TextIOWrapper
from pathlib import Path
from textwrap import fill
from typing import NoReturn

SUMMARY = "try policies on simulated fleets"

EXIT_USAGE = 2
"""As argparse's own: what was asked for cannot be."""

EXIT_INTERRUPTED = 130
"""As shells say for a command that Ctrl-C has ended."""

EXIT_TERMINATED = 143
"""Likewise, by SIGTERM."""

Subparsers = argparse._SubParsersAction
Run = Callable[[argparse.Namespace], int]


def main(arguments: list[str] | None = None) -> int:
    """`python -m sim`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m sim",
        description=f"{SUMMARY.capitalize()}.",
        epilog=_list_of_scenarios(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add(parser)
    given = parser.parse_args(arguments)
    code: int = given.run(given)
    return code


def add_command(commands: Subparsers[argparse.ArgumentParser]) -> None:
    """Adds `sim` to the commands of `warmroute`."""
    _add(
        commands.add_parser(
            "sim",
            help=SUMMARY,
            description=f"{SUMMARY.capitalize()}.",
            epilog=_list_of_scenarios(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )


def _add(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = _command(commands, "run", "one policy on a scenario", "r80 --policy sticky")
    _add_scenario(run)
    _add_policy(run)
    _add_runs(run)
    _add_output(run)
    run.set_defaults(run=_later("run_one"))

    compare = _command(
        commands, "compare", "several policies on the same sessions", "r80 --policies session_affinity,sticky"
    )
    _add_scenario(compare)
    _add_policies(compare)
    _add_runs(compare)
    _add_output(compare)
    compare.set_defaults(run=_later("compare"))

    sweep = _command(
        commands, "sweep", "policies on a scenario of which a key takes several values", "r80 --vary load=0.6,0.8,0.95"
    )
    _add_scenario(sweep)
    sweep.add_argument(
        "--vary", action="append", required=True, metavar="KEY=V1,V2", help="a key of the scenario; may be repeated"
    )
    _add_policies(sweep)
    _add_runs(sweep)
    _add_output(sweep)
    sweep.set_defaults(run=_later("sweep"))

    replay = _command(
        commands, "replay", "policies on a recorded trace, or on a router's journal", "journal.jsonl --replicas 3"
    )
    replay.add_argument("file", metavar="FILE", type=Path, help="plain, or packed by gzip")
    _add_policies(replay)
    replay.add_argument("--replicas", type=int, default=16, metavar="N", help="in the fleet (%(default)s)")
    replay.add_argument("--machine", default="kimi-int4-tp4-bf16", metavar="NAME", help="of each (%(default)s)")
    replay.add_argument("--no-host-tier", dest="host_tier", action="store_false", help="GPU memory alone")
    replay.add_argument(
        "--play", choices=("open", "closed", "again"),
        help="each request at its time; each session at its time, waiting for its answers; or sessions again and "
        "again, so many at a time (open if the trace has times, else again)",
    )  # fmt: skip
    replay.add_argument(
        "--agents", type=int, default=64, metavar="N", help="sessions at a time, of again (%(default)s)"
    )
    replay.add_argument("--speed", type=float, default=1.0, metavar="F", help="play it F times as fast (%(default)g)")
    replay.add_argument("--format", metavar="NAME", help="of the file, where it is not told by its content")
    _add_runs(replay, seeds="1")
    _add_output(replay)
    replay.set_defaults(run=_later("replay"))

    capacity = _command(
        commands,
        "capacity",
        "how many agents a replica takes, and how many replicas they take",
        "--agents 500 --machine kimi-int4-tp8-fp8",
    )
    capacity.add_argument(
        "--machine", default="kimi-int4-tp4-bf16,kimi-int4-tp4-fp8,kimi-int4-tp8-bf16,kimi-int4-tp8-fp8",
        metavar="NAME", help="several separated by commas (%(default)s)",
    )  # fmt: skip
    capacity.add_argument("--agents", type=int, default=250, metavar="N", help="at work at a time (%(default)s)")
    capacity.add_argument("--slo-ttft-p99", type=float, default=20.0, metavar="S", help="seconds (%(default)g)")
    _add_policy(capacity)
    _add_runs(capacity, seeds="31-32")
    capacity.add_argument("--json", action="store_true", help="one object a line for each row")
    capacity.set_defaults(run=_later("capacity"))


def _command(
    commands: Subparsers[argparse.ArgumentParser], name: str, what: str, example: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=f"examples:\n  warmroute sim {name} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


_POLICY = "its parameters behind its name, as in session_affinity:hysteresis_s=4 (%(default)s)"


def _add_scenario(parser: argparse.ArgumentParser) -> None:
    scenario = parser.add_argument(
        "scenario", metavar="SCENARIO", help="name, or path of a .toml file; several separated by commas"
    )
    scenario.suggested = _scenarios  # type: ignore[attr-defined]  # for completion
    parser.epilog = f"{_list_of_scenarios()}\n\n{parser.epilog}"
    parser.add_argument("--load", type=float, metavar="X", help="share of what the fleet can take; as --set load=X")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the scenario, as in fleet.count=8"
    )


def _add_policy(parser: argparse.ArgumentParser) -> None:
    policy = parser.add_argument(
        "--policy", dest="policies", metavar="NAME[:KEY=VALUE]", default="session_affinity", help=_POLICY
    )
    policy.suggested = _policies  # type: ignore[attr-defined]


def _add_policies(parser: argparse.ArgumentParser) -> None:
    policies = parser.add_argument(
        "--policies", metavar="NAMES", default="session_affinity,rendezvous",
        help="separated by commas; parameters behind a name, as in sticky,session_affinity:beta=0 (%(default)s)",
    )  # fmt: skip
    policies.suggested = _policies  # type: ignore[attr-defined]


def _add_runs(parser: argparse.ArgumentParser, seeds: str = "31-34") -> None:
    parser.add_argument("--seeds", default=seeds, help="31-34, or 31,33 (%(default)s)")
    parser.add_argument("--jobs", type=int, default=_cores(), metavar="N", help="processes (all cores: %(default)s)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one object a line for each run")
    form.add_argument("--csv", action="store_true", help="one line for each run")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a report that is one file; it needs warmroute[plots]"
    )
    parser.add_argument("--png", type=Path, metavar="DIR", help="write its pictures; likewise")


def _scenarios() -> list[str]:
    """Names of the packaged ones, without the imports that reading them takes."""
    return sorted(
        Path(each.name).stem for each in files("sim").joinpath("scenarios").iterdir() if each.name.endswith(".toml")
    )


def _policies() -> list[str]:
    from policies import registry  # with numpy, which a parser need not wait for

    return list(registry.POLICIES)


def _list_of_scenarios() -> str:
    return "scenarios:\n" + fill(", ".join(_scenarios()), 100, initial_indent="  ", subsequent_indent="  ")


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _later(name: str) -> Run:
    """Runs the function of that name in `sim.commands`."""

    def run(given: argparse.Namespace) -> int:
        def command() -> int:
            code: int = getattr(import_module("sim.commands"), name)(given)
            return code

        return guarded(command)

    return run


def guarded(command: Callable[[], int]) -> int:
    """The exit code of a command. Errors, and whatever happens to its streams, are told in a line."""
    if sys.stdout is None:
        return _fail("standard output is closed: leave it open, or redirect it to a file")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - to the end
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # ± where only ASCII is known
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        code = command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("warmroute sim: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except ValueError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("memory is exhausted: choose fewer --jobs, or less load or fewer replicas")
    except OSError as error:
        if error.filename or not error.errno:
            return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered is written once more at exit
        return 0 if isinstance(error, BrokenPipeError) else _fail(f"standard output: {error.strerror}")
    finally:
        signal.signal(signal.SIGTERM, before)
    return code


def _terminated(number: int, frame: object) -> NoReturn:
    """As if it were to end by itself, so that its processes are cleared away."""
    sys.exit(EXIT_TERMINATED)


def _fail(message: str) -> int:
    for line in message.splitlines():
        print(f"warmroute sim: {line}", file=sys.stderr)
    return EXIT_USAGE
