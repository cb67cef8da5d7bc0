"""Disaggregated: a producer that runs ahead as far as its weights allow, and a consumer that never waits in vain."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from forebay import (
    AsyncProduceStrategy,
    Budgets,
    BufferClosed,
    DisaggregatedAgentLoopManager,
    FunctionAgentLoop,
    InvalidInput,
    LostLease,
    MemoryStorage,
    ProduceError,
    ProducerState,
    ProducerStopped,
    ReplayBuffer,
    RolloutState,
    Status,
    SyncProduceStrategy,
    Timeouts,
    TooManyFailures,
    WaitTimeout,
    WeightsTooOld,
)
from forebay.core.staleness import group_staleness
from forebay.testing.simulate import LongTail, SimulatedEngine, SimulatedLoop, SimulationStuck, run
from tests.support import taken, turns
from tests.test_manager import Plane, by_group, failing
from tests.test_strategy import Counted, after, answer, at_once, ids, never, now, simulated, sorted_ids

Disaggregated = Plane[DisaggregatedAgentLoopManager]


def disaggregated(tasks: Mapping[str, float] | None = None, **options: Any) -> Disaggregated:
    return Plane(DisaggregatedAgentLoopManager, tasks, **({"make": AsyncProduceStrategy} | options))


@asynccontextmanager
async def producing(plane: Disaggregated, batch_size: int = 2) -> AsyncIterator[asyncio.Task[None]]:
    """A producer in the background, until the block ends."""
    producer = asyncio.create_task(plane.manager.produce_loop(batch_size))
    try:
        yield producer
    finally:
        await plane.manager.shutdown()
        with suppress(Exception, asyncio.CancelledError):
            await producer
        await plane.check_idle()


async def sync_weights(plane: Disaggregated, step: int) -> None:
    await plane.manager.pause_produce()
    for loop in plane.loops.values():
        if isinstance(loop, SimulatedEngine):
            loop.set_weights(step)
    await plane.manager.continue_produce(step)


# --- running ahead --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_staleness", "interval", "bound"), [(0, 1, 1), (0, 4, 4), (1, 2, 4), (2, 1, 3)])
def test_the_producer_runs_ahead_to_its_bound_and_not_further(max_staleness: int, interval: int, bound: int) -> None:
    async def main() -> None:
        plane = disaggregated({"a": 2, "b": 1}, loop=after(1), max_staleness=max_staleness, interval=interval)
        async with producing(plane, 3):
            await asyncio.sleep(100)
            assert plane.manager.bound == bound
            assert plane.manager.progress.target_upto == bound
            assert await plane.ledger("a") == {"issued": 2 * bound, "buffered": 2 * bound}
            assert await plane.ledger("b") == {"issued": bound, "buffered": bound}
            await sync_weights(plane, 3)
            await asyncio.sleep(100)
            assert plane.manager.bound == 3 + bound
            assert plane.manager.progress.target_upto == 3 + bound

    for seed in range(3):
        run(main, seed=seed)


def test_a_batch_acknowledged_while_the_ledger_was_read_was_owed_twice() -> None:
    class Slow(ReplayBuffer):
        async def ledger(self, **options: Any) -> Any:
            await asyncio.sleep(0.4)  # as over a network
            return await super().ledger(**options)

    async def main(ack_s: float) -> None:
        plane = disaggregated(buffer=Slow(), loop=after(0.3), interval=3)
        async with producing(plane):
            for step in (1, 2):
                async with plane.manager.get_batch(2, step):
                    await asyncio.sleep(ack_s)
            await asyncio.sleep(50)
            assert await plane.ledger() == {"issued": 6, "buffered": 2, "trained": 4}

    for tenths in range(1, 20):
        run(lambda tenths=tenths: main(tenths / 10), seed=tenths)  # type: ignore[misc]


@simulated
async def test_steps_are_filled_one_after_the_other() -> None:
    plane = disaggregated(loop=after(1), interval=4)
    async with producing(plane):
        for step in range(1, 5):
            await asyncio.sleep(0.5)
            assert plane.manager.progress.producer_future_step == step
            await asyncio.sleep(0.5)
        await turns(20)
        assert plane.manager.progress.producer_future_step == 5


@simulated
async def test_at_the_bound_what_goes_is_replaced() -> None:
    plane = disaggregated({"a": 1, "b": 1}, loop=after(1), interval=2)
    async with producing(plane):
        await asyncio.sleep(10)
        assert await plane.ledger("a") == {"issued": 2, "buffered": 2}
        assert await plane.buffer.discard({"task_name": "a", "group_id": 0}, "not wanted") == 1
        await asyncio.sleep(10)
        assert await plane.ledger("a") == {"issued": 3, "buffered": 2, "discarded": 1}
        assert await plane.buffer.discard({}, "none of it") == 4
        await asyncio.sleep(10)
        assert await plane.ledger("a") == {"issued": 5, "buffered": 2, "discarded": 3}
        assert await plane.ledger("b") == {"issued": 4, "buffered": 2, "discarded": 2}
        assert plane.manager.progress.target_upto == 2


@simulated
async def test_what_is_filtered_is_replaced() -> None:
    def odd(group: list[RolloutState]) -> bool | str:
        return (group[0].group_id or 0) % 3 != 0 or "dull"

    plane = disaggregated(loop=after(1), interval=2, is_valid_sample_fn=odd)
    async with producing(plane):
        await asyncio.sleep(50)
        ledger = await plane.ledger()
        assert (ledger["buffered"], plane.manager.progress.target_upto) == (4, 2)
        assert ledger["filtered"] == sum(number % 3 == 0 for number in range(ledger["issued"]))


@simulated
async def test_what_expires_below_the_bound_is_generated_again() -> None:
    plane = disaggregated(loop=after(1), max_staleness=1)
    async with producing(plane):
        await asyncio.sleep(10)
        assert await plane.ledger() == {"issued": 4, "buffered": 4}
        await sync_weights(plane, 2)
        batch = await taken(plane.manager.get_batch(2, 3))
        assert {spans for group in batch.groups for state in group for spans in state.version_spans} == {(2, 3)}
        await asyncio.sleep(10)
        ledger = await plane.ledger()
        assert ledger["issued"] == ledger["buffered"] + 2
        assert await plane.buffer.count("math", Status.EXPIRED) == 0


@simulated
async def test_rejected_and_returned_groups_are_refilled_and_used() -> None:
    plane = disaggregated(loop=after(1))
    async with producing(plane):
        async with plane.manager.get_batch(2, 1) as batch:
            await batch.lease.reject(batch.groups[:1], "no gradient")
            await asyncio.sleep(10)
            assert await plane.ledger() == {"issued": 3, "buffered": 1, "leased": 1, "discarded": 1}
        assert await plane.ledger() == {"issued": 3, "buffered": 1, "trained": 1, "discarded": 1}


@simulated
async def test_a_slow_task_does_not_let_the_fast_one_run_away() -> None:
    plane = disaggregated({"fast": 1, "slow": 1}, loop={"fast": at_once, "slow": after(50)}, interval=8)
    async with producing(plane):
        await asyncio.sleep(40)
        assert await plane.ledger("fast") == {"issued": 1, "buffered": 1}


@simulated
async def test_a_task_without_weight_neither_runs_nor_binds() -> None:
    plane = disaggregated(
        {"a": 1, "off": 0}, loop={"a": after(1), "off": failing()}, each={"a": {"max_staleness": 3}, "off": {}}
    )
    async with producing(plane):
        await asyncio.sleep(50)
        assert plane.manager.bound == 4
        assert await plane.ledger("a") == {"issued": 8, "buffered": 8}
        assert await plane.ledger("off") == {}


@simulated
async def test_the_strictest_task_binds_all() -> None:
    plane = disaggregated({"a": 1, "b": 1}, each={"a": {"max_staleness": 3}, "b": {"max_staleness": 1}})
    assert plane.manager.bound == 2


# --- getting batches ------------------------------------------------------------------------------------


@simulated
async def test_a_batch_is_waited_for_and_full() -> None:
    plane = disaggregated({"b": 1, "a": 2, "c": 0}, loop=after(5))
    async with producing(plane, 7), plane.manager.get_batch(7, 1) as batch:
        assert now() == 5.0, "woken by the last group itself"
        assert batch.task_batch_sizes == {"b": 2, "a": 5, "c": 0}
        assert {name: len(groups) for name, groups in batch.groups_by_task.items()} == {"b": 2, "a": 5}
        assert batch.wait_s == 5.0
        assert batch.task_results["a"].group_gen_mean_s == 5.0
    assert await plane.ledger("a") == {"issued": 5, "trained": 5}


@simulated
async def test_a_batch_that_is_ready_is_handed_out_though_the_producer_is_at_its_bound() -> None:
    """The reference returns an empty one."""
    plane = disaggregated(interval=4)
    async with producing(plane):
        await asyncio.sleep(10)
        for step in range(1, 5):
            assert plane.manager.progress.producer_future_step > plane.manager.bound
            batch = await taken(plane.manager.get_batch(2, step))
            assert (len(batch.groups), batch.wait_s) == (2, 0.0)


@simulated
async def test_weights_too_old_for_a_step_are_an_error_that_changes_nothing_and_the_step_is_asked_for_again() -> None:
    plane = disaggregated()
    async with producing(plane):
        await taken(plane.manager.get_batch(2, 1))
        before = await plane.ledger()
        explained = (
            r"for train step 2: .* weights of step 0 .* \(they are fresh enough up to step 1\); update the weights"
        )
        for _ in range(2):
            with pytest.raises(WeightsTooOld, match=explained) as raised:
                await plane.manager.get_batch(2, 2)
            assert (raised.value.step, raised.value.model_step) == (2, 0)
        with pytest.raises(WeightsTooOld):
            async with plane.manager.get_batch(2, 2):
                pytest.fail("there is no batch")
        assert plane.manager.next_train_step == 2, "no step was done"
        assert await plane.ledger() == before == {"issued": 2, "trained": 2}
        await sync_weights(plane, 1)
        batch = await taken(plane.manager.get_batch(2, 2))
        assert len(batch.groups) == 2
        assert batch.task_results["math"].produced_groups == 2, "asking in vain took nothing from the figures"


@simulated
async def test_a_wait_ends_when_newer_weights_come_and_not_before() -> None:
    plane = disaggregated(loop=after(5))
    async with producing(plane):
        await taken(plane.manager.get_batch(2, 1))
        await plane.manager.pause_produce()
        await plane.manager.continue_produce(1)
        assert len((await taken(plane.manager.get_batch(2, 2))).groups) == 2
        assert now() == 10.0


@pytest.mark.parametrize("seconds", [0.0, 0.3, 5.0], ids=["at once", "fast", "slow"])
def test_weights_synced_every_four_steps_are_synced_four_times_in_sixteen(seconds: float) -> None:
    """The reference needs sixteen with fast rollouts, and hands out twelve empty batches."""

    async def main() -> None:
        plane = disaggregated(loop=after(seconds), interval=4, max_staleness=0, over_sample_threshold=0.5)
        async with producing(plane, 4):
            for step in range(1, 17):
                async with plane.manager.get_batch(4, step) as batch:  # never WeightsTooOld
                    assert len(batch.groups) == 4
                    assert max(group_staleness(group, step) for group in batch.groups) < 4
                    await asyncio.sleep(1)
                if step % 4 == 0:
                    await sync_weights(plane, step)
        assert (await plane.ledger())["trained"] == 64

    for seed in range(3):
        run(main, seed=seed)


@simulated
async def test_a_batch_is_leased_until_it_is_acknowledged_or_given_back() -> None:
    plane = disaggregated(interval=3)
    async with producing(plane):
        await asyncio.sleep(10)
        awaited = await plane.manager.get_batch(2, 1)
        assert (awaited.step, awaited.open, plane.manager.next_train_step) == (1, True, 1)
        assert await plane.ledger() == {"issued": 6, "buffered": 4, "leased": 2}
        await awaited.ack()
        assert (awaited.open, plane.manager.next_train_step) == (False, 2)
        assert await plane.ledger() == {"issued": 6, "buffered": 4, "trained": 2}
        with pytest.raises(RuntimeError, match="out of memory"):
            async with plane.manager.get_batch(2, 2) as first:
                raise RuntimeError("out of memory")
        returned = await plane.manager.get_batch(2, 2)
        assert sorted_ids(returned.groups) == sorted_ids(first.groups)
        await returned.nack()
        assert await plane.ledger() == {"issued": 6, "buffered": 4, "trained": 2}
        async with plane.manager.get_batch(2, 2) as second:
            assert sorted_ids(second.groups) == sorted_ids(first.groups)
        assert plane.manager.next_train_step == 3


@simulated
async def test_an_awaited_batch_can_be_entered_later() -> None:
    plane = disaggregated(interval=2)
    async with producing(plane):
        batch = await plane.manager.get_batch(2, 1)
        with pytest.raises(RuntimeError, match="out of memory"):
            async with batch:
                raise RuntimeError("out of memory")
        assert not batch.open
        assert plane.manager.next_train_step == 1
        assert (await plane.ledger()).get("leased", 0) == 0
        batch = await plane.manager.get_batch(2, 1)
        async with batch as entered:
            assert entered is batch
            assert (await plane.ledger())["leased"] == 2
        assert plane.manager.next_train_step == 2
        assert (await plane.ledger())["trained"] == 2


@simulated
async def test_a_lost_lease_is_an_error_and_the_step_gets_a_full_batch_again() -> None:
    plane = disaggregated(loop=after(1))
    async with producing(plane):
        with pytest.raises(LostLease):
            async with plane.manager.get_batch(2, 1):
                await plane.buffer.storage.release(plane.buffer.owner)
        assert plane.manager.next_train_step == 1
        assert len((await taken(plane.manager.get_batch(2, 1))).groups) == 2


@simulated
async def test_a_batch_lost_at_the_bound_with_its_groups_was_waited_for_for_ever() -> None:
    """The producer had gone to wait for newer weights, and was not told that the step is to be done after all."""
    plane = disaggregated(loop=after(1))
    async with producing(plane):
        batch = await plane.manager.get_batch(2, 1)
        settle = batch.lease._settle

        async def late(*args: Any) -> None:
            await asyncio.sleep(10)  # a store takes its time, and the producer sees the step as done
            await plane.buffer.storage.release(plane.buffer.owner)
            await plane.buffer.discard({}, "gone")
            await settle(*args)

        batch.lease._settle = late
        with pytest.raises(LostLease):
            await batch.lease.ack()
        assert len((await taken(plane.manager.get_batch(2, 1, timeout_s=100))).groups) == 2


@simulated
async def test_a_batch_lost_after_the_next_step_was_asked_for_needs_newer_weights_and_says_so() -> None:
    """By then everything is judged for the next step; what was generated for this one was too old, again and again."""
    calls = Counted(after(1))
    plane = disaggregated(loop=calls)
    async with producing(plane):
        batch = await plane.manager.get_batch(2, 1)
        settle = batch.lease._settle

        async def late(*args: Any) -> None:
            await asyncio.sleep(10)
            await plane.buffer.storage.release(plane.buffer.owner)
            await settle(*args)

        batch.lease._settle = late
        acknowledging = asyncio.ensure_future(batch.lease.ack())
        await asyncio.sleep(1)
        with pytest.raises(WeightsTooOld):
            await plane.manager.get_batch(2, 2)
        with pytest.raises(LostLease):
            await acknowledging
        begun = len(calls.samples)
        with pytest.raises(WeightsTooOld):
            await plane.manager.get_batch(2, 1)
        await asyncio.sleep(50)
        assert len(calls.samples) == begun
        await sync_weights(plane, 1)
        for step in (1, 2):
            assert len((await taken(plane.manager.get_batch(2, step))).groups) == 2


@simulated
async def test_two_batches_may_be_held_at_a_time() -> None:
    plane = disaggregated(loop=after(1), interval=2)
    async with producing(plane):
        first, second = [await plane.manager.get_batch(2, step) for step in (1, 2)]
        assert not set(ids(first.groups)) & set(ids(second.groups))
        await first.ack()
        await second.ack()
        assert plane.manager.next_train_step == 3
        assert await plane.ledger() == {"issued": 4, "trained": 4}


@simulated
async def test_batches_are_acknowledged_in_order_of_their_steps() -> None:
    plane = disaggregated(loop=after(1), interval=3)
    async with producing(plane):
        first, second, third = [await plane.manager.get_batch(2, step) for step in (1, 2, 3)]
        await asyncio.sleep(10)
        leased = {"issued": 6, "leased": 6}
        assert await plane.ledger() == leased
        plan = plane.manager.progress.dump()
        for late in (third, second):
            refused = f"train step {late.step} is acknowledged, but the batch of step 1 is still leased"
            with pytest.raises(InvalidInput, match=refused):
                await late.ack()
            assert late.open
        assert await plane.ledger() == leased
        assert plane.manager.progress.dump() == plan
        await first.ack()
        with pytest.raises(InvalidInput, match="train step 3 is acknowledged, but the batch of step 2 is still leased"):
            await third.ack()
        await second.nack()
        await third.ack()  # given back is as good: nothing of it is held
        assert plane.manager.next_train_step == 4
        assert await plane.ledger() == {"issued": 6, "buffered": 2, "trained": 4}


@simulated
async def test_a_block_that_ends_before_that_of_an_earlier_step_gives_its_batch_back() -> None:
    plane = disaggregated(loop=after(1), interval=3)
    async with producing(plane):
        with pytest.raises(InvalidInput, match="the batch of step 1 is still leased"):
            async with plane.manager.get_batch(2, 1), plane.manager.get_batch(2, 2):
                pass
        assert (await plane.ledger()).get("leased", 0) == 0


@simulated
async def test_a_step_that_was_acknowledged_is_refused() -> None:
    plane = disaggregated(interval=2)
    async with producing(plane):
        await taken(plane.manager.get_batch(2, 1))
        with pytest.raises(InvalidInput, match="train step 1 was already acknowledged; the next one is 2"):
            await taken(plane.manager.get_batch(2, 1))


@simulated
async def test_another_batch_size_is_refused_and_does_not_stop_the_producer() -> None:
    """It was planned with the consumer's size, and the producer died of it."""
    plane = disaggregated(loop=after(1), interval=4)
    async with producing(plane) as producer:
        for step in (1, 3, 4):
            with pytest.raises(InvalidInput, match="get_batch asks for 5 groups, but produce_loop fills steps of 2"):
                await taken(plane.manager.get_batch(5, step))
        await asyncio.sleep(10)
        assert not producer.done()
        assert len((await taken(plane.manager.get_batch(2, 1))).groups) == 2


