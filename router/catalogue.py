"""The policies as their source documents them."""

from __future__ import annotations

import ast
import inspect
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from policies import registry


def catalogue() -> list[dict[str, Any]]:
    """Each policy with its module's first line, its parameters with defaults, and what these mean."""
    found = []
    for name, policy in registry.POLICIES.items():
        source = source_of(policy.__module__)
        found.append(
            {
                "policy": name,
                "summary": (ast.get_docstring(source) or "").partition("\n")[0],
                "parameters": registry.parameters(name),
                "meanings": _meanings(source, policy.Config.__name__),
            }
        )
    return found


def source_of(module: str) -> ast.Module:
    """Of a module, which may be compiled: then it lies beside, as it does in every wheel."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).with_name(f"{module.rpartition('.')[2]}.py").read_bytes())


def _meanings(source: ast.Module, config: str) -> dict[str, str]:
    """The text below each field of a dataclass, in one line."""
    body = next((each.body for each in source.body if isinstance(each, ast.ClassDef) and each.name == config), [])
    found = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value)).replace("\n", " ")
    return found
