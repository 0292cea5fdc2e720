"""Stands in for Triton (a gigabyte), of which no kernel runs on a CPU. For tests only.

SGLang carries a stub of Triton for macOS in sglang/_platform_stubs.py, inside a function that does nothing
elsewhere. The block that makes the stub is run from there; it puts itself in this module's place.
"""

import ast
import importlib.util
import sys
from pathlib import Path


def _install_stub():
    path = Path(importlib.util.find_spec("sglang").origin).with_name("_platform_stubs.py")
    spec = importlib.util.spec_from_file_location("sglang_platform_stubs", path)
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    function = next(
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "install_platform_stubs"
    )
    block = next(node for node in function.body if isinstance(node, ast.If) and "'triton'" in ast.unparse(node.test))
    exec(compile(ast.Module(block.body, []), str(path), "exec"), vars(stubs))


_install_stub()