@simulated
async def test_a_producer_of_another_batch_size_than_before_plans_anew() -> None:
    plane = disaggregated({"a": 2, "b": 1}, interval=2)
    producer = asyncio.create_task(plane.manager.produce_loop(3))
    await taken(plane.manager.get_batch(3, 1))
    await asyncio.sleep(5)
    producer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await producer
    async with producing(plane, 6):
        batch = await taken(plane.manager.get_batch(6, 2))
        assert batch.task_batch_sizes == {"a": 4, "b": 2}


@pytest.mark.parametrize("arguments", [(0, 1), (-1, 1), (1.5, 1), (2, 0), (2, None)])
def test_numbers_that_make_no_sense_are_refused(arguments: tuple[Any, Any]) -> None:
    async def main() -> None:
        plane = disaggregated()
        with pytest.raises(InvalidInput, match=r"batch_size is|train_step is"):
            await taken(plane.manager.get_batch(*arguments))
        if arguments[0] != 2:
            with pytest.raises(InvalidInput, match="batch_size is"):
                await plane.manager.produce_loop(arguments[0])

    run(main)


@simulated
async def test_a_run_that_starts_from_later_weights_produced_every_step_before_them() -> None:
    plane = disaggregated(loop=after(1))
    await plane.manager.continue_produce(100)
    async with producing(plane):
        await asyncio.sleep(50)
        assert await plane.ledger() == {"issued": 2, "buffered": 2}
        assert len((await taken(plane.manager.get_batch(2, 101))).groups) == 2
        await asyncio.sleep(50)
        assert await plane.ledger() == {"issued": 2, "trained": 2}
        assert plane.manager.next_train_step == 102


