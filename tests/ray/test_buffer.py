"""A hosted buffer is used like any other: blocking, sent to other processes, by managers, on any storage."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from forebay import (
    AsyncProduceStrategy,
    BufferClosed,
    DisaggregatedAgentLoopManager,
    FunctionAgentLoop,
    Lease,
    ManagedTask,
    NoProgress,
    ReplayBuffer,
    ReplayBufferConfig,
    ReplayPolicy,
    RolloutState,
    Sampler,
    Status,
    TooManyWaits,
    WaitTimeout,
    blocking,
)
from forebay.buffer.internal import internals
from forebay.core.ledger import Record
from forebay.ray import RayReplayBuffer, wire
from forebay.ray.client import storage as storage_module
from tests.processes import HANG_S
from tests.ray import children
from tests.ray.children import answered, connected, drawn, eventually, fill, hosted, ids
from tests.ray.conftest import LocalCluster
from tests.support import closed_ledger

COMPLETED = Status.COMPLETED
NewName = Callable[[], str]
NAME = "test-buffer-shared"
PLACES = 4


@pytest.fixture(scope="module")
def shared(cluster: LocalCluster) -> Iterator[str]:
    """A buffer in memory for the tests of this file, each with its own tasks: starting one takes long."""
    RayReplayBuffer.create(NAME, ReplayBufferConfig(lease_s=60), wait_places=PLACES)
    yield NAME
    RayReplayBuffer.destroy(NAME)


@pytest.fixture
async def buffer(shared: str) -> AsyncIterator[RayReplayBuffer]:
    async with connected(shared) as buffer:
        yield buffer


# --- the same interface -------------------------------------------------------------------------------


def test_the_blocking_facade_accepts_a_hosted_buffer(shared: str) -> None:
    with blocking.ReplayBuffer(RayReplayBuffer.connect(shared)) as buffer:
        drawing = buffer.submit(drawn(buffer.native, 3, "blocking"))
        buffer.put_many([answered(group) for group in drawing.result()], "blocking")
        with buffer.lease_batch({"blocking": 2}, train_step=1, timeout_s=HANG_S) as lease:
            assert ids(lease.groups) == [0, 1]
        assert buffer.count("blocking", COMPLETED) == 1
        assert buffer.ledger()["blocking"]["trained"] == 2


async def test_a_hosted_buffer_can_be_sent_to_a_task(buffer: RayReplayBuffer) -> None:
    declare: Any = ray.remote
    put = declare(num_cpus=0)(_put_from_a_task)
    pid, uid = await asyncio.wrap_future(put.remote(buffer).future())
    assert pid != os.getpid()
    group = await buffer.read(uid)
    assert group is not None
    assert group[0].response == "from afar"
    assert len(await buffer.get(1, "sent", COMPLETED)) == 1


def _put_from_a_task(buffer: RayReplayBuffer) -> tuple[int, int | None]:
    async def put() -> int | None:
        async with buffer:
            state = RolloutState(message=[], response="from afar", response_ids=[1], status=COMPLETED)
            return await buffer.put([state], "sent")

    return os.getpid(), asyncio.run(put())


def test_a_hosted_buffer_works_on_one_event_loop_after_another(shared: str) -> None:
    buffer = RayReplayBuffer.connect(shared)

    async def put_and_leave_a_wait() -> None:
        await fill(buffer, 1, "loops")
        waiting = asyncio.ensure_future(buffer.lease_batch({"loops": 5}, train_step=1)._granted())
        await eventually(lambda: _waits_at(shared, 1))
        waiting.cancel()

    async def take() -> list[int]:
        return ids(await buffer.get(2, "loops", COMPLETED))

    asyncio.run(put_and_leave_a_wait())
    assert asyncio.run(take()) == [0]
    asyncio.run(buffer.close())


async def test_groups_come_back_as_they_were_put_with_read_only_arrays(buffer: RayReplayBuffer) -> None:
    large, small = np.arange(100_000), np.arange(5)
    for column in (large, small):
        await buffer.put([RolloutState(message=[], response_ids=column, status=COMPLETED)], "own")
    async with buffer.lease_batch({"own": 2}, train_step=1) as lease:
        first, second = (np.asarray(group[0].response_ids) for group in lease.groups)
    assert np.array_equal(first, np.arange(100_000))
    assert np.array_equal(second, np.arange(5))
    assert not first.flags.writeable
    assert not second.flags.writeable


class NewestFirst(ReplayPolicy):
    """A user's own policy, which goes to the host with the buffer."""

    def choose(self, records: Sequence[Record], n: int) -> Sequence[int]:
        return [record.uid for record in reversed(records)][:n]


