"""What bad input gets, and what is said when something else goes wrong: typed errors, and never a hang."""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray

import forebay
from forebay import (
    BufferClosed,
    InvalidConfig,
    NameTaken,
    NoSuchBuffer,
    ReplayBufferConfig,
    RolloutState,
    Status,
    StorageError,
    StorageInUse,
    UnsupportedPayload,
    VersionMismatch,
)
from forebay.buffer.internal import internals
from forebay.core.capacity import Settings
from forebay.ray import RayReplayBuffer, wire
from forebay.ray.client.link import Link
from forebay.ray.host.actor import CALLS, HEARTBEATS, NAMESPACE, WAITS, BufferActor
from forebay.ray.host.operations import HostSpec
from forebay.ray.table import OPERATIONS as TABLE
from forebay.ray.table import Operation
from forebay.ray.wire import Parcel
from forebay.storage.sqlite import SQLiteStorage
from tests.processes import finished
from tests.ray import children
from tests.ray.children import connected, eventually, fill, hosted
from tests.ray.conftest import LocalCluster
from tests.support import closed_ledger

NewName = Callable[[], str]
NAME = "test-errors-shared"


@pytest.fixture(scope="module")
def shared(cluster: LocalCluster) -> Iterator[str]:
    RayReplayBuffer.create(NAME)
    yield NAME
    RayReplayBuffer.destroy(NAME)


def program(source: str, *arguments: str) -> str:
    """What a Python program prints that this process has nothing to do with."""
    done = finished("-c", textwrap.dedent(source), *arguments, env={**os.environ, "RAY_ADDRESS": ""})
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- no cluster ---------------------------------------------------------------------------------------


def test_without_a_cluster_everything_says_so_and_none_is_started(cluster: LocalCluster) -> None:
    printed = program(
        """
        import ray
        from forebay import NoCluster
        from forebay.ray import RayReplayBuffer
        for call in (RayReplayBuffer.create, RayReplayBuffer.connect, RayReplayBuffer.destroy):
            try:
                call("grpo")
            except NoCluster as error:
                print("ray.init" in str(error), ray.is_initialized())
        """
    )
    assert printed.split() == ["True", "False"] * 3


LEAVES = """
    import asyncio, logging, sys, time
    import ray
    from forebay import ForebayError, NoCluster, StorageUnavailable
    from forebay.buffer.internal import internals
    from forebay.ray import RayReplayBuffer
    from tests.ray.children import fill

    async def main():
        options = {"namespace": "forebay-tests", "log_to_driver": False, "logging_level": "error"}
        ray.init(address=sys.argv[1], **options)
        buffer = RayReplayBuffer.connect(sys.argv[2])
        print(await fill(buffer, 2, "leaving"))
        waiting = asyncio.create_task(buffer.lease_batch({"leaving": 50}, train_step=1)._granted())
        calling = asyncio.create_task(buffer.storage.summary(()))
        await asyncio.sleep(0.3)
        await calling
        ray.shutdown()
        for work in (waiting, internals(buffer).position("leaving"), buffer.get(1, "leaving", "completed")):
            try:
                await work
            except NoCluster as error:
                print("NoCluster")
        try:
            buffer.storage.beat(buffer.owner)
        except NoCluster:
            print("NoCluster", ray.is_initialized())
        ray.init(address=sys.argv[1], **options)
        try:
            await internals(buffer).position("leaving")
        except StorageUnavailable as error:
            print("again" in str(error))
        await buffer.close()
        buffer = RayReplayBuffer.connect(sys.argv[2])
        print(len(await buffer.get(5, "leaving", "completed")))
        await buffer.close()

    asyncio.run(main())
"""


def test_a_process_that_leaves_the_cluster_during_its_calls_gets_typed_errors(
    cluster: LocalCluster, shared: str
) -> None:
    printed = program(LEAVES, cluster.address, shared).split("\n")
    assert printed == ["[0, 1]", "NoCluster", "NoCluster", "NoCluster", "NoCluster False", "True", "2", ""]