@simulated
async def test_steps_that_the_trainer_leaves_out_are_not_produced() -> None:
    plane = disaggregated(loop=after(1))
    async with producing(plane):
        await taken(plane.manager.get_batch(2, 1))
        with pytest.raises(WeightsTooOld):
            await plane.manager.get_batch(2, 41)
        await sync_weights(plane, 40)
        assert len((await taken(plane.manager.get_batch(2, 41))).groups) == 2
        await asyncio.sleep(50)
        assert await plane.ledger() == {"issued": 4, "trained": 4}


@simulated
async def test_asking_beyond_the_bound_made_the_steps_before_it_unfillable() -> None:
    """Everything was judged for the step that was asked for: too old on arrival, generated again, without end."""
    plane = disaggregated(loop=after(1))
    async with producing(plane):
        with pytest.raises(WeightsTooOld):
            await plane.manager.get_batch(2, 2)
        held = await plane.manager.get_batch(2, 1)
        for step in (2, 1_000):
            with pytest.raises(WeightsTooOld):
                await plane.manager.get_batch(2, step)
        await held.lease.nack()
        await asyncio.sleep(50)
        assert await plane.ledger() == {"issued": 2, "buffered": 2}
        assert len((await taken(plane.manager.get_batch(2, 1, timeout_s=50))).groups) == 2


