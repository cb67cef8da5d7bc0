"""A hosted storage passes the conformance suite like any other: in memory, on SQLite, over several actors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay import Storage
from forebay.testing import StorageConformance
from tests.ray.conftest import LocalCluster
from tests.ray.hosts import Hosts


class _Hosted(StorageConformance):
    kind = "memory"
    hosts: Hosts

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _hosts(cls, cluster: LocalCluster) -> Iterator[None]:
        cls.hosts = Hosts(cls.kind)
        yield
        cls.hosts.end()

    def make_storage(self) -> Storage:
        return self.hosts.storage()


class TestInMemory(_Hosted):
    pass


class TestOnSQLite(_Hosted):
    kind = "sqlite"


class TestOverSeveralActors(_Hosted):
    def make_storage(self) -> Storage:
        return self.hosts.sharded(3)
