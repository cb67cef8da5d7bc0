"""Random histories through an actor, against a plain model: in memory, on SQLite, over several actors."""

from __future__ import annotations

import unittest
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from forebay import FIFOReplayPolicy, ReplayPolicy, StalenessReplayPolicy, Storage
from forebay.testing.machine import machine_for
from tests.ray.hosts import Hosts

RUNS = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))

_of: dict[str, Hosts] = {}


@pytest.fixture(autouse=True, scope="module")
def _hosts(hosts: Callable[[str], Hosts]) -> None:
    for kind in ("memory", "sqlite"):
        _of[kind] = hosts(kind)


def _memory() -> Storage:
    return _of["memory"].storage()


def _sqlite() -> Storage:
    return _of["sqlite"].storage()


def _case(make_storage: Callable[[], Storage], policy: ReplayPolicy, examples: int) -> type[unittest.TestCase]:
    case: type[unittest.TestCase] = machine_for(make_storage, policy).TestCase
    case.settings = settings(RUNS, max_examples=examples)  # type: ignore[attr-defined]
    return case


TestMemoryInOrderOfArrival = _case(_memory, FIFOReplayPolicy(), 3)
TestSQLiteOldestFirst = _case(_sqlite, StalenessReplayPolicy(), 3)

TestMemoryInOrderOfArrivalForLong = pytest.mark.slow(_case(_memory, FIFOReplayPolicy(), 50))
TestMemoryOldestFirstForLong = pytest.mark.slow(_case(_memory, StalenessReplayPolicy(), 50))
TestSQLiteOldestFirstForLong = pytest.mark.slow(_case(_sqlite, StalenessReplayPolicy(), 50))
