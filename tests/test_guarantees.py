"""The guarantees that part of the house keeps by itself, each by name. docs/guarantees.md lists them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import LostLease, MemoryStorage, ReplayBuffer, StalenessReplayPolicy, Status, WaitTimeout, sample_staleness
from forebay.buffer.internal import internals
from forebay.testing import make_group
from tests.processes import HANG_S
from tests.support import closed_ledger, draw, turns


async def test_g01_the_ledger_is_closed_while_everything_happens_at_once() -> None:
    buffer = ReplayBuffer(max_groups=16)
    await buffer.set_limits("math", stale_threshold=3)
    checked = 0

    async def produce() -> None:
        drawn = 0
        while drawn < 120:
            groups = await draw(buffer, 2)  # none while the buffer is full
            drawn += len(groups)
            await turns(1)
            for group in groups:
                for state in group:
                    state.status = [Status.COMPLETED, Status.ABORTED, Status.FAILED][drawn // 2 % 3]
                    state.response = "x"
                await buffer.put(group, "math")
                await turns(1)

    async def retry() -> None:
        while True:
            for group in await internals(buffer).redraw(2, "math"):
                for state in group:
                    state.status, state.response = Status.COMPLETED, "x"
                await buffer.put(group, "math")
            await turns(1)

    async def train() -> None:
        for step in range(1, 10_000):
            async with buffer.lease_batch({"math": 2}, train_step=step) as lease:
                await turns(1)
                if step % 5 == 0:
                    await lease.reject(lease.groups[:1], "rejected")

    async def watch() -> None:
        nonlocal checked
        while True:
            await closed_ledger(buffer)
            checked += 1
            await turns(1)

    others = [asyncio.create_task(work()) for work in (retry, train, watch)]
    await produce()
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert checked > 50
    assert (await closed_ledger(buffer))["issued"] == 120
    assert {"failed", "trained", "discarded"} <= set(await closed_ledger(buffer))


async def test_g02_two_prompts_are_never_mixed_and_groups_appear_whole() -> None:
    buffer = ReplayBuffer()
    groups = [make_group(4, group_id=number, text=f"prompt {number}") for number in range(50)]
    seen: list[int] = []

    async def consume() -> None:
        while len(seen) < 50:
            for group in await buffer.get(3, "math", Status.COMPLETED):
                assert len(group) == 4
                assert len({state.message[0]["content"] for state in group}) == 1
                assert len({state.group_id for state in group}) == 1
                seen.append(group[0].group_id or 0)
            await turns(1)

    consumer = asyncio.create_task(consume())
    await buffer.put_many(groups[:25], "math")
    for group in groups[25:]:
        await buffer.put(group, "math")
        await turns(1)
    await consumer
    assert sorted(seen) == list(range(50))


async def test_g05_a_batch_that_is_not_acknowledged_is_handed_out_again() -> None:
    buffer = ReplayBuffer()
    await buffer.put_many([make_group(group_id=number) for number in range(3)], "math")
    with pytest.raises(RuntimeError, match="out of memory"):
        async with buffer.lease_batch({"math": 2}, train_step=1):
            raise RuntimeError("out of memory")
    async with buffer.lease_batch({"math": 2}, train_step=1) as again:
        assert [group[0].group_id for group in again.groups] == [0, 1]
    assert await closed_ledger(buffer) == {"issued": 3, "buffered": 1, "trained": 2}


async def test_g05_a_cancelled_trainer_gives_its_batch_back() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math")

    async def train() -> None:
        async with buffer.lease_batch({"math": 1}, train_step=1):
            await asyncio.Event().wait()

    trainer = asyncio.create_task(train())
    await turns()
    assert await closed_ledger(buffer) == {"issued": 1, "leased": 1}
    trainer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trainer
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}


async def test_g05_a_holder_that_was_thought_dead_cannot_acknowledge() -> None:
    clock = iter(range(0, 100_000, 7)).__next__  # every look at the clock is seven seconds later
    storage = MemoryStorage(clock=lambda: float(clock()))
    dead = ReplayBuffer(storage=storage, lease_s=10.0)
    alive = ReplayBuffer(storage=storage)
    await dead.put(make_group(), "math")
    lease = await dead.lease_batch({"math": 1}, train_step=1)
    assert dead._session.heartbeat is not None
    dead._session.heartbeat.stop()
    async with alive.lease_batch({"math": 1}, train_step=1, timeout_s=HANG_S) as taken:
        assert len(taken.groups) == 1
        with pytest.raises(LostLease, match="taken away"):
            await lease.ack()
    assert await closed_ledger(alive) == {"issued": 1, "trained": 1}


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    asked=st.lists(st.integers(1, 16), min_size=1, max_size=6),
    threshold=st.integers(1, 5),
    oldest_first=st.booleans(),
)
def test_g06_nothing_at_or_over_its_threshold_is_handed_out(
    steps: list[int], asked: list[int], threshold: int, oldest_first: bool
) -> None:
    async def run() -> None:
        buffer = ReplayBuffer(StalenessReplayPolicy() if oldest_first else None)
        await buffer.set_limits("math", stale_threshold=threshold)
        for step in steps:
            await buffer.put(make_group(1), "math", model_step=step)
        for train_step in asked:
            fresh = await buffer.query(
                {"place": "buffered", "status": "completed", "oldest_step": {"$gte": train_step - threshold}}
            )
            try:
                lease = await buffer.lease_batch({"math": 1}, train_step=train_step, timeout_s=0)
            except WaitTimeout:
                assert not fresh, "a fresh group was not handed out"
                continue
            for group in lease.groups:
                assert all(sample_staleness(state, train_step) < threshold for state in group)
                assert all(state.seq_staleness == sample_staleness(state, train_step) for state in group)

    asyncio.run(run())


async def test_g06_holds_across_a_restart() -> None:
    buffer = ReplayBuffer()
    await buffer.set_limits("math", stale_threshold=2)
    await buffer.put(make_group(group_id=1), "math", model_step=0)
    await buffer.put(make_group(group_id=2), "math", model_step=5)
    await buffer.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=6)
    await buffer.close()
    again = ReplayBuffer(storage=buffer.storage)  # nobody sets the limits anew
    await again.put(make_group(group_id=3), "math", model_step=3)
    groups = await again.get(9, "math", Status.COMPLETED)
    assert [group[0].group_id for group in groups] == [2]


async def test_g10_refreshing_leaves_the_loop_free() -> None:
    buffer = ReplayBuffer()
    await buffer.put_many([make_group(1, tokens=1) for _ in range(3_000)], "math", model_step=0)
    largest, seen = 0, 0

    async def tick() -> None:
        nonlocal largest, seen
        while True:
            expired = await buffer.count("math", Status.EXPIRED)
            largest, seen = max(largest, expired - seen), expired
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    await buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=9)
    await turns()
    ticker.cancel()
    assert seen == 3_000
    assert largest <= 64, f"{largest} groups were expired in one go"


async def test_g10_a_query_of_everything_leaves_the_loop_free() -> None:
    buffer = ReplayBuffer()
    await buffer.put_many([make_group(1, tokens=1) for _ in range(3_000)], "math")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    assert await buffer.query({"tags.nothing": 1}) == []
    ticker.cancel()
    assert ticks >= 3_000 // 512


async def test_g10_putting_many_leaves_the_loop_free() -> None:
    buffer = ReplayBuffer()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    await buffer.put_many([make_group(1, tokens=1) for _ in range(640)], "math")
    ticker.cancel()
    assert ticks >= 640 // 64


async def test_g11_a_waiting_trainer_wakes_on_the_put_itself() -> None:
    buffer = ReplayBuffer()
    loop = asyncio.get_running_loop()
    waiting = asyncio.ensure_future(buffer.wait_ready({"math": 2}))
    await buffer.put(make_group(), "math")
    await turns()
    assert not waiting.done()
    started = loop.time()
    await buffer.put(make_group(), "math")
    await turns()
    assert waiting.done(), f"not woken by the put, {loop.time() - started} s ago"


async def test_g11_a_wait_that_times_out_says_what_it_was_waiting_for() -> None:
    buffer = ReplayBuffer(max_groups=8)
    await buffer.put(make_group(), "math")
    await draw(buffer, 2)
    with pytest.raises(WaitTimeout) as caught:
        await buffer.lease_batch({"math": 3, "code": 1}, train_step=7, timeout_s=0)
    explanation = str(caught.value)
    for part in (
        "completed groups: 3 of task 'math', 1 of task 'code' for train step 7",
        "task 'math': buffered 1 completed; 2 in flight",
        "in flight: 2 groups held by",
        "the oldest (group 0)",
        "task 'code': nothing was ever put or drawn under this name",
        "capacity: 3 of 8 groups in use",
    ):
        assert part in explanation
    assert isinstance(caught.value, TimeoutError)
    assert await closed_ledger(buffer) == {"issued": 3, "buffered": 1, "in_flight": 2}


async def test_g11_a_wait_can_be_explained_while_it_lasts() -> None:
    buffer = ReplayBuffer(max_groups=1)
    await buffer.put(make_group(), "math")
    putting = asyncio.ensure_future(buffer.put(make_group(), "math"))
    await turns()
    explanation = await buffer.explain_wait()
    assert "capacity for 1 groups of task 'math'" in explanation
    assert "nothing new fits until groups leave" in explanation
    assert (await buffer.stats())["forebay/waiting"] == 1
    await buffer.get(1, "math", Status.COMPLETED)
    await putting
    assert (await buffer.explain_wait()).startswith("nothing is waiting")
