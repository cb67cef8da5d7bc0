"""Hosts for tests: real actors that can start again with an empty storage, because starting an actor takes long."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import ray

from forebay import Storage
from forebay.ray.client.link import Link
from forebay.ray.client.shards import ShardedStorage
from forebay.ray.client.storage import RayStorage
from forebay.ray.host.actor import CALLS, HEARTBEATS, WAITS, BufferActor
from forebay.ray.host.operations import HostSpec

_GROUPS = {CALLS: 4, WAITS: 16, HEARTBEATS: 2}


class ReusableActor(BufferActor):
    """A host that can be emptied."""

    @ray.method(concurrency_group=CALLS)
    def renew(self, storage: str) -> None:
        if self._host is not None:
            self._loop.run(self._host.stop())
        self._use(storage)


class Hosts:
    """Actors, three for each shard, made when they are first needed."""

    def __init__(self, kind: str = "memory") -> None:
        self._kind = kind
        self._actors: dict[tuple[int, int], Any] = {}
        self._turns: dict[int, int] = {}
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = itertools.count()

    def storage(self) -> RayStorage:
        """An empty storage; the two made before it stay usable."""
        return self._storage(0)

    def sharded(self, shards: int) -> Storage:
        return ShardedStorage([self._storage(shard) for shard in range(shards)])

    def _storage(self, shard: int) -> RayStorage:
        turn = self._turns[shard] = self._turns.get(shard, 0) + 1
        place = (shard, turn % 3)
        actor = self._actors.get(place)
        if actor is None:
            declare: Any = ray.remote
            spec = HostSpec(name=f"tests-{shard}", shard=shard)
            actor = declare(num_cpus=0, concurrency_groups=_GROUPS)(ReusableActor).remote(spec, "memory")
            self._actors[place] = actor
        ray.get(actor.renew.remote(self._url()))
        return RayStorage(Link.to(actor, f"tests-{shard}"))

    def _url(self) -> str:
        if self._kind == "memory":
            return "memory"
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory()
        return f"sqlite:///{Path(self._directory.name) / f'{next(self._numbers)}.db'}"

    def end(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        if self._directory is not None:
            self._directory.cleanup()
