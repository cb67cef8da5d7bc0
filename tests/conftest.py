"""No test is skipped silently: a skip fails unless the test is marked `platform`, with what it needs of the machine."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import pytest

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
