"""Tasks over several actors: exact per task, batches granted on all or on none, checkpoints between any numbers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from forebay import (
    BufferLost,
    CheckpointTooOld,
    GroupEnd,
    LostLease,
    ReplayBuffer,
    ReplayBufferConfig,
    Status,
    WaitTimeout,
)
from forebay.buffer.internal import internals
from forebay.ray import RayReplayBuffer
from forebay.ray.client import storage as storage_module
from forebay.ray.client.shards import shard_of, shard_url
from forebay.ray.host.actor import actor_name
from forebay.ray.host.operations import UID_BITS
from tests.processes import HANG_S
from tests.ray import children
from tests.ray.children import connected, eventually, fill, hosted, ids, is_whole
from tests.ray.conftest import LocalCluster
from tests.support import closed_ledger

COMPLETED = Status.COMPLETED
NewName = Callable[[], str]
NAME = "test-shards-shared"
SHARDS = 3


def tasks_of(prefix: str, shards: int = SHARDS) -> list[str]:
    """A task for each shard, in the order of the shards."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < shards:
        name = f"{prefix}-{number}"
        found.setdefault(shard_of(name, shards), name)
        number += 1
    return [found[shard] for shard in range(shards)]


@pytest.fixture(scope="module")
def shared(cluster: LocalCluster) -> Iterator[str]:
    """A buffer over three actors for the tests of this file, each with its own tasks."""
    RayReplayBuffer.create(NAME, ReplayBufferConfig(lease_s=60), shards=SHARDS)
    yield NAME
    RayReplayBuffer.destroy(NAME)


@pytest.fixture
async def buffer(shared: str) -> AsyncIterator[RayReplayBuffer]:
    async with connected(shared) as buffer:
        yield buffer


async def _in_host(name: str, shard: int, look: Callable[[Any], Any]) -> Any:
    return await asyncio.wrap_future(children.host_of(actor_name(name, shard)).__ray_call__.remote(look).future())


async def _waits_at(name: str, shard: int, n: int) -> bool:
    return bool(await _in_host(name, shard, lambda actor: len(actor._host._waits)) == n)


async def _deadline_at(name: str, shard: int) -> float:
    """When the only owner would lose what it holds."""
    deadlines = await _in_host(name, shard, lambda actor: dict(actor._host.storage._engine.owners.deadlines))
    ((_, deadline),) = deadlines.values()
    return float(deadline)


def test_the_shard_of_a_task_never_changes() -> None:
    assert [shard_of(name, 4) for name in ("math", "code", "", "\ud800", "Ä")] == [1, 0, 0, 0, 3]
    here = Path("runs/a.db").absolute()  # a worker has another directory
    assert shard_url("sqlite:///runs/a.db", 0) == f"sqlite:///{here}"
    assert shard_url("sqlite:////runs/a.db", 2) == "sqlite:////runs/a.db.shard2"
    assert shard_url("postgresql://h/d", 1) == "postgresql://h/d#forebay_shard1"
    assert shard_url("postgresql://h/d#mine", 1) == "postgresql://h/d#mine_shard1"
    assert shard_url("memory", 3) == "memory"


async def test_reads_and_changes_reach_every_shard(shared: str, buffer: RayReplayBuffer) -> None:
    names = tasks_of("look")
    for number, name in enumerate(names):
        assert await fill(buffer, number + 1, name) == list(range(number + 1))
    async with connected(shared) as other:
        assert await other.count_statuses(names, [COMPLETED]) == {
            name: {COMPLETED: number + 1} for number, name in enumerate(names)
        }
        records = await other.query({"task_name": {"$in": names}})
        assert [record.uid >> UID_BITS for record in records] == [0, 1, 1, 2, 2, 2]
        assert [record.uid for record in await other.query({"task_name": {"$in": names}}, limit=2)] == [
            record.uid for record in records[:2]
        ]
        assert await other.set_priority({record.uid: 2.5 for record in records} | {10**15: 1.0}) == 6
        assert {record.priority for record in await other.query({"task_name": {"$in": names}})} == {2.5}
        for record in records:
            group = await other.read(record.uid)
            assert group is not None
            assert (group[0].task_name, group[0].group_id) == (record.task_name, record.group_id)
            assert is_whole(group)
        assert await other.read(10**15) is None
        assert await other.discard({"task_name": {"$in": names}, "group_id": 0}, "first ones") == 3
        for number, name in enumerate(names):
            line = {"issued": number + 1, "buffered": number, "discarded": 1}
            assert await closed_ledger(other, name) == {key: n for key, n in line.items() if n}
        assert {name: reasons for name, reasons in (await other.reasons()).items() if name in names} == {
            name: {"first ones": 1} for name in names
        }
        groups, counts = await other.take_batch(dict.fromkeys(names, 5))
        assert {name: len(groups[name]) for name in names} == dict(zip(names, (0, 1, 2), strict=True))
        assert counts is not None


