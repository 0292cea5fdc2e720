"""The `warmroute` command."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Iterator
from importlib import metadata

from router import console
from router.commands import drain, explain, policy, reload, replicas, serve, sessions, top
from router.commands.common import EXIT_FAILED, add_command, fail, fault
from router.commands.parser import Parser, suggested
from router.configuration import ConfigError
from router.version import VERSION

NOUNS = (serve, replicas, sessions, drain, policy, explain, reload, top)
"""Modules that add commands, in the order of the help."""

SHELLS = ("bash", "zsh", "fish")

PLUG_INS = "warmroute.commands"
"""Entry points of this group add commands: each is called with argparse's subparsers."""


_CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""A full or failing disk behind standard output."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit."""
    _open_standard_files()
    try:
        try:
            given = _parser(sys.argv[1:] if arguments is None else arguments).parse_args(arguments)
            sys.exit(given.run(given))
        finally:
            sys.stdout.flush()  # that nobody reads it any more shows only here
    except ConfigError as error:
        sys.exit(fail(str(error)))
    except (console.Unreachable, console.Refused) as error:
        sys.exit(fault(error))
    except BrokenPipeError:
        _drop_output()
        sys.exit(0)
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        _drop_output()
        sys.exit(fail(f"the output cannot be written: {error.strerror}", EXIT_FAILED))


def _drop_output() -> None:
    """What is still buffered is written once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _open_standard_files() -> None:
    """Descriptors 0 to 2 that a supervisor closed would become sockets, and libuv aborts when it closes one of them."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest free one, which is this
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = Parser(
        prog="warmroute",
        description="A session-affinity router for LLM inference: a session stays where its KV cache is.",
    )
    parser.add_argument("--version", action="version", version=f"warmroute {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for noun in NOUNS:
        noun.add(commands)
    completion = add_command(
        commands,
        "completion",
        "print a script that completes commands and options in a shell",
        """
        warmroute completion bash > ~/.local/share/bash-completion/completions/warmroute
        warmroute completion zsh > ~/.zfunc/_warmroute
        warmroute completion fish > ~/.config/fish/completions/warmroute.fish
        """,
    )
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=_completion)
    if not arguments or arguments[0] not in commands.choices:  # looked for only then: `serve` loads no plug-in
        for plug_in in metadata.entry_points(group=PLUG_INS):
            plug_in.load()(commands)
    return parser


def _completion(given: argparse.Namespace) -> int:
    import shtab  # no other command needs it

    parser = _parser([])
    for action in _actions(parser):
        if action.metavar == "FILE":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif values := suggested(action):
            action.choices = values  # nothing is parsed by it any more
    print(shtab.complete(parser, given.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Its options and arguments, those of the commands below included."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)


if __name__ == "__main__":
    main()
