"""The rule of conftest.py: nothing is skipped silently."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.processes import ROOT, finished

TESTS = """
import pytest

def test_passes(): pass

def test_skips(): pytest.skip("no reason")

@pytest.mark.skip
def test_is_marked(): pass

@pytest.mark.platform("a browser")
def test_needs_a_browser(): pytest.skip("none here")

@pytest.mark.xfail
def test_fails(): raise AssertionError
"""


def test_a_skip_fails_unless_the_platform_is_the_reason(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text('import pytest\npytest.importorskip("no_such_module")\n')
    run = ("-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors", tmp_path)
    done = finished(*run, cwd=tmp_path)
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 2 errors" in done.stdout
    assert done.stdout.count("skipped without a `platform` mark") >= 3
    assert done.returncode == 1