@pytest.mark.parametrize("kind", ["memory", "pandas", "sqlite"])
async def test_any_storage_works_with_limits_and_a_users_own_policy(
    cluster: LocalCluster, new_name: NewName, tmp_path: Path, kind: str
) -> None:
    storage = f"sqlite:///{tmp_path / 'store.db'}" if kind == "sqlite" else kind
    config = ReplayBufferConfig(storage=storage, max_groups=4, keep_trained=1)
    name = new_name()
    async with hosted(name, config, policy=NewestFirst()) as buffer, connected(name) as other:
        await fill(buffer, 4)
        assert repr(other.policy) == "NewestFirst()"
        assert await _draw_one(other) is None
        with pytest.raises(WaitTimeout, match="4 of 4 groups"):
            await other.put(answered([*children.prompts(1)[0]]), "hand", timeout_s=0.05)
        drawing = asyncio.create_task(internals(other).until(lambda: _draw_one(other), "a prompt", ("math",)))
        putting = asyncio.create_task(other.put(answered([*children.prompts(1)[0]]), "hand"))
        await eventually(lambda: _waits_at(name, 2))
        async with buffer.lease_batch({"math": 2}, train_step=1) as lease:
            assert ids(lease.groups) == [3, 2]
        assert ids(await drawing) == [4]
        assert await putting is not None
        assert await _draw_one(other) is None
        archived = await buffer.query({"status": "archived"})
        assert len(archived) == 1
        assert await closed_ledger(buffer) == {"issued": 5, "buffered": 2, "trained": 2, "in_flight": 1}


async def _draw_one(buffer: ReplayBuffer) -> list[list[RolloutState]] | None:
    """A new prompt, if there is room for it."""
    cursor, _ = await internals(buffer).position("math")
    return (await internals(buffer).issue(children.prompts(1), "math", cursor=cursor)).groups or None


async def test_a_manager_runs_on_a_hosted_buffer_and_its_checkpoint_resumes_elsewhere(
    buffer: RayReplayBuffer, tmp_path: Path
) -> None:
    async def answer(state: RolloutState) -> None:
        await asyncio.sleep(0)
        state.response, state.response_ids = "391", [3, 9, 1]

    def manager_on(buffer: ReplayBuffer) -> DisaggregatedAgentLoopManager:
        strategy = AsyncProduceStrategy(buffer, max_staleness=1, progress=NoProgress())
        prompts = [{"prompt": str(number)} for number in range(40)]
        sampler = Sampler(prompts, group_size=2, shuffle=False)
        task = ManagedTask(name="managed", sampler=sampler, agent_loop=FunctionAgentLoop(answer), strategy=strategy)
        return DisaggregatedAgentLoopManager([task], buffer)

    trained: list[int] = []

    async def steps(manager: DisaggregatedAgentLoopManager, *numbers: int) -> None:
        for step in numbers:
            async with manager.get_batch(4, step, timeout_s=HANG_S) as batch:
                trained.extend(ids(batch.groups))
            await manager.save(tmp_path / "checkpoint", model_step=step)
            await manager.pause_produce()
            await manager.continue_produce(model_step=step)

    async with manager_on(buffer) as manager:
        producer = asyncio.create_task(manager.produce_loop(4))
        await steps(manager, 1, 2, 3)
    await producer
    assert (await closed_ledger(buffer, "managed"))["trained"] == 12
    # Everything continues in one process, from the last checkpoint.
    async with ReplayBuffer() as local, manager_on(local) as manager:
        assert await manager.resume(tmp_path / "checkpoint") == 3
        await manager.continue_produce(3)
        producer = asyncio.create_task(manager.produce_loop(4))
        await steps(manager, 4, 5)
        await manager.shutdown()
        await producer
        assert (await closed_ledger(local, "managed"))["trained"] == 20
    assert sorted(trained) == sorted(set(trained)), "trained twice"
    assert len(trained) == 20


