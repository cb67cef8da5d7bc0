"""Colocated: one call, one full batch; what it says of itself, how it ends when something goes wrong.

The tools of the tests of managers stand here, too: `Plane` brings a buffer, tasks and a manager together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import pytest
from msgspec.structs import replace

from forebay import (
    AgentLoop,
    AgentLoopManager,
    AsyncProduceStrategy,
    BatchRequest,
    Budgets,
    BufferClosed,
    DisaggregatedAgentLoopManager,
    FunctionAgentLoop,
    InvalidConfig,
    InvalidInput,
    InvalidRecord,
    LostLease,
    ManagedTask,
    MemoryStorage,
    NoProgress,
    ProduceError,
    ProduceStrategy,
    ReplayBuffer,
    RolloutState,
    Sampler,
    SamplerWithReplayBuffer,
    Status,
    StorageError,
    SyncProduceStrategy,
    TaskConfig,
    TaskResult,
    Timeouts,
    TooManyFailures,
    WeightsTooOld,
)
from forebay.buffer.internal import internals
from forebay.core.validate import RESERVED_NAMES
from forebay.manager.base import Manager
from forebay.testing import make_group
from forebay.testing.simulate import LongTail, SimulatedEngine, SimulatedLoop, check_ledger, run
from tests.support import closed_ledger, taken, turns
from tests.test_strategy import PROMPTS, after, answer, at_once, ids, never, now, simulated, sorted_ids

M = TypeVar("M", bound=Manager)
Answer = Callable[[RolloutState], Awaitable[Any]]

# --- tools ----------------------------------------------------------------------------------------------


class Plane(Generic[M]):
    """A buffer, tasks with their weights, and a manager. `loop` is one for all tasks, or one for each."""

    def __init__(
        self,
        kind: type[M],
        tasks: Mapping[str, float] | None = None,
        *,
        loop: AgentLoop | Answer | Mapping[str, AgentLoop | Answer] = at_once,
        make: type[SyncProduceStrategy] | type[AsyncProduceStrategy] = SyncProduceStrategy,
        members: int = 2,
        buffer: ReplayBuffer | None = None,
        interval: int = 1,
        prompts: Any = PROMPTS,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        **settings: Any,
    ) -> None:
        self.buffer = ReplayBuffer() if buffer is None else buffer
        self.loops: dict[str, AgentLoop] = {}
        self.strategies: dict[str, ProduceStrategy] = {}
        made = []
        for name, weight in ({"math": 1.0} if tasks is None else tasks).items():
            chosen = loop[name] if isinstance(loop, Mapping) else loop
            self.loops[name] = chosen if isinstance(chosen, AgentLoop) else FunctionAgentLoop(chosen)
            options: dict[str, Any] = {"progress": NoProgress(), "sync_weights_interval": interval} | settings
            self.strategies[name] = make(self.buffer, **options, **(each or {}).get(name, {}))
            made.append(
                ManagedTask(
                    name=name,
                    sampler=Sampler(prompts, group_size=members, shuffle=False),
                    agent_loop=self.loops[name],
                    strategy=self.strategies[name],
                    weight=weight,
                )
            )
        self.manager: M = kind(made, self.buffer, sync_weights_interval=interval)

    async def ledger(self, name: str = "math") -> dict[str, int]:
        return await closed_ledger(self.buffer, name)

    async def check_idle(self) -> None:
        """Nothing is under way: neither in the books nor in a strategy; the ledger is closed."""
        ledger = await self.buffer.ledger()
        check_ledger(ledger)
        assert {name: line["in_flight"] for name, line in ledger.items() if line["in_flight"]} == {}
        assert {name: s.in_flight(name) for name, s in self.strategies.items() if s.in_flight(name)} == {}


def colocated(tasks: Mapping[str, float] | None = None, **options: Any) -> Plane[AgentLoopManager]:
    return Plane(AgentLoopManager, tasks, **options)


def by_group(*seconds: float) -> Answer:
    """A function that answers group 0 after the first time, group 1 after the second, and so on, round and round."""

    async def slowly(state: RolloutState) -> None:
        await asyncio.sleep(seconds[(state.group_id or 0) % len(seconds)])
        answer(state)

    return slowly


def failing(after_s: float = 0.0) -> Answer:
    async def fail(state: RolloutState) -> None:
        await asyncio.sleep(after_s)
        raise RuntimeError("the engine is down")

    return fail


# --- the batch ------------------------------------------------------------------------------------------


@simulated
async def test_a_batch_is_full_and_shared_by_weight() -> None:
    plane = colocated({"b": 1, "a": 2, "c": 0}, loop=after(3))
    async with plane.manager.produce_batch(7, 1, model_step=0) as batch:
        assert (batch.step, batch.task_batch_sizes) == (1, {"b": 2, "a": 5, "c": 0})
        assert {name: sorted_ids(groups) for name, groups in batch.groups_by_task.items()} == {
            "b": [0, 1],
            "a": [0, 1, 2, 3, 4],
        }
        assert len(batch.groups) == 7
        assert {state.task_name for group in batch.groups for state in group} == {"a", "b"}
        assert now() == 3.0, "the tasks run together"
    await plane.check_idle()
    assert await plane.ledger("a") == {"issued": 5, "trained": 5}


@simulated
async def test_a_task_without_weight_never_runs() -> None:
    plane = colocated({"a": 1, "off": 0}, loop={"a": at_once, "off": failing()})
    for step in range(1, 5):
        await taken(plane.manager.produce_batch(2, step, model_step=step - 1))
    assert await plane.ledger("off") == {}


@simulated
async def test_credits_are_kept_over_the_steps() -> None:
    plane = colocated({"a": 1, "b": 1, "c": 1})
    order = []
    for step in range(1, 7):
        batch = await taken(plane.manager.produce_batch(1, step, model_step=step - 1))
        order += list(batch.groups_by_task)
    assert order == ["a", "b", "c", "a", "b", "c"]


@simulated
async def test_an_evaluation_every_third_step_reaches_every_task() -> None:
    plane = colocated({"a": 1, "b": 1, "c": 1})
    evaluated = []
    for step in (3, 6, 9):
        evaluated += list((await taken(plane.manager.produce_batch(1, step, model_step=step))).groups_by_task)
    assert evaluated == ["a", "b", "c"]


@simulated
async def test_the_fast_task_is_not_paused_before_the_slow_one_has_finished() -> None:
    plane = colocated(
        {"fast": 1, "slow": 1}, loop={"fast": by_group(1, 9), "slow": after(20)}, make=AsyncProduceStrategy,
        over_sample_threshold=1.0,
    )  # fmt: skip
    batch = await taken(plane.manager.produce_batch(2, 1, model_step=0))
    assert batch.task_results["fast"].leftover == {"completed": 1}, "what it had over-issued ended by itself"
    assert now() == 20.0
    await plane.check_idle()


@simulated
async def test_the_order_of_a_batch_does_not_depend_on_which_group_was_answered_first() -> None:
    plane = colocated(loop=by_group(3, 1, 2))
    batch = await taken(plane.manager.produce_batch(3, 1, model_step=0))
    assert ids(batch.groups) == [0, 1, 2]


@simulated
async def test_groups_that_are_left_over_are_used_next_time() -> None:
    plane = colocated(make=AsyncProduceStrategy, over_sample_threshold=1.0, max_staleness=1, loop=by_group(1, 1, 1, 50))
    first = await taken(plane.manager.produce_batch(2, 1, model_step=0))
    assert first.task_results["math"].leftover == {"aborted": 1, "completed": 1}
    assert await plane.ledger() == {"issued": 4, "buffered": 2, "trained": 2}
    second = await taken(plane.manager.produce_batch(2, 2, model_step=1))
    left = {0, 1, 2} - set(ids(first.groups))
    assert left < set(ids(second.groups))
    assert (await internals(plane.buffer).position("math"))[0] == 6, (
        "one there, one again, two new ones beyond the target"
    )
    await plane.check_idle()


@simulated
async def test_what_is_there_already_is_not_produced_again() -> None:
    plane = colocated(loop=after(5))
    await plane.buffer.put_many([make_group(), make_group()], "math", model_step=0)
    batch = await taken(plane.manager.produce_batch(3, 1, model_step=0))
    assert len(batch.groups) == 3
    assert await plane.ledger() == {"issued": 3, "trained": 3}


@simulated
async def test_token_masks_are_applied() -> None:
    plane = colocated(make=AsyncProduceStrategy, max_staleness=7, max_token_staleness=3)
    for spans in (((0, 1), (4, 1)), ((4, 2),)):
        group = make_group(1, tokens=2)
        group[0].version_spans = spans
        await plane.buffer.put(group, "math")
    async with plane.manager.produce_batch(2, 5, model_step=4) as batch:
        assert sorted((state.version_spans, list(state.response_mask or ())) for (state,) in batch.groups) == [
            (((0, 1), (4, 1)), [0, 1]),
            (((4, 2),), [1, 1]),
        ]


@simulated
async def test_what_is_too_old_is_generated_again() -> None:
    plane = colocated()
    await plane.buffer.put(make_group(model_step=0), "math", model_step=0)
    batch = await taken(plane.manager.produce_batch(1, 4, model_step=3))
    assert [state.version_spans for group in batch.groups for state in group] == [((3, 3),)] * 2
    assert await plane.ledger() == {"issued": 1, "trained": 1}


@simulated
async def test_groups_that_leave_while_another_task_is_produced_are_replaced() -> None:
    plane = colocated({"fast": 1, "slow": 1}, loop={"fast": at_once, "slow": after(20)})
    producing = asyncio.ensure_future(plane.manager.produce_batch(4, 1, model_step=0).__aenter__())
    await asyncio.sleep(10)
    assert await plane.buffer.discard({"task_name": "fast"}, "not wanted") == 2
    batch = await producing
    assert {name: len(groups) for name, groups in batch.groups_by_task.items()} == {"fast": 2, "slow": 2}
    assert await plane.ledger("fast") == {"issued": 4, "leased": 2, "discarded": 2}


@simulated
async def test_the_batch_size_may_change_from_step_to_step() -> None:
    plane = colocated({"a": 1, "b": 1})
    for step, size in enumerate((4, 1, 7, 2), 1):
        assert len((await taken(plane.manager.produce_batch(size, step, model_step=step - 1))).groups) == size


@simulated
async def test_a_step_that_was_given_back_could_not_be_asked_for_with_another_size() -> None:
    plane = colocated({"a": 2, "b": 1})
    with pytest.raises(RuntimeError, match="out of memory"):
        async with plane.manager.produce_batch(6, 1, model_step=0):
            raise RuntimeError("out of memory")
    batch = await taken(plane.manager.produce_batch(3, 1, model_step=0))
    assert batch.task_batch_sizes == {"a": 2, "b": 1}


# --- leases ---------------------------------------------------------------------------------------------


@simulated
async def test_an_awaited_batch_is_leased_until_it_is_acknowledged() -> None:
    plane = colocated()
    batch = await plane.manager.produce_batch(2, 1, model_step=0)
    assert batch.open
    assert repr(batch) == "<AsyncBatch for train step 1: 2 groups, held>"
    assert await plane.ledger() == {"issued": 2, "leased": 2}
    assert plane.manager.next_train_step == 1
    await batch.ack()
    await batch.ack()  # twice is harmless
    assert not batch.open
    assert repr(batch) == "<AsyncBatch for train step 1: 2 groups, acked>"
    assert await plane.ledger() == {"issued": 2, "trained": 2}
    assert plane.manager.next_train_step == 2
    with pytest.raises(LostLease, match="already settled"):
        await batch.nack()


@simulated
async def test_an_awaited_batch_that_is_given_back_is_handed_out_again() -> None:
    plane = colocated()
    first = await plane.manager.produce_batch(2, 1, model_step=0)
    await first.nack()
    assert not first.open
    assert await plane.ledger() == {"issued": 2, "buffered": 2}
    assert plane.manager.next_train_step == 1
    second = await taken(plane.manager.produce_batch(2, 1, model_step=0))
    assert sorted_ids(second.groups) == sorted_ids(first.groups)


@simulated
async def test_an_awaited_batch_can_be_entered_later() -> None:
    plane = colocated()
    batch = await plane.manager.produce_batch(2, 1, model_step=0)
    with pytest.raises(RuntimeError, match="out of memory"):
        async with batch:
            raise RuntimeError("out of memory")
    assert await plane.ledger() == {"issued": 2, "buffered": 2}
    assert plane.manager.next_train_step == 1
    batch = await plane.manager.produce_batch(2, 1, model_step=0)
    async with batch as entered:
        assert entered is batch
        assert await plane.ledger() == {"issued": 2, "leased": 2}
    assert await plane.ledger() == {"issued": 2, "trained": 2}
    assert plane.manager.next_train_step == 2


@simulated
async def test_batches_are_acknowledged_in_order_of_their_steps() -> None:
    plane = colocated()
    first = await plane.manager.produce_batch(2, 1, model_step=0)
    second = await plane.manager.produce_batch(2, 2, model_step=1)
    plan = plane.manager.progress.dump()
    for _ in range(2):
        with pytest.raises(InvalidInput, match="train step 2 is acknowledged, but the batch of step 1 is still leased"):
            await second.ack()
        assert (first.open, second.open) == (True, True)
        assert await plane.ledger() == {"issued": 4, "leased": 4}
        assert plane.manager.progress.dump() == plan
    await first.ack()
    await second.ack()
    assert await plane.ledger() == {"issued": 4, "trained": 4}
    assert plane.manager.next_train_step == 3


@simulated
async def test_a_batch_that_is_entered_is_acknowledged_when_the_block_ends() -> None:
    plane = colocated()
    async with plane.manager.produce_batch(2, 1, model_step=0) as batch:
        assert batch.lease.train_step == 1
        assert await plane.ledger() == {"issued": 2, "leased": 2}
        assert plane.manager.next_train_step == 1
    assert await plane.ledger() == {"issued": 2, "trained": 2}
    assert plane.manager.next_train_step == 2


@simulated
async def test_a_block_that_raises_gives_the_batch_back_and_the_step_can_be_done_again() -> None:
    plane = colocated()
    with pytest.raises(RuntimeError, match="out of memory"):
        async with plane.manager.produce_batch(2, 1, model_step=0) as first:
            raise RuntimeError("out of memory")
    assert await plane.ledger() == {"issued": 2, "buffered": 2}
    second = await taken(plane.manager.produce_batch(2, 1, model_step=0))
    assert sorted_ids(second.groups) == sorted_ids(first.groups)


@simulated
async def test_a_lost_lease_is_an_error_and_the_step_can_be_done_again() -> None:
    plane = colocated()
    with pytest.raises(LostLease):
        async with plane.manager.produce_batch(2, 1, model_step=0):
            await plane.buffer.storage.release(plane.buffer.owner)
    assert plane.manager.next_train_step == 1
    assert len((await taken(plane.manager.produce_batch(2, 1, model_step=0))).groups) == 2
    assert await plane.ledger() == {"issued": 2, "trained": 2}


@simulated
async def test_a_batch_settled_within_the_block_is_left_alone() -> None:
    plane = colocated()
    async with plane.manager.produce_batch(2, 1, model_step=0) as batch:
        await batch.lease.ack()
    assert await plane.ledger() == {"issued": 2, "trained": 2}


@simulated
async def test_rejected_groups_leave_the_batch() -> None:
    plane = colocated()
    async with plane.manager.produce_batch(3, 1, model_step=0) as batch:
        await batch.reject(batch.groups[:1], "no gradient")
        assert len(batch.groups) == len(batch.lease.groups) == 2
    assert await plane.ledger() == {"issued": 3, "trained": 2, "discarded": 1}
    assert plane.manager.next_train_step == 2


@simulated
async def test_a_batch_beside_one_that_is_still_held_was_waited_for_for_ever() -> None:
    """What is leased for one step was counted as there for the next: round and round without end."""
    plane = colocated({"a": 1, "b": 1}, loop=after(2))
    first = await plane.manager.produce_batch(4, 1, model_step=0)
    second = await plane.manager.produce_batch(4, 2, model_step=1)
    assert len(first.groups) == len(second.groups) == 4
    await first.ack()
    await second.ack()
    assert await plane.ledger("a") == {"issued": 4, "trained": 4}
    assert plane.manager.next_train_step == 3


@simulated
async def test_a_lease_of_somebody_else_does_not_count() -> None:
    plane = colocated()
    await plane.buffer.put_many([make_group(), make_group()], "math", model_step=0)
    lease = await plane.buffer.lease_batch({"math": 2}, train_step=1)
    assert len((await taken(plane.manager.produce_batch(2, 1, model_step=0))).groups) == 2
    await lease.nack()
    assert len((await taken(plane.manager.produce_batch(2, 2, model_step=1))).groups) == 2


@simulated
@pytest.mark.parametrize("max_groups", [4, 6, None])
async def test_groups_of_a_dead_owner_complete_the_batch_when_they_are_back(max_groups: int | None) -> None:
    storage = MemoryStorage(clock=now)
    dead = ReplayBuffer(storage=storage, max_groups=max_groups, lease_s=60)
    await dead.put_many([make_group() for _ in range(4)], "math", model_step=0)
    await dead.lease_batch({"math": 4}, train_step=1)  # its process is killed: no heartbeat in virtual time
    plane = colocated(buffer=ReplayBuffer(storage=storage, max_groups=max_groups), loop=after(1))
    async with plane.manager.produce_batch(4, 1, model_step=0, timeout_s=1000) as batch:
        assert len(batch.groups) == 4
        assert now() == pytest.approx(1 if max_groups is None else 60)
    assert (await plane.ledger())["trained"] == 4
    await dead.close()


@simulated
async def test_a_strategy_counts_groups_that_come_back_from_a_dead_owner() -> None:
    storage = MemoryStorage(clock=now)
    dead = ReplayBuffer(storage=storage, max_groups=4, lease_s=60)
    await dead.put_many([make_group() for _ in range(4)], "math", model_step=0)
    await dead.lease_batch({"math": 4}, train_step=1)
    plane = colocated(buffer=ReplayBuffer(storage=storage, max_groups=4), loop=after(1))
    produced = await plane.strategies["math"].produce_batch(
        plane.loops["math"], Sampler(PROMPTS), 4, "math", train_step=1, model_step=0
    )
    assert produced.complete
    assert now() == pytest.approx(60)
    await dead.close()


@simulated
async def test_a_request_is_for_one_batch() -> None:
    plane = colocated()
    request = plane.manager.produce_batch(1, 1, model_step=0)
    await request
    with pytest.raises(InvalidInput, match="already asked for"):
        await request
    with pytest.raises(InvalidInput, match="already asked for"):
        async with request:
            pass


def test_a_request_is_a_coroutine_for_asyncio() -> None:
    plane = colocated()

    def step(number: int) -> BatchRequest:
        return plane.manager.produce_batch(1, number, model_step=number - 1)

    async def others() -> None:
        assert (await asyncio.create_task(step(2))).step == 2
        assert (await asyncio.wait_for(step(3), 60)).step == 3
        assert [batch.step for batch in await asyncio.gather(step(4))] == [4]
        lease = asyncio.create_task(plane.buffer.lease_batch({"math": 1}, train_step=5))
        await turns()
        lease.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lease
        early = asyncio.create_task(step(5))
        early.cancel()
        with pytest.raises(asyncio.CancelledError):
            await early
        step(5).close()
        await plane.check_idle()

    assert asyncio.run(step(1)).step == 1
    asyncio.run(others())


@simulated
async def test_a_batch_whose_figures_could_not_be_read_stayed_leased_for_ever() -> None:
    class Failing(ReplayBuffer):
        broken = True

        async def count_statuses(self, *args: Any) -> Any:
            if self.broken and (await self.ledger())["math"]["leased"]:
                raise StorageError("the server went away")
            return await super().count_statuses(*args)

    buffer = Failing()
    plane = colocated(buffer=buffer)
    with pytest.raises(StorageError, match="went away"):
        await taken(plane.manager.produce_batch(2, 1, model_step=0))
    assert await plane.ledger() == {"issued": 2, "buffered": 2}
    buffer.broken = False
    assert len((await taken(plane.manager.produce_batch(2, 1, model_step=0))).groups) == 2


# --- the result -----------------------------------------------------------------------------------------


@simulated
async def test_a_result_says_how_its_batch_came_about() -> None:
    plane = colocated(
        loop=by_group(10, 20, 30, 40), reward_fn=lambda state: float(state.group_id or 0), members=2,
    )  # fmt: skip
    batch = await taken(plane.manager.produce_batch(4, 1, model_step=0))
    assert batch.task_results == {
        "math": TaskResult(
            batch_size=4,
            produced_groups=4,
            produced_samples=8,
            produced_tokens=24,
            failed_groups=0,
            failed_samples=0,
            filtered_groups=0,
            filtered_samples=0,
            acceptance_rate=1.0,
            group_gen_count=4,
            group_gen_mean_s=25.0,
            group_gen_p50_s=30.0,
            group_gen_p99_s=40.0,
            group_gen_p99_p50_ratio=40 / 30,
            judge_mean_s=0.0,
            pause_time_s=0.0,
            raw_rewards_sum=12.0,
            raw_rewards_count=8,
            raw_reward_mean=1.5,
            reward_mean=1.5,
            response_tokens_mean=3.0,
            staleness_mean=0.0,
            staleness_max=0,
            leftover={},
        )
    }
    assert (batch.wait_s, batch.raw_reward_mean) == (40.0, 1.5)
    assert (batch.total("produced_tokens"), batch.total("group_gen_count")) == (24, 4)


@simulated
async def test_what_was_filtered_and_failed_is_counted_in_the_batch_in_which_it_happened() -> None:
    async def some(state: RolloutState) -> None:
        await asyncio.sleep(1)
        if state.group_id == 1:
            raise RuntimeError("no answer to this one")
        answer(state, score=0.0 if state.group_id == 2 else 1.0)

    plane = colocated(
        loop=some, max_tries=1, is_valid_sample_fn=lambda group: group[0].reward["score"] > 0.5 or "dull", members=1,
    )  # fmt: skip
    first = (await taken(plane.manager.produce_batch(2, 1, model_step=0))).task_results["math"]
    second = (await taken(plane.manager.produce_batch(2, 2, model_step=1))).task_results["math"]
    assert (first.failed_groups, first.filtered_groups) == (1, 1)
    assert (second.failed_groups, second.filtered_groups) == (0, 0)
    assert second.produced_groups >= 2
    assert (second.raw_rewards_sum, second.raw_rewards_count) == (second.group_gen_count, second.group_gen_count)
    assert first.raw_rewards_count == first.group_gen_count >= 3, "filtered ones were generated and judged, too"
    assert (await plane.ledger())["trained"] == 4


@simulated
async def test_a_pause_and_what_it_leaves_are_in_the_result() -> None:
    engine = SimulatedEngine(
        lengths=LongTail(median=100, sigma=0, long_share=0.5, long_factor=10), tokens_per_second=100, abort_latency_s=2
    )
    plane = colocated(loop=engine, make=AsyncProduceStrategy, over_sample_threshold=1.0, members=1)
    batch = await taken(plane.manager.produce_batch(2, 1, model_step=0))
    (result,) = batch.task_results.values()
    long = sum(engine.is_long(number) for number in range(4))
    assert long, "the seed is chosen so"
    assert result.leftover == {"aborted": long} | ({"completed": 2 - long} if long < 2 else {})
    assert result.pause_time_s == 2.0
    assert batch.wait_s == 3.0


@simulated
async def test_reading_a_result_or_any_figure_resets_nothing() -> None:
    plane = colocated(loop=after(1))
    first = await taken(plane.manager.produce_batch(2, 1, model_step=0))
    for _ in range(2):
        assert first.stats()["forebay/math/batch/produced_groups"] == 2
        assert (await plane.manager.stats())["forebay/math/produce/completed"] == 2
        assert plane.strategies["math"].stats()["forebay/math/produce/completed"] == 2
    second = await taken(plane.manager.produce_batch(3, 2, model_step=1))
    assert first.task_results["math"].produced_groups == 2
    assert second.task_results["math"].produced_groups == 3
    assert (await plane.manager.stats())["forebay/math/produce/completed"] == 5


@simulated
async def test_a_batch_that_nothing_was_produced_for_has_no_times() -> None:
    plane = colocated()
    await plane.buffer.put(make_group(), "math", model_step=0)
    (result,) = (await taken(plane.manager.produce_batch(1, 1, model_step=0))).task_results.values()
    assert (result.group_gen_count, result.group_gen_mean_s, result.group_gen_p99_p50_ratio) == (0, None, None)
    assert (result.produced_groups, result.raw_rewards_count) == (0, 0)


@simulated
async def test_times_of_no_length_have_no_ratio() -> None:
    plane = colocated()
    batch = await taken(plane.manager.produce_batch(1, 1, model_step=0))
    assert batch.task_results["math"].group_gen_p50_s == 0
    assert batch.task_results["math"].group_gen_p99_p50_ratio is None
    assert batch.raw_reward_mean is None


@simulated
async def test_a_result_is_flat_for_any_logger() -> None:
    plane = colocated({"math": 1, "code": 1}, loop=after(1), make=AsyncProduceStrategy, over_sample_threshold=1.0)
    flat = (await taken(plane.manager.produce_batch(4, 1, model_step=0))).stats()
    assert all(isinstance(value, (int, float)) for value in flat.values())
    assert flat["forebay/batch/wait_s"] == 1.0
    for name in ("math", "code"):
        assert flat[f"forebay/{name}/batch/batch_size"] == 2
        assert flat[f"forebay/{name}/batch/leftover/completed"] == 2
        assert flat[f"forebay/{name}/batch/group_gen_p99_s"] == 1.0


@simulated
async def test_a_batch_is_handed_to_ranks_by_its_tokens() -> None:
    plane = colocated()
    async with plane.manager.produce_batch(4, 1, model_step=0) as batch:
        assert [len(batch.shard(rank, 2)) for rank in range(2)] == [2, 2]
        assert batch.shard(1, 2) == batch.lease.shard(1, 2)


# --- what goes wrong ------------------------------------------------------------------------------------


@simulated
async def test_one_tasks_exception_stops_and_drains_the_others_and_then_surfaces() -> None:
    plane = colocated(
        {"good": 1, "bad": 1, "worse": 1},
        loop={"good": after(100), "bad": failing(1), "worse": never},
        budgets=Budgets(max_consecutive_failures=4),
        max_tries=9,
    )
    with pytest.raises(TooManyFailures, match="4 attempts in a row at groups of task 'bad' failed"):
        await taken(plane.manager.produce_batch(6, 1, model_step=0))
    assert now() < 10
    await plane.check_idle()
    assert await plane.ledger("good") == {"issued": 2, "buffered": 2}

    for name in ("bad", "worse"):
        plane.loops[name].function = at_once  # type: ignore[attr-defined]
    batch = await taken(plane.manager.produce_batch(6, 1, model_step=0))
    assert len(batch.groups) == 6
    assert await plane.ledger("good") == {"issued": 2, "trained": 2}, "what was stopped is generated again"
    await plane.check_idle()


@simulated
async def test_over_issued_groups_of_a_task_that_had_finished_are_drained_too() -> None:
    plane = colocated(
        {"done": 1, "bad": 1},
        loop={"done": by_group(0, 0, 500), "bad": failing(1)},
        make=AsyncProduceStrategy,
        over_sample_threshold=1.0,
        budgets=Budgets(max_consecutive_failures=3),
        max_tries=9,
    )
    with pytest.raises(TooManyFailures):
        await taken(plane.manager.produce_batch(4, 1, model_step=0))
    await plane.check_idle()
    assert now() < 20


@simulated
async def test_a_data_set_that_cannot_be_read_surfaces_as_it_is() -> None:
    def refuse(record: Any) -> RolloutState:
        raise KeyError("prompt")

    plane = colocated({"good": 1, "bad": 1}, loop=after(100))
    sampler = Sampler(PROMPTS, to_rollout_state=refuse)
    plane.manager.tasks["bad"] = replace(plane.manager.tasks["bad"], sampler=sampler)
    with pytest.raises(InvalidRecord):
        await taken(plane.manager.produce_batch(4, 1, model_step=0))
    await plane.check_idle()


@simulated
async def test_a_function_that_stops_before_the_batch_is_there_hung_the_run() -> None:
    plane = colocated(should_continue_fn=lambda available, target: available < target - 1, loop=by_group(1, 2, 3, 99))
    with pytest.raises(ProduceError, match="should_continue_fn of task 'math' stopped at 3 of 4 groups"):
        await taken(plane.manager.produce_batch(4, 1, model_step=0))
    await plane.check_idle()


@simulated
async def test_a_function_that_goes_on_beyond_the_batch_is_fine() -> None:
    plane = colocated(should_continue_fn=lambda available, target: available < target + 2)
    batch = await taken(plane.manager.produce_batch(2, 1, model_step=0))
    assert (len(batch.groups), batch.task_results["math"].leftover) == (2, {"completed": 2})


@simulated
async def test_weights_too_old_for_the_step_generated_without_end() -> None:
    plane = colocated(interval=2)
    await taken(plane.manager.produce_batch(2, 2, model_step=0))
    before = plane.manager.progress.dump()
    explained = r"for train step 3: .* weights of step 0 .* \(the stale threshold of task 'math' is 2\); update"
    with pytest.raises(WeightsTooOld, match=explained) as raised:
        await plane.manager.produce_batch(2, 3, model_step=0)
    assert (raised.value.step, raised.value.model_step) == (3, 0)
    assert plane.manager.progress.dump() == before
    assert await plane.ledger() == {"issued": 2, "trained": 2}
    await taken(plane.manager.produce_batch(2, 3, model_step=2))


@simulated
async def test_one_task_that_fills_the_buffer_before_the_other_hung_the_run() -> None:
    buffer = ReplayBuffer(max_groups=5)
    plane = colocated({"a": 1, "b": 1}, buffer=buffer, make=AsyncProduceStrategy, over_sample_threshold=1.0)
    with pytest.raises(InvalidConfig, match=r"needs 4 of task 'a', 4 of task 'b' .* max_groups=5"):
        await taken(plane.manager.produce_batch(4, 1, model_step=0))
    plane = colocated(
        {"a": 1, "b": 1}, buffer=ReplayBuffer(max_groups=8), make=AsyncProduceStrategy, over_sample_threshold=1.0
    )
    for step in range(1, 6):
        await taken(plane.manager.produce_batch(4, step, model_step=step - 1))


@simulated
async def test_a_step_that_was_acknowledged_is_refused_with_the_next_one() -> None:
    plane = colocated()
    for step in (1, 2):
        await taken(plane.manager.produce_batch(1, step, model_step=step - 1))
    with pytest.raises(InvalidInput, match="train step 2 was already acknowledged; the next one is 3"):
        await taken(plane.manager.produce_batch(1, 2, model_step=1))
    assert len((await taken(plane.manager.produce_batch(1, 3, model_step=2))).groups) == 1


@simulated
async def test_weights_older_than_those_in_use_are_refused() -> None:
    plane = colocated()
    await taken(plane.manager.produce_batch(1, 5, model_step=4))
    with pytest.raises(InvalidInput, match="model_step is 3, but weights of step 4 were already used"):
        await taken(plane.manager.produce_batch(1, 6, model_step=3))
    assert plane.manager.model_step == 4


@simulated
async def test_two_calls_at_once_are_refused() -> None:
    plane = colocated(loop=after(5))
    producing = asyncio.ensure_future(plane.manager.produce_batch(1, 1, model_step=0).__aenter__())
    await asyncio.sleep(1)
    with pytest.raises(InvalidInput, match="already being produced; one call at a time"):
        await taken(plane.manager.produce_batch(1, 1, model_step=0))
    assert len((await producing).groups) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 0}, {"batch_size": -1}, {"batch_size": 1.5}, {"train_step": 0}, {"model_step": -1},
        {"train_step": None},
    ],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    async def main() -> None:
        plane = colocated()
        with pytest.raises(InvalidInput, match=next(iter(arguments))):
            await taken(
                plane.manager.produce_batch(**({"batch_size": 1, "train_step": 1, "model_step": 0} | arguments))
            )
        assert await plane.buffer.ledger() == {}

    run(main)


@simulated
async def test_a_shutdown_ends_a_call_and_returns_what_is_in_flight() -> None:
    plane = colocated(loop=after(100), make=AsyncProduceStrategy)
    producing = asyncio.ensure_future(plane.manager.produce_batch(2, 1, model_step=0).__aenter__())
    await asyncio.sleep(5)
    await plane.manager.shutdown()
    await plane.check_idle()
    with pytest.raises(BufferClosed, match="this manager was shut down"):
        await producing
    with pytest.raises(BufferClosed):
        await taken(plane.manager.produce_batch(2, 1, model_step=0))
    assert await plane.ledger() == {"issued": 2, "buffered": 2}, "the buffer stays open"
    await plane.manager.shutdown()


@simulated
async def test_leaving_a_manager_shuts_it_down() -> None:
    plane = colocated()
    async with plane.manager as manager:
        await taken(manager.produce_batch(1, 1, model_step=0))
    with pytest.raises(BufferClosed):
        await taken(plane.manager.produce_batch(1, 2, model_step=1))


def cancelled_at(number: int | None) -> int:
    """Two steps of which one is cancelled at an event and done again; the events of a run without that."""
    events = 0

    async def main() -> None:
        nonlocal events
        plane = colocated(
            {"a": 1, "b": 1}, loop={"a": by_group(1, 2, 3), "b": by_group(2, 5)}, make=AsyncProduceStrategy,
            over_sample_threshold=0.5, max_staleness=1, reward_fn=judged,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)

        async def steps() -> None:
            for step in range(plane.manager.next_train_step, 3):
                async with plane.manager.produce_batch(3, step, model_step=step - 1) as batch:
                    assert len(batch.groups) == 3
                    await asyncio.sleep(1)

        training = asyncio.ensure_future(steps())
        if number is not None:
            loop.at_event(number, training.cancel)
        try:
            await training
        except asyncio.CancelledError:
            await plane.check_idle()
            leased = sum(line["leased"] for line in (await plane.buffer.ledger()).values())
            assert leased == 0, "a cancelled trainer holds its batch"
        events = loop.events
        await steps()
        await plane.manager.shutdown()
        await plane.check_idle()
        trained = sum(line["trained"] for line in (await plane.buffer.ledger()).values())
        assert trained == 6

    run(main, seed=number or 0, max_events=100_000)
    return events


async def judged(state: RolloutState) -> float:
    await asyncio.sleep(0.5)
    return 1.0


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_g03_a_cancel_at_every_point_in_turn_loses_nothing(stride: int) -> None:
    for number in range(3, cancelled_at(None), stride):
        try:
            cancelled_at(number)
        except BaseException as error:
            raise AssertionError(f"a cancel at event {number}: {error!r}") from error


@simulated
async def test_cancels_upon_cancels_leave_nothing_in_flight() -> None:
    async def stubborn(state: RolloutState) -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            await asyncio.sleep(3)
            raise

    plane = colocated({"a": 1, "b": 1, "c": 1}, loop=stubborn, make=AsyncProduceStrategy)
    producing = asyncio.ensure_future(plane.manager.produce_batch(3, 1, model_step=0).__aenter__())
    await asyncio.sleep(1)
    for _ in range(3):
        producing.cancel()
        await asyncio.sleep(0.5)
    with pytest.raises(asyncio.CancelledError):
        await producing
    await plane.check_idle()


# --- tasks ----------------------------------------------------------------------------------------------


def make_task(buffer: ReplayBuffer, name: str = "math", **changes: Any) -> ManagedTask:
    options: dict[str, Any] = {
        "name": name,
        "sampler": Sampler(PROMPTS),
        "agent_loop": FunctionAgentLoop(at_once),
        "strategy": SyncProduceStrategy(buffer, progress=NoProgress()),
    }
    return ManagedTask(**(options | changes))


@pytest.mark.parametrize("kind", [AgentLoopManager, DisaggregatedAgentLoopManager])
def test_tasks_that_do_not_fit_are_refused_by_name(kind: type[Manager]) -> None:
    buffer, other = ReplayBuffer(), ReplayBuffer()
    strategy = SyncProduceStrategy(buffer, sync_weights_interval=2, progress=NoProgress())
    for tasks, says in (
        ([], "there is no task"),
        ([make_task(buffer), make_task(buffer)], "two tasks are named 'math'"),
        ([make_task(buffer, weight=0), make_task(buffer, "code", weight=0.0)], r"all tasks \(math, code\) are 0"),
        ([make_task(buffer), make_task(buffer, "code", weight=-1)], "the weight of task 'code' is -1"),
        ([make_task(other)], "the strategy of task 'math' was made for another buffer"),
        ([make_task(buffer, strategy=strategy)], "'math' counts on new weights every 2 steps, the manager on every 1"),
        ([make_task(buffer), "code"], "'code' is not a task; expected ManagedTask"),
    ):
        with pytest.raises(InvalidConfig, match=says):
            kind(tasks, buffer)  # type: ignore[arg-type]


def test_one_task_needs_no_list() -> None:
    buffer = ReplayBuffer()
    assert list(AgentLoopManager(make_task(buffer), buffer).tasks) == ["math"]


def test_an_interval_that_is_none_is_refused() -> None:
    buffer = ReplayBuffer()
    with pytest.raises(InvalidInput, match="sync_weights_interval is 0"):
        AgentLoopManager(make_task(buffer), buffer, sync_weights_interval=0)


@pytest.mark.parametrize("part", ["sampler", "agent_loop", "strategy"])
def test_a_part_that_is_something_else_is_refused_by_name(part: str) -> None:
    with pytest.raises(InvalidConfig, match=f"the {part} of task 'math' is 'x'; expected a"):
        make_task(ReplayBuffer(), **{part: "x"})


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_task_needs_a_name(name: Any) -> None:
    with pytest.raises(InvalidInput):
        make_task(ReplayBuffer(), name)


@pytest.mark.parametrize("name", ["manager", "batch", "produce", "groups", "math/tokens"])
def test_a_task_is_not_named_like_figures(name: str) -> None:
    async def draw() -> None:
        await Sampler(PROMPTS).sample(name)

    async def put() -> None:
        await ReplayBuffer().put(make_group(), name)

    async def limit() -> None:
        await ReplayBuffer().set_limits(name, stale_threshold=1)

    for enters in (
        lambda: make_task(ReplayBuffer(), name),
        lambda: TaskConfig(name=name),
        lambda: asyncio.run(limit()),
        lambda: asyncio.run(draw()),
        lambda: asyncio.run(put()),
    ):
        with pytest.raises(InvalidInput, match=f"task_name is {name!r}, but names of figures contain .*another name"):
            enters()


class OwnOrder(Sampler):
    async def sample(self, task_name: str) -> list[RolloutState]:
        return await super().sample(task_name)


class OwnDraws(SamplerWithReplayBuffer):
    async def sample(self, task_name: str, statuses: Sequence[Status] = ()) -> list[RolloutState]:
        return await super().sample(task_name, statuses)


class OwnBinding(OwnOrder):
    def with_buffer(self, replay_buffer: ReplayBuffer) -> SamplerWithReplayBuffer:
        return super().with_buffer(replay_buffer)


@simulated
async def test_a_sampler_whose_own_sample_nobody_would_call_is_refused() -> None:
    buffer = ReplayBuffer()
    for sampler in (OwnOrder(PROMPTS), OwnDraws(PROMPTS, buffer)):
        with pytest.raises(InvalidConfig, match=r"has its own sample\(\), which strategies do not call"):
            make_task(buffer, sampler=sampler)
        with pytest.raises(InvalidConfig, match=r"has its own sample\(\), which strategies do not call"):
            await SyncProduceStrategy(buffer, progress=NoProgress()).produce_batch(
                FunctionAgentLoop(at_once), sampler, 1, "math", train_step=1, model_step=0
            )
    make_task(buffer, sampler=OwnBinding(PROMPTS))


@simulated
async def test_the_limits_of_a_task_replace_those_of_an_earlier_run_before_a_batch_is_handed_out() -> None:
    buffer = ReplayBuffer()
    await buffer.set_limits("math", stale_threshold=9)
    await buffer.put(make_group(model_step=0), "math", model_step=0)
    plane = colocated(buffer=buffer)
    async with plane.manager.produce_batch(1, 4, model_step=3) as batch:
        spans = [state.version_spans for group in batch.groups for state in group]
        assert {model_step for runs in spans for model_step, _ in runs} == {3}, "the old group expired"


# --- looking --------------------------------------------------------------------------------------------


@simulated
async def test_figures_are_flat_and_named_by_task() -> None:
    plane = colocated({"math": 2, "code": 1}, make=AsyncProduceStrategy, over_sample_threshold=1.0, loop=after(1))
    await taken(plane.manager.produce_batch(3, 1, model_step=0))
    async with plane.manager.produce_batch(3, 2, model_step=1):
        flat = await plane.manager.stats()
    assert all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in flat.values())
    ledger = await plane.buffer.ledger()
    for name in ("math", "code"):
        assert flat[f"forebay/{name}/issued"] == ledger[name]["issued"]
        assert flat[f"forebay/{name}/buffered/completed"] + flat[f"forebay/{name}/buffered/aborted"] >= 0
        assert flat[f"forebay/{name}/produce/in_flight"] == 0
    assert (flat["forebay/math/consumed"], flat["forebay/code/consumed"]) == (2, 1)
    assert (flat["forebay/math/target"], flat["forebay/code/target"]) == (4, 2)
    assert (flat["forebay/math/leased"], flat["forebay/math/trained"]) == (2, 2)
    assert flat["forebay/manager/next_train_step"] == 2
    assert flat["forebay/manager/model_step"] == 1
    assert flat["forebay/manager/future_step"] == 2
    assert "forebay/math/tokens/trained" in flat
    assert "forebay/math/produce/group_p99_s" in flat
    for key in flat:
        _, first, *rest = key.split("/")
        assert first in ("math", "code") or first in RESERVED_NAMES, "no task may be called so"
        assert len(rest) < 2 or rest[0] in RESERVED_NAMES


@simulated
async def test_waiting_is_explained_by_task() -> None:
    buffer = ReplayBuffer(storage=MemoryStorage(clock=now))
    plane = colocated(
        {"math": 2, "code": 1}, buffer=buffer, loop={"math": by_group(1, 50), "code": after(20)},
        timeouts=Timeouts(member_timeout_s=500),
    )  # fmt: skip
    producing = asyncio.ensure_future(plane.manager.produce_batch(3, 1, model_step=0).__aenter__())
    await asyncio.sleep(7)
    text = await plane.manager.explain_wait()
    assert "waited 7.0 s so far for task 'math' to have 2 completed groups in the buffer" in text
    assert "task 'math': buffered 1 completed; 1 in flight" in text
    assert "the oldest (group 1) for 7.0 s" in text
    assert "task 'math': 1 groups missing of 2 owed up to step 1; 1 in flight here" in text
    assert "task 'code': 1 groups missing of 1 owed up to step 1; 1 in flight here" in text
    assert "manager: next train step 1, generating with the weights of step 0" in text
    await producing
    assert "nothing is waiting" in await plane.manager.explain_wait()


@simulated
async def test_groups_that_others_hold_are_said_to_be_missing() -> None:
    storage = MemoryStorage(clock=now)
    dead = ReplayBuffer(storage=storage, max_groups=4, lease_s=60)
    await dead.put_many([make_group() for _ in range(4)], "math", model_step=0)
    await dead.lease_batch({"math": 4}, train_step=1)
    plane = colocated(buffer=ReplayBuffer(storage=storage, max_groups=4), loop=after(1))
    producing = asyncio.ensure_future(plane.manager.produce_batch(4, 1, model_step=0).__aenter__())
    await asyncio.sleep(7)
    text = await plane.manager.explain_wait()
    assert "task 'math' to have 4 completed groups in the buffer" in text
    assert "task 'math': 4 groups missing of 4 owed up to step 1; 0 in flight here" in text
    batch = await producing
    assert "task 'math': 0 groups missing of 4 owed up to step 1" in await plane.manager.explain_wait()
    await batch.lease.ack()
    await dead.close()


@simulated
async def test_the_ledger_of_a_manager_is_that_of_its_buffer() -> None:
    plane = colocated()
    await taken(plane.manager.produce_batch(1, 1, model_step=0))
    assert await plane.manager.ledger() == await plane.buffer.ledger()


# --- an error while cleaning up -------------------------------------------------------------------------


class FailsToClose(SyncProduceStrategy):
    async def close(self) -> None:
        await super().close()
        raise RuntimeError("cleaning up failed")


def manager_that_fails_to_close(kind: type[Manager], generate: Answer = at_once, **options: Any) -> Any:
    buffer = ReplayBuffer()
    strategy = FailsToClose(buffer, progress=NoProgress(), **options)
    task = ManagedTask(name="math", sampler=Sampler(PROMPTS), agent_loop=FunctionAgentLoop(generate), strategy=strategy)
    return kind([task], buffer)


@simulated
@pytest.mark.parametrize("kind", [AgentLoopManager, DisaggregatedAgentLoopManager])
async def test_the_error_of_a_block_is_raised_when_the_shutdown_fails_too(kind: type[Manager]) -> None:
    with pytest.raises(ValueError, match="the original"):
        async with manager_that_fails_to_close(kind):
            raise ValueError("the original")
    with pytest.raises(RuntimeError, match="cleaning up failed"):
        async with manager_that_fails_to_close(kind):
            pass


@simulated
async def test_the_error_of_a_batch_is_raised_when_cleaning_up_fails_too() -> None:
    """S4 of the field report: it was not even in the chain."""

    async def failing(state: RolloutState) -> None:
        raise ValueError("the original")

    manager = manager_that_fails_to_close(AgentLoopManager, failing, budgets=Budgets(max_consecutive_failures=2))
    with pytest.raises(TooManyFailures, match="the original"):
        await taken(manager.produce_batch(2, 1, model_step=0))
