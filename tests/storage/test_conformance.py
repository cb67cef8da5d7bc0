"""Every storage that ships passes the conformance suite."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from forebay import MemoryStorage, Storage
from forebay.storage.local.pandas import PandasStorage
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import StorageConformance


class Clock:
    """A clock that stands still until it is told to advance."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class _VirtualTime(StorageConformance):
    def advance_clock(self, storage: Storage, seconds: float) -> None:
        clock = storage._engine.clock  # type: ignore[attr-defined]
        clock.now += seconds


class TestMemoryStorage(_VirtualTime):
    def make_storage(self) -> Storage:
        return MemoryStorage(clock=Clock())


class TestPandasStorage(_VirtualTime):
    def make_storage(self) -> Storage:
        return PandasStorage(clock=Clock())


class TestSQLiteStorage(_VirtualTime):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path
        self.numbers = itertools.count()

    def make_storage(self) -> Storage:
        return SQLiteStorage(self.directory / f"store{next(self.numbers)}.db", clock=Clock())
