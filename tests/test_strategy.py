"""How a batch is produced: how many groups are started, which, when it ends, and what is left behind: nothing.

The tools of the tests of producing stand here, too: `simulated` runs a test in virtual time under several orders of
events, `Producer` brings a buffer, a sampler, an agent loop and a strategy together.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import pytest

from forebay import (
    AgentLoop,
    AsyncProduceStrategy,
    Budgets,
    BufferClosed,
    FunctionAgentLoop,
    InvalidConfig,
    InvalidInput,
    InvalidRecord,
    MemoryStorage,
    NoProgress,
    ProduceStrategy,
    Production,
    ReplayBuffer,
    RolloutState,
    Sampler,
    SamplerWithReplayBuffer,
    Status,
    StorageError,
    SyncProduceStrategy,
    Timeouts,
    TooManyFailures,
    TooManyRejections,
    WeightsTooOld,
)
from forebay.buffer.internal import internals
from forebay.core.ledger import Place, Record
from forebay.storage.base import Arrival, Summary
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import make_group, simulate
from forebay.testing.simulate import check_nothing_lost, train
from tests.support import closed_ledger

P = ParamSpec("P")

TASK = "math"
PROMPTS = [{"prompt": f"question {number}", "prompt_ids": [number, 2]} for number in range(40)]
SEEDS = range(4)

# --- tools ----------------------------------------------------------------------------------------------


class _Complaints(logging.Handler):
    """What asyncio has to say of exceptions that nobody looked at."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


def simulated(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in virtual time, once for every order of events; nobody may leave an exception behind."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        complaints = _Complaints()
        logging.getLogger("asyncio").addHandler(complaints)
        try:
            for seed in SEEDS:
                try:
                    simulate.run(lambda: test(*args, **kwargs), seed=seed, max_events=300_000)
                except BaseException as error:
                    error.add_note(f"under seed {seed}")
                    raise
        finally:
            logging.getLogger("asyncio").removeHandler(complaints)
        assert complaints.texts == []

    return run


def now() -> float:
    return asyncio.get_running_loop().time()


def answer(state: RolloutState, tokens: int = 3, *, reason: str | None = "stop", score: float | None = None) -> None:
    """Give a sample a whole response of so many tokens, from its first one on."""
    state.response_ids = list(range(tokens))
    state.logprobs = [-0.5] * tokens
    state.response = "word " * tokens
    state.status = Status.COMPLETED
    state.finish_reason = reason
    if score is not None:
        state.reward = {"score": score}


async def at_once(state: RolloutState) -> None:
    answer(state)


def after(seconds: float) -> Callable[[RolloutState], Awaitable[None]]:
    """A function that answers after so long."""

    async def slowly(state: RolloutState) -> None:
        await asyncio.sleep(seconds)
        answer(state)

    return slowly


class Counted:
    """Calls a function for every sample, and keeps what it was called with."""

    def __init__(self, function: Callable[[RolloutState], Awaitable[Any]] = at_once) -> None:
        self.function = function
        self.samples: list[RolloutState] = []

    async def __call__(self, state: RolloutState) -> Any:
        self.samples.append(state.__copy__())
        return await self.function(state)

    @property
    def rollout_ids(self) -> list[int | None]:
        return [state.rollout_id for state in self.samples]

    @property
    def groups(self) -> list[int]:
        """The groups, in order of their first call: groups that were drawn together begin in any order."""
        return list(dict.fromkeys(state.group_id or 0 for state in self.samples))


class Producer:
    """A buffer, a sampler, an agent loop and a strategy that brings them together."""

    def __init__(
        self,
        loop: AgentLoop | Callable[[RolloutState], Awaitable[Any]] = at_once,
        make: type[SyncProduceStrategy] | type[AsyncProduceStrategy] = SyncProduceStrategy,
        *,
        members: int = 2,
        buffer: ReplayBuffer | None = None,
        **settings: Any,
    ) -> None:
        self.loop = loop if isinstance(loop, AgentLoop) else FunctionAgentLoop(loop)
        self.buffer = ReplayBuffer() if buffer is None else buffer
        self.strategy: ProduceStrategy = make(self.buffer, **({"progress": NoProgress()} | settings))
        self.sampler = Sampler(PROMPTS, group_size=members, shuffle=False)

    async def produce(
        self, batch_size: int = 2, train_step: int = 1, model_step: int | None = None, **options: Any
    ) -> Production:
        options = {"task_name": TASK} | options
        return await self.strategy.produce_batch(
            self.loop,
            self.sampler,
            batch_size,
            train_step=train_step,
            model_step=train_step - 1 if model_step is None else model_step,
            **options,
        )

    async def train(self, groups: int, train_step: int = 1) -> list[list[RolloutState]]:
        """Take a batch, and acknowledge it."""
        async with self.buffer.lease_batch({TASK: groups}, train_step=train_step, timeout_s=0) as lease:
            return lease.groups

    async def records(self, **query: Any) -> list[Record]:
        return await self.buffer.query({"task_name": TASK} | query)

    async def buffered(self, status: Status) -> list[list[RolloutState]]:
        """The buffered groups of a status, by group_id."""
        records = await self.records(status=status, place=Place.BUFFERED)
        groups = [await self.buffer.read(record.uid) for record in sorted(records, key=lambda record: record.group_id)]
        return [group for group in groups if group is not None]

    async def only(self, status: Status) -> list[RolloutState]:
        (group,) = await self.buffered(status)
        return group

    async def ledger(self) -> dict[str, int]:
        return await closed_ledger(self.buffer, TASK)

    async def check_idle(self) -> None:
        """Nothing is under way: neither in the books nor on the event loop."""
        assert (await self.ledger()).get("in_flight", 0) == 0
        assert self.strategy.in_flight(TASK) == 0
        current = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not current]
        assert [task.get_name() for task in left] == []