async def test_g05_a_lease_over_several_actors_is_granted_on_all_or_on_none(buffer: RayReplayBuffer) -> None:
    names = tasks_of("whole")
    for name in names[:2]:
        await fill(buffer, 2, name)
    with pytest.raises(WaitTimeout, match=names[2]):
        await buffer.lease_batch(dict.fromkeys(names, 1), train_step=1, timeout_s=0.1)
    for name in names[:2]:
        assert await closed_ledger(buffer, name) == {"issued": 2, "buffered": 2}
    leasing = asyncio.create_task(buffer.lease_batch(dict.fromkeys(names, 2), train_step=1)._granted())
    await eventually(lambda: _waits_at(NAME, 2, 1))  # it waits there, and does not try again and again
    await fill(buffer, 1, names[2])
    await fill(buffer, 1, names[2])
    lease = await leasing
    assert {name: ids(groups) for name, groups in lease.groups_by_task.items()} == {name: [0, 1] for name in names}
    await lease.reject(lease.groups_by_task[names[1]][:1], "no use")
    await lease.ack()
    assert await closed_ledger(buffer, names[1]) == {"issued": 2, "trained": 1, "discarded": 1}
    assert await closed_ledger(buffer, names[2]) == {"issued": 2, "trained": 2}
    for shard in range(SHARDS):
        await eventually(lambda shard=shard: _waits_at(NAME, shard, 0))  # type: ignore[misc]


