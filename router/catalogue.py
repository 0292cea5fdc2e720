"""The policies as their source documents them."""

from __future__ import annotations

import ast
import inspect
import sys
from textwrap import dedent
from typing import Any

from policies import registry


def catalogue() -> list[dict[str, Any]]:
    """Each policy with its module's first line, its parameters with defaults, and what these mean."""
    return [
        {
            "policy": name,
            "summary": (sys.modules[policy.__module__].__doc__ or "").partition("\n")[0],
            "parameters": registry.parameters(name),
            "meanings": _meanings(policy.Config),
        }
        for name, policy in registry.POLICIES.items()
    ]


def _meanings(config: type[Any]) -> dict[str, str]:
    """The text below each field of a dataclass, in one line."""
    (tree,) = ast.parse(dedent(inspect.getsource(config))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value)).replace("\n", " ")
    return found
