"""An operation of the storage contract is written three times: contract, local engine, PostgreSQL."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from forebay.storage.base import OPERATIONS, Operation, Storage
from forebay.storage.local.engine import Engine
from forebay.storage.local.memory import MemoryStorage
from forebay.storage.local.storage import LocalStorage
from forebay.storage.postgres import PostgresStorage, moves, reads
from forebay.storage.sqlite import SQLiteStorage


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """The parameters after the first one: that is the storage, the engine, the step or the connection."""
    found = list(inspect.signature(function).parameters.values())[1:]
    return [(parameter.name, parameter.default) for parameter in found]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
def test_every_backend_has_every_operation_with_the_parameters_of_the_contract(operation: Operation) -> None:
    declared = getattr(Storage, operation.name)
    for backend, generic in ((LocalStorage, Engine), (PostgresStorage, moves if operation.changes else reads)):
        own = getattr(backend, operation.name)
        if own is declared:
            own = getattr(generic, operation.name)
        if operation.name != "release":  # in PostgreSQL, of several owners
            assert _parameters(own) == _parameters(declared), backend


def test_sqlite_defines_only_operations_with_payloads_and_files() -> None:
    own = {name for name in OPERATIONS if name in vars(SQLiteStorage)}
    assert own == {"open", "close", "issue", "put", "revise", "claim", "undo"}


class Incomplete(MemoryStorage):
    _perform = Storage._perform


def test_a_storage_that_lacks_an_operation_cannot_be_built() -> None:
    with pytest.raises(TypeError, match=r"Incomplete lacks operations: open, .*settle"):
        Incomplete()
