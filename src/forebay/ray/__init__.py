"""The same buffers and agent loops on a Ray cluster, for more than one machine. Needs `forebay[ray]`.

    buffer = RayReplayBuffer.create("grpo", ReplayBufferConfig(max_groups=1024))   # once, anywhere
    buffer = RayReplayBuffer.connect("grpo")                                       # in every other process
    RayReplayBuffer.destroy("grpo")

`RayReplayBuffer` is a `forebay.ReplayBuffer` whose groups an actor hosts: samplers, strategies, managers and
`forebay.blocking` take it as it is. The actor is detached: it outlives the process that created it, until it is
destroyed. In memory, groups are gone with it; on SQLite (on the node where it was created) or PostgreSQL it is
restarted, and its clients continue. `RayAgentLoop` runs an agent loop as a pool of actors. Samples may hold Ray's
object references. See docs/guide/scaling.md.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

try:
    import ray
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("forebay.ray needs Ray: pip install 'forebay[ray]'", name="ray") from missing
from msgspec.structs import replace
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.group_ends import OnGroupEnd
from forebay.buffer.session import SHARED_LEASE_S
from forebay.config import POLICIES, ReplayBufferConfig
from forebay.core.capacity import Settings
from forebay.core.policy import Order, ReplayPolicy
from forebay.core.validate import checked_integer
from forebay.errors import BufferLost, ForebayError, InvalidConfig, NameTaken, NoSuchBuffer, StorageUnavailable
from forebay.ray import wire
from forebay.ray.client.link import Link, check_cluster, find_host
from forebay.ray.client.shards import MAX_SHARDS, ShardedStorage, shard_url
from forebay.ray.client.storage import RayStorage
from forebay.ray.host import notes
from forebay.ray.host.actor import CALLS, HEARTBEATS, NAMESPACE, SPARE_THREADS, WAITS, BufferActor, actor_name
from forebay.ray.host.operations import HostSpec
from forebay.ray.loops.loop import RayAgentLoop
from forebay.storage.base import Storage
from forebay.storage.urls import IN_MEMORY, SQLITE_URL

__all__ = ["RayAgentLoop", "RayReplayBuffer", "RayStorage"]

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_STOP_S = 10.0
"""How long `destroy` waits for a host to close its storage before it ends the host all the same."""
_DURABLE_THREADS = 16
"""Concurrent operations on a durable storage, which share their syncs. In memory, one at a time is fastest."""

_LIMITS = ("max_groups", "max_bytes", "expect_group_bytes", "keep_trained")
_POLICIES = {policy.__name__: policy for policy in POLICIES.values()}


class HostedPolicy(ReplayPolicy):
    """A user's own policy, as a client sees it: its function stays with the host."""

    def __init__(self, name: str, order: Order) -> None:
        self.name = name
        self.order = order

    def __repr__(self) -> str:
        return f"{self.name}()"


