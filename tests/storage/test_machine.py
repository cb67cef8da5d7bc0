"""Random histories against a plain model, on every storage and both ways of ordering."""

from __future__ import annotations

import atexit
import itertools
import shutil
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from forebay import FIFOReplayPolicy, MemoryStorage, ReplayPolicy, StalenessReplayPolicy, Storage
from forebay.storage.local.memory import SortedKeys
from forebay.storage.local.pandas import PandasStorage
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing.machine import machine_for

RUNS = settings(stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the edges of the indexes appear at a handful of groups."""
    monkeypatch.setattr(SortedKeys, "LOAD", 2)


def _case(make_storage: Callable[[], Storage], policy: ReplayPolicy, examples: int) -> type[unittest.TestCase]:
    case: type[unittest.TestCase] = machine_for(make_storage, policy).TestCase
    case.settings = settings(RUNS, max_examples=examples)  # type: ignore[attr-defined]
    return case


def _long(make_storage: Callable[[], Storage], policy: ReplayPolicy) -> type[unittest.TestCase]:
    return pytest.mark.slow(_case(make_storage, policy, 1_000))


_directory = Path(tempfile.mkdtemp(prefix="forebay-test-"))
atexit.register(shutil.rmtree, _directory, ignore_errors=True)
_numbers = itertools.count()


def _sqlite() -> Storage:
    return SQLiteStorage(_directory / f"{next(_numbers)}.db", synchronous="NORMAL")


TestMemoryInOrderOfArrival = _case(MemoryStorage, FIFOReplayPolicy(), 20)
TestMemoryOldestFirst = _case(MemoryStorage, StalenessReplayPolicy(), 20)
TestSQLiteInOrderOfArrival = _case(_sqlite, FIFOReplayPolicy(), 10)
TestSQLiteOldestFirst = _case(_sqlite, StalenessReplayPolicy(), 10)
TestPandasInOrderOfArrival = _case(PandasStorage, FIFOReplayPolicy(), 3)
TestPandasOldestFirst = _case(PandasStorage, StalenessReplayPolicy(), 3)

TestMemoryInOrderOfArrivalForLong = _long(MemoryStorage, FIFOReplayPolicy())
TestMemoryOldestFirstForLong = _long(MemoryStorage, StalenessReplayPolicy())
TestSQLiteInOrderOfArrivalForLong = _long(_sqlite, FIFOReplayPolicy())
TestSQLiteOldestFirstForLong = _long(_sqlite, StalenessReplayPolicy())
TestPandasInOrderOfArrivalForLong = _long(PandasStorage, FIFOReplayPolicy())
TestPandasOldestFirstForLong = _long(PandasStorage, StalenessReplayPolicy())
