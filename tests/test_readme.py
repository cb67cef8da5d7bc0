"""What the README and the examples show really runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import ROOT, finished

GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))


def test_the_code_in_the_readme_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    result = finished("-W", "error", "-c", code)
    assert result.returncode == 0, result.stderr
    assert "step 5: training on 8 groups" in result.stdout
    assert "'trained': 40" in result.stdout


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_the_code_in_a_guide_runs(guide: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    assert blocks
    result = finished("-W", "error", "-c", "\n".join(blocks))  # later ones may go on where earlier ones stopped
    assert result.returncode == 0, result.stderr


def test_the_demo_ends_with_a_closed_ledger() -> None:
    result = finished("-W", "error", "examples/producers_and_trainer.py", "--steps", "12")
    assert result.returncode == 0, result.stderr
    assert "It is closed" in result.stdout


def test_the_demo_refuses_a_wrong_argument() -> None:
    result = finished("examples/producers_and_trainer.py", "--steps", "0")
    assert result.returncode == 2
    assert "expected at least 1" in result.stderr


def test_the_files_that_the_readme_points_to_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