# --- names and settings -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".a", "-a", "a#1", "a/b", "a b", "ä", "a" * 101, None, 7, b"a"])
def test_bad_names_are_refused(cluster: LocalCluster, name: Any) -> None:
    for call in (RayReplayBuffer.create, RayReplayBuffer.connect, RayReplayBuffer.destroy):
        with pytest.raises(InvalidConfig, match="letters, digits"):
            call(name)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"config": {"storage": "memory"}}, "expected a ReplayBufferConfig"),
        ({"policy": "fifo"}, "expected a ReplayPolicy"),
        ({"shards": 0}, "shards"),
        ({"shards": 129}, "at most 128"),
        ({"shards": True}, "shards"),
        ({"wait_places": 0}, "wait_places"),
        ({"shards": 2, "config": ReplayBufferConfig(max_groups=5)}, "one shard instead of 2"),
        ({"shards": 2, "config": ReplayBufferConfig(max_bytes=5)}, "one shard instead of 2"),
        ({"shards": 2, "config": ReplayBufferConfig(keep_trained=5)}, "one shard instead of 2"),
        ({"actor_options": {"num_gpu": 1}}, "num_gpu"),
    ],
)
def test_bad_settings_are_refused(
    cluster: LocalCluster, new_name: NewName, options: dict[str, Any], problem: str
) -> None:
    name = new_name()
    with pytest.raises(forebay.InvalidInput, match=problem):
        RayReplayBuffer.create(name, **options)
    with pytest.raises(NoSuchBuffer):
        RayReplayBuffer.connect(name)


async def test_a_name_that_is_taken_is_refused(shared: str) -> None:
    async with connected(shared) as buffer:
        await fill(buffer, 1, "taken")
        for options in ({}, {"shards": 2}):
            with pytest.raises(NameTaken, match="connect to it"):
                await asyncio.to_thread(RayReplayBuffer.create, shared, **options)  # type: ignore[arg-type]
        assert await closed_ledger(buffer, "taken") == {"issued": 1, "buffered": 1}


async def test_of_several_that_create_a_name_at_once_one_succeeds(cluster: LocalCluster, new_name: NewName) -> None:
    name = new_name()
    made = await asyncio.gather(
        *[asyncio.to_thread(RayReplayBuffer.create, name) for _ in range(3)], return_exceptions=True
    )
    refused = [error for error in made if isinstance(error, BaseException)]
    assert [type(error) for error in refused] == [NameTaken, NameTaken]
    async with connected(name) as buffer:
        assert await fill(buffer, 1) == [0]
    for one in made:
        if isinstance(one, RayReplayBuffer):
            await one.close()
    RayReplayBuffer.destroy(name)


def test_an_unknown_name_is_an_error(cluster: LocalCluster, new_name: NewName) -> None:
    name = new_name()
    for call in (RayReplayBuffer.connect, RayReplayBuffer.destroy):
        with pytest.raises(NoSuchBuffer, match=name):
            call(name)


# --- the end of a buffer ------------------------------------------------------------------------------


async def test_clients_of_a_destroyed_buffer_get_typed_errors(cluster: LocalCluster, new_name: NewName) -> None:
    name = new_name()
    buffer = await asyncio.to_thread(RayReplayBuffer.create, name)
    other = await asyncio.to_thread(RayReplayBuffer.connect, name)
    await fill(buffer, 2)
    lease = await other.lease_batch({"math": 1}, train_step=1)
    waiting = asyncio.create_task(other.lease_batch({"math": 9}, train_step=1)._granted())
    pid = await asyncio.to_thread(children.host_pid, name)
    await eventually(lambda: _waits(name))
    await asyncio.to_thread(RayReplayBuffer.destroy, name)
    with pytest.raises((NoSuchBuffer, BufferClosed)):
        await waiting
    await eventually(lambda: _ended(pid))
    for call in (lease.ack, lambda: fill(other, 1), other.ledger, lambda: internals(buffer).position("math")):
        with pytest.raises(NoSuchBuffer, match="destroyed"):
            await call()
    await buffer.close()
    await other.close()
    for end in (RayReplayBuffer.destroy, RayReplayBuffer.connect):
        with pytest.raises(NoSuchBuffer):
            end(name)
    # The name is free, and what is there now has nothing to do with what was.
    async with hosted(name) as again:
        assert await again.ledger() == {}


async def _waits(name: str) -> int:
    waits = children.host_of(name).__ray_call__.remote(lambda actor: len(actor._host._waits))
    return int(await asyncio.wrap_future(waits.future()))


async def _ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# --- another version ----------------------------------------------------------------------------------


def test_a_client_of_another_version_is_refused(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forebay, "__version__", "0.0.1")
    with pytest.raises(VersionMismatch, match=r"here is 0\.0\.1 .* install one version"):
        RayReplayBuffer.connect(shared)


class FromTheFuture(BufferActor):
    """A host whose messages are others."""

    @ray.method(concurrency_group=CALLS)
    def hello(self) -> Any:
        body = msgspec.Raw(wire.encoded({"protocol": 99, "version": "9.0", "hosts": ["a", "b"]}))
        return wire.encoded([0, 0, [], None, body, None, [], "more"]), b"", []