@simulated
async def test_a_trainer_that_goes_back_to_a_step_it_left_out_gets_it() -> None:
    plane = disaggregated(loop=after(1), interval=8)
    async with producing(plane):
        first = await plane.manager.get_batch(2, 5)
        await first.lease.nack()
        for step in (2, 3, 5, 6):
            assert len((await taken(plane.manager.get_batch(2, step, timeout_s=50))).groups) == 2


# --- weight updates -------------------------------------------------------------------------------------


@simulated
async def test_a_pause_brings_everything_in_and_nothing_starts_before_the_weights_are_there() -> None:
    calls = Counted(after(30))
    plane = disaggregated({"a": 1, "b": 1}, loop=calls, over_sample_threshold=1.0, interval=2)
    async with producing(plane):
        await asyncio.sleep(10)
        assert (await plane.ledger("a"))["in_flight"] == 2
        states = [plane.manager.producer_state]
        await plane.manager.pause_produce()
        assert [*states, plane.manager.producer_state] == [ProducerState.RUNNING, ProducerState.PAUSED]
        await plane.check_idle()
        started = len(calls.samples)
        await asyncio.sleep(500)
        await plane.buffer.discard({}, "also what has to be replaced")
        await asyncio.sleep(500)
        assert len(calls.samples) == started
        await plane.check_idle()
        await plane.manager.continue_produce(1)
        await asyncio.sleep(1)
        assert len(calls.samples) > started
        assert plane.manager.model_step == 1


