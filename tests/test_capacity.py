"""Room in bytes: reserved when a group is issued, true when it is back, and never waited for in vain."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import (
    AgentLoopManager,
    AsyncProduceStrategy,
    AsyncReplayBufferConfig,
    DisaggregatedAgentLoopManager,
    FunctionAgentLoop,
    InvalidConfig,
    ManagedTask,
    MemoryStorage,
    ReplayBuffer,
    RolloutState,
    Sampler,
    Status,
    Storage,
    SyncProduceStrategy,
    WaitTimeout,
)
from forebay.buffer.internal import internals
from forebay.core.capacity import MAX_SIZES, note_size, response_size_p99, rounded_up
from forebay.produce import NoProgress
from forebay.storage.local.pandas import PandasStorage
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import make_group
from forebay.testing.simulate import run
from tests.support import closed_ledger, draw

MAX_BYTES = 10_000


# --- sizes of responses -------------------------------------------------------------------------------


@given(size=st.integers(0, 2**50))
def test_a_size_is_rounded_up_by_at_most_a_quarter(size: int) -> None:
    assert size <= rounded_up(size) <= size * 5 / 4


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 100_000), min_size=1, max_size=MAX_SIZES - 1))
def test_the_percentile_of_the_sizes_errs_upwards_by_at_most_a_quarter(sizes: list[int]) -> None:
    seen: dict[int, int] = {}
    for size in sizes:
        note_size(seen, rounded_up(size))
    exact = sorted(sizes)[-(len(sizes) // 100) - 1]
    found = response_size_p99(seen)
    assert found is not None
    assert exact <= found <= exact * 5 / 4


def test_the_sizes_follow_a_run_that_changes() -> None:
    seen: dict[int, int] = {}
    for size in [100] * 5_000 + [10] * 10_000:
        note_size(seen, size)
    assert sum(seen.values()) < MAX_SIZES
    assert response_size_p99(seen) == 10


# --- reservations -------------------------------------------------------------------------------------


def answered(group: list[RolloutState], size: int, status: Status = Status.COMPLETED) -> list[RolloutState]:
    """The group back from its producer, each member with a response of this many bytes, at least one."""
    for state in group:
        state.response_ids, state.version_spans = np.zeros(max(1, size), np.int8), ()
        state.status = status
    return group


async def test_what_is_in_flight_counts_with_its_reservation_until_its_true_size_is_known() -> None:
    buffer = ReplayBuffer(max_bytes=MAX_BYTES, expect_group_bytes=4_000)
    (first,) = await draw(buffer)
    usage = (await buffer.storage.summary(())).usage
    assert usage.reserved == 4_000
    await draw(buffer)
    cursor, _ = await internals(buffer).position("math")
    assert (await internals(buffer).issue([make_group(status=Status.INIT)], "math", cursor=cursor)).taken == 0
    await buffer.put(answered(first, 100), "math")
    (third,) = await draw(buffer)  # the first one turned out to be small, and so will this one
    (record,) = await buffer.query({"group_id": third[0].group_id})
    assert record.reserved_bytes == record.bytes + 2 * rounded_up(100)


async def test_a_group_that_expires_keeps_the_room_that_it_had() -> None:
    buffer = ReplayBuffer(max_bytes=MAX_BYTES, expect_group_bytes=6_000)
    (group,) = await draw(buffer)
    await buffer.put(answered(group, 2_000), "math", model_step=0)
    (before,) = await buffer.query({})
    await buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=5)
    (after,) = await buffer.query({})
    usage = (await buffer.storage.summary(())).usage
    assert after.status is Status.EXPIRED
    assert usage.bytes + usage.reserved == before.bytes == after.reserved_bytes
    await internals(buffer).redraw(1, "math")
    assert (await buffer.storage.summary(())).usage == usage


async def test_one_group_always_fits_into_an_empty_buffer() -> None:
    buffer = ReplayBuffer(max_bytes=MAX_BYTES)
    assert MAX_BYTES < 2**20  # by default a group is expected to be larger than all of it
    await draw(buffer)
    cursor, _ = await internals(buffer).position("math")
    prompts = [make_group(status=Status.INIT) for _ in range(2)]
    assert (await internals(buffer).issue(prompts, "math", cursor=cursor)).taken == 0


def _storages(directory: Path) -> list[Callable[[], Storage]]:
    return [MemoryStorage, PandasStorage, lambda: SQLiteStorage(directory / "store.db", synchronous="NORMAL")]


_actions = st.tuples(
    st.sampled_from(["issue", "issue", "complete", "complete", "abort", "redraw", "hand", "take", "expire"]),
    st.integers(0, 3_000),
)


@pytest.mark.parametrize("number", [0, 1, 2], ids=["memory", "pandas", "sqlite"])
def test_what_is_held_exceeds_max_bytes_by_at_most_what_groups_grow_beyond_their_reservations(
    number: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @settings(max_examples=60 if number == 0 else 15, deadline=None)
    @given(actions=st.lists(_actions, max_size=40), expected=st.integers(0, 2_000))
    def check(actions: list[tuple[str, int]], expected: int) -> None:
        storage = _storages(tmp_path_factory.mktemp("capacity"))[number]()
        asyncio.run(_check_bound(storage, actions, expected))

    check()


async def _check_bound(storage: Storage, actions: list[tuple[str, int]], expected: int) -> None:
    async with ReplayBuffer(storage=storage, max_bytes=MAX_BYTES, expect_group_bytes=expected) as buffer:
        owned: dict[int, int] = {}  # the room that a group may fill, by uid
        flying: list[list[RolloutState]] = []
        step = 1
        for action, size in actions:
            match action:
                case "issue":
                    cursor, _ = await internals(buffer).position("math")
                    prompts = [make_group(status=Status.INIT)]
                    flying += (await internals(buffer).issue(prompts, "math", cursor=cursor)).groups
                case "complete" | "abort" if flying:
                    status = Status.COMPLETED if action == "complete" else Status.ABORTED
                    await buffer.put(answered(flying.pop(size % len(flying)), size, status), "math", model_step=step)
                case "redraw":
                    flying += await internals(buffer).redraw(1, "math")
                case "hand":
                    by_hand = answered(make_group(status=Status.INIT), size)
                    with suppress(WaitTimeout):
                        await buffer.put(by_hand, "math", model_step=step, timeout_s=0)
                case "take":
                    await buffer.get(1, "math", Status.COMPLETED)
                case "expire":
                    step += 1
                    await buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=step + 1)
            records = await buffer.query({})
            for record in records:
                room = owned.setdefault(record.uid, record.reserved_bytes)
                if record.status is Status.COMPLETED:
                    owned[record.uid] = min(room, record.bytes)
            beyond = sum(max(0, record.bytes - owned[record.uid]) for record in records)
            usage = (await storage.summary(())).usage
            assert usage.bytes == sum(record.bytes for record in records)
            assert usage.bytes <= MAX_BYTES + beyond
            assert usage.reserved == sum(max(0, record.reserved_bytes - record.bytes) for record in records)
        await closed_ledger(buffer)


# --- what can never come ------------------------------------------------------------------------------


def a_task(
    buffer: ReplayBuffer, sizes: Callable[[], int], *, ahead: bool, name: str = "math", k: int = 2
) -> ManagedTask:
    async def answer(state: RolloutState) -> None:
        await asyncio.sleep(1)
        state.response_ids = np.zeros(sizes(), np.int8)

    strategy = (
        AsyncProduceStrategy(buffer, max_staleness=3, over_sample_threshold=0.5, progress=NoProgress())
        if ahead
        else SyncProduceStrategy(buffer, progress=NoProgress())
    )
    prompts = Sampler([{"prompt": f"q{number}"} for number in range(100)], group_size=k)
    return ManagedTask(name=name, sampler=prompts, agent_loop=FunctionAgentLoop(answer), strategy=strategy)


async def train_ahead(buffer: ReplayBuffer, tasks: list[ManagedTask], batch: int, steps: int) -> None:
    async with DisaggregatedAgentLoopManager(tasks, buffer) as manager:
        producer = asyncio.create_task(manager.produce_loop(batch))
        try:
            for step in range(1, steps + 1):
                async with manager.get_batch(batch, step):
                    await asyncio.sleep(1)
                await manager.pause_produce()
                await manager.continue_produce(step)
        finally:
            await manager.shutdown()
            await asyncio.wait((producer,))
            if not producer.cancelled():
                producer.exception()


async def train_in_turns(buffer: ReplayBuffer, tasks: list[ManagedTask], batch: int, steps: int) -> None:
    async with AgentLoopManager(tasks, buffer) as manager:
        for step in range(1, steps + 1):
            async with manager.produce_batch(batch, step, model_step=step - 1):
                await asyncio.sleep(1)


@pytest.mark.parametrize("ahead", [True, False])
def test_g11_a_batch_that_can_never_fit_ends_the_wait_at_once_with_the_numbers(ahead: bool) -> None:
    async def main() -> None:
        buffer = AsyncReplayBufferConfig(max_bytes=20_000, expect_group_bytes=6_000).build()
        train = train_ahead if ahead else train_in_turns
        with pytest.raises(InvalidConfig, match=r"of 8 groups of task 'math' are buffered, none is in flight .*20000"):
            await train(buffer, [a_task(buffer, lambda: 3_000, ahead=ahead)], 8, 3)
        assert asyncio.get_running_loop().time() < 60
        assert (await closed_ledger(buffer))["buffered"] >= 3

    run(main, seed=1)


@pytest.mark.parametrize("long", [20_000, 40_000, 45_000])
@pytest.mark.parametrize("ahead", [True, False])
def test_one_long_answer_does_not_end_the_run(ahead: bool, long: int) -> None:
    async def main() -> None:
        buffer = AsyncReplayBufferConfig(max_bytes=100_000, expect_group_bytes=90_000).build()
        answers = iter([long, long])  # of the first group; its batch takes most of the room
        train = train_ahead if ahead else train_in_turns
        await train(buffer, [a_task(buffer, lambda: next(answers, 100), ahead=ahead)], 8, 3)
        assert (await closed_ledger(buffer))["trained"] == 24

    run(main, seed=1)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_batch_can_never_come_only_when_buffered_groups_leave_no_room_for_a_prompt(ahead: bool) -> None:
    async def main() -> None:
        buffer = AsyncReplayBufferConfig(max_bytes=100_000, expect_group_bytes=90_000).build()
        answers = iter([60_000, 60_000])
        train = train_ahead if ahead else train_in_turns
        with pytest.raises(InvalidConfig, match=r"the next prompt \([0-9,]+ bytes without responses\) does not fit"):
            await train(buffer, [a_task(buffer, lambda: next(answers, 100), ahead=ahead)], 8, 3)
        assert (await buffer.storage.summary()).usage.bytes > 100_000
        line = await closed_ledger(buffer)
        assert line["buffered"] == line["issued"] < 8

    run(main, seed=1)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_batch_that_fits_is_trained_on_although_more_was_expected_of_the_groups(ahead: bool) -> None:
    async def main() -> None:
        buffer = AsyncReplayBufferConfig(max_bytes=100_000, expect_group_bytes=90_000).build()
        train = train_ahead if ahead else train_in_turns
        await train(buffer, [a_task(buffer, lambda: 1_000, ahead=ahead)], 8, 3)
        assert (await closed_ledger(buffer))["trained"] == 24

    run(main, seed=1)


def test_a_lease_that_waits_beside_a_producer_without_room_ends_at_once() -> None:
    async def main() -> None:
        buffer = ReplayBuffer(max_groups=2)
        sampler = Sampler([{"prompt": "q"}]).with_buffer(buffer)
        waiting = asyncio.ensure_future(buffer.lease_batch({"math": 1, "code": 1}, train_step=1).__aenter__())
        for _ in range(2):
            await buffer.put(answered(await sampler.sample("math"), 10), "math", model_step=0)
        drawing = asyncio.ensure_future(sampler.sample("code"))
        with pytest.raises(InvalidConfig, match=r"0 of 1 groups of task 'code'.* 2 of 2 groups in use"):
            await waiting
        drawing.cancel()

    run(main, seed=1)


def test_a_lease_keeps_waiting_while_another_trainer_may_take_what_fills_the_buffer() -> None:
    async def main() -> None:
        buffer = ReplayBuffer(max_groups=1)
        sampler = Sampler([{"prompt": "q"}]).with_buffer(buffer)
        await buffer.put(answered(await sampler.sample("code"), 10), "code", model_step=0)
        waiting = asyncio.ensure_future(buffer.lease_batch({"math": 1}, train_step=1).__aenter__())
        drawing = asyncio.ensure_future(sampler.sample("math"))
        await asyncio.sleep(60)
        assert not waiting.done()
        async with buffer.lease_batch({"code": 1}, train_step=1):
            pass
        await buffer.put(answered(await drawing, 10), "math", model_step=0)
        assert len((await waiting).groups) == 1

    run(main, seed=1)


@pytest.mark.parametrize("seed", range(40))
def test_g11_random_sizes_and_limits_train_or_say_why_not_and_never_wait_silently(seed: int) -> None:
    chance = random.Random(seed)
    ahead = chance.random() < 0.6
    batch = chance.choice((1, 2, 4, 8))
    most = chance.choice((50, 1_000, 4_000))

    async def main() -> None:
        buffer = AsyncReplayBufferConfig(
            max_bytes=chance.choice((3_000, 20_000, 60_000)),
            max_groups=chance.choice((None, 2 * batch)),
            expect_group_bytes=chance.choice((0, 1_000, 2**20)),
        ).build()
        names = chance.choice((["math"], ["math", "code"]))
        tasks = [a_task(buffer, lambda: chance.randint(1, most), ahead=ahead, name=name) for name in names]
        try:
            await (train_ahead if ahead else train_in_turns)(buffer, tasks, batch, 4)
        except InvalidConfig:
            assert ahead or not (await buffer.storage.summary(holdings=True)).holdings
        else:
            trained = sum(line["trained"] for line in (await buffer.ledger()).values())
            assert trained == 4 * batch
        await closed_ledger(buffer)

    run(main, seed=seed)  # SimulationStuck if it waits forever


# --- tasks that nobody produces -----------------------------------------------------------------------


async def _with_leftovers(groups: int, max_groups: int) -> ReplayBuffer:
    buffer = AsyncReplayBufferConfig(max_groups=max_groups).build()
    for _ in range(groups):
        await buffer.put(make_group(), "code", model_step=0)
    return buffer


def test_room_that_a_removed_task_holds_is_named_with_the_way_to_free_it() -> None:
    async def main() -> None:
        buffer = await _with_leftovers(3, 4)
        task = a_task(buffer, lambda: 10, ahead=False)
        with pytest.raises(InvalidConfig, match=r"3 of them belong to 'code', which no task here produces .*discard"):
            await train_in_turns(buffer, [task], 2, 1)
        async with AgentLoopManager([task], buffer) as manager:
            assert "4 of 4 groups in use, 3 of them belong to 'code'" in await manager.explain_wait()
            assert (await manager.stats())["forebay/groups_kept_aside"] == 3
            assert await buffer.discard({"task_name": "code"}, "task_removed") == 3
            assert (await manager.stats())["forebay/groups_kept_aside"] == 0
        await train_in_turns(buffer, [a_task(buffer, lambda: 10, ahead=False)], 2, 1)

    run(main, seed=1)


async def test_without_a_manager_no_task_counts_as_removed() -> None:
    buffer = await _with_leftovers(3, 4)
    assert "belong to" not in await buffer.explain_wait()
    assert (await buffer.stats())["forebay/groups_kept_aside"] == 0
