"""What commands share: options, exit codes, faults, tables, and asking a running router."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from router import console, token
from router.configuration import ConfigError
from router.tls import replica_context

EXIT_FAILED = 1
"""It could not be done: no answer, a port that is taken, a router that cannot."""
EXIT_USAGE = 2
"""As argparse's own: what was asked for cannot be; the command line or the configuration is to be mended."""

ADMIN_URL = "http://127.0.0.1:8081"
"""Where a running router's admin port is looked for."""

TOKEN, TOKEN_FILE = "WARMROUTE_ADMIN__TOKEN", "WARMROUTE_ADMIN__TOKEN_FILE"
"""The router's own settings: beside it, the command finds what it needs."""

Subparsers = argparse._SubParsersAction
"""What a command is added to."""


def add_command(
    commands: Subparsers[argparse.ArgumentParser], name: str, summary: str, examples: str = "", more: str = ""
) -> argparse.ArgumentParser:
    """A parser whose help says what the command does, `more` about it, and shows examples, one a line."""
    shown = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    epilog = "\n\n".join(part for part in (more.strip(), f"examples:\n{shown}" if shown else "") if part)
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_admin(parser: argparse.ArgumentParser) -> None:
    """The options of a command that asks a running router."""
    # What a command does not get it leaves to the one above it: `policy --json set NAME`.
    parser.add_argument("--admin", metavar="URL", default=argparse.SUPPRESS, help=f"its admin port ({ADMIN_URL})")
    for option, what in (
        ("--token-file", f"holds its token (the one that {TOKEN} or {TOKEN_FILE} tells)"),
        ("--ca-file", "authorities to trust, where it speaks TLS (the system's)"),
        ("--cert-file", "certificate to show, where it asks for one"),
        ("--key-file", "its private key"),
    ):
        parser.add_argument(option, metavar="FILE", default=argparse.SUPPRESS, help=what)
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option to answer for programs."""
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON")


def wants_json(given: argparse.Namespace) -> bool:
    """Whether the answer is for a program."""
    return bool(getattr(given, "json", False))


def access(given: argparse.Namespace) -> console.Access:
    """The admin port that is meant, and what it wants to see. Raises ConfigError naming what cannot be used."""
    try:
        return _access(given)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _access(given: argparse.Namespace) -> console.Access:

    def option(name: str) -> str:
        return str(getattr(given, name, ""))

    secret = os.environ.get(TOKEN, "")
    if file := option("token_file") or ("" if secret else os.environ.get(TOKEN_FILE, "")):
        secret = token.read(file)
    url = option("admin") or ADMIN_URL
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--admin {url!r} is not a URL: write it as in {ADMIN_URL}")
    files = [option(name) for name in ("ca_file", "cert_file", "key_file")]
    if bool(files[1]) != bool(files[2]):
        raise ValueError("--cert-file and --key-file go together: give both, or neither")
    tls = replica_context(*files, verify=True) if any(files) else None
    return console.Access(url, secret, tls)


def ask(given: argparse.Namespace, show: Callable[[Any], str], path: str, *, inside: str = "", **asked: Any) -> int:
    """Print what a running router's admin port answers, or what of it is `inside` a key. Returns the exit code.

    Raises what `console.ask` and `access` do: `main` tells it.
    """
    told = console.ask(access(given), path, **asked)
    told = told[inside] if inside else told
    print(json.dumps(told) if wants_json(given) else show(told))
    return 0


def fault(error: console.Unreachable | console.Refused) -> int:
    """Say why there is no answer. Returns the exit code: of a usage error when what was asked for cannot be."""
    wrong = isinstance(error, console.Refused) and error.status < 500
    return fail(str(error), EXIT_USAGE if wrong else EXIT_FAILED)


def fail(message: str, code: int = EXIT_USAGE) -> int:
    """Say on standard error what is wrong, line by line. Returns the exit code."""
    for line in message.splitlines():
        print(f"warmroute: {line}", file=sys.stderr)
    return code


def present(options: dict[str, Any]) -> dict[str, Any]:
    """Those that were given."""
    return {key: value for key, value in options.items() if value not in (None, {})}


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows as columns for people."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def known(value: object) -> str:
    """A value for a table; what is not known is a question mark."""
    return "?" if value is None else str(value)
