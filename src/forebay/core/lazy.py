"""Names of a package that are imported on first use.

A package shows a class whose module needs an optional dependency, and stays importable without it. Nothing is loaded
before the name is used. If the dependency is missing, the error says what to install.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

_EXTRAS = {"asyncpg": "postgres", "httpx": "http", "pandas": "pandas"}


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a package: finds each name in its module.

    >>> find = lazy_names("forebay", {"Pool": "forebay.core.aio"})
    >>> find("Pool").__name__
    'Pool'
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(modules[name]), name)
        except ModuleNotFoundError as missing:
            if missing.name not in _EXTRAS:
                raise
            text = f"{package}.{name} needs {missing.name}: pip install 'forebay[{_EXTRAS[missing.name]}]'"
            raise ModuleNotFoundError(text, name=missing.name) from missing

    return find
