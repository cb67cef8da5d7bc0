"""A stand-in for `sgl_kernel`, which exists as a CUDA build only: `build.py` copies it into the SGLang environment.

SGLang imports many names from that package, on every platform, and on CPU with torch's own kernels it calls none of
them. Here every name, of the package and of any module below it, is an operator that raises when it is called and says
which one was missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.4.10"  # what sglang 0.5.23 asks for
__path__: list[str] = []


class MissingOperator:
    """Stands for a CUDA operator, or for an object that has some."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> MissingOperator:
        return _missing(f"{self.name}.{attribute}", attribute)

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"{self.name} has no CPU version: this sgl_kernel is the stand-in of Forebay's tests")


def _missing(name: str, attribute: str) -> MissingOperator:
    if attribute.startswith("__"):  # Python asks for these, and must hear that they do not exist
        raise AttributeError(attribute)
    return MissingOperator(name)


def __getattr__(attribute: str) -> MissingOperator:
    return _missing(f"sgl_kernel.{attribute}", attribute)


class _EmptyModule(ModuleType):
    def __getattr__(self, attribute: str) -> MissingOperator:
        return _missing(f"{self.__name__}.{attribute}", attribute)


class _Submodules(MetaPathFinder, Loader):
    """Finds every module below sgl_kernel, empty."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if __name__ == "sgl_kernel":
    sys.meta_path.append(_Submodules())