@simulated
async def test_a_pause_says_how_long_it_took() -> None:
    engine = SimulatedEngine(lengths=LongTail(median=1000, sigma=0, long_share=0), abort_latency_s=2)
    plane = disaggregated(loop=engine)
    async with producing(plane):
        await asyncio.sleep(3)
        assert await plane.manager.pause_produce() == 2.0
        assert await plane.manager.pause_produce() == 0.0
        engine.set_weights(1)
        await plane.manager.continue_produce(1)
        batch = await taken(plane.manager.get_batch(2, 1))
        assert batch.task_results["math"].pause_time_s == 2.0


@simulated
async def test_older_weights_than_those_in_use_are_refused() -> None:
    plane = disaggregated()
    await plane.manager.continue_produce(3)
    with pytest.raises(InvalidInput, match="weights of step 2, but those of step 3 were already used"):
        await plane.manager.continue_produce(2)
    await plane.manager.continue_produce(3)
    assert plane.manager.model_step == 3
    with pytest.raises(InvalidInput, match="model_step is -1"):
        await plane.manager.continue_produce(-1)


class TakesWeights(FunctionAgentLoop):
    takes_weights_while_running = True


@simulated
async def test_loops_that_take_weights_while_they_run_are_not_stopped() -> None:
    calls = Counted(after(10))
    plane = disaggregated(loop=TakesWeights(calls))
    async with producing(plane):
        await asyncio.sleep(5)
        assert await plane.manager.pause_produce() == 0.0
        assert plane.manager.producer_state is ProducerState.RUNNING
        assert (await plane.ledger())["in_flight"] == 2
        await plane.manager.continue_produce(1)
        assert len((await taken(plane.manager.get_batch(2, 1))).groups) == 2
        assert now() == 10.0
        assert len(calls.samples) == 4, "every sample was generated once"


@simulated
async def test_a_loop_that_takes_weights_while_it_runs_was_stopped_because_of_another_one() -> None:
    taking, stopping = Counted(after(10)), Counted(after(10))
    plane = disaggregated({"a": 1, "b": 1}, loop={"a": TakesWeights(taking), "b": FunctionAgentLoop(stopping)})
    async with producing(plane):
        await asyncio.sleep(5)
        await plane.manager.pause_produce()
        assert (await plane.ledger("a"), await plane.ledger("b")) == (
            {"issued": 1, "in_flight": 1},
            {"issued": 1, "buffered": 1},
        )
        await plane.manager.continue_produce(1)
        await taken(plane.manager.get_batch(2, 1))
        assert now() == 15.0
        assert (len(taking.samples), len(stopping.samples)) == (2, 4)


