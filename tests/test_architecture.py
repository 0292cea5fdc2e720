"""The house has walls: who may import what, read from the syntax trees. See docs/architecture.md.

The checker is a function of a module's name and source, so that it is itself tried on sources that offend.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("policies", "router", "sim")

CORE_IMPORTS = {"policies", "numpy", "xxhash"}
"""What the core imports besides the standard library."""

CORE_FORBIDDEN = {
    "clock": {"time", "datetime", "sched", "calendar", "zoneinfo"},
    "chance": {"random", "secrets", "uuid"},
    "concurrency": {"asyncio", "threading", "concurrent", "multiprocessing", "queue", "contextvars", "_thread"},
    "input and output": {"io", "logging", "os", "pathlib", "select", "selectors", "shutil", "signal", "socket"}
    | {"socketserver", "ssl", "subprocess", "tempfile", "http", "urllib", "sys", "platform", "warnings"},
    "dynamic import": {"importlib", "runpy", "pkgutil", "ctypes"},
}
CORE_FORBIDDEN_NAMES = {"open", "print", "input", "eval", "exec", "__import__", "breakpoint"}

HTTPX_ROOMS = ("router.console", "router.discovery", "router.workers")
"""Control plane: periodic or administrative work, where a general HTTP client is the right tool."""

OFF_THE_DATA_PATH = {"httpx", "starlette", "requests", "aiohttp", "redis", "pydantic_settings"}


def _within(module: str, *rooms: str) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def _imports(module: str, tree: ast.AST, package: bool = False) -> Iterator[tuple[int, str]]:
    """Every imported name as `line, dotted name`; `from a import b` counts as `a.b`, and relative ones are resolved.

    Imports inside functions and under TYPE_CHECKING count too: a direction is a direction.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = parts[: len(parts) - node.level + package] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def offences(module: str, source: str, package: bool = False) -> list[str]:
    """What the source of `module` does that its room does not allow, as `module:line: what`."""
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else [(1, "no module docstring")]
    for line, name in _imports(module, tree, package):
        top = name.split(".")[0]
        if _within(module, "policies"):
            if top not in CORE_IMPORTS and top not in sys.stdlib_module_names:
                found.append((line, f"the core imports {name}"))
            found += [(line, f"the core uses {why}: {name}") for why, names in CORE_FORBIDDEN.items() if top in names]
        if (_within(module, "router") and top == "sim") or (_within(module, "sim") and top == "router"):
            found.append((line, f"router and sim never meet: imports {name}"))
        if top == "tests" and not _within(module, "policies"):
            found.append((line, f"a package imports tests: {name}"))
        if top == "httpx" and not _within(module, *HTTPX_ROOMS):
            found.append((line, f"imports {name} outside the control plane ({', '.join(HTTPX_ROOMS)})"))
        if top in OFF_THE_DATA_PATH and _within(module, "router.proxy"):
            found.append((line, f"the data plane imports {name}"))
    if _within(module, "policies"):
        found += list(_core_offences(tree))
    return [f"{module}:{line}: {what}" for line, what in found]


def _core_offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await):
            yield node.lineno, "the core awaits nothing"
        elif isinstance(node, ast.comprehension) and node.is_async:
            yield node.target.lineno, "the core awaits nothing"
        elif isinstance(node, ast.Name) and node.id in CORE_FORBIDDEN_NAMES:
            yield node.lineno, f"the core does no input, output or evaluation: {node.id}"


