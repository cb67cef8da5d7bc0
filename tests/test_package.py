"""The package as a whole: light to import, all public names exported, all examples correct."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import forebay
from forebay import agent_loop, errors
from forebay.agent_loop.openai import OpenAIAgentLoop
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


_LAZY = {
    "OpenAIAgentLoop": "httpx",
    "PandasStorage": "pandas",
    "PostgresStorage": "asyncpg",
    "SGLangGenerateLoop": "httpx",
    "SQLiteStorage": "sqlite3",
}
_EXTRAS = {"httpx": "http", "pandas": "pandas", "asyncpg": "postgres"}


@pytest.mark.parametrize(("name", "package"), _LAZY.items())
def test_a_class_with_an_optional_dependency_is_imported_on_first_use(name: str, package: str) -> None:
    loaded = f"{package!r} in sys.modules"
    program = f"import sys, forebay; print({loaded}, forebay.{name}.__name__, {loaded})"
    assert finished("-c", program).stdout.split() == ["False", name, "True"]


@pytest.mark.parametrize(("package", "extra"), _EXTRAS.items())
def test_a_class_whose_dependency_is_missing_says_what_to_install(package: str, extra: str) -> None:
    name = next(name for name, needed in _LAZY.items() if needed == package)
    done = finished("-c", f"import sys; sys.modules[{package!r}] = None; import forebay; forebay.{name}")
    assert f"ModuleNotFoundError: forebay.{name} needs {package}: pip install 'forebay[{extra}]'" in done.stderr


def test_importing_all_names_needs_no_optional_dependency() -> None:
    program = "import sys; sys.modules.update(httpx=None, pandas=None, asyncpg=None); from forebay import *"
    assert finished("-c", program).returncode == 0


def test_the_openai_loop_is_the_same_class_wherever_it_is_imported_from() -> None:
    assert forebay.OpenAIAgentLoop is agent_loop.OpenAIAgentLoop is OpenAIAgentLoop


@pytest.mark.parametrize("package", [forebay, agent_loop])
def test_an_unknown_name_of_a_package_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Nothing'"):
        _ = package.Nothing


def test_forebay_ray_without_ray_says_what_to_install() -> None:
    program = "import sys; sys.modules['ray'] = None; import forebay.ray"
    done = finished("-c", program)
    assert "ModuleNotFoundError: forebay.ray needs Ray: pip install 'forebay[ray]'" in done.stderr


def test_every_exported_name_exists() -> None:
    assert [name for name in forebay.__all__ if not hasattr(forebay, name)] == []


def test_exported_names_are_distinct() -> None:
    assert sorted(forebay.__all__) == sorted(set(forebay.__all__))


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


def test_the_drawing_of_the_error_tree_is_complete() -> None:
    drawing = (errors.__doc__ or "").splitlines()
    drawn = {line.lstrip(" │├└─").split(" ")[0] for line in drawing if "──" in line or line == "    ForebayError"}
    assert drawn == set(errors.__all__)


def test_the_version_equals_that_of_the_project() -> None:
    project = Path(__file__).parent.parent / "pyproject.toml"
    assert forebay.__version__ == tomllib.loads(project.read_text())["project"]["version"]


def test_the_list_of_modules_is_not_empty() -> None:
    assert {"forebay.buffer.buffer", "forebay.core.query", "forebay.storage.local.memory"} <= set(_MODULES)


@pytest.mark.parametrize("name", _MODULES)
def test_every_module_imports_and_its_examples_hold(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, "a module says what it is for"
    assert doctest.testmod(module).failed == 0
    missing = [public for public in getattr(module, "__all__", []) if not hasattr(module, public)]
    assert missing == []