def paused_at(number: int | None, *, make: Any, seed: int) -> int:
    """A run that is paused at an event, and looked at; the events of a run without that."""
    events = 0

    async def main() -> None:
        nonlocal events
        calls = Counted(by_group(1, 2, 5))

        async def rewarded(state: RolloutState) -> float:
            await asyncio.sleep(0.2)
            return 1.0

        options: dict[str, Any] = {} if make is SyncProduceStrategy else {"over_sample_threshold": 0.5}
        plane = disaggregated({"a": 1, "b": 1}, loop=calls, make=make, reward_fn=rewarded, interval=2, **options)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        pausing: asyncio.Future[asyncio.Task[float]] = loop.create_future()
        if number is not None:
            loop.at_event(number, lambda: pausing.set_result(loop.create_task(plane.manager.pause_produce())))
        producer = asyncio.create_task(plane.manager.produce_loop(2))
        step = 1

        async def train() -> None:
            nonlocal step
            while step <= 2:
                async with plane.manager.get_batch(2, step):
                    await asyncio.sleep(1)
                step += 1

        training = asyncio.ensure_future(train())
        if number is None:
            await training
            events = loop.events
        else:
            await (await pausing)
            await plane.check_idle()
            begun = len(calls.samples)
            await asyncio.sleep(60)
            assert len(calls.samples) == begun, "something was started in a pause"
            await plane.check_idle()
            await plane.manager.continue_produce(0)
            await training
        assert not producer.done()
        await plane.manager.shutdown()
        await producer
        await plane.check_idle()
        assert sum(line["trained"] for line in (await plane.buffer.ledger()).values()) == 4

    run(main, seed=seed, max_events=100_000, max_seconds=10_000)
    return events


@pytest.mark.parametrize("make", [AsyncProduceStrategy, SyncProduceStrategy])
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_pause_at_every_point_in_turn_lets_nothing_start(make: Any, stride: int) -> None:
    for number in range(3, paused_at(None, make=make, seed=1), stride):
        try:
            paused_at(number, make=make, seed=1)
        except BaseException as error:
            raise AssertionError(f"a pause at event {number}: {error!r}") from error


@simulated
async def test_a_pause_before_the_producer_starts_holds_it() -> None:
    calls = Counted(at_once)
    plane = disaggregated(loop=calls)
    await plane.manager.pause_produce()
    async with producing(plane):
        await asyncio.sleep(50)
        assert calls.samples == []
        await plane.manager.continue_produce(0)
        assert len((await taken(plane.manager.get_batch(2, 1))).groups) == 2


# --- failures -------------------------------------------------------------------------------------------


@simulated
async def test_a_failure_of_the_producer_surfaces_in_a_waiting_get_batch_and_in_later_ones() -> None:
    plane = disaggregated(
        {"good": 1, "bad": 1},
        loop={"good": after(500), "bad": failing(1)},
        budgets=Budgets(max_consecutive_failures=3),
        max_tries=9,
    )
    producer = asyncio.create_task(plane.manager.produce_loop(2))
    with pytest.raises(ProducerStopped, match="the producer failed: TooManyFailures: 3 attempts in a row at") as caught:
        await taken(plane.manager.get_batch(2, 1))
    assert isinstance(caught.value.__cause__, TooManyFailures)
    assert now() == 3.0
    with pytest.raises(TooManyFailures):
        await producer
    await plane.check_idle()
    for step in (1, 2):
        with pytest.raises(ProducerStopped, match="the producer failed"):
            await taken(plane.manager.get_batch(2, step))
    assert "producer failed: 3 attempts" in await plane.manager.explain_wait()

    plane.loops["bad"].function = at_once  # type: ignore[attr-defined]
    plane.loops["good"].function = at_once  # type: ignore[attr-defined]
    async with producing(plane):
        assert len((await taken(plane.manager.get_batch(2, 1))).groups) == 2


@simulated
async def test_a_failure_was_hidden_until_everything_was_used_up() -> None:
    async def some(state: RolloutState) -> None:
        await asyncio.sleep(1)
        if (state.group_id or 0) >= 6:
            raise RuntimeError("the engine is down")
        answer(state)

    plane = disaggregated(loop=some, interval=8, budgets=Budgets(max_consecutive_failures=2), max_tries=9)
    producer = asyncio.create_task(plane.manager.produce_loop(2))
    await asyncio.sleep(20)
    assert (await plane.ledger())["buffered"] >= 6
    with pytest.raises(ProducerStopped, match="its groups are kept"):
        await taken(plane.manager.get_batch(2, 1))
    with pytest.raises(TooManyFailures):
        await producer
    plane.loops["math"].function = at_once  # type: ignore[attr-defined]
    async with producing(plane):
        assert sorted_ids((await taken(plane.manager.get_batch(2, 1))).groups) == [0, 1], "it is kept"


@simulated
async def test_a_producer_that_was_never_started_is_an_error_at_once() -> None:
    plane = disaggregated()
    with pytest.raises(ProducerStopped, match="produce_loop is not running; start it with"):
        await taken(plane.manager.get_batch(2, 1))
    assert now() == 0


@simulated
async def test_a_producer_that_is_started_just_now_is_one() -> None:
    plane = disaggregated(loop=after(1))
    producer = asyncio.create_task(plane.manager.produce_loop(2))
    assert len((await taken(plane.manager.get_batch(2, 1))).groups) == 2
    await plane.manager.shutdown()
    await producer


@simulated
async def test_a_producer_that_was_cancelled_gives_its_groups_back_and_ends_waits() -> None:
    plane = disaggregated({"a": 1, "b": 1}, loop=after(100), over_sample_threshold=1.0, interval=2)
    producer = asyncio.create_task(plane.manager.produce_loop(2))
    getting = asyncio.ensure_future(plane.manager.get_batch(2, 1).__aenter__())
    await asyncio.sleep(10)
    producer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await producer
    await plane.check_idle()
    assert await plane.ledger("a") == {"issued": 2, "buffered": 2}
    with pytest.raises(ProducerStopped, match="produce_loop is not running"):
        await getting
    assert now() == 10.0