def ids(groups: Sequence[Sequence[RolloutState]]) -> list[int | None]:
    return [group[0].group_id for group in groups]


def sorted_ids(groups: Sequence[Sequence[RolloutState]]) -> list[int]:
    return sorted(group[0].group_id or 0 for group in groups)


def statuses(group: Sequence[RolloutState]) -> list[Status]:
    return [state.status for state in group]


async def failing(state: RolloutState) -> None:
    raise RuntimeError("the engine is down")


async def never(state: RolloutState) -> None:
    await asyncio.Event().wait()


# --- sync -----------------------------------------------------------------------------------------------


@simulated
async def test_a_batch_is_produced_and_nothing_is_left_running() -> None:
    calls = Counted(after(5))
    producer = Producer(calls)
    production = await producer.produce(3)
    assert production == Production(
        task_name=TASK, complete=True, left=3, target=3, available=3, started=3, tail=False, seconds=5.0
    )
    assert sorted(calls.groups) == [0, 1, 2]
    assert sorted(id for id in calls.rollout_ids if id is not None) == [0, 1, 2, 3, 4, 5]
    await producer.check_idle()
    assert await producer.ledger() == {"issued": 3, "buffered": 3}


@simulated
async def test_sync_starts_only_what_is_missing() -> None:
    """The reference starts a whole batch regardless, and loses three results."""
    producer = Producer()
    await producer.produce(3)
    production = await producer.produce(4)
    assert production.started == 1
    assert await producer.ledger() == {"issued": 4, "buffered": 4}


@simulated
async def test_a_batch_that_is_there_already_starts_nothing() -> None:
    producer = Producer()
    await producer.produce(3)
    production = await producer.produce(2)
    assert (production.started, production.available, production.target) == (0, 3, 2)


@simulated
async def test_a_batch_of_nothing_is_complete_at_once() -> None:
    """Twenty times nothing were too many rejections."""
    producer = Producer()
    production = await producer.produce(0)
    assert (production.complete, production.started) == (True, 0)
    await producer.produce(2)
    assert (await producer.produce(0)).complete


@simulated
async def test_what_was_trained_and_leased_counts_towards_the_target() -> None:
    producer = Producer()
    await producer.produce(2)
    await producer.train(1)
    lease = await producer.buffer.lease_batch({TASK: 1}, train_step=1)
    production = await producer.produce(3)
    assert (production.target, production.started) == (5, 3)
    await lease.ack()
    assert await producer.ledger() == {"issued": 5, "buffered": 3, "trained": 2}


@simulated
async def test_a_cumulative_target_may_be_given() -> None:
    producer = Producer()
    await producer.produce(2)
    await producer.train(2)
    assert (await producer.produce(2, target=7)).started == 5


@simulated
async def test_a_group_that_comes_back_while_the_counts_are_read_is_not_replaced() -> None:
    class Slow(MemoryStorage):
        async def summary(self, *args: Any, **kwargs: Any) -> Summary:
            summary = await super().summary(*args, **kwargs)
            await asyncio.sleep(0.4)  # as over a network
            return summary

    async def staggered(state: RolloutState) -> None:
        await asyncio.sleep(1 + 0.3 * (state.group_id or 0))
        answer(state)

    producer = Producer(staggered, buffer=ReplayBuffer(storage=Slow()))
    production = await producer.produce(4)
    assert (production.available, production.started) == (4, 4)


@simulated
async def test_a_rejected_lease_makes_room_for_another_group() -> None:
    producer = Producer(after(10))
    await producer.produce(1)
    lease = await producer.buffer.lease_batch({TASK: 1}, train_step=1)
    producing = asyncio.create_task(producer.produce(1, target=2))
    await asyncio.sleep(5)
    await lease.reject(lease.groups, "no gradient")
    production = await producing
    assert (production.started, production.seconds) == (2, 15.0)


@simulated
async def test_a_rejected_lease_does_not_count_for_the_next_batch() -> None:
    producer = Producer(after(10))
    await producer.produce(1)
    lease = await producer.buffer.lease_batch({TASK: 1}, train_step=1)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(5)
    await lease.reject(lease.groups, "no gradient")
    production = await producing
    assert (production.started, production.seconds) == (1, 10.0)


@simulated
async def test_filtered_groups_are_replaced_by_new_prompts() -> None:
    def odd(group: list[RolloutState]) -> bool | str:
        return (group[0].group_id or 0) % 2 == 1 or "even"

    producer = Producer(is_valid_sample_fn=odd)
    production = await producer.produce(3)
    assert all((group_id or 0) % 2 for group_id in ids(await producer.train(3)))
    assert production.started >= 6
    await producer.check_idle()
    ledger = await producer.ledger()
    assert ledger["trained"] == 3
    assert (await producer.buffer.reasons())[TASK] == {"even": ledger["filtered"]}


@simulated
async def test_groups_that_failed_for_good_are_replaced_by_new_prompts() -> None:
    async def some(state: RolloutState) -> None:
        if state.group_id in (0, 2):
            raise RuntimeError("no answer to this one")
        answer(state)

    producer = Producer(some, max_tries=2)
    await producer.produce(3)
    assert sorted(record.group_id for record in await producer.records()) == [1, 3, 4]
    assert (await producer.ledger())["failed"] == 2
    assert (await producer.buffer.reasons())[TASK] == {"RuntimeError: no answer to this one": 2}
    await producer.check_idle()


@simulated
async def test_a_group_that_failed_is_generated_again_before_new_prompts_are_drawn() -> None:
    failures = iter([True])

    async def first(state: RolloutState) -> None:
        if next(failures, False):
            raise RuntimeError("once")
        answer(state)

    producer = Producer(first, members=1)
    production = await producer.produce(3)
    assert production.started == 4
    assert ids(await producer.buffered(Status.COMPLETED)) == [0, 1, 2]


