"""Pausing: everything under way comes back, in time, with what it had; and nothing begins behind a pause's back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay import (
    AgentLoop,
    Budgets,
    FunctionAgentLoop,
    MemoryStorage,
    ReplayBuffer,
    RolloutState,
    Status,
    StorageError,
    Timeouts,
    TooManyFailures,
)
from forebay.buffer.internal import internals
from forebay.core.ledger import Record
from forebay.storage.base import Arrival, Claim, Claimed, Draw
from forebay.storage.values import Content
from forebay.testing import make_group, simulate
from tests.test_strategy import (
    TASK,
    Counted,
    Producer,
    after,
    answer,
    at_once,
    ids,
    never,
    now,
    running_ahead,
    simulated,
    sorted_ids,
    statuses,
)


class Stubborn(FunctionAgentLoop):
    """Does not care for a pause before it was asked so often; notes when it was asked."""

    def __init__(self, function: Any, heeds: int = 10**9) -> None:
        super().__init__(function)
        self.heeds = heeds
        self.asked: list[float] = []
        self.resumed: list[float] = []

    async def pause(self) -> None:
        self.asked.append(now())
        if len(self.asked) >= self.heeds:
            await super().pause()

    async def resume(self) -> None:
        self.resumed.append(now())
        await super().resume()


async def streaming(state: RolloutState) -> None:
    """A token a second, ten in all; goes on behind what there is."""
    tokens = 0 if state.response_ids is None else len(state.response_ids)
    while tokens < 10:
        await asyncio.sleep(1)
        tokens += 1
        state.response_ids, state.logprobs = list(range(tokens)), [-0.5] * tokens
    answer(state, 10)


# --- bringing in ------------------------------------------------------------------------------------------


@simulated
async def test_a_pause_with_nothing_under_way_takes_no_time_and_asks_nobody() -> None:
    loop = Stubborn(at_once)
    producer = running_ahead(loop)
    assert await producer.strategy.pause() == 0
    await producer.produce(2)
    await asyncio.sleep(1)
    assert await producer.strategy.pause() == 0
    assert await producer.strategy.pause("another task") == 0
    assert loop.asked == []
    assert (await producer.produce(4)).complete


@simulated
async def test_stopped_groups_keep_their_tokens_with_partial_rollout_and_go_on_from_there() -> None:
    producer = running_ahead(streaming, enable_partial_rollout=True)
    producing = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(4.5)
    assert await producer.strategy.pause() == 0
    production = await producing
    assert (production.complete, production.available, production.started) == (False, 0, 2)
    await producer.check_idle()
    for group in await producer.buffered(Status.ABORTED):
        assert [state.response_ids for state in group] == [[0, 1, 2, 3]] * 2
        assert [state.version_spans for state in group] == [((0, 4),)] * 2
    production = await producer.produce(2, 2)
    assert production.seconds == 6
    for group in await producer.buffered(Status.COMPLETED):
        assert [state.version_spans for state in group] == [((0, 4), (1, 6))] * 2
        assert [state.num_tries for state in group] == [0, 0]


@simulated
async def test_a_group_completed_when_the_pause_arrives_stays_completed() -> None:
    async def staggered(state: RolloutState) -> None:
        await asyncio.sleep(1 + 4 * (state.group_id or 0))
        answer(state)

    producer = running_ahead(staggered, over_sample_threshold=2.0)
    await producer.produce(1)
    await asyncio.sleep(4)  # the second group ends in this very moment
    await producer.strategy.pause()
    await producer.check_idle()
    completed = sorted_ids(await producer.buffered(Status.COMPLETED))
    assert completed[0] == 0
    assert completed + sorted_ids(await producer.buffered(Status.ABORTED)) == [0, 1, 2]
    for group in await producer.buffered(Status.ABORTED):
        assert all(state.finish_reason is None for state in group)


@simulated
async def test_a_pause_is_asked_for_again_and_again() -> None:
    loop = Stubborn(never, heeds=4)
    producer = running_ahead(loop)
    producing = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(1)
    assert await producer.strategy.pause() == 15
    assert loop.asked == [1, 6, 11, 16]
    await producing
    await producer.check_idle()


@simulated
async def test_what_does_not_end_is_cancelled_and_comes_back_with_what_it_had() -> None:
    """The reference loses what a pause has to cancel, uncounted."""

    async def stuck(state: RolloutState) -> None:
        if state.version_spans:
            answer(state, 3)
            return
        state.response_ids, state.logprobs = [0, 1], [-0.5, -0.5]
        if state.rollout_id == 0:
            answer(state, 7)
            return
        await never(state)

    loop = Stubborn(stuck)
    producer = running_ahead(loop, enable_partial_rollout=True, members=2)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(1)
    assert await producer.strategy.pause() == 60
    assert len(loop.asked) == 12
    await producing
    await producer.check_idle()
    group = await producer.only(Status.ABORTED)
    assert statuses(group) == [Status.COMPLETED, Status.ABORTED]
    assert [state.response_ids for state in group] == [[0, 1, 2, 3, 4, 5, 6], [0, 1]]
    assert [state.version_spans for state in group] == [((0, 7),), ((0, 2),)]
    assert [state.num_tries for state in group] == [0, 1]
    await producer.produce(1, 2)
    assert [state.version_spans for state in await producer.only(Status.COMPLETED)] == [((0, 7),), ((0, 2), (1, 1))]


@simulated
async def test_groups_that_one_pause_cancels_are_one_failure_in_a_row() -> None:
    async def slow(state: RolloutState) -> None:
        if state.num_tries == 0:
            await never(state)
        answer(state, 3)

    producer = running_ahead(Stubborn(slow))
    producing = asyncio.create_task(producer.produce(30))
    await asyncio.sleep(1)
    assert await producer.strategy.pause() == 60
    await producing
    assert len(await producer.records(status=Status.ABORTED)) == 30
    assert (await producer.produce(30, 2)).complete
    assert {state.num_tries for group in await producer.buffered(Status.COMPLETED) for state in group} == {1}


@simulated
async def test_pauses_that_always_have_to_cancel_end_producing_and_say_what_to_do() -> None:
    producer = running_ahead(Stubborn(never), budgets=Budgets(max_consecutive_failures=2))
    for step in (1, 2):
        producing = asyncio.create_task(producer.produce(4, step))
        await asyncio.sleep(40)
        await producer.strategy.pause()
        await producing
    with pytest.raises(TooManyFailures, match=r"2 attempts .* of a pause \(.*`paused`, or raise pause_timeout_s\)\."):
        await producer.produce(4, 3)


@simulated
async def test_the_time_of_a_pause_is_counted() -> None:
    producer = running_ahead(Stubborn(never), timeouts=Timeouts(pause_timeout_s=20, pause_interval_s=7))
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(1)
    assert await producer.strategy.pause() == 20
    await producing
    stats = producer.strategy.stats()
    assert stats["forebay/math/produce/pauses"] == 1
    assert stats["forebay/math/produce/pause_s"] == 20


class Unwilling(FunctionAgentLoop):
    """A loop whose engine cannot be asked: the request hangs, raises, or hangs and does not heed its cancel."""

    def __init__(self, how: str) -> None:
        super().__init__(never)
        self.how = how
        self.asked = 0

    async def pause(self) -> None:
        self.asked += 1
        if self.how == "raises":
            raise ConnectionError("the engine is away")
        if self.how == "cancels itself":
            raise asyncio.CancelledError
        while True:
            try:
                await asyncio.sleep(3600)
                return
            except asyncio.CancelledError:
                if self.how == "hangs":
                    raise


@pytest.mark.parametrize("how", ["raises", "hangs", "hangs for good", "cancels itself"])
def test_a_pause_request_that_fails_does_not_hold_the_pause_up(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """One that did not heed its cancel was waited for, for ever."""

    async def main() -> None:
        loop = Unwilling(how)
        producer = running_ahead(loop)
        producing = asyncio.create_task(producer.produce(2))
        await asyncio.sleep(1)
        pause_s = await producer.strategy.pause()
        assert 60 <= pause_s <= 80
        assert loop.asked == 12
        await producing
        assert producer.strategy.in_flight(TASK) == 0
        assert await producer.ledger() == {"issued": 2, "buffered": 2}

    with caplog.at_level(logging.WARNING):
        simulate.run(main)
    assert "pause_timed_out" in caplog.text
    if how in ("raises", "hangs"):
        assert "pause_request_failed" in caplog.text


@simulated
async def test_a_pause_that_is_cancelled_is_cancelled_and_the_next_batch_goes_on() -> None:
    loop = Stubborn(after(60))
    producer = running_ahead(loop, over_sample_threshold=1.0)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(1)
    pausing = asyncio.create_task(producer.strategy.pause())
    await asyncio.sleep(1)
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert not (await producing).complete
    assert producer.strategy.in_flight(TASK) == 2
    assert (await producer.produce(1)).complete
    assert now() == 60
    assert loop.resumed == [2]
    await producer.strategy.close()
    await producer.check_idle()


@simulated
async def test_two_pauses_at_once_are_one() -> None:
    loop = Stubborn(never, heeds=3)
    producer = running_ahead(loop)
    producing = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(1)
    await asyncio.gather(producer.strategy.pause(), producer.strategy.pause(TASK))
    await producing
    await producer.check_idle()


# --- while a batch is being produced ------------------------------------------------------------------------


class Slow(MemoryStorage):
    """Takes its time for some steps, before or after it has done them."""

    def __init__(self, *steps: str, seconds: float = 10, late: bool = False) -> None:
        super().__init__()
        self.steps = steps
        self.seconds = seconds
        self.late = late

    async def _delay(self, step: str, late: bool) -> None:
        if step in self.steps and late is self.late:
            await asyncio.sleep(self.seconds)

    async def issue(self, task_name: str, contents: Sequence[Content], draw: Draw) -> list[Record]:
        await self._delay("issue", False)
        records = await super().issue(task_name, contents, draw)
        await self._delay("issue", True)
        return records

    async def claim(self, claim: Claim) -> Claimed:
        await self._delay("claim", False)
        claimed = await super().claim(claim)
        await self._delay("claim", True)
        return claimed

    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        await self._delay("put", False)
        records = await super().put(arrivals, owner=owner)
        await self._delay("put", True)
        return records

    async def advance(self, clocks: Any) -> None:
        await self._delay("advance", False)
        await super().advance(clocks)
        await self._delay("advance", True)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("step", ["issue", "claim", "put", "advance"])
@pytest.mark.parametrize("after_s", [5, 15, 25])
def test_a_pause_in_the_middle_of_a_slow_step_leaves_nothing_in_flight(step: str, late: bool, after_s: float) -> None:
    """In the reference a pause during a draw returns at once; a task appears afterwards, and kills the checkpoint."""

    @simulated
    async def main() -> None:
        storage = Slow(step, late=late)
        producer = running_ahead(after(3), buffer=ReplayBuffer(storage=storage), over_sample_threshold=1.0)
        producing = asyncio.create_task(producer.produce(2))
        await asyncio.sleep(after_s)
        await producer.strategy.pause()
        await producing
        await producer.check_idle()
        before = await producer.ledger()
        await asyncio.sleep(1000)
        assert await producer.ledger() == before
        assert before.get("issued", 0) == before.get("buffered", 0)
        storage.steps = ()
        assert (await producer.produce(2)).complete
        assert [state.num_tries for group in await producer.train(2) for state in group] == [0] * 4

    main()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("after_s", [5, 15, 25, 35])
def test_a_draw_that_a_pause_sends_back_and_a_cancel_meets_is_not_lost(late: bool, after_s: float) -> None:
    """The cancel ended the return of what had been drawn, half way."""

    @simulated
    async def main() -> None:
        storage = Slow("issue", "claim", "put", late=late)
        producer = running_ahead(after(3), buffer=ReplayBuffer(storage=storage))
        producing = asyncio.create_task(producer.produce(3))
        await asyncio.sleep(5)
        pausing = asyncio.create_task(producer.strategy.pause())
        await asyncio.sleep(after_s)
        producing.cancel()
        await asyncio.wait((producing, pausing))
        await producer.check_idle()

    main()


@simulated
async def test_nothing_is_drawn_behind_the_back_of_a_pause() -> None:
    """When the retries that it drew had been sent back, new prompts were drawn, and sent back as well."""
    storage = Slow("claim")
    producer = running_ahead(after(3), buffer=ReplayBuffer(storage=storage))
    await producer.buffer.put(make_group(status=Status.ABORTED, tokens=0), TASK)
    producing = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(5)
    await producer.strategy.pause()
    await producing
    assert await internals(producer.buffer).position(TASK) == (0, None)


@simulated
async def test_a_batch_that_a_pause_overtakes_does_not_resume_the_loop() -> None:
    loop = FunctionAgentLoop(after(3))
    producer = running_ahead(loop, buffer=ReplayBuffer(storage=Slow("advance")))
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(5)
    await loop.pause()
    await producer.strategy.pause()
    assert not (await producing).complete
    assert loop.paused


class Failing(Slow):
    """A slow storage whose puts fail; `done`: though they were done, as when a server goes away before it answers."""

    done = False

    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        if "put" not in self.steps:
            return await super().put(arrivals, owner=owner)
        if self.done:
            await super().put(arrivals, owner=owner)
        await asyncio.sleep(self.seconds)
        raise StorageError("the disk is full")


@pytest.mark.parametrize("done", [False, True])
def test_a_draw_that_cannot_be_sent_back_when_it_is_cancelled_is_not_lost(done: bool) -> None:
    @simulated
    async def main() -> None:
        storage = Failing()
        storage.done = done
        producer = running_ahead(after(3), buffer=ReplayBuffer(storage=storage))
        await producer.buffer.put(make_group(status=Status.ABORTED, tokens=0), TASK)
        storage.steps = ("claim", "put")
        producing = asyncio.create_task(producer.produce(1))
        await asyncio.sleep(5)
        pausing = asyncio.create_task(producer.strategy.pause())
        await asyncio.sleep(10)
        producing.cancel()
        await asyncio.wait((producing, pausing))
        storage.steps = ()
        assert (await producer.produce(1)).complete
        assert await producer.ledger() == {"issued": 1, "buffered": 1}

    main()


@simulated
async def test_a_checkpoint_after_a_pause_has_every_group(tmp_path: Path) -> None:
    """In the reference four drawn groups are in neither the buffer nor the sampler."""
    storage = Slow("put")
    producer = running_ahead(after(1), buffer=ReplayBuffer(storage=storage))
    producing = asyncio.create_task(producer.produce(4))
    await asyncio.sleep(2)
    await producer.strategy.pause()
    await producing
    path = tmp_path / f"checkpoint-{id(storage)}"
    await producer.buffer.save(path, model_step=0)
    restored = ReplayBuffer()
    await restored.resume(path)
    assert await restored.count(TASK, Status.COMPLETED) == 4
    assert (await internals(restored).position(TASK))[0] == 4


@simulated
async def test_after_a_pause_nothing_begins_before_the_next_batch() -> None:
    calls = Counted(after(3))
    producer = running_ahead(calls)
    producing = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(1)
    await producer.strategy.pause()
    assert not (await producing).complete
    begun = len(calls.samples)
    await asyncio.sleep(1000)
    assert len(calls.samples) == begun
    assert (await producer.produce(2)).complete
    assert len(calls.samples) == 2 * begun


@simulated
async def test_a_batch_waits_for_a_pause_that_is_under_way() -> None:
    """Its groups were asked to stop, too, and in the end cancelled."""
    calls = Counted(after(40))
    loop = Stubborn(calls)
    producer = running_ahead(loop, timeouts=Timeouts(pause_timeout_s=20))
    first = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(1)
    pausing = asyncio.create_task(producer.strategy.pause())
    await asyncio.sleep(1)
    assert not (await first).complete
    second = await producer.produce(2)
    assert pausing.done()
    assert second.complete
    assert (second.started, now()) == (4, 61)  # two rest, two are new
    assert len(loop.asked) == 4  # not once after the pause


@simulated
async def test_the_loop_is_resumed_by_the_next_batch() -> None:
    loop = Stubborn(after(5), heeds=1)
    producer = running_ahead(loop)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(1)
    await producer.strategy.pause()
    await producing
    assert loop.paused
    assert (await producer.produce(1)).complete
    assert loop.resumed == [1]
    await producer.produce(2)
    assert loop.resumed == [1]


class Sleepy(FunctionAgentLoop):
    """Cannot be resumed at the first attempt."""

    attempts = 0

    async def resume(self) -> None:
        self.attempts += 1
        if self.attempts == 1:
            raise ConnectionError("the engine sleeps on")
        await super().resume()


@simulated
async def test_a_loop_that_cannot_be_resumed_is_an_error_and_is_resumed_the_next_time() -> None:
    producer = running_ahead(Sleepy(after(5)))
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(1)
    await producer.strategy.pause()
    await producing
    with pytest.raises(ConnectionError, match="sleeps on"):
        await producer.produce(1)
    assert (await producer.produce(1)).complete


# --- several tasks ------------------------------------------------------------------------------------------


@simulated
async def test_a_pause_is_of_one_task_or_of_all() -> None:
    async def by_group(state: RolloutState) -> None:
        await asyncio.sleep(100)
        answer(state)

    producer = running_ahead(by_group)
    math, code = FunctionAgentLoop(by_group), FunctionAgentLoop(by_group)
    producer.loop = math
    first = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(1)
    producer.loop = code
    second = asyncio.create_task(producer.produce(1, task_name="code"))
    await asyncio.sleep(1)
    await producer.strategy.pause(TASK)
    assert not (await first).complete
    assert (producer.strategy.in_flight(TASK), producer.strategy.in_flight("code")) == (0, 1)
    assert (math.paused, code.paused) == (True, False)
    await producer.strategy.pause()
    assert not (await second).complete
    assert producer.strategy.in_flight("code") == 0


@simulated
async def test_a_loop_that_one_task_paused_is_resumed_by_another() -> None:
    """Everything came back from it at once, was drawn again, and so on without end."""
    producer = running_ahead(after(5))
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(1)
    await producer.strategy.pause()
    await producing
    assert (await producer.produce(1, task_name="code")).complete
    assert (await producer.produce(1)).complete


@simulated
async def test_a_batch_ends_when_another_task_pauses_the_loop_that_both_use() -> None:
    """It drew its groups again and again, each time returned at once, and virtual time stood still."""
    producer = running_ahead(after(5))
    first = asyncio.create_task(producer.produce(2))
    second = asyncio.create_task(producer.produce(2, task_name="code"))
    await asyncio.sleep(1)
    await producer.strategy.pause(TASK)
    assert not (await first).complete
    assert not (await second).complete
    assert await producer.ledger() == {"issued": 2, "buffered": 2}
    both = await asyncio.gather(producer.produce(2), producer.produce(2, task_name="code"))
    assert [production.complete for production in both] == [True, True]
    await producer.check_idle()


@simulated
async def test_two_strategies_may_share_a_loop() -> None:
    training = running_ahead(after(5))
    evaluation = Producer(training.loop)
    producing = asyncio.create_task(training.produce(1))
    await asyncio.sleep(1)
    await training.strategy.pause()
    await producing
    assert (await evaluation.produce(1)).complete


# --- sync ---------------------------------------------------------------------------------------------------


@simulated
async def test_a_sync_batch_can_be_paused_and_leaves_nothing_running() -> None:
    producer = Producer(after(5))
    producing = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(1)
    await producer.strategy.pause()
    production = await producing
    assert (production.complete, production.started) == (False, 2)
    await producer.check_idle()
    assert (await producer.produce(2)).complete


@simulated
async def test_judging_gets_its_time_in_a_pause_of_a_sync_batch_too() -> None:
    """The batch ended at the sight of the pause, and cancelled what was being judged."""

    async def reward(state: RolloutState) -> float:
        await asyncio.sleep(9)
        return 0.5

    producer = Producer(reward_fn=reward)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(1)
    await producer.strategy.pause()
    assert not (await producing).complete
    assert now() == 9
    assert len(await producer.buffered(Status.COMPLETED)) == 1
    await producer.check_idle()


# --- the loop's own way -------------------------------------------------------------------------------------


class CancelsItsGroups(AgentLoop):
    """Pauses by cancelling what it runs."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        raise AssertionError("not called")

    async def generate_group(
        self, group: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        for state in group:
            state.response_ids, state.logprobs = [1], [-0.5]
        await asyncio.sleep(10)
        for state in group:
            answer(state)
        return group

    async def pause(self) -> None:
        await super().pause()
        for task in self.tasks:
            task.cancel()


@simulated
async def test_a_loop_may_pause_by_cancelling_its_groups() -> None:
    producer = running_ahead(CancelsItsGroups(), enable_partial_rollout=True)
    producing = asyncio.create_task(producer.produce(2))
    await asyncio.sleep(1)
    assert await producer.strategy.pause() == 0
    await producing
    for group in await producer.buffered(Status.ABORTED):
        assert [(state.response_ids, state.num_tries) for state in group] == [([1], 0)] * 2
    assert (await producer.produce(2)).complete


@simulated
async def test_restored_prompts_that_a_pause_sends_back_are_drawn_first_again() -> None:
    storage = Slow("claim", late=True)
    producer = running_ahead(after(1), buffer=ReplayBuffer(storage=storage), members=1)
    await producer.buffer.put(make_group(1, status=Status.INIT, group_id=-4), TASK)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(5)
    await producer.strategy.pause()
    await producing
    storage.steps = ()
    await producer.produce(1)
    assert ids(await producer.train(1)) == [-4]
