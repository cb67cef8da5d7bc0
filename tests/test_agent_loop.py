"""The contract of agent loops: every member is returned, even if some of them fail."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import pytest

from forebay import AgentLoop, FunctionAgentLoop, InvalidConfig, RolloutState, Status
from forebay.core.validate import check_group
from forebay.testing import simulate
from tests.test_strategy import after, answer, at_once, never, now, simulated, statuses


def group_of(members: int = 3, **fields: Any) -> list[RolloutState]:
    identity: dict[str, Any] = {"task_name": "math", "group_id": 7, "attempt": 2, "num_tries": 1}
    return [
        RolloutState(message=[{"role": "user", "content": "?"}], rollout_id=21 + index, **(identity | fields))
        for index in range(members)
    ]


class Answering(AgentLoop):
    """Calls a function for every sample, and nothing else; `FunctionAgentLoop` does more."""

    def __init__(self, function: Any) -> None:
        self.function = function  # a subclass need not call the constructor of AgentLoop

    async def generate(
        self, state: RolloutState, *, enable_partial_rollout: bool
    ) -> RolloutState | Sequence[RolloutState]:
        return await self.function(state)  # type: ignore[no-any-return]


# --- groups -----------------------------------------------------------------------------------------------


@simulated
async def test_members_are_generated_concurrently() -> None:
    loop = FunctionAgentLoop(after(5))
    group = await loop.generate_group(group_of(4))
    assert now() == 5
    assert statuses(group) == [Status.COMPLETED] * 4


@simulated
async def test_the_group_is_returned_in_its_order() -> None:
    async def last_first(state: RolloutState) -> None:
        await asyncio.sleep(30 - (state.rollout_id or 0))
        answer(state)

    group = await FunctionAgentLoop(last_first).generate_group(group_of(4))
    assert [state.rollout_id for state in group] == [21, 22, 23, 24]


@simulated
async def test_completed_members_are_not_generated_again() -> None:
    seen = []

    async def count(state: RolloutState) -> None:
        seen.append(state.rollout_id)
        answer(state)

    group = group_of(3)
    answer(group[1], 5)
    returned = await FunctionAgentLoop(count).generate_group(group)
    assert sorted(id for id in seen if id is not None) == [21, 23]
    assert returned[1] is group[1]
    assert returned[1].response_ids == [0, 1, 2, 3, 4]


@simulated
async def test_a_member_that_raises_is_failed_and_the_others_finish() -> None:
    """In the reference one exception fails the group while the other members keep running."""

    async def one_raises(state: RolloutState) -> None:
        if state.rollout_id == 22:
            state.response_ids = [1]
            raise ValueError("no such tool")
        await asyncio.sleep(1)
        answer(state)

    group = await FunctionAgentLoop(one_raises).generate_group(group_of())
    assert statuses(group) == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    failed = group[1]
    assert (failed.error_msg, failed.finish_reason) == ("ValueError: no such tool", "error")
    assert failed.response_ids is None


@simulated
async def test_a_cancel_waits_for_all_members_and_leaves_them_in_the_list() -> None:
    ended = []

    async def reluctant(state: RolloutState) -> RolloutState:
        state.response_ids = [4, 5]
        if state.rollout_id == 21:
            answer(state)
            return state
        try:
            await never(state)
        finally:
            await asyncio.sleep(3)
            ended.append(state.rollout_id)
        return state

    group = group_of()
    task = asyncio.create_task(Answering(reluctant).generate_group(group))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert now() == 4
    assert sorted(id for id in ended if id is not None) == [22, 23]
    assert statuses(group) == [Status.COMPLETED, Status.ABORTED, Status.ABORTED]
    assert [state.response_ids for state in group[1:]] == [[4, 5], [4, 5]]


@simulated
async def test_new_samples_get_the_identity_of_the_sample_that_they_answer() -> None:
    async def anew(state: RolloutState) -> RolloutState:
        fresh = RolloutState(message=state.message)
        answer(fresh)
        return fresh

    group = await FunctionAgentLoop(anew).generate_group(group_of())
    assert [(state.group_id, state.rollout_id, state.segment) for state in group] == [
        (7, 21, 0),
        (7, 22, 0),
        (7, 23, 0),
    ]
    assert {(state.task_name, state.attempt, state.num_tries) for state in group} == {("math", 2, 1)}
    check_group(group, "math")


@pytest.mark.parametrize("given", [(0, 0, 0), (0, 1, 2), (2, 1, 0), (0, 1, 1)])
@pytest.mark.parametrize("own", [0, 1, 2])
def test_segments_are_numbered_unless_their_numbers_differ(given: tuple[int, ...], own: int) -> None:
    """Also if the issued sample is not the first of the segments."""

    async def several(state: RolloutState) -> list[RolloutState]:
        segments = [RolloutState(message=state.message) for _ in given]
        segments[own] = state
        for segment, number in zip(segments, given, strict=True):
            answer(segment)
            segment.segment = number
        return segments

    async def main() -> None:
        group = await FunctionAgentLoop(several).generate_group(group_of(2))
        expected = list(given) if len(set(given)) == len(given) else [0, 1, 2]
        assert [state.segment for state in group] == expected * 2
        assert [state.rollout_id for state in group] == [21] * 3 + [22] * 3
        check_group(group, "math")

    simulate.run(main)


@pytest.mark.parametrize("wrong", [[], 5, "text", [5], None])
def test_a_result_that_is_not_a_sample_fails_its_member(wrong: object) -> None:
    async def bad(state: RolloutState) -> object:
        if state.rollout_id == 21:
            return wrong
        answer(state)
        return state

    group = simulate.run(lambda: Answering(bad).generate_group(group_of()))
    assert statuses(group) == [Status.FAILED, Status.COMPLETED, Status.COMPLETED]
    assert "expected a RolloutState" in (group[0].error_msg or "")


# --- pausing ----------------------------------------------------------------------------------------------


@simulated
async def test_members_that_arrive_in_a_pause_are_returned_at_once_and_unchanged() -> None:
    loop = FunctionAgentLoop(never)
    await loop.pause()
    await loop.pause()
    group = group_of()
    answer(group[0])
    group[1].response_ids = [3]
    returned = await loop.generate_group(group)
    assert statuses(returned) == [Status.COMPLETED, Status.ABORTED, Status.ABORTED]
    assert returned[1].response_ids == [3]
    await loop.resume()
    await loop.resume()
    assert not loop.paused
    loop.function = at_once
    assert statuses(await loop.generate_group(group_of())) == [Status.COMPLETED] * 3


@simulated
async def test_a_pause_cancels_functions_and_keeps_their_tokens() -> None:
    async def streaming(state: RolloutState) -> None:
        for tokens in range(1, 100):
            await asyncio.sleep(1)
            state.response_ids = list(range(tokens))
        answer(state, 100)

    loop = FunctionAgentLoop(streaming)
    running = asyncio.create_task(loop.generate_group(group_of()))
    await asyncio.sleep(3.5)
    await loop.pause()
    group = await running
    assert now() == 3.5
    assert statuses(group) == [Status.ABORTED] * 3
    assert [state.response_ids for state in group] == [[0, 1, 2]] * 3


@simulated
async def test_a_pause_waits_for_functions_without_cancel_on_pause() -> None:
    loop = FunctionAgentLoop(after(10), cancel_on_pause=False)
    running = asyncio.create_task(loop.generate_group(group_of()))
    await asyncio.sleep(1)
    await loop.pause()
    assert statuses(await running) == [Status.COMPLETED] * 3
    assert now() == 10


@simulated
async def test_an_error_of_a_function_that_a_pause_cancels_is_no_failure() -> None:
    """FAILED would cost a try."""

    async def converts(state: RolloutState) -> None:
        state.response_ids = [1, 2]
        try:
            await never(state)
        except asyncio.CancelledError:
            raise ConnectionError("the request was closed") from None

    loop = FunctionAgentLoop(converts)
    running = asyncio.create_task(loop.generate_group(group_of()))
    await asyncio.sleep(1)
    await loop.pause()
    group = await running
    assert statuses(group) == [Status.ABORTED] * 3
    assert [state.response_ids for state in group] == [[1, 2]] * 3


@simulated
async def test_an_incomplete_answer_of_a_function_that_swallows_its_cancel_is_aborted() -> None:
    """A response alone does not make it COMPLETED."""

    async def swallows(state: RolloutState) -> None:
        state.response_ids = [1, 2]
        try:
            await never(state)
        except asyncio.CancelledError:
            return

    loop = FunctionAgentLoop(swallows)
    running = asyncio.create_task(loop.generate_group(group_of()))
    await asyncio.sleep(1)
    await loop.pause()
    assert statuses(await running) == [Status.ABORTED] * 3


@simulated
async def test_a_function_that_ends_at_the_moment_of_a_pause_is_completed() -> None:
    loop = FunctionAgentLoop(after(5))
    running = asyncio.create_task(loop.generate_group(group_of()))
    asyncio.get_running_loop().call_at(5, lambda: asyncio.ensure_future(loop.pause()))
    group = await running
    # Either order of the two is correct; an answered sample never counts as a stopped one.
    assert {state.status is Status.COMPLETED for state in group} == {state.finish_reason == "stop" for state in group}


@simulated
async def test_a_pause_may_cancel_members_from_inside() -> None:
    class Cancelling(AgentLoop):
        def __init__(self) -> None:
            self.tasks: list[asyncio.Task[Any]] = []

        async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
            task = asyncio.current_task()
            assert task is not None
            self.tasks.append(task)
            await never(state)
            return state

        async def pause(self) -> None:
            await super().pause()
            for task in self.tasks:
                task.cancel()

    loop = Cancelling()
    running = asyncio.create_task(loop.generate_group(group_of()))
    await asyncio.sleep(1)
    await loop.pause()
    assert statuses(await running) == [Status.ABORTED] * 3


@simulated
async def test_a_member_that_cancels_itself_has_failed() -> None:

    async def self_cancelling(state: RolloutState) -> None:
        if state.rollout_id == 22:
            raise asyncio.CancelledError
        await asyncio.sleep(1)
        answer(state)

    for loop in (Answering(self_cancelling), FunctionAgentLoop(self_cancelling)):
        returned = await loop.generate_group(group_of())
        assert returned[1].status is Status.FAILED
        assert "cancelled" in (returned[1].error_msg or "")


def test_a_loop_outlives_an_event_loop() -> None:
    """The event of its pause must not belong to the first event loop."""
    loop = FunctionAgentLoop(after(1))

    async def main(*, pause: bool) -> list[RolloutState]:
        running = asyncio.create_task(loop.generate_group(group_of()))
        await asyncio.sleep(0.5)
        if pause:
            await loop.pause()
        return await running

    assert statuses(simulate.run(main(pause=False))) == [Status.COMPLETED] * 3
    assert statuses(simulate.run(main(pause=True))) == [Status.ABORTED] * 3
    assert loop.paused
    assert statuses(simulate.run(main(pause=False))) == [Status.ABORTED] * 3
    simulate.run(loop.resume)
    assert statuses(simulate.run(main(pause=False))) == [Status.COMPLETED] * 3


# --- functions --------------------------------------------------------------------------------------------


def filled(**fields: Any) -> Any:
    async def fill(state: RolloutState) -> None:
        for name, value in fields.items():
            setattr(state, name, value)

    return fill


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"response": "yes"}, Status.COMPLETED),
        ({"response_ids": [1]}, Status.COMPLETED),
        ({"input_ids": [1], "labels": [1]}, Status.COMPLETED),
        ({"response": "yes", "finish_reason": "length"}, Status.COMPLETED),
        ({"response": "yes", "finish_reason": "abort"}, Status.ABORTED),
        ({"response": "yes", "finish_reason": "weird"}, Status.FAILED),
        ({"response": "yes", "status": Status.FAILED}, Status.FAILED),
        ({}, Status.FAILED),
    ],
)
def test_a_status_left_at_init_follows_from_the_sample(fields: dict[str, Any], status: Status) -> None:
    (state,) = simulate.run(lambda: FunctionAgentLoop(filled(**fields)).generate_group(group_of(1)))
    assert state.status is status


def test_a_value_that_is_not_an_async_function_is_refused() -> None:
    def plain(state: RolloutState) -> None:
        state.response = "yes"

    for function in (5, plain, group_of(1)[0].__copy__):
        with pytest.raises(InvalidConfig, match="async function"):
            FunctionAgentLoop(function)  # type: ignore[arg-type]
    for wrapped in (functools.partial(after(1)), functools.wraps(after(1))(lambda state: after(1)(state))):
        FunctionAgentLoop(wrapped)


def test_a_function_that_is_not_async_fails_its_member_with_a_clear_error() -> None:
    group = simulate.run(lambda: FunctionAgentLoop(lambda state: None).generate_group(group_of(1)))  # type: ignore[arg-type,return-value]
    assert group[0].status is Status.FAILED
    assert "returned None; expected an async function" in (group[0].error_msg or "")


@pytest.mark.parametrize("returned", ["yes", {"response": "yes"}, ["yes"], 5])
def test_a_function_that_returns_no_sample_fails_its_member_with_a_clear_error(returned: Any) -> None:
    async def says(state: RolloutState) -> Any:
        return returned

    (state,) = simulate.run(lambda: FunctionAgentLoop(says).generate_group(group_of(1)))
    assert state.status is Status.FAILED
    assert f"returned {returned!r}; expected None, the sample" in (state.error_msg or "")


@simulated
async def test_a_cancelled_call_leaves_no_exception_behind() -> None:
    async def raises_on_its_way_out(state: RolloutState) -> None:
        try:
            await never(state)
        finally:
            raise ConnectionError("on its way out")

    task = asyncio.create_task(FunctionAgentLoop(raises_on_its_way_out).generate_group(group_of()))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
