"""The guarantees G1, G3, G5 and G7 in a real cluster: processes, actors and nodes are killed for real."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from forebay import (
    BufferLost,
    CursorMoved,
    LostLease,
    ReplayBuffer,
    ReplayBufferConfig,
    Status,
    StorageUnavailable,
    WaitTimeout,
)
from forebay.buffer.internal import internals
from forebay.ray import RayReplayBuffer
from forebay.ray.host.notes import LOST_REASON, read_note
from tests.processes import HANG_S
from tests.ray import children
from tests.ray.children import answered, connected, drawn, eventually, fill, here, hosted, ids, is_whole, kill_host
from tests.ray.conftest import LocalCluster
from tests.support import closed_ledger

COMPLETED = Status.COMPLETED
NewName = Callable[[], str]

QUICK = ReplayBufferConfig(lease_s=3)
"""A client without a heartbeat for three seconds is dead."""

LARGE = 60_000
"""Tokens of a sample that is far above what travels within a call."""


async def get(reference: Any) -> Any:
    return await asyncio.wrap_future(reference.future())


async def train_on_all(buffer: ReplayBuffer, groups: int, **wants: int) -> list[int]:
    """Lease and acknowledge; which groups these were."""
    async with buffer.lease_batch(wants or {"math": groups}, train_step=1, timeout_s=HANG_S) as lease:
        assert all(is_whole(group) for group in lease.groups)
        return ids(lease.groups)


# --- producers and trainers that die ------------------------------------------------------------------


async def test_g03_groups_in_flight_at_a_killed_producer_are_drawn_again(
    cluster: LocalCluster, new_name: NewName
) -> None:
    name = new_name()
    async with hosted(name, QUICK) as buffer:
        dying, living = children.start(name), children.start(name)
        assert await get(dying.draw.remote(3)) == [0, 1, 2]
        assert await get(dying.put.remote()) == [0, 1, 2]  # answered for: these stay
        assert await get(dying.draw.remote(4)) == [3, 4, 5, 6]
        assert await get(living.draw.remote(2)) == [7, 8]
        children.kill(dying)
        back = await eventually(lambda: internals(buffer).redraw(10, "math"))
        assert ids(back) == [3, 4, 5, 6]
        assert await get(living.put.remote()) == [7, 8]  # it beats, and has lost nothing
        await buffer.put_many([answered(group) for group in back], "math")
        assert await internals(buffer).redraw(10, "math") == []
        assert await closed_ledger(buffer) == {"issued": 9, "buffered": 9}
        assert sorted(await train_on_all(buffer, 9)) == list(range(9))
        assert await closed_ledger(buffer) == {"issued": 9, "trained": 9}
        assert (await internals(buffer).position("math"))[0] == 9


async def test_g01_stored_groups_outlive_their_producer_and_its_node(
    cluster: LocalCluster, doomed_node: Any, new_name: NewName
) -> None:
    name = new_name()
    async with hosted(name, QUICK, actor_options=here()) as buffer:
        there = children.start(name, resources={"doomed": 1})
        shot = children.start(name)
        for worker, task_name, tokens in ((there, "small", 3), (there, "large", LARGE), (shot, "shot", LARGE)):
            await get(worker.draw.remote(2, task_name))
            await get(worker.put.remote(task_name, tokens))
        await get(there.draw.remote(2, "small"))
        children.kill(shot)
        cluster.kill_node(doomed_node)
        for task_name, tokens in (("small", 3), ("large", LARGE), ("shot", LARGE)):
            async with buffer.lease_batch({task_name: 2}, train_step=1, timeout_s=HANG_S) as lease:
                assert ids(lease.groups) == [0, 1]
                assert all(is_whole(group, tokens) for group in lease.groups)
                assert all(
                    not state.response_ids.flags.writeable  # type: ignore[union-attr]
                    for group in lease.groups
                    for state in group
                )
            line = await closed_ledger(buffer, task_name)
            assert line["trained"] == 2
        assert ids(await eventually(lambda: internals(buffer).redraw(5, "small"))) == [2, 3]
        assert await closed_ledger(buffer, "small") == {"issued": 4, "trained": 2, "in_flight": 2}


async def test_g05_the_lease_of_a_killed_trainer_is_handed_out_again(cluster: LocalCluster, new_name: NewName) -> None:
    name = new_name()
    async with hosted(name, QUICK) as buffer:
        trainer, sleeper = children.start(name), children.start(name)
        await fill(buffer, 6)
        assert await get(trainer.lease.remote({"math": 2}, 1)) == [0, 1]
        assert await get(sleeper.lease.remote({"math": 2}, 1)) == [2, 3]
        pid = await get(sleeper.pid.remote())
        os.kill(pid, signal.SIGSTOP)  # it lives, and is not heard of
        try:
            children.kill(trainer)
            # The wait is woken by the deadlines themselves; the first four come back to their old places.
            lease = await buffer.lease_batch({"math": 6}, train_step=1, timeout_s=HANG_S)
            assert ids(lease.groups) == [0, 1, 2, 3, 4, 5]
        finally:
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(LostLease):
            await get(sleeper.ack.remote())
        await lease.ack()
        with pytest.raises(LostLease):
            await get(sleeper.ack.remote())
        assert await closed_ledger(buffer) == {"issued": 6, "trained": 6}
        # It continues under its name.
        await fill(buffer, 1)
        assert await get(sleeper.lease.remote({"math": 1}, 2)) == [6]
        await get(sleeper.ack.remote())
        assert await closed_ledger(buffer) == {"issued": 7, "trained": 7}


# --- a host that dies, and comes back -----------------------------------------------------------------


class History:
    """What clients were promised."""

    def __init__(self) -> None:
        self.put: list[int] = []
        self.trained: list[int] = []
        self.stopped = False


async def produce(buffer: ReplayBuffer, history: History, choice: random.Random) -> None:
    while not history.stopped:
        groups = await internals(buffer).redraw(2, "math")
        if not groups:
            try:
                groups = await drawn(buffer, choice.randint(1, 3))
            except CursorMoved:
                continue
        for group in groups:
            await buffer.put(answered(group, choice.choice((3, 3, 3, 20_000))), "math")
            history.put += ids([group])
        await asyncio.sleep(choice.uniform(0, 0.02))


async def train(buffer: ReplayBuffer, history: History, choice: random.Random) -> None:
    step = 0
    while not history.stopped:
        step += 1
        try:
            lease = await buffer.lease_batch({"math": choice.randint(1, 4)}, train_step=step, timeout_s=1)
        except WaitTimeout:
            continue
        await asyncio.sleep(choice.uniform(0, 0.2))
        if choice.random() < 0.2:
            await lease.nack()
            continue
        leased = ids(lease.groups)
        await lease.ack()
        history.trained += leased


async def survive_kills(name: str, path: Path, kills: int, seed: int) -> None:
    choice = random.Random(seed)
    history = History()
    config = ReplayBufferConfig(storage=f"sqlite:///{path}", lease_s=60)
    async with hosted(name, config) as buffer, connected(name) as one, connected(name) as two:
        tasks = [
            asyncio.create_task(produce(one, history, random.Random(seed + 1))),
            asyncio.create_task(produce(two, history, random.Random(seed + 2))),
            asyncio.create_task(train(one, history, random.Random(seed + 3))),
            asyncio.create_task(train(buffer, history, random.Random(seed + 4))),
        ]
        for _ in range(kills):
            pid = await asyncio.to_thread(children.host_pid, name)
            seen = len(history.put)
            await eventually(lambda seen=seen: _more_than(history.put, seen))  # type: ignore[misc]
            await asyncio.sleep(choice.uniform(0, 0.3))
            os.kill(pid, signal.SIGKILL)
        seen = len(history.trained)
        await eventually(lambda: _more_than(history.trained, seen))
        history.stopped = True
        await asyncio.gather(*tasks)  # no LostLease, no error at all: everybody lived through it
        assert len(set(history.trained)) == len(history.trained), "trained twice"
        assert len(set(history.put)) == len(history.put), "put twice"
        line = await closed_ledger(buffer)
        assert line["trained"] == len(history.trained)
        assert line["issued"] == (await internals(buffer).position("math"))[0] == len(history.put)
        rest = await buffer.query({"task_name": "math", "place": "buffered"})
        assert line.get("buffered", 0) == len(rest)
        assert {record.group_id for record in rest} == set(history.put) - set(history.trained)
        for record in rest:
            group = await buffer.read(record.uid)
            assert group is not None
            assert [state.response for state in group] == [f"answer to {record.group_id}"] * 2


async def _more_than(done: list[int], seen: int) -> bool:
    return len(done) > seen


async def test_g07_a_host_on_sqlite_that_is_killed_at_any_moment_loses_nothing(
    cluster: LocalCluster, new_name: NewName, tmp_path: Path
) -> None:
    await survive_kills(new_name(), tmp_path / "store.db", kills=2, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 50, 10))
async def test_g07_a_host_on_sqlite_that_is_killed_again_and_again_loses_nothing(
    cluster: LocalCluster, new_name: NewName, tmp_path: Path, seed: int
) -> None:
    await survive_kills(new_name(), tmp_path / "store.db", kills=15, seed=seed)


async def test_g03_clients_keep_their_groups_when_the_host_is_restarted(
    cluster: LocalCluster, new_name: NewName, tmp_path: Path
) -> None:
    name = new_name()
    config = ReplayBufferConfig(storage=f"sqlite:///{tmp_path / 'store.db'}", lease_s=3)
    async with hosted(name, config) as buffer:
        dying = children.start(name)
        held = await drawn(buffer, 2)
        await get(dying.draw.remote(2))
        await fill(buffer, 2)
        lease = await buffer.lease_batch({"math": 1}, train_step=1)
        assert await get(dying.lease.remote({"math": 1}, 1)) == [5]
        children.kill(dying)
        kill_host(name)
        await buffer.put_many([answered(group) for group in held], "math")
        await lease.ack()
        # What the dead one held comes back though the host that knew it is gone.
        assert ids(await eventually(lambda: internals(buffer).redraw(5, "math"))) == [2, 3]
        assert sorted(await train_on_all(buffer, 3)) == [0, 1, 5]
        assert await closed_ledger(buffer) == {"issued": 6, "trained": 4, "in_flight": 2}


async def test_g07_a_host_on_postgresql_continues_on_another_node_when_its_own_is_lost(
    cluster: LocalCluster, doomed_node: Any, new_name: NewName
) -> None:
    from tests.storage import postgres_server

    name, schema = new_name(), postgres_server.new_name()
    config = ReplayBufferConfig(storage=f"{postgres_server.dsn()}#{schema}", lease_s=60)
    try:
        async with hosted(name, config, actor_options={"resources": {"doomed": 1}}) as buffer:
            await fill(buffer, 3)
            held = await drawn(buffer, 1)
            lease = await buffer.lease_batch({"math": 2}, train_step=1)
            pid = await asyncio.to_thread(children.host_pid, name)
            cluster.kill_node(doomed_node)
            await eventually(lambda: _ended(pid))
            acknowledging = asyncio.create_task(lease.ack())  # there is no node for it now
            await asyncio.sleep(0)
            other = cluster.add_node(resources={"doomed": 1})
            await acknowledging
            await buffer.put(answered(held[0]), "math")
            assert sorted(await train_on_all(buffer, 2)) == [2, 3]
            assert await closed_ledger(buffer) == {"issued": 4, "trained": 4}
        cluster.kill_node(other)
        cluster.wait_until_missed(other)
    finally:
        await asyncio.to_thread(postgres_server.drop, schema)


# --- a host that dies with all it had -----------------------------------------------------------------


async def fails_as_lost(buffer: ReplayBuffer, lost: dict[str, int]) -> None:
    """Every call says that the buffer is lost, and how much with it."""
    for call in (
        lambda: internals(buffer).position("math"),
        lambda: buffer.put(answered([*children.prompts(1)[0]]), "math"),
        lambda: buffer.get(1, "math", COMPLETED),
        lambda: buffer.lease_batch({"math": 1}, train_step=9),
        lambda: buffer.query({"task_name": "math"}),
    ):
        with pytest.raises(BufferLost) as caught:
            await call()
        assert caught.value.lost == lost
        assert str(sum(lost.values())) in str(caught.value)


async def test_g01_clients_of_a_killed_host_in_memory_learn_what_was_lost(
    cluster: LocalCluster, new_name: NewName, tmp_path: Path
) -> None:
    name = new_name()
    async with hosted(name, ReplayBufferConfig(lease_s=60)) as buffer, connected(name) as other:
        await fill(buffer, 4)
        await fill(buffer, 1, "code")
        async with buffer.lease_batch({"math": 1}, train_step=1):
            pass
        await buffer.save(tmp_path / "checkpoint", model_step=1)
        await buffer.discard({"task_name": "code"}, "not wanted")
        lease = await buffer.lease_batch({"math": 1}, train_step=2)
        await drawn(other, 2)
        lost = {"math": 5}
        waiting = asyncio.create_task(other.lease_batch({"math": 50}, train_step=2)._granted())
        await eventually(lambda: _waits(name))
        await eventually(lambda: _noted(name, lost))  # of what others did, a client knows what was noted
        kill_host(name)
        with pytest.raises(BufferLost) as caught:
            await waiting
        assert caught.value.lost == lost
        with pytest.raises(BufferLost):
            await lease.ack()
        for client in (buffer, other):
            await fails_as_lost(client, lost)
            assert await closed_ledger(client) == {"issued": 6, "trained": 1, "discarded": 5}
            assert await closed_ledger(client, "code") == {"issued": 1, "discarded": 1}
            assert await client.reasons() == {"math": {LOST_REASON: 5}, "code": {"not wanted": 1}}
            tokens = (await client.ledger(tokens=True))["math"]
            assert tokens["issued"] == sum(tokens.values()) - tokens["issued"]
        with pytest.raises(BufferLost) as caught:
            await asyncio.to_thread(RayReplayBuffer.connect, name)
        assert caught.value.lost == lost
        # A new one under the same name is empty, takes the checkpoint, and does not repair the old clients.
        async with hosted(name, ReplayBufferConfig()) as again:
            assert await again.ledger() == {}
            assert await again.resume(tmp_path / "checkpoint") == 1
            assert sorted(await train_on_all(again, 3)) == [1, 2, 3]
            assert await closed_ledger(again) == {"issued": 4, "trained": 4}
            with pytest.raises(BufferLost):
                await internals(buffer).position("math")


async def _waits(name: str) -> int:
    waits = children.host_of(name).__ray_call__.remote(lambda actor: len(actor._host._waits))
    return int(await get(waits))


async def _noted(name: str, lost: dict[str, int]) -> bool:
    note = read_note(children.host_of(name)._actor_id.hex())
    return note is not None and note.lost() == lost


async def _ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_g01_clients_learn_what_was_lost_with_the_node_of_a_host(
    cluster: LocalCluster, doomed_node: Any, new_name: NewName, tmp_path: Path
) -> None:
    in_memory, on_sqlite = new_name(), new_name()
    there = {"scheduling_strategy": NodeAffinitySchedulingStrategy(doomed_node.node_id, soft=False)}
    config = ReplayBufferConfig(storage=f"sqlite:///{tmp_path / 'store.db'}", lease_s=60)
    memory = await asyncio.to_thread(RayReplayBuffer.create, in_memory, actor_options=there)
    sqlite = await asyncio.to_thread(RayReplayBuffer.create, on_sqlite, config, actor_options=there)
    await fill(memory, 3)
    await fill(sqlite, 3)
    pids = [await asyncio.to_thread(children.host_pid, name) for name in (in_memory, on_sqlite)]
    cluster.kill_node(doomed_node)
    for pid in pids:
        await eventually(lambda pid=pid: _ended(pid))  # type: ignore[misc]
    await fails_as_lost(memory, {"math": 3})
    with pytest.raises(StorageUnavailable, match="in its storage"):
        await internals(sqlite).position("math")
    with pytest.raises(StorageUnavailable):
        await asyncio.to_thread(RayReplayBuffer.connect, on_sqlite)
    with pytest.raises(BufferLost):
        await asyncio.to_thread(RayReplayBuffer.connect, in_memory)
    for buffer in (memory, sqlite):
        await buffer.close()
    await asyncio.to_thread(RayReplayBuffer.destroy, in_memory)
    # The file is there: a host on another node that reaches it continues.
    async with hosted(on_sqlite, config, actor_options=here()) as again:
        assert await closed_ledger(again) == {"issued": 3, "buffered": 3}
        assert sorted(await train_on_all(again, 3)) == [0, 1, 2]
