"""The command line's parser: argparse's, with a hint for what is misspelt."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """Tells of an unknown option, or of a word that is none of a few, which one was meant.

    Commands below are parsed by the same class, so that what is wrong with them is told beside their own usage.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does; but there is nobody who would want the rest."""
        given, rest = super().parse_known_args(args, namespace)
        if rest:
            options = (word.partition("=")[0] for word in rest if word.startswith("-"))
            hints = (near for option in options if (near := nearest(option, self._option_string_actions)))
            self.error(f"unrecognized arguments: {' '.join(rest)}{_meant(hints)}")
        return given, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            if near := nearest(str(value), map(str, action.choices or ())):
                raise argparse.ArgumentError(action, f"invalid choice: {value!r}{_meant([near])}") from None
            raise


def suggest(action: argparse.Action, values: Iterable[str]) -> None:
    """Have the shell complete an argument by these, which are not all that it takes."""
    action.suggested = lambda: list(values)  # type: ignore[attr-defined]


def suggested(action: argparse.Action) -> list[str] | None:
    """What the shell is to complete an argument by, when that was said."""
    found: Callable[[], list[str]] | None = getattr(action, "suggested", None)
    return None if found is None else found()


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The one that was most likely meant."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def _meant(words: Iterable[str]) -> str:
    told = " and ".join(dict.fromkeys(words))
    return f": did you mean {told}?" if told else ""
