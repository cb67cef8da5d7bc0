"""No test is skipped silently: a skip fails unless the test is marked `platform`, with what it needs of the machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Generator
from typing import TypeVar

import pytest

# Hundreds of processes that tests start would each compile everything that they import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# httpcore tries to import it with every lock that it takes; a name that is known to lead nowhere is refused at once.
if importlib.util.find_spec("sniffio") is None:
    sys.modules["sniffio"] = None  # type: ignore[assignment]

_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if hasattr(report, "wasxfail") or item.get_closest_marker("platform") is not None:
        return report
    return _failed_if_skipped(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _failed_if_skipped((yield))


def _failed_if_skipped(report: _Report) -> _Report:
    if report.outcome == "skipped":
        report.outcome = "failed"
        report.longrepr = f"skipped without a `platform` mark: {report.longreprtext}"
    return report