def test_a_host_of_another_version_is_refused(cluster: LocalCluster, new_name: NewName) -> None:
    name = new_name()
    declare: Any = ray.remote
    groups = {CALLS: 1, WAITS: 2, HEARTBEATS: 1}
    made = declare(num_cpus=0, concurrency_groups=groups)(FromTheFuture).options(name=name, namespace=NAMESPACE)
    actor = made.remote(HostSpec(name=name), "memory")
    with pytest.raises(VersionMismatch, match=r"Forebay 9\.0 \(protocol 99\)"):
        RayReplayBuffer.connect(name)
    RayReplayBuffer.destroy(name)  # it can be ended all the same
    with pytest.raises(NoSuchBuffer):
        RayReplayBuffer.connect(name)
    del actor


def test_connecting_to_a_storage_without_a_buffer_is_refused(cluster: LocalCluster, new_name: NewName) -> None:
    name = new_name()
    declare: Any = ray.remote
    groups = {CALLS: 1, WAITS: 2, HEARTBEATS: 1}
    made = declare(num_cpus=0, concurrency_groups=groups)(BufferActor).options(name=name, namespace=NAMESPACE)
    actor = made.remote(HostSpec(name=name), "memory")
    with pytest.raises(InvalidConfig, match="without a buffer"):
        RayReplayBuffer.connect(name)
    ray.kill(actor)


# --- storages that cannot be opened -------------------------------------------------------------------


async def test_a_store_that_another_process_has_open_is_refused(
    cluster: LocalCluster, new_name: NewName, tmp_path: Path
) -> None:
    name = new_name()
    config = ReplayBufferConfig(storage=f"sqlite:///{tmp_path / 'store.db'}")
    mine = SQLiteStorage(tmp_path / "store.db")
    await mine.open("me", Settings(), None)
    with pytest.raises(StorageInUse):
        await asyncio.to_thread(RayReplayBuffer.create, name, config)
    with pytest.raises(NoSuchBuffer):  # nothing of it is left
        await asyncio.to_thread(RayReplayBuffer.connect, name)
    await mine.close("me")
    async with hosted(name, config) as buffer:
        assert await fill(buffer, 1) == [0]


def test_a_store_that_is_no_file_is_refused(cluster: LocalCluster, new_name: NewName, tmp_path: Path) -> None:
    name = new_name()
    with pytest.raises(StorageError):
        RayReplayBuffer.create(name, ReplayBufferConfig(storage=f"sqlite:///{tmp_path}"))
    with pytest.raises(NoSuchBuffer):
        RayReplayBuffer.connect(name)


# --- calls --------------------------------------------------------------------------------------------


async def test_a_payload_that_is_no_plain_data_is_refused_and_nothing_stored(shared: str) -> None:
    async with connected(shared) as buffer:
        bad = RolloutState(message=[], response_ids=[1], status=Status.COMPLETED, extra_fields={"it": object()})
        good = RolloutState(message=[], response_ids=[1], status=Status.COMPLETED)
        for _ in range(2):
            with pytest.raises(UnsupportedPayload, match="extra_fields"):
                await buffer.put_many([[good], [bad]], "refused")
        assert await closed_ledger(buffer, "refused") == {}
        assert await fill(buffer, 1, "refused") == [0]
        link: Link = buffer.storage.link  # type: ignore[attr-defined]
        assert not link._open  # numbers of calls that were never sent are not waited for


async def test_a_call_that_cannot_be_sent_leaves_no_number_behind(shared: str) -> None:
    async with connected(shared) as buffer:
        await internals(buffer).position("unsent")
        link: Link = buffer.storage.link  # type: ignore[attr-defined]
        with pytest.raises(TypeError):
            link.begin(TABLE["put"], object(), Parcel())
        assert not link._open
        assert await fill(buffer, 1, "unsent") == [0]


async def pour(storage: object) -> None:
    """An operation that hosts do not have."""


async def discard(storage: object, node: None, reason: str) -> None:
    """Sends no node, unlike the operation of this name."""


async def test_an_unknown_operation_is_refused(shared: str) -> None:
    async with connected(shared) as buffer:
        with pytest.raises(forebay.InvalidInput, match="unknown operation"):
            await buffer.storage._run(Operation(pour), ())  # type: ignore[attr-defined]


async def test_a_host_reports_an_unexpected_error_and_continues(shared: str) -> None:
    async with connected(shared) as buffer:
        with pytest.raises(StorageError, match="failed: RayTaskError"):
            await buffer.storage._run(Operation(discard), (None, "no node"))  # type: ignore[attr-defined]
        assert await fill(buffer, 1, "failing") == [0]
