"""Programs in README.md, the guides and the examples run as they are printed.

The info string of a fence says what is executed. "python": the program runs; a block continues the blocks above it on
its page. "python ranks=N": a program of its own, which N processes of torch.distributed run. "python no-run": a
fragment, which is only parsed. Every fence names its language, so that no Python is left out by accident.
"""

from __future__ import annotations

import ast
import os
import re
import socket
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes import ROOT, finished, started

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs" / "guide").glob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<content>.*?)^```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {"bash", "ini", "pycon", "python", "text", "toml", "yaml"}


def blocks(page: Path, kind: str) -> list[str]:
    return [found["content"] for found in FENCE.finditer(page.read_text()) if found["info"] == kind]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_programs_of_a_page_run(page: Path, tmp_path: Path) -> None:
    programs = blocks(page, "python")
    assert programs
    result = finished("-W", "error", "-c", "\n".join(programs), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    if page == README:
        assert "step 10: mean reward" in result.stdout
        assert "'trained': 48" in result.stdout


def test_the_first_program_of_the_readme_has_at_most_20_lines() -> None:
    first = next(FENCE.finditer(README.read_text()[README.read_text().index("```python") :]))
    assert first["info"] == "python"
    assert first["content"].count("\n") <= 20
    assert "RolloutLoader" in first["content"]


RANKED = [
    pytest.param(found["content"], int(ranks[1]), id=f"{page.stem}-{number}")
    for page in PAGES
    for number, found in enumerate(FENCE.finditer(page.read_text()))
    if (ranks := re.fullmatch(r"python ranks=(\d+)", found["info"]))
]


@pytest.mark.parametrize(("program", "world_size"), RANKED)
def test_a_program_of_several_ranks_runs(program: str, world_size: int, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                started("-W", "error", "-c", program, cwd=tmp_path, env={**os.environ, **place, "RANK": str(rank)})
            )
            for rank in range(world_size)
        ]
        for child in children:
            _, errors = child.communicate()
            assert child.returncode == 0, errors


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_fences_name_their_language_and_fragments_can_be_parsed(page: Path) -> None:
    text = page.read_text()
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text)), "a fence is not closed"
    for found in FENCE.finditer(text):
        language, *rest = found["info"].split() or [""]
        assert language in LANGUAGES, f"{page.name}: ```{found['info']}\n{found['content'][:80]}"
        if language == "python":
            assert not rest or re.fullmatch(r"no-run|ranks=\d+", " ".join(rest)), found["info"]
            compile(textwrap.dedent(found["content"]), page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_demo_ends_with_a_closed_ledger() -> None:
    result = finished("-W", "error", "examples/producers_and_trainer.py", "--steps", "12")
    assert result.returncode == 0, result.stderr
    assert "It is closed" in result.stdout


def test_the_demo_refuses_a_wrong_argument() -> None:
    result = finished("examples/producers_and_trainer.py", "--steps", "0")
    assert result.returncode == 2
    assert "expected at least 1" in result.stderr


def test_the_files_that_pages_point_to_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