# --- waiting ------------------------------------------------------------------------------------------


def _count_calls(actor: Any) -> None:
    """In the host's process: count the calls of each client, waits among them."""
    host = actor._host
    host.counts = {}

    def counted(method: Any) -> Any:
        async def call(request: wire.Request, *rest: Any) -> Any:
            counts = host.counts.setdefault(request.client, {})
            counts[request.op] = counts.get(request.op, 0) + 1
            return await method(request, *rest)

        return call

    host.call, host.begin_wait = counted(type(host).call.__get__(host)), counted(type(host).begin_wait.__get__(host))


def _in_host(name: str, look: Callable[[Any], Any]) -> asyncio.Future[Any]:
    return asyncio.wrap_future(children.host_of(name).__ray_call__.remote(look).future())


async def _waits_at(name: str, n: int) -> bool:
    try:
        # This look is a separate call, beside those of the host; one that is late is repeated.
        return bool(await asyncio.wait_for(_in_host(name, lambda actor: len(actor._host._waits)), 10) == n)
    except TimeoutError:
        return False


async def test_g11_a_wait_is_one_long_call(shared: str, buffer: RayReplayBuffer) -> None:
    await buffer.count("wait", COMPLETED)
    async with connected(shared) as producer:
        await producer.count("wait", COMPLETED)
        await _in_host(shared, _count_calls)
        leasing = asyncio.create_task(buffer.lease_batch({"wait": 64}, train_step=1, timeout_s=HANG_S)._granted())
        await eventually(lambda: _waits_at(shared, 1))
        for _ in range(64):
            await producer.put(answered([*children.prompts(1)[0]]), "wait")
        lease = await leasing
        await lease.ack()
        counts = await _in_host(shared, lambda actor: actor._host.counts)
        assert counts[producer.storage.link.client]["put"] == 64  # type: ignore[attr-defined]
        mine = counts[buffer.storage.link.client]  # type: ignore[attr-defined]
        assert mine["wait"] <= 2
        assert sum(mine.values()) <= 8, f"it should wait in one call, and made {mine}"


async def test_g11_one_wait_more_than_there_are_places_is_refused(shared: str, buffer: RayReplayBuffer) -> None:
    def wait(timeout_s: float | None = None) -> asyncio.Task[Any]:
        return asyncio.create_task(buffer.lease_batch({"places": 1}, train_step=1, timeout_s=timeout_s)._granted())

    waiting = [wait() for _ in range(PLACES)]

    async def all_wait() -> bool:
        for task in waiting:
            if task.done():
                task.result()
        return await _waits_at(shared, PLACES)

    await eventually(all_wait)
    with pytest.raises(TooManyWaits, match=f"{PLACES} places"):
        await wait()
    assert not any(task.done() for task in waiting)
    waiting.pop().cancel()
    await eventually(lambda: _waits_at(shared, PLACES - 1))
    waiting.append(wait())
    await eventually(lambda: _waits_at(shared, PLACES))
    # Each gets what arrives, one after the other, and then all places are free.
    await fill(buffer, PLACES, "places")
    leases = await asyncio.gather(*waiting)
    assert sorted(ids([group for lease in leases for group in lease.groups])) == list(range(PLACES))
    await eventually(lambda: _waits_at(shared, 0))
    with pytest.raises(WaitTimeout, match=f"leased {PLACES}|{PLACES} leased"):
        await wait(timeout_s=0.05)
    await eventually(lambda: _waits_at(shared, 0))
    for lease in leases:
        await lease.nack()


