"""The packages import each other in one direction only, and stay as small as docs/architecture.md says."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

import forebay

SOURCE = Path(forebay.__file__).parent
ORDER = (
    "errors",
    "core",
    "collate",
    "codec",
    "checkpoint",
    "storage",
    "buffer",
    "prompts",
    "agent_loop",
    "engines",
    "produce",
    "manager",
    "config",
    "blocking",
    "ray",
    "loader",
    "testing",
    "trajectory",
    "cli",
    "__main__",
)


def _imports() -> Iterator[tuple[str, str, str]]:
    """Every import of one package by another: the importing file, its package, the imported package."""
    for path in SOURCE.rglob("*.py"):
        file = path.relative_to(SOURCE)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("forebay."):
                yield str(file), file.parts[0].removesuffix(".py"), node.module.split(".")[1]


def test_every_package_has_a_place_in_the_order() -> None:
    found = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__pycache__", "py.typed"} == set(ORDER)


def test_no_package_imports_a_later_one() -> None:
    wrong = [
        f"{file} imports {later}"
        for file, package, later in _imports()
        if package != "__init__" and ORDER.index(later) > ORDER.index(package)
    ]
    assert wrong == []


def test_the_figures_of_the_architecture_hold() -> None:
    tool = SOURCE.parents[1] / "tools" / "measure_design.py"
    found = {name: value for name, (value, _) in runpy.run_path(str(tool))["figures"]().items()}
    most = {
        "storage operations, batch of 8, roomy buffer": 24,
        "storage operations, batch of 8, buffer just large enough": 45,
        "explanations built meanwhile": 0,
        "files that one group passes in memory": 26,
        "public methods of ReplayBuffer": 25,
        "files over 500 lines outside trajectory/": 0,
    }
    assert {name: found[name] for name, limit in most.items() if found[name] > limit} == {}