async def test_g05_trainers_that_compete_over_shards_neither_deadlock_nor_hold_parts(
    shared: str, buffer: RayReplayBuffer
) -> None:
    """Each wants another mixture; in the end everything was trained on once, and no part was ever left held."""
    names = tasks_of("compete")
    choice = random.Random(5)
    rounds = 30
    trained: list[tuple[str, int]] = []

    async def produce() -> None:
        for _ in range(rounds):
            for name in choice.sample(names, len(names)):
                await fill(buffer, 1, name)

    async def train(client: ReplayBuffer, wants: list[dict[str, int]], own: random.Random) -> None:
        for step, want in enumerate(wants, 1):
            lease = await client.lease_batch(want, train_step=step, timeout_s=HANG_S)
            assert {name: len(groups) for name, groups in lease.groups_by_task.items()} == want
            if own.random() < 0.2:  # give it back, and take another
                await lease.nack()
                lease = await client.lease_batch(want, train_step=step, timeout_s=HANG_S)
            trained.extend((name, i) for name, groups in lease.groups_by_task.items() for i in ids(groups))
            await lease.ack()

    async with connected(shared) as other:
        # Together they want everything: {a, b, c} and then pairs that cross.
        mine = [dict.fromkeys(names, 1)] * (rounds // 3)
        pairs = [(0, 1), (1, 2), (2, 0)]
        theirs = [{names[one]: 1, names[two]: 1} for _ in range(rounds // 3) for one, two in pairs]
        await asyncio.gather(
            produce(), train(buffer, mine, random.Random(1)), train(other, theirs[::-1], random.Random(2))
        )
    assert len(trained) == len(set(trained)) == rounds * len(names)
    for name in names:
        assert await closed_ledger(buffer, name) == {"issued": rounds, "trained": rounds}


async def test_g03_a_cancel_in_the_middle_of_a_lease_over_shards_leaves_nothing_held(buffer: RayReplayBuffer) -> None:
    names = tasks_of("cancel")
    choice = random.Random(11)
    for name in names:
        await fill(buffer, 2, name)
    for _ in range(40):
        leasing = asyncio.create_task(buffer.lease_batch(dict.fromkeys(names, 2), train_step=1)._granted())
        for _ in range(choice.randint(0, 12)):
            await asyncio.sleep(choice.choice((0, 0, 0.0005, 0.001)))
        leasing.cancel()
        (result,) = await asyncio.gather(leasing, return_exceptions=True)
        if not isinstance(result, BaseException):
            await result.nack()
    for name in names:
        assert await closed_ledger(buffer, name) == {"issued": 2, "buffered": 2}


async def test_g05_a_lease_that_was_lost_on_one_shard_is_settled_on_none(buffer: RayReplayBuffer) -> None:
    names = tasks_of("fence")
    for name in names:
        await fill(buffer, 1, name)
    lease = await buffer.lease_batch(dict.fromkeys(names, 1), train_step=1)
    uid = (await buffer.query({"task_name": names[1]}))[0].uid
    await buffer.storage.fail({uid: "gone"})
    with pytest.raises(LostLease):
        await lease.ack()
    assert await closed_ledger(buffer, names[0]) == {"issued": 1, "leased": 1}


@pytest.mark.parametrize(("first", "last"), [(2, 3), pytest.param(3, 4, marks=pytest.mark.slow)])
async def test_a_checkpoint_goes_from_any_number_of_shards_to_any_other(
    cluster: LocalCluster, new_name: NewName, tmp_path: Path, first: int, last: int
) -> None:
    names = sorted({*tasks_of("save", first), *tasks_of("save", last)})
    expected: dict[str, Any] = {}

    async def check(buffer: ReplayBuffer) -> None:
        found = {name: await closed_ledger(buffer, name) for name in names}
        assert found == expected
        for name in names:
            records = await buffer.query({"task_name": name, "status": "completed"})
            assert sorted(record.group_id for record in records) == [1, 2]
            for record in records:
                group = await buffer.read(record.uid)
                assert group is not None
                assert is_whole(group)
            assert (await internals(buffer).position(name))[0] == 4

    async with hosted(new_name(), shards=first) as several:
        for name in names:
            await fill(several, 3, name)
            await children.drawn(several, 1, name)
        await several.discard({"group_id": 0}, "first")
        await several.save(tmp_path / "several")
        # What was in flight is to be generated again.
        expected.update({name: {"issued": 4, "buffered": 3, "discarded": 1} for name in names})
    async with hosted(new_name()) as one:
        await one.resume(tmp_path / "several")
        await check(one)
        await one.save(tmp_path / "one")
    async with ReplayBuffer() as local:
        await local.resume(tmp_path / "one")
        await check(local)
        await local.save(tmp_path / "local")
    async with hosted(new_name(), shards=last) as more:
        await more.resume(tmp_path / "local")
        await check(more)
        assert {record.uid >> UID_BITS for record in await more.query({"group_id": 1})} == {
            shard_of(name, last) for name in names
        }
        # It continues: new uids and ids, and every group can be taken.
        assert await fill(more, 1, names[0]) == [4]
        assert len(await internals(more).redraw(5, names[0])) == 1
        async with more.lease_batch(dict.fromkeys(names, 2), train_step=1) as lease:
            assert all(sorted(ids(groups)) == [1, 2] for groups in lease.groups_by_task.values())
        await more.save(tmp_path / "more")
    async with ReplayBuffer() as local:
        await local.resume(tmp_path / "more")
        assert (await closed_ledger(local, names[0]))["trained"] == 2


async def test_g04_a_checkpoint_that_is_too_old_for_one_shard_changes_none(
    cluster: LocalCluster, new_name: NewName, tmp_path: Path
) -> None:
    dropped, kept = tasks_of("old", 2)
    config = ReplayBufferConfig(storage=f"sqlite:///{tmp_path / 'store.db'}")
    async with hosted(new_name(), config, shards=2) as buffer:
        for name in (dropped, kept):
            await fill(buffer, 1, name)
        await buffer.save(tmp_path / "0", model_step=0)
        async with buffer.lease_batch({dropped: 1}, train_step=1):
            pass
        await buffer.save(tmp_path / "1", model_step=1)
        async with buffer.lease_batch({kept: 1}, train_step=2):
            pass
        with pytest.raises(CheckpointTooOld, match=f"1 groups of task '{dropped}', which"):
            await buffer.resume(tmp_path / "0")
        assert await closed_ledger(buffer, kept) == {"issued": 1, "trained": 1}
        assert await buffer.resume(tmp_path / "1") == 1
        assert await closed_ledger(buffer, dropped) == {"issued": 1, "trained": 1}
        assert await closed_ledger(buffer, kept) == {"issued": 1, "buffered": 1}


async def test_g04_the_tasks_of_one_run_are_saved_and_rewound_on_their_shard_only(
    cluster: LocalCluster, new_name: NewName, tmp_path: Path
) -> None:
    config = ReplayBufferConfig(storage=f"sqlite:///{tmp_path / 'store.db'}")
    async with hosted(new_name(), config, shards=2) as buffer:
        ours, other = tasks_of("run", 2)
        for task in (ours, other):
            await fill(buffer, 3, task)
        await buffer.storage.saved(1, [ours])
        await buffer.storage.saved(2, [other])
        for step in (1, 2, 3):
            async with buffer.lease_batch({ours: 1, other: 1}, train_step=step):
                pass
        assert await buffer.storage.rewind(1, [ours]) == {ours: 2}
        assert await closed_ledger(buffer, ours) == {"issued": 3, "trained": 1, "buffered": 2}
        assert await closed_ledger(buffer, other) == {"issued": 3, "trained": 3}


async def test_g01_when_one_actor_is_lost_the_tasks_of_the_others_continue(
    cluster: LocalCluster, new_name: NewName
) -> None:
    name = new_name()
    first, second = tasks_of("lost", 2)
    async with hosted(name, shards=2) as buffer:
        await fill(buffer, 2, first)
        await fill(buffer, 3, second)
        lease = await buffer.lease_batch({second: 1}, train_step=1)
        children.kill_host(name)
        with pytest.raises(BufferLost) as caught:
            await internals(buffer).position(first)
        assert caught.value.lost == {first: 2}
        with pytest.raises(BufferLost):
            await buffer.lease_batch({first: 1, second: 1}, train_step=1)
        before = await _deadline_at(name, 1)
        with pytest.raises(ray.exceptions.RayActorError):
            await asyncio.to_thread(buffer.storage.beat, buffer.owner)
        assert await _deadline_at(name, 1) > before  # the other one heard it
        await lease.ack()
        assert await closed_ledger(buffer, first) == {"issued": 2, "discarded": 2}
        assert await closed_ledger(buffer, second) == {"issued": 3, "buffered": 2, "trained": 1}
        with pytest.raises(BufferLost):
            await asyncio.to_thread(RayReplayBuffer.connect, name)
        await asyncio.to_thread(RayReplayBuffer.destroy, name)
        with pytest.raises(ValueError, match="look up actor"):
            ray.get_actor(actor_name(name, 1), namespace="forebay")
        async with hosted(name, shards=2) as again:
            assert await again.ledger() == {}


async def test_the_client_with_the_callback_is_told_of_the_ends_of_all_shards(shared: str) -> None:
    heard: list[GroupEnd] = []
    tasks = tasks_of("told")
    listener = await asyncio.to_thread(RayReplayBuffer.connect, shared, on_group_end=heard.append)
    async with listener, connected(shared) as other:
        await listener.stats()  # it is open: from now on ends are noted
        expected = {(task_name, group_id) for task_name in tasks for group_id in await fill(other, 2, task_name)}
        for task_name in tasks:
            await other.get(2, task_name, COMPLETED)
        await eventually(lambda: _heard_all(heard, tasks, expected))
    mine = [(event.task_name, event.group_id) for event in heard if event.task_name in tasks]
    assert len(mine) == len(expected)


async def _heard_all(heard: list[GroupEnd], tasks: list[str], expected: set[tuple[str, int]]) -> bool:
    return {(event.task_name, event.group_id) for event in heard if event.task_name in tasks} == expected


async def test_g05_a_host_that_does_not_answer_delays_no_heartbeat_to_the_others(
    cluster: LocalCluster, new_name: NewName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "_BEAT_TIMEOUT_S", HANG_S)
    name = new_name()
    async with hosted(name, ReplayBufferConfig(lease_s=6 * HANG_S), shards=2) as buffer:
        await buffer.ledger()
        before = await _deadline_at(name, 1)
        pid = await asyncio.to_thread(children.host_pid, name)
        os.kill(pid, signal.SIGSTOP)
        try:
            beating = asyncio.create_task(asyncio.to_thread(buffer.storage.beat, buffer.owner))
            await eventually(lambda: _later_than(before, name))
            assert not beating.done()
        finally:
            os.kill(pid, signal.SIGCONT)
        await beating


async def _later_than(before: float, name: str) -> bool:
    return await _deadline_at(name, 1) > before