def _modules() -> dict[str, tuple[str, bool]]:
    """Every module of the packages: name -> (source, whether it is a package)."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            found[".".join(parts[:-1] if is_package else parts)] = path.read_text(encoding="utf-8"), is_package
    return found


MODULES = _modules()


# The house


def test_the_walk_sees_the_house() -> None:
    assert {"policies", "policies.balancer", "policies.registry", "router", "router.proxy", "sim"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_keeps_to_its_room(module: str) -> None:
    source, package = MODULES[module]
    assert offences(module, source, package) == []


def _importers(modules: dict[str, tuple[str, bool]], library: str) -> set[str]:
    return {
        module
        for module, (source, package) in modules.items()
        for _, name in _imports(module, ast.parse(source), package)
        if name.split(".")[0] == library
    }


def test_one_module_knows_redis() -> None:
    assert _importers(MODULES, "redis") == {"router.store.redis"}


# The checker


def test_it_finds_redis_wherever_it_is() -> None:
    house = {"router.a": ("import redis.asyncio", False), "router.b": ("def f():\n    from redis import Redis", False)}
    assert _importers(house, "redis") == {"router.a", "router.b"}
    assert _importers({"router.a": ("from router import redis", False)}, "redis") == set()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("policies.x", "import time"),
        ("policies.x", "from time import monotonic"),
        ("policies.x", "import datetime as d"),
        ("policies.x", "from datetime import datetime"),
        ("policies.x", "import random"),
        ("policies.x", "from random import choice"),
        ("policies.x", "import math, asyncio"),
        ("policies.x", "import logging.handlers"),
        ("policies.x", "import os.path"),
        ("policies.x", "from threading import Lock"),
        ("policies.x", "import socket"),
        ("policies.x", "import http.client"),
        ("policies.x", "import importlib"),
        ("policies.x", "import pandas"),
        ("policies.x", "import httpx"),
        ("policies.x", "from redis import Redis"),
        ("policies.x", "from router.settings import Settings"),
        ("policies.x", "from sim import engine"),
        ("policies.x", "from .. import router"),
        ("policies.x", "from tests.fakes.fleet import fleet"),
        ("policies.x", "def f():\n    import time"),
        ("policies.x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from router.app import App"),
        ("policies.x", "async def f() -> None: ..."),
        ("policies.x", "async def f(x):\n    return [y async for y in x]"),
        ("policies.x", "print('chosen')"),
        ("policies.x", "f = open('journal')"),
        ("policies.x", "__import__('time')"),
        ("policies", "import time"),
        ("router.app", "import sim"),
        ("router.app", "from sim.emulator import server"),
        ("router.proxy.relay", "def f():\n    from sim.engine import Engine"),
        ("router", "from . import httpx_pool\nimport httpx"),
        ("sim.world", "import router.app"),
        ("sim.world", "from router import app"),
        ("sim.emulator.app", "from ...router import app"),
        ("router.proxy.upstream", "import httpx"),
        ("router.proxy.upstream", "from starlette.requests import Request"),
        ("router.proxy", "import aiohttp"),
        ("router.identity", "import httpx"),
        ("router.healthy", "import httpx"),
        ("sim.engine", "import httpx"),
        ("router.app", "from tests.fakes.fleet import fleet"),
    ],
)
def test_an_offence_is_found(module: str, line: str) -> None:
    found = offences(module, f'"""Documented."""\n{line}\n')
    assert found
    assert all(offence.startswith(f"{module}:") for offence in found)


@pytest.mark.parametrize("source", ["", "x = 1", "# only a comment", '"""   """', "x = 1\n'''late'''"])
@pytest.mark.parametrize("module", ["policies.x", "router.x", "sim.x"])
def test_a_module_without_a_docstring_is_found(module: str, source: str) -> None:
    assert offences(module, source) == [f"{module}:1: no module docstring"]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("policies.x", "from math import log\nfrom collections import OrderedDict\nimport inspect"),
        ("policies.x", "from xxhash import xxh3_64_intdigest"),
        ("policies.x", "from policies.random import Random\nfrom policies import random"),
        ("policies.x", "from .random import Random\nfrom . import random"),
        ("policies.x", "def f(time: float, open_leases: int) -> float:\n    return time"),
        ("router.proxy.relay", "import asyncio, time\nfrom policies.balancer import Balancer"),
        ("router.console", "import httpx"),
        ("router.discovery.dns", "import httpx"),
        ("router.app", "from router.sim_names import x\nfrom . import sim"),
        ("sim.replay", "from policies.balancer import Balancer\nimport random"),
    ],
)
def test_what_is_allowed_is_not_an_offence(module: str, line: str) -> None:
    assert offences(module, f'"""Documented."""\n{line}\n') == []


def test_relative_imports_of_a_package_are_its_own() -> None:
    """In `policies/__init__.py` one dot is policies itself; in `policies/x.py` too."""
    tree = ast.parse("from . import a\nfrom .b import c\nfrom .. import d")
    assert [name for _, name in _imports("router.proxy", tree, package=True)] == [
        "router.proxy.a",
        "router.proxy.b.c",
        "router.d",
    ]
    assert [name for _, name in _imports("router.app", tree)][:2] == ["router.a", "router.b.c"]
