"""A hosted storage passes the conformance suite like any other: in memory, on SQLite, over several actors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forebay import Storage
from forebay.testing import StorageConformance
from tests.ray.hosts import Hosts


class _Hosted(StorageConformance):
    kind = "memory"
    hosts: Hosts

    @pytest.fixture(autouse=True)
    def _hosts(self, hosts: Callable[[str], Hosts]) -> None:
        self.hosts = hosts(self.kind)

    def make_storage(self) -> Storage:
        return self.hosts.storage()


class TestInMemory(_Hosted):
    pass


@pytest.mark.slow  # the storage behind a host is none of its business, and SQLite passes the suite without one
class TestOnSQLite(_Hosted):
    kind = "sqlite"


class TestOverSeveralActors(_Hosted):
    def make_storage(self) -> Storage:
        return self.hosts.sharded(2)