@simulated
async def test_retries_are_drawn_first_in_order_of_their_group() -> None:
    calls = Counted()
    producer = Producer(calls)
    for status in (Status.ABORTED, Status.EXPIRED, Status.INIT):
        for _ in range(2):
            await producer.buffer.put(make_group(status=status, tokens=0), TASK)
    for groups in range(1, 8):
        await producer.produce(groups)
    # Put by hand they were numbered downwards. What was restored comes first, then what expired, then what was stopped.
    assert calls.groups == [-6, -5, -4, -3, -2, -1, 0]


@simulated
async def test_prompts_restored_from_a_checkpoint_are_drawn_first() -> None:
    """The reference skips every prompt that was in the buffer."""
    producer = Producer()
    drawn = await producer.sampler.with_buffer(producer.buffer).draw(3, TASK)
    for group in drawn:
        await producer.buffer.put(group, TASK)
    assert await producer.buffer.count(TASK, Status.INIT) == 3
    production = await producer.produce(4)
    assert production.started == 4
    assert sorted_ids(await producer.train(4)) == [0, 1, 2, 3]
    assert (await producer.ledger())["issued"] == 4


@simulated
async def test_a_cancelled_batch_is_back_in_the_buffer() -> None:
    producer = Producer(after(10))
    producing = asyncio.create_task(producer.produce(4))
    await asyncio.sleep(5)
    producing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await producing
    await producer.check_idle()
    assert await producer.ledger() == {"issued": 4, "buffered": 4}
    assert [state.num_tries for group in await producer.buffered(Status.ABORTED) for state in group] == [0] * 8
    assert (await producer.produce(4)).complete
    assert sorted_ids(await producer.train(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("event", range(1, 60, 3))
def test_a_batch_cancelled_at_any_moment_loses_nothing(event: int) -> None:
    """A group that was cancelled before the first step of its task stayed in flight for ever."""

    async def main() -> None:
        producer = Producer(after(1))
        producing = asyncio.ensure_future(producer.produce(3))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, simulate.SimulatedLoop)
        loop.at_event(loop.events + event, producing.cancel)
        await asyncio.wait((producing,))
        await producer.check_idle()
        assert (await producer.produce(3)).complete
        assert sorted(record.group_id for record in await producer.records()) == [0, 1, 2]

    for seed in SEEDS:
        simulate.run(main, seed=seed)


@simulated
async def test_an_exception_brings_everything_back() -> None:
    """The reference stores two of seven good groups when one raises, and leaves the others running."""
    seen = 0

    def stop(available: int, target: int) -> bool:
        nonlocal seen
        seen += 1
        if available:
            raise ZeroDivisionError("in the user's own function")
        return True

    calls = Counted()

    async def staggered(state: RolloutState) -> None:
        await asyncio.sleep(1 + (state.group_id or 0))
        answer(state)

    calls.function = staggered
    producer = Producer(calls, should_continue_fn=stop)
    with pytest.raises(ZeroDivisionError):
        await producer.produce(7)
    await producer.check_idle()
    assert await producer.ledger() == {"issued": 7, "buffered": 7}
    assert ids(await producer.buffered(Status.COMPLETED)) == [0]
    assert ids(await producer.buffered(Status.ABORTED)) == [1, 2, 3, 4, 5, 6]


@simulated
async def test_a_bad_record_of_the_data_set_is_raised_and_what_runs_comes_back() -> None:
    producer = Producer(after(5), members=1)
    producer.sampler = Sampler([{"prompt": "good"}, {"no": "message"}], shuffle=False)
    with pytest.raises(InvalidRecord, match="record 1"):
        await producer.produce(2)
    await producer.check_idle()


@simulated
async def test_stopping_early_by_a_function_of_the_user_leaves_nothing_running() -> None:
    async def staggered(state: RolloutState) -> None:
        await asyncio.sleep(1 + (state.group_id or 0))
        answer(state)

    producer = Producer(staggered, should_continue_fn=lambda available, target: available < target - 2)
    production = await producer.produce(5)
    assert (production.complete, production.available, production.target) == (True, 3, 5)
    await producer.check_idle()
    assert await producer.ledger() == {"issued": 5, "buffered": 5}


@simulated
async def test_going_on_beyond_the_target_keeps_one_group_in_flight() -> None:
    producer = Producer(should_continue_fn=lambda available, target: available < target + 2)
    production = await producer.produce(2)
    assert (production.complete, production.available) == (True, 4)


# --- async ----------------------------------------------------------------------------------------------


def running_ahead(loop: Any = at_once, **settings: Any) -> Producer:
    return Producer(loop, AsyncProduceStrategy, **({"max_staleness": 3} | settings))


@simulated
async def test_over_issue_starts_more_than_the_target() -> None:
    """T = 10, A = 9, B = 4 and over 1.0: five are started."""
    calls = Counted()
    producer = running_ahead(calls, over_sample_threshold=1.0)
    await producer.buffer.put_many([make_group(model_step=0) for _ in range(9)], TASK)
    calls.function = after(5)
    production = await producer.produce(4, target=10)
    assert (production.started, production.available) == (5, 14)
    assert sorted(calls.groups) == [0, 1, 2, 3, 4]


@simulated
async def test_seven_hundredths_of_a_hundred_are_seven() -> None:
    async def first_hundred(state: RolloutState) -> None:
        if (state.group_id or 0) >= 100:
            await never(state)
        await asyncio.sleep(1)
        answer(state)

    producer = running_ahead(first_hundred, over_sample_threshold=0.07, members=1)
    production = await producer.produce(100)
    assert (production.started, producer.strategy.in_flight(TASK)) == (107, 7)
    await producer.strategy.pause()
    await producer.check_idle()


@simulated
async def test_what_runs_ahead_is_counted_and_brought_in_by_the_pause() -> None:
    async def staggered(state: RolloutState) -> None:
        await asyncio.sleep(1 + (state.group_id or 0))
        answer(state)

    producer = running_ahead(staggered, over_sample_threshold=1.0)
    first = await producer.produce(2)
    assert (first.started, first.seconds) == (4, 2.0)
    assert producer.strategy.in_flight(TASK) == 2
    await producer.strategy.pause()
    await producer.check_idle()
    assert await producer.ledger() == {"issued": 4, "buffered": 4}
    await producer.train(2)
    second = await producer.produce(2)
    assert second.complete
    assert sorted_ids(await producer.train(2)) == [2, 3]  # nothing that ran ahead was lost


@simulated
async def test_what_was_left_running_is_not_started_again() -> None:
    async def staggered(state: RolloutState) -> None:
        await asyncio.sleep(1 + (state.group_id or 0))
        answer(state)

    producer = running_ahead(staggered, over_sample_threshold=1.0, members=1)
    await producer.produce(2)
    await producer.train(2)
    second = await producer.produce(2)  # two are under way
    assert second.started == 2
    assert ids(await producer.train(2)) == [2, 3]
    await producer.strategy.close()
    await producer.check_idle()


@simulated
async def test_a_tail_waits_until_so_many_have_expired() -> None:
    """Trigger 3: two that expired wait on, and three are run first, without over-issue."""
    calls = Counted()
    producer = running_ahead(calls, tail_batch_trigger_size=3, over_sample_threshold=1.0)
    for number in (100, 101):
        await producer.buffer.put(make_group(status=Status.EXPIRED, group_id=-number), TASK)
    normal = await producer.produce(2)
    assert (normal.tail, normal.started) == (False, 4)
    assert sorted(calls.groups) == [0, 1, 2, 3]
    await producer.train(4)
    await producer.buffer.put(make_group(status=Status.EXPIRED, group_id=-102), TASK)
    tail = await producer.produce(4)
    assert (tail.tail, tail.started) == (True, 4)
    assert sorted(calls.groups[4:7]) == [-102, -101, -100]
    assert calls.groups[7:] == [4]


@simulated
async def test_trigger_zero_runs_what_expired_first_and_over_issues_still() -> None:
    calls = Counted(after(1))
    producer = running_ahead(calls, over_sample_threshold=1.0)
    await producer.buffer.put(make_group(status=Status.EXPIRED, group_id=-9), TASK)
    production = await producer.produce(2)
    assert (production.tail, production.started) == (False, 4)
    assert -9 in calls.groups


@simulated
async def test_without_a_tail_what_expired_is_discarded_as_stale_and_what_was_stopped_is_retried() -> None:
    calls = Counted()
    producer = Producer(calls, AsyncProduceStrategy, tail_batch_trigger_size=-1)
    await producer.buffer.put(make_group(model_step=0, group_id=-1), TASK)
    await producer.buffer.put(make_group(status=Status.ABORTED, tokens=0, group_id=-2), TASK)
    await producer.buffer.put(make_group(status=Status.EXPIRED, group_id=-3), TASK)
    await producer.produce(2, train_step=5)
    assert sorted(calls.groups) == [-2, 0]
    assert await producer.ledger() == {"issued": 4, "buffered": 2, "discarded": 2}
    assert await producer.buffer.reasons() == {TASK: {"stale": 2}}


@simulated
async def test_aborted_groups_count_for_a_tail_only_without_partial_rollout() -> None:
    for partial, started_first in ((False, [0]), (True, [-3, -2])):
        calls = Counted()
        producer = running_ahead(calls, tail_batch_trigger_size=3, enable_partial_rollout=partial)
        for number in (2, 3):
            await producer.buffer.put(make_group(status=Status.ABORTED, model_step=0, group_id=-number), TASK)
        production = await producer.produce(len(started_first))
        assert (production.tail, sorted(calls.groups)) == (False, started_first)


@simulated
async def test_a_group_that_was_returned_three_times_is_drawn_first_and_delays_no_batch() -> None:
    async def one_is_long(state: RolloutState) -> None:
        await asyncio.sleep(1000 if state.group_id == 0 else 1)
        answer(state)

    calls = Counted(one_is_long)
    producer = running_ahead(calls, over_sample_threshold=0.5, members=1)
    for step in range(1, 9):
        first = len(calls.samples)
        production = await producer.produce(2, step)
        assert not production.tail
        assert production.seconds <= 2
        await producer.strategy.pause()
        await producer.train(2, step)
        if step > 4:
            assert 0 in {state.group_id for state in calls.samples[first:]}


@simulated
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("trigger", [0, 1, 8])
async def test_a_straggler_is_drawn_before_groups_with_lower_ids(trigger: int, partial: bool) -> None:
    """The straggler has the highest id, and the last status in the order of draws."""
    buffer = ReplayBuffer()
    started: list[int | None] = []

    async def note(state: RolloutState) -> None:
        started.append(state.group_id)
        await never(state)

    producer = running_ahead(
        note, buffer=buffer, members=1, tail_batch_trigger_size=trigger, enable_partial_rollout=partial, tail_after=2
    )
    straggler = 7
    await producer.sampler.with_buffer(buffer).draw(straggler + 1, TASK)
    await buffer.storage.release(buffer.owner)
    await internals(buffer).redraw(1, TASK, group_ids=[straggler])
    await buffer.storage.release(buffer.owner)
    by_id = {record.group_id: record for record in await producer.records()}
    assert (by_id[straggler].attempt, by_id[0].attempt) == (2, 1)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(1)
    assert started == [straggler]
    await producer.strategy.pause()
    await producing


@simulated
async def test_stragglers_are_not_drawn_where_expired_groups_are_dropped() -> None:
    calls = Counted()
    producer = Producer(calls, AsyncProduceStrategy, tail_batch_trigger_size=-1, tail_after=1)
    await producer.buffer.put(make_group(status=Status.EXPIRED, group_id=-3), TASK)
    await producer.produce(1)
    assert sorted(calls.groups) == [0]


@simulated
async def test_a_straggler_is_known_after_a_restart() -> None:
    """Which groups straggle was only remembered by the strategy that had run them."""
    buffer = ReplayBuffer()
    first = running_ahead(never, buffer=buffer, tail_batch_trigger_size=8, members=1)
    for step in (1, 2, 3):
        producing = asyncio.create_task(first.produce(1, step))
        await asyncio.sleep(1)
        await first.strategy.pause()
        assert not (await producing).complete
        # At a trigger of 8 what was stopped waits, and new prompts are drawn; this one is drawn by hand.
        while step < 3 and (await buffer.query({"group_id": 0}))[0].attempt < step + 1:
            await internals(buffer).redraw(9, TASK)
            await buffer.storage.release(buffer.owner)
    calls = Counted()
    second = running_ahead(calls, buffer=buffer, tail_batch_trigger_size=8, over_sample_threshold=1.0, members=1)
    assert max(record.attempt for record in await second.records()) >= 3
    production = await second.produce(1, 4)
    assert not production.tail
    assert 0 in calls.groups


@simulated
async def test_new_tokens_have_the_model_step_of_the_beginning_of_the_attempt() -> None:
    async def two_more(state: RolloutState) -> None:
        await asyncio.sleep(1)
        state.response_ids = [*(state.response_ids or []), 7, 8]
        state.logprobs = [*(state.logprobs or []), -0.1, -0.2]
        if len(state.response_ids) < 4:
            state.finish_reason = "abort"
            await never(state)
        state.status, state.finish_reason = Status.COMPLETED, "stop"

    producer = running_ahead(two_more, enable_partial_rollout=True, members=1)
    producing = asyncio.create_task(producer.produce(1, 1, 0))
    await asyncio.sleep(2)
    await producer.strategy.pause()
    assert not (await producing).complete
    (stopped,) = await producer.only(Status.ABORTED)
    assert (stopped.response_ids, stopped.version_spans) == ([7, 8], ((0, 2),))
    await producer.produce(1, 2, 1)
    (whole,) = await producer.only(Status.COMPLETED)
    assert (whole.response_ids, whole.version_spans) == ([7, 8, 7, 8], ((0, 2), (1, 2)))


@simulated
async def test_without_partial_rollout_a_stopped_sample_restarts_from_its_prompt() -> None:
    calls = Counted()

    async def half(state: RolloutState) -> None:
        assert state.response_ids is None
        state.response_ids, state.logprobs = [7], [-0.1]
        await asyncio.sleep(10)
        answer(state)

    calls.function = half
    producer = running_ahead(calls, members=1)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(2)
    await producer.strategy.pause()
    await producing
    (stopped,) = await producer.only(Status.ABORTED)
    assert (stopped.response_ids, stopped.logprobs, stopped.version_spans) == (None, None, ())
    await producer.produce(1, 2)
    (whole,) = await producer.only(Status.COMPLETED)
    assert whole.version_spans == ((1, 3),)


@simulated
async def test_versions_that_the_engine_gave_win() -> None:
    async def versioned(state: RolloutState) -> None:
        answer(state, 3)
        state.response_model_steps = [1, 2]

    producer = running_ahead(versioned, members=1, max_staleness=1)
    await producer.produce(1, 3, 2)
    (state,) = await producer.only(Status.COMPLETED)
    assert state.version_spans == ((1, 1), (2, 2))


# --- what is refused --------------------------------------------------------------------------------------


def test_partial_rollout_that_would_throw_every_continued_token_away_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="raise max_staleness"):
        AsyncProduceStrategy(ReplayBuffer(), enable_partial_rollout=True)
    AsyncProduceStrategy(ReplayBuffer(), enable_partial_rollout=True, max_staleness=1)
    AsyncProduceStrategy(ReplayBuffer(), enable_partial_rollout=True, sync_weights_interval=2)
    tokens: dict[str, Any] = {"enable_partial_rollout": True, "max_staleness": 2, "max_token_staleness": 0}
    with pytest.raises(InvalidConfig, match="raise max_token_staleness"):
        AsyncProduceStrategy(ReplayBuffer(), **tokens)
    AsyncProduceStrategy(ReplayBuffer(), **tokens, sync_weights_interval=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"over_sample_threshold": -0.1}, "over_sample_threshold"),
        ({"timeouts": {"member_timeout_s": 5}}, r"timeouts is .*; expected forebay\.Timeouts"),
        ({"budgets": {"max_consecutive_failures": 5}}, r"budgets is .*; expected forebay\.Budgets"),
        ({"over_sample_threshold": float("nan")}, "over_sample_threshold"),
        ({"over_sample_threshold": float("inf")}, "over_sample_threshold"),
        ({"over_sample_threshold": True}, "over_sample_threshold"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"sync_weights_interval": 0}, "sync_weights_interval"),
        ({"max_staleness": 1, "max_token_staleness": 2}, "max_token_staleness"),
        ({"tail_batch_trigger_size": -2}, "tail_batch_trigger_size"),
        ({"tail_after": 0}, "tail_after"),
        ({"max_tries": 0}, "max_tries"),
        ({"reward_fn": len, "group_reward_fn": len}, "one of them"),
        ({"reward_fn": "no function"}, "no function"),
        ({"is_valid_sample_fn": [len, 5]}, "5 is not a function"),
        ({"should_continue_fn": 5}, "should_continue_fn"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_when_built(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        AsyncProduceStrategy(ReplayBuffer(), **settings)


def test_a_strategy_needs_a_buffer() -> None:
    with pytest.raises(InvalidConfig, match="ReplayBuffer"):
        SyncProduceStrategy(None)  # type: ignore[arg-type]


@simulated
async def test_arguments_that_cannot_be_meant_are_refused() -> None:
    producer = Producer()
    for wrong in ({"train_step": 0}, {"model_step": -1}, {"batch_size": -1}, {"task_name": ""}, {"batch_size": 1.5}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            await producer.produce(**wrong)
    other = SamplerWithReplayBuffer(PROMPTS, ReplayBuffer())
    with pytest.raises(InvalidConfig, match="another buffer"):
        await producer.strategy.produce_batch(producer.loop, other, 1, TASK, train_step=1, model_step=0)
    with pytest.raises(InvalidInput, match="expected an AgentLoop"):
        await producer.strategy.produce_batch(
            at_once,  # type: ignore[arg-type]
            producer.sampler,
            1,
            TASK,
            train_step=1,
            model_step=0,
        )
    with pytest.raises(InvalidInput, match="expected a Sampler"):
        await producer.strategy.produce_batch(
            producer.loop,
            PROMPTS,  # type: ignore[arg-type]
            1,
            TASK,
            train_step=1,
            model_step=0,
        )
    assert (await producer.produce(1)).complete


@simulated
async def test_weights_that_are_too_old_for_the_step_are_refused() -> None:
    """Whatever they generate is stale when it arrives: it was generated again and again, for ever."""
    producer = Producer()
    with pytest.raises(
        WeightsTooOld, match=r"weights of step 1 .* too old .* stale threshold of task 'math' is 1"
    ) as late:
        await producer.produce(1, train_step=5, model_step=1)
    assert (late.value.step, late.value.model_step) == (5, 1)
    assert await producer.ledger() == {}


@simulated
async def test_one_task_is_produced_by_one_call_at_a_time() -> None:
    producer = Producer(after(5))
    first = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(1)
    with pytest.raises(InvalidInput, match="already"):
        await producer.produce(2)
    assert (await first).complete  # the refused call disturbed nothing


@simulated
async def test_two_tasks_are_produced_at_once() -> None:
    producer = Producer(after(5))
    both = await asyncio.gather(producer.produce(2), producer.produce(3, task_name="code"))
    assert [production.available for production in both] == [2, 3]
    assert set(producer.strategy.stats()) == {
        name.replace("/math/", f"/{task}/") for name in producer.strategy.stats() for task in (TASK, "code")
    }


# --- too much goes wrong ----------------------------------------------------------------------------------


@simulated
async def test_twenty_failures_in_a_row_end_it_with_the_last_cause() -> None:
    calls = Counted(failing)
    producer = Producer(calls, members=1, max_tries=1000)
    with pytest.raises(
        TooManyFailures, match=r"20 attempts .* RuntimeError: the engine is down. Of these groups 0 .* 4 are back"
    ):
        await producer.produce(4)
    await producer.check_idle()
    assert 20 <= len(calls.samples) < 24
    assert await producer.ledger() == {"issued": 4, "buffered": 4}
    producer.loop = FunctionAgentLoop(at_once)
    assert (await producer.produce(4)).complete
    assert sorted_ids(await producer.train(4)) == [0, 1, 2, 3]


@simulated
async def test_the_error_of_many_failures_says_how_many_groups_ended() -> None:
    producer = Producer(failing, members=1, max_tries=2, budgets=Budgets(max_consecutive_failures=6))
    with pytest.raises(TooManyFailures) as caught:
        await producer.produce(2)
    ledger = await producer.ledger()
    assert ledger["failed"] >= 2
    said = f"Of these groups {ledger['failed']} spent their last try and ended as failed, "
    assert f"{said}{ledger.get('buffered', 0)} are back in the buffer" in str(caught.value)


@simulated
async def test_a_success_starts_the_count_of_failures_again() -> None:
    calls = Counted()

    async def every_fifth(state: RolloutState) -> None:
        if len(calls.samples) % 5:
            raise RuntimeError("not this time")
        answer(state)

    calls.function = every_fifth
    producer = Producer(calls, members=1, max_tries=1000, budgets=Budgets(max_consecutive_failures=5))
    for groups in range(1, 7):
        assert (await producer.produce(groups)).complete


@simulated
async def test_a_failure_budget_may_be_set() -> None:
    producer = Producer(failing, members=1, max_tries=1000, budgets=Budgets(max_consecutive_failures=3))
    with pytest.raises(TooManyFailures, match="3 attempts"):
        await producer.produce(1)


@simulated
async def test_twenty_batches_rejected_in_a_row_end_it_with_the_last_reason() -> None:
    producer = Producer(members=1, is_valid_sample_fn=lambda group: "too easy")
    with pytest.raises(TooManyRejections, match=r"\d+ groups .* too easy"):
        await producer.produce(2)
    await producer.check_idle()
    ledger = await producer.ledger()
    assert ledger["filtered"] >= 40
    assert ledger == {"issued": ledger["issued"], "filtered": ledger["filtered"]} | (
        {"buffered": ledger["buffered"]} if "buffered" in ledger else {}
    )


@simulated
async def test_a_rejection_budget_may_be_set_and_a_success_starts_it_again() -> None:
    verdicts = iter([False] * 4 + [True] + [False] * 50)
    producer = Producer(
        members=1, is_valid_sample_fn=lambda group: next(verdicts), budgets=Budgets(max_consecutive_rejections=5)
    )
    await producer.produce(1)
    with pytest.raises(TooManyRejections, match=r"\d+ groups"):
        await producer.produce(2)
    assert await producer.buffer.count(TASK, Status.COMPLETED) == 1
    verdicts = iter([True] * 50)
    assert (await producer.produce(2)).complete


# --- capacity ---------------------------------------------------------------------------------------------


@simulated
async def test_a_batch_that_never_fits_is_refused_at_once() -> None:
    producer = Producer(buffer=ReplayBuffer(max_groups=3))
    with pytest.raises(InvalidConfig, match="max_groups=3"):
        await producer.produce(4)
    assert (await producer.produce(3)).complete


@simulated
async def test_a_capacity_below_batch_and_over_issue_only_limits_the_over_issue() -> None:
    producer = running_ahead(after(1), over_sample_threshold=1.0, buffer=ReplayBuffer(max_groups=5))
    for step in (1, 2, 3):
        production = await producer.produce(4, step)
        assert production.complete
        await producer.strategy.pause()
        await producer.train(4, step)
    await producer.check_idle()


@simulated
async def test_capacity_that_an_acknowledgement_frees_lets_a_batch_go_on() -> None:
    producer = Producer(after(1), buffer=ReplayBuffer(max_groups=4))
    await producer.produce(4)
    lease = await producer.buffer.lease_batch({TASK: 4}, train_step=1)
    producing = asyncio.create_task(producer.produce(2, 2))
    await asyncio.sleep(100)
    assert not producing.done()
    explanation = await producer.buffer.explain_wait()
    assert "waited 100.0 s so far for task 'math' to have 2 completed groups in the buffer" in explanation
    assert "nothing new fits" in explanation
    await lease.ack()
    assert (await producing).seconds == 101.0


@pytest.mark.parametrize("trigger", [0, 3, -1])
def test_a_full_buffer_of_groups_that_failed_once_does_not_stand_still(trigger: int) -> None:
    """They waited to be generated again, and no new ones fitted beside them."""

    async def main() -> None:
        calls = Counted()

        async def once(state: RolloutState) -> None:
            if calls.rollout_ids.count(state.rollout_id) == 1:
                raise RuntimeError("the first time")
            answer(state)

        calls.function = once
        producer = running_ahead(calls, members=1, buffer=ReplayBuffer(max_groups=4), tail_batch_trigger_size=trigger)
        assert (await producer.produce(4)).complete

    simulate.run(main)


@simulated
async def test_the_wait_of_a_batch_is_explained() -> None:
    producer = Producer(after(50))
    producing = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(10)
    explanation = await producer.buffer.explain_wait()
    assert "waited 10.0 s so far for task 'math' to have 2 completed groups in the buffer" in explanation
    assert "2 in flight" in explanation
    await producing
    assert "nothing is waiting" in await producer.buffer.explain_wait()


# --- what the store does ----------------------------------------------------------------------------------


class Unreliable(MemoryStorage):
    """Fails when it is told to."""

    failures = 0
    puts = 0

    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        self.puts += 1
        if self.failures > 0:
            self.failures -= 1
            raise StorageError("the disk is full")
        return await super().put(arrivals, owner=owner)


@simulated
async def test_a_storage_error_is_raised_and_nothing_is_lost() -> None:
    """The group whose return had failed stayed in flight, though the store was well again a moment later."""
    storage = Unreliable()

    async def staggered(state: RolloutState) -> None:
        await asyncio.sleep(1 + (state.group_id or 0))
        answer(state)

    producer = Producer(staggered, buffer=ReplayBuffer(storage=storage))
    storage.failures = 1
    with pytest.raises(StorageError, match="disk is full"):
        await producer.produce(4)
    await producer.check_idle()
    assert await producer.ledger() == {"issued": 4, "buffered": 4}
    assert ids(await producer.buffered(Status.COMPLETED)) == [0]  # its work was kept, too
    assert (await producer.produce(4)).started == 3


@simulated
async def test_a_store_that_failed_several_times_is_heard_of_once() -> None:
    """The errors of the groups that were stopped surfaced in the next call, when all was well again."""
    storage = Unreliable()

    async def staggered(state: RolloutState) -> None:
        await asyncio.sleep(1 + (state.group_id or 0))
        answer(state)

    producer = Producer(staggered, buffer=ReplayBuffer(storage=storage))
    storage.failures = 3
    with pytest.raises(StorageError, match="disk is full"):
        await producer.produce(3)
    await producer.check_idle()
    assert (await producer.produce(3)).complete


@simulated
async def test_a_store_that_stays_broken_gets_the_groups_back_when_it_is_mended() -> None:
    storage = Unreliable()
    producer = Producer(after(1), buffer=ReplayBuffer(storage=storage))
    storage.failures = 1_000_000
    with pytest.raises(StorageError, match="disk is full"):
        await producer.produce(3)
    assert await producer.ledger() == {"issued": 3, "in_flight": 3}
    with pytest.raises(StorageError, match="disk is full"):
        await producer.produce(3)
    storage.failures = 0
    assert (await producer.produce(3)).complete
    await producer.check_idle()
    assert await producer.ledger() == {"issued": 3, "buffered": 3}


@simulated
async def test_a_group_that_was_taken_away_is_dropped_quietly() -> None:
    async def staggered(state: RolloutState) -> None:
        await asyncio.sleep(10 if (state.attempt or 0) == 1 else 1)
        answer(state)

    producer = Producer(staggered)
    producing = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(5)
    assert await producer.buffer.storage.release(producer.buffer.owner) == {TASK: 2}
    production = await producing
    assert production.complete
    await producer.check_idle()
    assert await producer.ledger() == {"issued": 2, "buffered": 2}
    assert [record.attempt for record in await producer.records()] == [2, 2]


@simulated
async def test_a_buffer_closed_in_the_middle_ends_the_batch_and_leaves_no_task() -> None:
    producer = Producer(after(10))
    producing = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(5)
    await producer.buffer.close()
    with pytest.raises(BufferClosed):
        await producing
    assert producer.strategy.in_flight(TASK) == 0
    ledger = (await producer.buffer.storage.summary()).ledger()[TASK]
    assert (ledger["in_flight"], ledger["buffered"]) == (0, 2)


class Anything:
    """No plain data."""


def test_what_cannot_be_stored_costs_a_try_and_the_group_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        calls = Counted()

        async def once(state: RolloutState) -> None:
            answer(state)
            if len(calls.samples) == 1:
                state.extra_fields["tool"] = Anything()

        calls.function = once
        async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
            producer = Producer(calls, buffer=buffer, members=2)
            await producer.produce(1)
            group = await producer.only(Status.COMPLETED)
            assert [state.num_tries for state in group] == [1, 0]  # the sibling kept its work
            assert calls.rollout_ids == [0, 1, 0]
            assert all("tool" not in state.extra_fields for state in group)
            await producer.check_idle()

    asyncio.run(main())


def test_what_can_never_be_stored_fails_with_its_path(tmp_path: Path) -> None:
    async def main() -> None:
        async def always(state: RolloutState) -> None:
            answer(state)
            if state.group_id == 0:
                state.extra_fields["tool"] = Anything()

        async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
            producer = Producer(always, buffer=buffer, max_tries=2)
            await producer.produce(1)
            (reason,) = (await buffer.reasons())[TASK]
            assert "cannot be stored" in reason
            assert "extra_fields" in reason
            assert await producer.ledger() == {"issued": 2, "buffered": 1, "failed": 1}

    asyncio.run(main())


def test_an_error_text_that_is_no_unicode_does_not_lose_the_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "forebay")  # workers of pytest cannot send such a text to each other

    async def main() -> None:
        async def once(state: RolloutState) -> None:
            if state.num_tries == 0:
                raise RuntimeError("half a pair: \ud800")
            answer(state)

        async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
            producer = Producer(once, buffer=buffer)
            assert (await producer.produce(1)).complete
            await producer.check_idle()

    asyncio.run(main())


@simulated
async def test_a_strategy_that_is_closed_in_the_middle_ends_its_batch() -> None:
    """The batch under way went on to draw new groups behind the back of whoever had closed it."""
    calls = Counted(after(10))
    producer = running_ahead(calls, timeouts=Timeouts())
    producing = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(5)
    await producer.strategy.close()
    assert not (await producing).complete
    await producer.check_idle()
    assert sorted(calls.groups) == [0, 1]
    assert await producer.ledger() == {"issued": 2, "buffered": 2}
    assert (await producer.produce(2)).complete


@simulated
async def test_a_storage_error_in_a_pause_does_not_leave_the_group_in_flight() -> None:
    storage = Unreliable()
    producer = running_ahead(after(10), buffer=ReplayBuffer(storage=storage))
    producing = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(5)
    storage.failures = 1
    await producer.strategy.pause()
    assert not (await producing).complete
    await producer.check_idle()
    with pytest.raises(StorageError, match="disk is full"):  # it is heard of, once
        await producer.produce(2)
    assert (await producer.produce(2)).complete


# --- the eight ways in which the reference loses work -------------------------------------------------------

# 1 is here; 2 (failed groups) in test_members; 3 (what a pause cancels) in test_pausing; 4 (an exception) above; 5
# and 6 (what a checkpoint misses) here and in test_pausing; 7 (what a call leaves behind) above; 8 (delivery) here.


def test_long_answers_do_not_starve() -> None:
    """With over-issue and its other defaults the reference trains on no long answer, and loses half of the prompts."""

    async def main() -> None:
        buffer = ReplayBuffer()
        engine = simulate.SimulatedEngine(
            lengths=simulate.LongTail(median=100, sigma=0.2, long_share=0.25, long_factor=8)
        )
        strategy = AsyncProduceStrategy(buffer, over_sample_threshold=1.0, progress=NoProgress())
        sampler = SamplerWithReplayBuffer(PROMPTS, buffer, group_size=2)
        report = await train(strategy, engine, sampler, steps=30, batch_size=8)
        trained = report.group_ids
        assert len(trained) == 240
        assert 0.18 <= sum(map(engine.is_long, trained)) / 240 <= 0.3
        await check_nothing_lost(buffer, "simulated", trained)
        assert report.ledger["discarded"] == report.ledger["failed"] == 0

    simulate.run(main)


@simulated
async def test_a_checkpoint_made_while_groups_are_in_flight_has_their_prompts(tmp_path: Path) -> None:
    producer = running_ahead(after(10))
    producing = asyncio.create_task(producer.produce(3))
    await asyncio.sleep(5)
    path = tmp_path / f"checkpoint-{id(producer)}"
    await producer.buffer.save(path, model_step=0)
    await producing
    calls = Counted()
    restored = running_ahead(calls)
    await restored.buffer.resume(path)
    assert await restored.ledger() == {"issued": 3, "buffered": 3}
    await restored.produce(4)
    assert sorted(calls.groups) == [0, 1, 2, 3]


@simulated
async def test_groups_are_numbered_on_over_the_end_of_the_data_set() -> None:
    producer = Producer(members=1)
    producer.sampler = Sampler(PROMPTS[:3], shuffle=False)
    await producer.produce(8)
    groups = await producer.train(8)
    assert sorted_ids(groups) == list(range(8))
    contents = [group[0].message[0]["content"] for group in groups]
    assert sorted(contents) == sorted(f"question {number % 3}" for number in range(8))


@simulated
async def test_a_batch_that_was_not_trained_on_is_there_for_the_next_call() -> None:
    producer = Producer()
    await producer.produce(2)

    async def failing_trainer() -> None:
        async with producer.buffer.lease_batch({TASK: 2}, train_step=1):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        await failing_trainer()
    assert (await producer.produce(2)).started == 0
    assert sorted_ids(await producer.train(2)) == [0, 1]


def test_a_strategy_outlives_an_event_loop() -> None:
    """The future by which judging hears of a pause belonged to the first one."""

    async def reward(state: RolloutState) -> float:
        await asyncio.sleep(20)
        return 0.5

    producer = running_ahead(after(1), reward_fn=reward)

    async def main(*, pause: bool) -> bool:
        producing = asyncio.create_task(producer.produce(2))
        await asyncio.sleep(5)
        if pause:
            await producer.strategy.pause()
        return (await producing).complete

    assert [simulate.run(main(pause=pause)) for pause in (False, True, False)] == [True, True, True]
    assert simulate.run(producer.produce(4, train_step=2)).complete
    simulate.run(producer.train(4, 2))
    assert not simulate.run(main(pause=True))
    assert simulate.run(main(pause=False))
