"""Judging: samples are rewarded once, complete groups are filtered, and an error of a judge loses no response."""

from __future__ import annotations

import asyncio
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import (
    FunctionAgentLoop,
    InvalidConfig,
    ReplayBuffer,
    RewardUnavailable,
    RolloutState,
    Status,
    Timeouts,
    TooManyFailures,
    on_loop,
    reject_truncated,
    reject_zero_std,
)
from forebay.produce.judge import Judge
from forebay.produce.members import fail_judging
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import make_group, simulate
from tests.processes import HANG_S
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
    statuses,
)


def rewards(group: Sequence[RolloutState]) -> list[Any]:
    return [state.reward for state in group]


def judged(group: list[RolloutState], *, max_tries: int = 3, **functions: Any) -> str | None:
    """The error of judging a group, without retries."""
    verdict = simulate.run(lambda: Judge(**functions).judge(group))
    return verdict.error and fail_judging(group, verdict.error, max_tries, rewarded=verdict.rewarded)


def finished(members: int = 2) -> list[RolloutState]:
    group = make_group(members)
    for index, state in enumerate(group):
        state.rollout_id, state.finish_reason = index, "stop"
    return group


# --- the event loop ---------------------------------------------------------------------------------------


def hold(seconds: float) -> None:
    """Keep the event loop from its work, as a reward that calls `requests.post` does."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@on_loop
def cheap_but_slow(judged: Any) -> Any:
    hold(0.06)
    return True if isinstance(judged, list) else 1.0


@on_loop
async def cheap_and_async(judged: Any) -> Any:
    await asyncio.sleep(0)
    return cheap_but_slow(judged)


async def async_but_blocking(judged: Any) -> Any:
    await asyncio.sleep(0)
    hold(0.06)
    await asyncio.sleep(0)
    return True if isinstance(judged, list) else 1.0


class BlockingCall:
    async def __call__(self, judged: Any) -> Any:
        return await async_but_blocking(judged)


@pytest.mark.parametrize("kind", ["reward_fn", "filters"])
@pytest.mark.parametrize("function", [cheap_but_slow, cheap_and_async, async_but_blocking, BlockingCall()])
def test_g10_a_function_that_holds_the_event_loop_is_warned_about_once(
    caplog: pytest.LogCaptureFixture, kind: str, function: Any
) -> None:
    async def main() -> None:
        judge = Judge(**{kind: [function] if kind == "filters" else function})  # type: ignore[arg-type]
        for _ in range(3):
            assert (await judge.judge(finished())).error is None

    simulate.run(main)
    assert caplog.text.count("loop_held function=") == 1


def test_g10_an_async_function_that_waits_holds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def reward(state: RolloutState) -> float:
        await asyncio.sleep(100)
        return 1.0

    simulate.run(lambda: Judge(reward_fn=reward).judge(finished()))
    assert "loop_held" not in caplog.text


async def test_a_cancelled_or_failing_async_reward_ends_as_without_a_watch() -> None:
    ended: list[str] = []

    async def reward(state: RolloutState) -> float:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return 1.0

    async def failing(state: RolloutState) -> float:
        await asyncio.sleep(0)
        raise ValueError("no")

    judging = asyncio.create_task(Judge(reward_fn=reward).judge(finished(1)))
    while not judging.done() and not ended:
        await asyncio.sleep(0)
        judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging
    assert (await Judge(reward_fn=failing).judge(finished(1))).error == "the reward raised ValueError: no"


@pytest.mark.parametrize("kind", ["reward_fn", "group_reward_fn", "filters"])
async def test_g10_plain_functions_run_in_threads_at_most_so_many_at_a_time(kind: str) -> None:
    limit, running, most, seen = 2, 0, 0, set[int]()
    lock, all_there = threading.Lock(), threading.Event()

    def plain(judged: Any) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            seen.add(threading.get_ident())
            if running == limit:
                all_there.set()
        assert all_there.wait(HANG_S)
        with lock:
            running -= 1
        return True if kind == "filters" else [1.0] * len(judged) if kind == "group_reward_fn" else 1.0

    judge = Judge(**{kind: [plain] if kind == "filters" else plain}, concurrency=limit)  # type: ignore[arg-type]
    groups = [finished(3) for _ in range(3)]
    for number, group in enumerate(groups):
        for state in group:
            state.response = f"answer {number}"  # the same call for the same answer would be made once
    verdicts = await asyncio.gather(*[judge.judge(group) for group in groups])
    assert [verdict.error for verdict in verdicts] == [None] * 3
    assert most == limit
    assert threading.get_ident() not in seen


@on_loop
def where(judged: Any) -> Any:
    asyncio.get_running_loop()  # which a thread has not
    return True if isinstance(judged, list) else 1.0


async def test_functions_that_are_declared_cheap_are_called_on_the_event_loop() -> None:
    assert (await Judge(reward_fn=where, filters=[where]).judge(finished())).error is None


# --- rewards ----------------------------------------------------------------------------------------------


class ZeroDimensional:
    """As a torch tensor without dimensions."""

    shape = ()

    def __init__(self, value: float) -> None:
        self.value = value

    def item(self) -> float:
        return self.value


async def soon(value: Any) -> Any:
    await asyncio.sleep(1)
    return value


@pytest.mark.parametrize("wrap", [lambda value: value, soon], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (0.5, {"score": 0.5}),
        (1, {"score": 1.0}),
        (True, {"score": 1.0}),
        (np.float32(0.25), {"score": 0.25}),
        (np.int64(3), {"score": 3.0}),
        (np.bool_(False), {"score": 0.0}),
        (np.array(0.5), {"score": 0.5}),
        (ZeroDimensional(0.5), {"score": 0.5}),
        ({"score": ZeroDimensional(0.5), "format": "ok"}, {"score": 0.5, "format": "ok"}),
        ({"score": 0.5, "format": "ok"}, {"score": 0.5, "format": "ok"}),
        ({"format": "ok"}, {"format": "ok"}),
    ],
)
def test_a_reward_may_be_a_number_or_a_dict(value: Any, reward: Any, wrap: Callable[[Any], Any]) -> None:
    group = finished()
    assert judged(group, reward_fn=lambda state: wrap(value)) is None
    assert rewards(group) == [reward, reward]
    assert statuses(group) == [Status.COMPLETED] * 2
    group = finished()
    assert judged(group, group_reward_fn=lambda members: wrap([value] * len(members))) is None
    assert rewards(group) == [reward, reward]


@pytest.mark.parametrize("value", [math.nan, math.inf, "good", [1.0], {"score": "high"}, {"score": math.nan}, object()])
def test_an_invalid_reward_costs_a_try_and_keeps_the_response(value: Any) -> None:
    """A score that is not a number is not written into the samples: they could not be stored."""
    for functions in ({"reward_fn": lambda state: value}, {"group_reward_fn": lambda members: [0.5, value]}):
        group = finished()
        assert judged(group, **functions) is not None
        assert statuses(group) == [Status.ABORTED] * 2
        assert [state.num_tries for state in group] == [1, 1]
        assert rewards(group) == [None, None]
        assert [state.response for state in group] == ["391", "391"]
        assert all(state.error_msg for state in group)


def test_the_error_for_a_reward_that_is_not_a_number_names_the_function_that_returned_it() -> None:
    def score(state: RolloutState) -> float:
        return math.nan

    problem = judged(finished(), reward_fn=score)
    assert problem is not None
    assert re.search(r"score returned nan for rollout \d of group None; expected a finite number", problem)
    assert "raised" not in problem


@simulated
async def test_the_error_for_a_reward_that_cannot_be_stored_names_the_reward() -> None:
    producer = Producer(max_tries=1, members=1, reward_fn=lambda state: {"score": 1.0, "x": object()})
    with pytest.raises(TooManyFailures, match=r"the reward cannot be stored: .*\$\[0\]\.reward\.x"):
        await producer.produce(1)


@simulated
async def test_only_attempts_that_were_judged_count_for_the_judging_time() -> None:
    async def some(state: RolloutState) -> None:
        if state.group_id == 0 and not state.num_tries:
            raise RuntimeError("no answer")
        answer(state)

    producer = Producer(some, members=1, reward_fn=lambda state: soon(0.5))
    await producer.produce(2)
    figures = producer.strategy.figures(TASK)
    assert (figures.attempts, figures.judged, figures.judge_s) == (3, 2, 2.0)


def test_a_reward_may_be_set_by_the_function_itself() -> None:
    def sets(state: RolloutState) -> None:
        state.reward = {"score": 0.5}

    def sets_all(members: list[RolloutState]) -> list[None]:
        for state in members:
            sets(state)
        return [None] * len(members)

    def sets_all_and_returns_nothing(members: list[RolloutState]) -> None:
        sets_all(members)

    for functions in (
        {"reward_fn": sets},
        {"group_reward_fn": sets_all},
        {"group_reward_fn": sets_all_and_returns_nothing},
    ):
        group = finished()
        assert judged(group, **functions) is None
        assert rewards(group) == [{"score": 0.5}] * 2


def test_the_error_for_a_missing_reward_names_the_function_and_the_sample() -> None:
    def score(state: RolloutState) -> float | None:
        return 1.0 if state.rollout_id == 0 else None

    group = finished()
    problem = judged(group, reward_fn=score)
    assert problem is not None
    assert re.search(r"score returned None for rollout 1 of group None, and `reward` is not set", problem)
    assert rewards(group) == [{"score": 1.0}, None]
    assert statuses(group) == [Status.COMPLETED, Status.ABORTED]

    def score_all(members: list[RolloutState]) -> list[float | None]:
        return [1.0, None]

    for function in (score_all, lambda members: None):
        group = finished()
        problem = judged(group, group_reward_fn=function)
        assert problem is not None
        assert re.search(r"(score_all|<lambda>) returned None for rollout [01] of group None", problem)
        assert rewards(group) == [None, None]
        assert statuses(group) == [Status.ABORTED] * 2


def test_a_reward_function_that_returns_its_samples_is_refused() -> None:
    for problem in (
        judged(finished(), reward_fn=lambda state: state),
        judged(finished(), group_reward_fn=lambda members: members),
    ):
        assert problem is not None
        assert "returned a sample; return its score, or None if it set `reward` itself" in problem


@pytest.mark.parametrize("value", [[1.0], [1.0] * 3, 5, "ab", {"a": 1, "b": 2}])
def test_a_group_reward_must_return_one_reward_per_member(value: Any) -> None:
    group = finished()
    assert judged(group, group_reward_fn=lambda members: value) is not None
    assert rewards(group) == [None, None]
    assert statuses(group) == [Status.ABORTED] * 2


def test_group_rewards_may_be_an_array_or_none() -> None:
    group = finished()
    assert judged(group, group_reward_fn=lambda members: np.array([0.0, 1.0])) is None
    assert rewards(group) == [{"score": 0.0}, {"score": 1.0}]
    assert judged(group, group_reward_fn=lambda members: None) is None
    assert rewards(group) == [{"score": 0.0}, {"score": 1.0}]  # the rewards are unchanged


def test_samples_are_rewarded_concurrently() -> None:
    async def main() -> float:
        await Judge(reward_fn=lambda state: soon(0.5)).judge(finished(8))
        return now()

    assert simulate.run(main) == 1


def test_a_reward_that_raises_does_not_affect_the_other_members() -> None:
    def some(state: RolloutState) -> float:
        if state.rollout_id == 1:
            raise KeyError("gold")
        return 0.5

    async def later(state: RolloutState) -> float:
        await asyncio.sleep(1)
        return some(state)

    for function in (some, later):
        group = finished(3)
        assert judged(group, reward_fn=function) == "the reward raised KeyError: 'gold'"
        assert rewards(group) == [{"score": 0.5}, None, {"score": 0.5}]
        assert statuses(group) == [Status.COMPLETED, Status.ABORTED, Status.COMPLETED]
        assert [state.num_tries for state in group] == [0, 1, 0]


def test_a_reward_that_cancels_itself_fails() -> None:
    async def cancels(state: RolloutState) -> float:
        if state.rollout_id == 1:
            raise asyncio.CancelledError
        return 0.5

    group = finished()
    assert "cancelled itself" in (judged(group, reward_fn=cancels) or "")
    assert rewards(group) == [{"score": 0.5}, None]


def test_rewards_that_the_agent_loop_gave_are_kept() -> None:
    group = finished()
    group[0].reward = {"score": 9.0}
    judged(group, reward_fn=lambda state: 0.5)
    assert rewards(group) == [{"score": 9.0}, {"score": 0.5}]


def test_only_completed_members_are_rewarded_and_only_complete_groups_filtered() -> None:
    seen: list[int | None] = []

    def reward(state: RolloutState) -> float:
        seen.append(state.rollout_id)
        return 0.5

    def unexpected(group: list[RolloutState]) -> Any:
        raise AssertionError("the group is not whole")

    for status in (Status.ABORTED, Status.FAILED):
        group = finished()
        group[1].status, group[1].finish_reason = status, None
        assert judged(group, reward_fn=reward, filters=(unexpected,)) is None
        assert judged(group, group_reward_fn=unexpected) is None
    assert seen == [0, 0]


def test_two_kinds_of_rewards_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="one of them"):
        Judge(reward_fn=lambda state: 1, group_reward_fn=lambda group: [1])
    with pytest.raises(InvalidConfig, match="not a function"):
        Judge(filters=(5,))  # type: ignore[arg-type]
    assert Judge().idle
    assert not Judge(reward_fn=lambda state: 1).idle


# --- filters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda value: value, soon], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("verdict", "reason"),
    [(True, None), (np.bool_(True), None), (False, "filtered"), (np.bool_(False), "filtered"), ("dull", "dull")],
)
def test_a_filter_may_return_a_bool_or_a_reason(verdict: Any, reason: str | None, wrap: Callable[[Any], Any]) -> None:
    group = finished()
    assert judged(group, filters=(lambda members: wrap(verdict),)) is None
    expected = Status.COMPLETED if reason is None else Status.FILTERED
    assert [(state.status, state.error_msg) for state in group] == [(expected, reason)] * 2


@pytest.mark.parametrize("verdict", [None, 1, 0, 0.5, [], object(), np.array([True, False])])
def test_an_invalid_verdict_costs_a_try_and_keeps_the_response(verdict: Any) -> None:
    group = finished()
    assert "expected True, False or a reason" in (judged(group, filters=(lambda members: verdict,)) or "")
    assert [(state.status, state.num_tries, state.response) for state in group] == [(Status.ABORTED, 1, "391")] * 2


def test_filters_run_in_order_until_one_rejects() -> None:
    asked = []

    def filter_of(name: str, verdict: bool | str) -> Any:
        def accepts(group: list[RolloutState]) -> bool | str:
            asked.append(name)
            return verdict

        return accepts

    group = finished()
    judged(group, filters=(filter_of("a", True), filter_of("b", "dull"), filter_of("c", False)))
    assert asked == ["a", "b"]
    assert group[0].error_msg == "dull"


def test_a_user_function_cannot_remove_members_from_a_group() -> None:
    """User functions get a copy of the list."""

    def greedy(group: list[RolloutState]) -> bool:
        group.clear()
        return True

    def greedy_reward(group: list[RolloutState]) -> list[float]:
        scores = [0.5] * len(group)
        group.clear()
        return scores

    group = finished(3)
    judged(group, filters=(greedy,))
    judged(group, group_reward_fn=greedy_reward)
    assert len(group) == 3


def scored(*scores: float | None) -> list[RolloutState]:
    return [
        RolloutState(message=[], reward=None if score is None else {"score": score}, finish_reason="stop")
        for score in scores
    ]


def test_groups_with_equal_scores_are_rejected() -> None:
    assert reject_zero_std(scored(1.0, 1.0, 1.0)) == "zero_std"
    assert reject_zero_std(scored(1.0, 0.0)) is True
    assert reject_zero_std(scored(1.0)) is True  # a group of one cannot differ


def test_groups_with_a_truncated_response_are_rejected() -> None:
    group = scored(1.0, 0.0)
    assert reject_truncated(group) is True
    group[1].finish_reason = "length"
    assert reject_truncated(group) == "truncated"


# --- through a strategy -----------------------------------------------------------------------------------


@simulated
async def test_groups_are_rewarded_and_filtered_before_they_are_stored() -> None:
    producer = Producer(
        reward_fn=lambda state: float((state.rollout_id or 0) % 4 == 0),
        is_valid_sample_fn=[reject_truncated, reject_zero_std],
    )
    await producer.produce(2)
    assert ids(await producer.train(2)) == [0, 2]
    assert set((await producer.buffer.reasons())[TASK]) == {"zero_std"}
    figures = producer.strategy.figures(TASK)
    # Raw rewards are those before the filter.
    assert figures.reward_count == figures.samples
    assert 0 < figures.reward_sum / figures.reward_count < 0.5


@simulated
async def test_a_reward_that_raises_is_repeated_and_the_response_is_kept() -> None:
    calls, asked = Counted(), []

    async def stumbling(state: RolloutState) -> float:
        asked.append(state.rollout_id)
        await asyncio.sleep(1)
        if state.rollout_id == 1 and asked.count(1) == 1:
            raise ConnectionError("the judge is away")
        return 0.5

    producer = Producer(calls, members=2, reward_fn=stumbling)
    await producer.produce(1)
    assert sorted(id for id in calls.rollout_ids if id is not None) == [0, 1]
    assert sorted(id for id in asked if id is not None) == [0, 1, 1]
    group = await producer.only(Status.COMPLETED)
    assert [(state.num_tries, state.reward, state.error_msg) for state in group] == [
        (0, {"score": 0.5}, None),
        (0, {"score": 0.5}, None),
    ]
    assert producer.strategy.figures(TASK).reward_count == 2


@pytest.mark.parametrize("part", ["reward_fn", "group_reward_fn", "is_valid_sample_fn"])
def test_producing_ends_if_the_judge_raises_for_all_groups(part: str) -> None:
    @simulated
    async def main() -> None:
        calls, asked = Counted(), 0

        def broken(judged: Any) -> Any:
            nonlocal asked
            asked += 1
            raise ValueError("no gold answer")

        functions: dict[str, Any] = {part: broken}
        producer = Producer(calls, members=1, max_tries=3, **functions)
        with pytest.raises(RewardUnavailable, match="no gold answer"):
            await producer.produce(1)
        # The first group, alone, may have been the cause.
        assert await producer.ledger() == {"issued": 2, "failed": 1, "buffered": 1}
        assert asked > 4 * 20  # repeated for ten minutes before each try
        assert now() >= 4 * 570
        assert len(calls.samples) == 2  # judged three times, generated once
        (reason,) = (await producer.buffer.reasons())[TASK]
        assert "no gold answer" in reason
        await producer.check_idle()

    main()


@simulated
async def test_a_judge_that_cancels_itself_is_not_repeated_forever() -> None:
    """Each attempt costs a try."""

    def cancels(group: list[RolloutState]) -> bool:
        raise asyncio.CancelledError

    producer = Producer(members=1, is_valid_sample_fn=cancels)
    with pytest.raises(TooManyFailures, match="cancelled itself"):
        await producer.produce(1)
    await producer.check_idle()


@simulated
async def test_rewards_of_kept_members_stay_and_a_group_reward_is_computed_again() -> None:
    """The reference generates and judges kept members again."""
    calls = Counted()

    async def one_fails(state: RolloutState) -> None:
        if state.rollout_id == 1 and not state.num_tries:
            raise RuntimeError("the first time")
        answer(state)

    calls.function = one_fails
    rewarded = []

    def reward(state: RolloutState) -> float:
        rewarded.append(state.rollout_id)
        return 0.25

    producer = Producer(calls, members=2, reward_fn=reward)
    await producer.produce(1)
    assert sorted(id for id in rewarded if id is not None) == [0, 1]
    assert producer.strategy.figures(TASK).reward_count == 2

    asked = []

    def group_reward(group: list[RolloutState]) -> list[float]:
        asked.append([state.rollout_id for state in group])
        return [0.0, 1.0]

    # The group reward is called when the group is complete, and again when it is complete again.
    stumbles = iter([False, True])

    def accepts(group: list[RolloutState]) -> bool:
        if not next(stumbles, True):
            raise RuntimeError("the filter stumbled")
        return True

    calls.samples.clear()
    producer = Producer(calls, members=2, group_reward_fn=group_reward, is_valid_sample_fn=accepts)
    await producer.produce(1)
    assert asked == [[0, 1], [0, 1]]
    figures = producer.strategy.figures(TASK)
    assert (figures.reward_count, figures.reward_sum) == (2, 1.0)


@simulated
async def test_judging_that_a_pause_stops_is_repeated_without_generating_and_without_a_try() -> None:
    calls, asked = Counted(), []

    async def slow(state: RolloutState) -> float:
        asked.append(now())
        await asyncio.sleep(60)
        return 0.5

    producer = running_ahead(calls, members=1, reward_fn=slow)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(5)
    assert await producer.strategy.pause() == 10
    assert not (await producing).complete
    (state,) = await producer.only(Status.ABORTED)
    assert (state.response_ids, state.reward, state.num_tries) == ([0, 1, 2], None, 0)
    assert (await producer.produce(2, 2)).complete
    await asyncio.sleep(100)  # no batch waits for it any more
    assert [state.group_id for state in calls.samples].count(0) == 1
    assert asked[:1] == [0]
    state = (await producer.buffered(Status.COMPLETED))[0][0]
    assert (state.group_id, state.reward, state.num_tries) == (0, {"score": 0.5}, 0)


@simulated
async def test_a_judge_that_ends_in_time_counts_in_a_pause() -> None:
    async def reward(state: RolloutState) -> float:
        await asyncio.sleep(9)
        return 0.5

    producer = running_ahead(members=1, reward_fn=reward)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(5)
    await producer.strategy.pause()
    assert now() == 9
    assert not (await producing).complete  # the pause ended it
    assert rewards(await producer.only(Status.COMPLETED)) == [{"score": 0.5}]


@simulated
async def test_judging_left_from_an_earlier_batch_is_limited_in_a_pause_too() -> None:
    """The limit of a pause holds for judging that began before the current batch."""

    async def reward(state: RolloutState) -> float:
        await asyncio.sleep(1 if (state.group_id or 0) != 1 else 1000)
        return 0.5

    producer = running_ahead(members=1, reward_fn=reward, over_sample_threshold=1.0)
    await producer.produce(1, 1)
    await producer.train(1, 1)
    await producer.produce(1, 2)
    await producer.train(1, 2)
    assert await producer.strategy.pause() == 10
    await producer.check_idle()


@simulated
async def test_an_abandoned_pause_costs_no_try_of_judging() -> None:
    """The time of the pause does not count toward the limit of judging."""

    async def reward(state: RolloutState) -> float:
        await asyncio.sleep(60)
        return 0.5

    producer = running_ahead(members=1, reward_fn=reward)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(5)
    pausing = asyncio.create_task(producer.strategy.pause())
    await asyncio.sleep(5)
    pausing.cancel()
    await asyncio.wait((pausing,))
    await producing
    await producer.produce(1, 2)
    (state,) = await producer.only(Status.COMPLETED)
    assert state.num_tries == 0


@simulated
async def test_a_judge_that_hangs_is_cancelled() -> None:
    async def hanging(state: RolloutState) -> float:
        if not state.num_tries:
            await never(state)
        return 0.5

    calls = Counted()
    producer = Producer(calls, members=1, reward_fn=hanging, timeouts=Timeouts(judge_give_up_s=60))
    production = await producer.produce(1)
    assert production.seconds == 60.5  # it rests, and another prompt is started meanwhile
    assert calls.rollout_ids == [0, 1]
    assert [state.num_tries for state in await producer.only(Status.COMPLETED)] == [1]
    assert producer.strategy.figures(TASK).failures == 1


@simulated
async def test_a_judge_that_ignores_its_cancel_cannot_change_stored_samples() -> None:
    async def stubborn(state: RolloutState) -> float:
        if state.num_tries:
            return 0.5
        for _ in range(100):
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue
        state.status = Status.FAILED
        state.response_ids = None
        state.extra_fields["zombie"] = True
        return 0.9

    producer = Producer(members=1, reward_fn=stubborn, timeouts=Timeouts(judge_give_up_s=60, cancel_timeout_s=3))
    assert (await producer.produce(1)).seconds == 63.5
    await asyncio.sleep(1_000_000)
    (state,) = await producer.only(Status.COMPLETED)
    assert (state.reward, state.response_ids, state.extra_fields.get("zombie")) == ({"score": 0.5}, [0, 1, 2], None)


@simulated
async def test_a_cancel_while_judging_keeps_the_response_and_spends_no_try() -> None:
    calls = Counted()
    producer = Producer(calls, members=2, reward_fn=lambda state: soon(0.5))
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(0.5)
    producing.cancel()
    await asyncio.wait((producing,))
    group = await producer.only(Status.ABORTED)
    assert [(state.response_ids, state.num_tries) for state in group] == [([0, 1, 2], 0)] * 2
    await producer.produce(1)
    assert len(calls.samples) == 2


@simulated
async def test_a_verdict_that_arrives_with_a_cancel_counts() -> None:
    producer = Producer(members=1, reward_fn=lambda state: soon(0.5), is_valid_sample_fn=lambda group: "dull")
    producing = asyncio.create_task(producer.produce(1))
    asyncio.get_running_loop().call_at(1, producing.cancel)
    await asyncio.wait((producing,))
    await producer.check_idle()
    ledger = await producer.ledger()
    # Either order of the two is correct: it was judged, or it waits for that.
    assert ledger.get("filtered", 0) + ledger["buffered"] == ledger["issued"]
    for record in await producer.records():
        assert record.status is Status.ABORTED
        assert record.num_tries == 0


@simulated
async def test_finished_groups_without_a_judge_stay_completed_when_they_are_cancelled() -> None:
    """Without a judge there is nothing to repeat."""

    class Late(FunctionAgentLoop):
        async def generate_group(
            self, group: list[RolloutState], *, enable_partial_rollout: bool = False
        ) -> list[RolloutState]:
            await super().generate_group(group)
            await asyncio.sleep(100)
            return group

    producer = Producer(Late(at_once), members=1)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(5)
    producing.cancel()
    await asyncio.wait((producing,))
    assert statuses(await producer.only(Status.COMPLETED)) == [Status.COMPLETED]


@simulated
async def test_expired_unjudged_groups_are_generated_again() -> None:
    calls = Counted()
    producer = running_ahead(calls, members=1, max_staleness=0, reward_fn=lambda state: soon(0.5))
    producing = asyncio.create_task(producer.produce(1, 1))
    await asyncio.sleep(0.5)
    producing.cancel()
    await asyncio.wait((producing,))
    await producer.produce(1, 5)
    assert len(calls.samples) == 2
    (state,) = await producer.only(Status.COMPLETED)
    assert (state.version_spans, state.num_tries) == (((4, 3),), 0)


@simulated
async def test_statistics_count_a_member_once_over_retries() -> None:
    calls = Counted(after(10))

    async def one_is_slow(state: RolloutState) -> None:
        await asyncio.sleep(1 if state.rollout_id == 0 else 10)
        answer(state)

    calls.function = one_is_slow
    producer = running_ahead(calls, members=2, reward_fn=lambda state: 0.5)
    for _ in range(3):
        producing = asyncio.create_task(producer.produce(1))
        await asyncio.sleep(5)
        await producer.strategy.pause()
        await producing
    await producer.produce(1)
    assert calls.rollout_ids.count(0) == 1
    figures = producer.strategy.figures(TASK)
    assert (figures.reward_count, figures.reward_sum) == (2, 1.0)
    assert (figures.attempts, figures.groups, figures.samples) == (4, 1, 2)
    assert figures.tokens == 6  # the tokens of both members, each counted once


def test_numpy_rewards_can_be_stored(tmp_path: Path) -> None:
    async def main() -> None:
        async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
            producer = Producer(buffer=buffer, members=2, reward_fn=lambda state: np.float32(0.5))
            await producer.produce(1)
            (record,) = await producer.records()
            assert record.reward == 0.5

    asyncio.run(main())


def test_numpy_scores_inside_a_dict_can_be_stored(tmp_path: Path) -> None:
    """The response is kept."""

    async def main() -> None:
        async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
            producer = Producer(
                buffer=buffer, members=2, reward_fn=lambda state: {"score": np.float32(0.5), "hits": np.int64(3)}
            )
            await producer.produce(1)
            group = await producer.only(Status.COMPLETED)
            assert [(state.reward, state.num_tries) for state in group] == [({"score": 0.5, "hits": 3}, 0)] * 2

    asyncio.run(main())


def test_rewards_of_samples_that_could_not_be_stored_are_not_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async def once(state: RolloutState) -> None:
            answer(state)
            if not state.num_tries:
                state.extra_fields["tool"] = object()

        async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
            producer = Producer(once, buffer=buffer, members=2, reward_fn=lambda state: 0.5)
            await producer.produce(1)
            assert producer.strategy.figures(TASK).reward_count == 2

    asyncio.run(main())


@simulated
async def test_a_group_is_returned_even_if_a_judge_corrupts_a_sample() -> None:
    """The group does not stay in flight."""
    calls = Counted()

    def spoils(group: list[RolloutState]) -> bool:
        if group[0].num_tries:
            return True
        group[0].finish_reason = 5  # type: ignore[assignment]
        raise ValueError("and raises")

    producer = Producer(calls, members=1, is_valid_sample_fn=spoils)
    await producer.produce(1)
    assert [state.num_tries for state in await producer.only(Status.COMPLETED)] == [1]
    assert len(calls.samples) == 2
    await producer.check_idle()