@simulated
async def test_what_is_there_is_handed_out_without_a_producer() -> None:
    plane = disaggregated(interval=2)
    producer = asyncio.create_task(plane.manager.produce_loop(2))
    await asyncio.sleep(5)
    producer.cancel()
    await asyncio.wait([producer])
    for step in (1, 2):
        assert len((await taken(plane.manager.get_batch(2, step))).groups) == 2
    with pytest.raises(WeightsTooOld):
        await plane.manager.get_batch(2, 3)
    await plane.manager.continue_produce(2)
    with pytest.raises(ProducerStopped):
        await taken(plane.manager.get_batch(2, 3))


@simulated
async def test_one_producer_at_a_time() -> None:
    plane = disaggregated()
    async with producing(plane):
        await asyncio.sleep(1)
        with pytest.raises(InvalidInput, match="produce_loop is already running"):
            await plane.manager.produce_loop(2)
        assert len((await taken(plane.manager.get_batch(2, 1))).groups) == 2


@simulated
async def test_a_function_that_stops_before_the_step_is_full_kept_the_producer_busy_for_ever() -> None:
    plane = disaggregated(
        loop=by_group(1, 2, 3, 99), interval=2, should_continue_fn=lambda available, target: available < target - 1
    )
    producer = asyncio.create_task(plane.manager.produce_loop(4))
    with pytest.raises(ProducerStopped, match="should_continue_fn of task 'math' stopped at 3 of 4 groups"):
        await taken(plane.manager.get_batch(4, 1))
    with pytest.raises(ProduceError):
        await producer
    await plane.check_idle()


@simulated
async def test_a_timeout_explains_what_is_missing() -> None:
    buffer = ReplayBuffer(storage=MemoryStorage(clock=now))
    plane = disaggregated({"math": 2, "code": 1}, loop={"math": by_group(1, 500), "code": at_once}, buffer=buffer)
    async with producing(plane, 3):
        with pytest.raises(WaitTimeout) as caught:
            await taken(plane.manager.get_batch(3, 1, timeout_s=60))
        assert now() == 60.0
        text = caught.value.explanation
        assert str(caught.value).startswith(
            "the batch of train step 1: 2 of task 'math', 1 of task 'code': not within 60 s\n"
        )
        assert "waited 60.0 s so far for the batch of train step 1" in text
        assert "task 'math': buffered 1 completed; 1 in flight" in text
        assert "the oldest (group 1) for 60.0 s" in text
        assert "task 'math': 1 groups missing of 2 owed up to step 1; 1 in flight here" in text
        assert "task 'code': 0 groups missing of 1 owed" in text
        assert "producer running, filling step 1, at most up to 1" in text
        assert await plane.ledger("code") == {"issued": 1, "buffered": 1}, "nothing was taken"
        with pytest.raises(WaitTimeout):
            await taken(plane.manager.get_batch(3, 1, timeout_s=0))
        with pytest.raises(InvalidInput, match="timeout_s is 'soon'"):
            await taken(plane.manager.get_batch(3, 1, timeout_s="soon"))  # type: ignore[arg-type]


@simulated
async def test_a_producer_at_its_bound_is_said_to_wait_for_weights() -> None:
    plane = disaggregated(loop=after(1), interval=3)
    async with producing(plane):
        await asyncio.sleep(100)
        text = await plane.manager.explain_wait()
        assert "producer running, keeping the steps up to 3 filled, the last one that these weights are" in text


@simulated
async def test_a_paused_producer_is_said_to_be_paused() -> None:
    plane = disaggregated()
    async with producing(plane):
        await plane.manager.pause_produce()
        with pytest.raises(WaitTimeout, match="producer paused, filling step 1"):
            await taken(plane.manager.get_batch(2, 1, timeout_s=5))
        await plane.manager.continue_produce(0)


@simulated
async def test_a_cancelled_wait_takes_nothing() -> None:
    plane = disaggregated(loop=after(5))
    async with producing(plane):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(plane.manager.get_batch(2, 1).__aenter__(), 2)
        await asyncio.sleep(10)
        assert await plane.ledger() == {"issued": 2, "buffered": 2}


# --- the end --------------------------------------------------------------------------------------------


@simulated
async def test_a_shutdown_returns_what_is_in_flight_and_ends_every_wait() -> None:
    plane = disaggregated({"a": 1, "b": 1}, loop=after(100), over_sample_threshold=1.0)
    producer = asyncio.create_task(plane.manager.produce_loop(2))
    getting = asyncio.ensure_future(plane.manager.get_batch(2, 1).__aenter__())
    await asyncio.sleep(10)
    await plane.manager.shutdown()
    await plane.check_idle()
    assert producer.done() or (await turns() or producer.done())  # type: ignore[func-returns-value]
    await producer
    with pytest.raises(BufferClosed, match="this manager was shut down"):
        await getting
    for call in (
        lambda: plane.manager.get_batch(2, 1),
        lambda: plane.manager.produce_loop(2),
        lambda: plane.manager.pause_produce(),
        lambda: plane.manager.continue_produce(1),
    ):
        with pytest.raises(BufferClosed):
            await call()
    await plane.manager.shutdown()
    assert await plane.ledger("a") == {"issued": 2, "buffered": 2}, "the buffer stays open"


