"""Stands in for sgl-kernel, whose CPU build wants AVX512. For tests only.

SGLang imports many of its names and, with PyTorch attention and sampling, calls none. Any name and any submodule
can be imported; a call says which operator is missing. Nothing is registered under torch.ops.sgl_kernel, so
SGLang's probe for AMX stays false and it takes its plain PyTorch paths.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"


class _Missing:
    def __init__(self, name):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} is not in this stand-in for sgl-kernel")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        """Nothing to run: names are made when asked for."""


sys.modules[__name__].__class__ = _Module
sys.meta_path.append(_Importer())