class RayReplayBuffer(ReplayBuffer):
    """A buffer in the cluster. Made by `create` and `connect`; it can be sent to other processes, which connect."""

    def __init__(
        self,
        name: str,
        storage: Storage,
        policy: ReplayPolicy,
        settings: wire.BufferSettings,
        on_group_end: OnGroupEnd | None = None,
    ) -> None:
        super().__init__(policy, storage, lease_s=settings.lease_s, on_group_end=on_group_end, **settings.limits)
        self.name = name

    def __repr__(self) -> str:
        return f"<RayReplayBuffer {self.name!r}: {self.policy!r}, {len(self)} buffered groups>"

    def __reduce__(self) -> tuple[Any, ...]:
        return RayReplayBuffer.connect, (self.name,)

    @classmethod
    def create(
        cls,
        name: str,
        config: ReplayBufferConfig | None = None,
        *,
        policy: ReplayPolicy | None = None,
        shards: int = 1,
        wait_places: int = 64,
        actor_options: Mapping[str, Any] | None = None,
        on_group_end: OnGroupEnd | None = None,
    ) -> RayReplayBuffer:
        """Start a buffer of this name in the cluster, and connect to it. NameTaken if it already exists.

        `policy` replaces that of the config. `shards`: the number of actors, each with its own tasks; capacity limits
        and `keep_trained` need one. `wait_places`: how many calls may wait at each actor at once. `actor_options` are
        Ray's (`num_cpus`, `resources`, `scheduling_strategy`, ...). Blocks until the actors have opened their storage.
        """
        config = ReplayBufferConfig() if config is None else config
        if not isinstance(config, ReplayBufferConfig):
            raise InvalidConfig(f"RayReplayBuffer.create got {config!r:.80}; expected a ReplayBufferConfig")
        _check_name(name)
        if checked_integer("shards", shards, least=1) > MAX_SHARDS:
            raise InvalidConfig(f"shards is {shards}; expected at most {MAX_SHARDS}")
        checked_integer("wait_places", wait_places, least=1)
        bounded = config.max_groups is not None or config.max_bytes is not None or config.keep_trained
        if shards > 1 and bounded:
            raise InvalidConfig(
                "max_groups, max_bytes and keep_trained count over all tasks, which several actors cannot do in one "
                f"step; leave them out, or use one shard instead of {shards}"
            )
        check_cluster()
        chosen = config.build().policy if policy is None else policy
        if not isinstance(chosen, ReplayPolicy):
            raise InvalidConfig(f"policy is {policy!r:.80}; expected a ReplayPolicy")
        limits = {limit: getattr(config, limit) for limit in _LIMITS}
        lease_s = SHARED_LEASE_S if config.lease_s is None else config.lease_s
        settings = wire.BufferSettings(type(chosen).__name__, chosen.order, lease_s, limits)
        spec = HostSpec(
            name=name,
            settings=Settings(order=chosen.order, choose=chosen.choose, **limits),
            lease_s=lease_s,
            wait_places=wait_places,
        )
        started: list[Any] = []
        try:
            for shard in range(shards):
                host = replace(spec, shard=shard)
                started.append(_start(host, shards, config.storage, settings, actor_options or {}))
            links = [Link.to(actor, name) for actor in started]
            for shard, link in enumerate(links):
                notes.write_actor(actor_name(name, shard), link.hello.incarnation)
        except BaseException:
            for actor in started:
                ray.kill(actor)
            raise
        return cls._around(name, links, on_group_end)

    @classmethod
    def connect(cls, name: str, *, on_group_end: OnGroupEnd | None = None) -> RayReplayBuffer:
        """The buffer of this name. NoSuchBuffer, or BufferLost if its actor died with the groups in its memory.

        `on_group_end` runs in this process, and is not sent along with the buffer.
        """
        _check_name(name)
        first = Link.to(find_host(name), name)
        others = [Link.to(find_host(name, shard), name) for shard in range(1, first.hello.shards)]
        return cls._around(name, [first, *others], on_group_end)

    @classmethod
    def destroy(cls, name: str) -> None:
        """End the buffer of this name: its actors and the groups in their memory. Files and databases stay.

        NoSuchBuffer if there is none; a buffer that was lost is forgotten.
        """
        _check_name(name)
        shards = MAX_SHARDS  # unless the first one can be asked: when it is lost, others may still exist
        with suppress(BufferLost):
            first = find_host(name)
            with suppress(ForebayError):  # of another version, or it cannot open its storage: it ends all the same
                shards = Link.to(first, name, timeout_s=_STOP_S).hello.shards
        for shard in range(shards):
            try:
                actor = find_host(name, shard)
            except (NoSuchBuffer, BufferLost):
                notes.forget_notes(actor_name(name, shard))
                continue
            try:
                ray.get(actor.stop.remote(), timeout=_STOP_S)
            except exceptions.RayError as error:
                log.warning("host_not_stopped buffer=%s shard=%d %s", name, shard, error)
            notes.forget_notes(actor_name(name, shard))
            ray.kill(actor)

    @classmethod
    def _around(cls, name: str, links: list[Link], on_group_end: OnGroupEnd | None) -> RayReplayBuffer:
        settings = links[0].hello.settings
        if settings is None:
            raise InvalidConfig(f"the actor {name!r} hosts a storage without a buffer; use RayStorage on it")
        storages = [RayStorage(link) for link in links]  # the table makes its methods
        known = _POLICIES.get(settings.policy)
        policy = HostedPolicy(settings.policy, settings.order) if known is None else known()
        storage = storages[0] if len(storages) == 1 else ShardedStorage(storages)
        return cls(name, storage, policy, settings, on_group_end)


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"a buffer is named {name!r:.80}; expected up to 100 characters: letters, digits, '_', '.' and '-', the "
            "first one no '.' or '-'"
        )


def _start(
    spec: HostSpec, shards: int, storage: str, settings: wire.BufferSettings, actor_options: Mapping[str, Any]
) -> Any:
    durable = storage not in IN_MEMORY
    options: dict[str, Any] = {
        "num_cpus": 0,
        # Groups in memory do not come back with the actor, and an empty buffer must not pass for the lost one.
        "max_restarts": -1 if durable else 0,
        "max_task_retries": -1,  # a call that arrives twice happens once
        "concurrency_groups": {
            CALLS: _DURABLE_THREADS if durable else 1,
            WAITS: spec.wait_places + SPARE_THREADS,
            HEARTBEATS: 2,
        },
    }
    if storage.startswith(SQLITE_URL):
        # The file is on the disk of this node: an actor on another one would find nothing.
        node_id = ray.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options |= actor_options
    options |= {"name": actor_name(spec.name, spec.shard), "namespace": NAMESPACE, "lifetime": "detached"}
    try:
        declare: Any = ray.remote  # its annotations lack some parameters
        remote = declare(concurrency_groups=options.pop("concurrency_groups"))(BufferActor)
        return remote.options(**options).remote(spec, shard_url(storage, spec.shard), shards, settings)
    except ValueError as error:
        if "already" in str(error) and "name" in str(error):
            raise NameTaken(
                f"a buffer {spec.name!r} already exists in this cluster; connect to it, destroy it, or use another name"
            ) from error
        raise InvalidConfig(f"Ray refuses these actor_options: {error}") from error
    except exceptions.RayError as error:
        raise StorageUnavailable(f"the actor of buffer {spec.name!r} could not be started: {error}") from error