@simulated
async def test_a_shutdown_ends_a_paused_producer_and_one_at_its_bound() -> None:
    for paused in (False, True):
        plane = disaggregated()
        producer = asyncio.create_task(plane.manager.produce_loop(2))
        await asyncio.sleep(10)
        if paused:
            await plane.manager.pause_produce()
        else:
            await taken(plane.manager.get_batch(2, 1))  # now it waits for newer weights
        await asyncio.sleep(10)
        await plane.manager.shutdown()
        await producer


@simulated
async def test_a_batch_that_is_held_can_be_acknowledged_after_a_shutdown() -> None:
    plane = disaggregated()
    async with producing(plane), plane.manager.get_batch(2, 1):
        await plane.manager.shutdown()
    assert await plane.ledger() == {"issued": 2, "trained": 2}
    assert plane.manager.next_train_step == 2


@simulated
async def test_a_buffer_closed_under_the_producer_ends_it() -> None:
    plane = disaggregated(loop=after(100))
    producer = asyncio.create_task(plane.manager.produce_loop(2))
    await asyncio.sleep(10)
    await plane.buffer.close()
    await producer
    with pytest.raises(BufferClosed):
        await taken(plane.manager.get_batch(2, 1))
    await plane.manager.shutdown()


@simulated
async def test_a_loop_that_ignores_cancels_delays_a_shutdown_and_no_more() -> None:
    async def stubborn(state: RolloutState) -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
                return

    plane = disaggregated(loop=stubborn, timeouts=Timeouts(cancel_timeout_s=5))
    producer = asyncio.create_task(plane.manager.produce_loop(2))
    await asyncio.sleep(10)
    await plane.manager.shutdown()
    assert now() <= 20.0
    await plane.check_idle()
    await producer


def stopped_at(number: int | None, how: str) -> int:
    """A run whose producer is cancelled, or whose manager is shut down, at an event; the events without that."""
    events = 0

    async def main() -> None:
        nonlocal events
        plane = disaggregated({"a": 1, "b": 1}, loop=by_group(1, 2, 5), over_sample_threshold=0.5, interval=2)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        producer = asyncio.create_task(plane.manager.produce_loop(2))
        ending: list[asyncio.Task[None]] = []
        faults: dict[str, Callable[[], object]] = {
            "cancel": producer.cancel,
            "shutdown": lambda: ending.append(loop.create_task(plane.manager.shutdown())),
        }
        if number is not None:
            loop.at_event(number, faults[how])

        async def train() -> None:
            for step in (1, 2):
                async with plane.manager.get_batch(2, step):
                    await asyncio.sleep(1)

        training = asyncio.ensure_future(train())
        with suppress(ProducerStopped, BufferClosed):
            await training
        events = loop.events
        if number is not None:
            await asyncio.wait([producer, *ending])
            await plane.check_idle()
            assert all(line["leased"] == 0 for line in (await plane.buffer.ledger()).values())
        await plane.manager.shutdown()
        await asyncio.wait([producer])

    run(main, seed=1, max_events=100_000)
    return events


@pytest.mark.parametrize("how", ["cancel", "shutdown"])
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_g03_a_producer_stopped_at_every_point_in_turn_loses_nothing(how: str, stride: int) -> None:
    for number in range(4, stopped_at(None, how), stride):
        try:
            stopped_at(number, how)
        except BaseException as error:
            raise AssertionError(f"{how} at event {number}: {error!r}") from error


# --- looking --------------------------------------------------------------------------------------------


@simulated
async def test_figures_say_how_far_the_producer_is() -> None:
    plane = disaggregated(interval=2)
    assert (await plane.manager.stats())["forebay/manager/producer_running"] == 0
    async with producing(plane):
        await asyncio.sleep(5)
        flat = await plane.manager.stats()
        assert flat["forebay/math/buffered/completed"] == 4
        assert flat["forebay/manager/future_step"] == 3
        assert flat["forebay/manager/bound_step"] == 2
        assert flat["forebay/manager/producer_running"] == 1
        assert (flat["forebay/math/consumed"], flat["forebay/math/target"]) == (0, 4)
        await plane.manager.pause_produce()
        assert (await plane.manager.stats())["forebay/manager/producer_running"] == 0
        await plane.manager.continue_produce(0)


@simulated
async def test_a_producer_that_is_not_running_is_explained() -> None:
    plane = disaggregated(interval=2)
    text = await plane.manager.explain_wait()
    assert "producer not running (produce_loop was not started, or has ended)" in text
    assert re.search(r"task 'math': 0 groups missing of 0 owed", text)


def test_nobody_polls_while_nothing_happens() -> None:
    """At the bound, in a pause, and without weights: no event at all, so a simulation would be stuck."""

    async def main() -> None:
        plane = disaggregated()
        producer = asyncio.create_task(plane.manager.produce_loop(2))
        await taken(plane.manager.get_batch(2, 1))
        await producer

    with pytest.raises(SimulationStuck, match="nothing is ready and no timer is set"):
        run(main)


@simulated
async def test_a_hanging_engine_is_waited_for_without_polling() -> None:
    plane = disaggregated(loop=never, timeouts=Timeouts(member_timeout_s=1e6))
    async with producing(plane):
        getting = asyncio.ensure_future(plane.manager.get_batch(2, 1).__aenter__())
        await asyncio.sleep(1)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        before = loop.events
        await asyncio.sleep(100_000)
        assert loop.events - before < 10
        getting.cancel()