async def test_g11_closing_ends_waits(shared: str) -> None:
    buffer = await asyncio.to_thread(RayReplayBuffer.connect, shared)
    waits = [
        asyncio.create_task(buffer.lease_batch({"closing": 1}, train_step=1)._granted()),
        asyncio.create_task(buffer.wait_ready({"closing": 1})),
    ]
    await eventually(lambda: _waits_at(shared, 2))
    assert "closing" in await buffer.explain_wait()
    await buffer.close()
    for wait in waits:
        with pytest.raises(BufferClosed):
            await wait
    await eventually(lambda: _waits_at(shared, 0))


async def test_g03_a_cancel_at_any_moment_leaves_nothing_held(shared: str, buffer: RayReplayBuffer) -> None:
    choice = random.Random(3)
    await fill(buffer, 4, "cancel")
    for number in range(60):
        if number % 3 == 0:
            working: asyncio.Task[Any] = asyncio.create_task(
                buffer.lease_batch({"cancel": choice.choice((2, 5))}, train_step=1)._granted()
            )
        elif number % 3 == 1:
            working = asyncio.create_task(buffer.put(answered([*children.prompts(1)[0]]), "cancelled puts"))
        else:
            working = asyncio.create_task(buffer.wait_ready({"cancel": 9}))
        for _ in range(choice.randint(0, 6)):
            await asyncio.sleep(choice.choice((0, 0, 0.0005, 0.002)))
        working.cancel()
        result: Any = (await asyncio.gather(working, return_exceptions=True))[0]
        if isinstance(result, Lease):
            await result.nack()
    assert await closed_ledger(buffer, "cancel") == {"issued": 4, "buffered": 4}
    await closed_ledger(buffer, "cancelled puts")
    await eventually(lambda: _waits_at(shared, 0))
    async with buffer.lease_batch({"cancel": 4}, train_step=1) as lease:
        assert sorted(ids(lease.groups)) == [0, 1, 2, 3]


async def test_g03_a_lease_that_is_cancelled_while_its_host_is_stopped_is_held_by_nobody(
    shared: str, buffer: RayReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "_PATIENCE_S", 0.1)
    await fill(buffer, 2, "away")
    pid = await asyncio.to_thread(children.host_pid, shared)
    os.kill(pid, signal.SIGSTOP)
    try:
        leasing = asyncio.create_task(buffer.lease_batch({"away": 2}, train_step=1)._granted())
        await asyncio.sleep(0.1)  # the call is on its way
        leasing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leasing
    finally:
        os.kill(pid, signal.SIGCONT)
    lease = await buffer.lease_batch({"away": 2}, train_step=1, timeout_s=HANG_S)
    assert ids(lease.groups) == [0, 1]
    await lease.ack()
    assert await closed_ledger(buffer, "away") == {"issued": 2, "trained": 2}
    link = buffer.storage.link  # type: ignore[attr-defined]
    assert not link._open  # both calls were answered


async def test_g06_old_groups_expire_whichever_client_advances_the_step(shared: str, buffer: RayReplayBuffer) -> None:
    async with connected(shared) as other:
        for client in (buffer, other):
            await client.set_limits("aging", stale_threshold=2)
        group = answered([*children.prompts(1)[0]])
        await buffer.put(group, "aging", model_step=0, current_train_step=1)
        with pytest.raises(WaitTimeout):
            await other.lease_batch({"aging": 2}, train_step=5, timeout_s=0.05)
        assert await buffer.count("aging", Status.EXPIRED) == 1
        assert len(await internals(buffer).redraw(2, "aging")) == 1
        assert await closed_ledger(buffer, "aging") == {"issued": 1, "in_flight": 1}
