"""The package as a whole: light to import, complete in what it exports, right in its examples."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import tomllib
from pathlib import Path

import pytest

import forebay
from forebay import errors
from tests.processes import finished

_OPTIONAL = {"pandas", "torch", "ray", "asyncpg", "httpx", "click"}
_MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(forebay.__path__, "forebay.")
    if not module.name.endswith("__main__")  # importing it would run the command
)


def test_importing_forebay_loads_no_optional_or_heavy_package() -> None:
    program = "import sys, forebay; print(*{name.partition('.')[0] for name in sys.modules})"
    done = finished("-c", program)
    loaded = set(done.stdout.split())
    assert {"forebay", "msgspec", "numpy"} <= loaded
    assert loaded & _OPTIONAL == set()


def test_without_ray_its_part_says_what_to_install() -> None:
    program = "import sys; sys.modules['ray'] = None; import forebay.ray"
    done = finished("-c", program)
    assert "ModuleNotFoundError: forebay.ray needs Ray: pip install 'forebay[ray]'" in done.stderr


def test_every_exported_name_exists() -> None:
    assert [name for name in forebay.__all__ if not hasattr(forebay, name)] == []


def test_exported_names_are_sorted_and_distinct() -> None:
    assert forebay.__all__ == sorted(set(forebay.__all__))


def test_every_public_name_of_the_package_is_exported() -> None:
    public = {name for name, value in vars(forebay).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(forebay.__all__)


def test_every_error_is_exported_from_the_package() -> None:
    assert [name for name in errors.__all__ if name not in forebay.__all__] == []
    assert all(getattr(forebay, name) is getattr(errors, name) for name in errors.__all__)


def test_the_errors_module_lists_every_error_that_it_defines() -> None:
    defined = [name for name, value in vars(errors).items() if inspect.isclass(value) and not name.startswith("_")]
    assert sorted(defined) == errors.__all__
    assert all(issubclass(getattr(errors, name), errors.ForebayError) for name in defined)


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    drawing = (errors.__doc__ or "").splitlines()
    drawn = {line.lstrip(" │├└─").split(" ")[0] for line in drawing if "──" in line or line == "    ForebayError"}
    assert drawn == set(errors.__all__)


def test_the_version_is_that_of_the_project() -> None:
    project = Path(__file__).parent.parent / "pyproject.toml"
    assert forebay.__version__ == tomllib.loads(project.read_text())["project"]["version"]


def test_the_list_of_modules_is_complete() -> None:
    assert {"forebay.buffer.buffer", "forebay.core.query", "forebay.storage.local.sorted_keys"} <= set(_MODULES)


@pytest.mark.parametrize("name", _MODULES)
def test_every_module_imports_and_its_examples_hold(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, "a module says what it is for"
    assert doctest.testmod(module).failed == 0
    missing = [public for public in getattr(module, "__all__", []) if not hasattr(module, public)]
    assert missing == []
