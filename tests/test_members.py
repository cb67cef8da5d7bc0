"""Members before and after an attempt: one bad answer costs that member only; the others keep their responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from forebay import AgentLoop, ReplayBuffer, RolloutState, Status, Timeouts, TooManyFailures, group_bytes
from forebay.produce.members import collect, is_answered, new_tokens, prepare, settle_tries, untrusted_responses
from tests.test_strategy import (
    TASK,
    Counted,
    Producer,
    after,
    answer,
    ids,
    never,
    now,
    running_ahead,
    simulated,
    statuses,
)

# --- pure functions ---------------------------------------------------------------------------------------


def issued(members: int = 3, **fields: Any) -> list[RolloutState]:
    identity: dict[str, Any] = {"task_name": TASK, "group_id": 7, "attempt": 2}
    message = [{"role": "user", "content": "?"}]
    return [
        RolloutState(message=message, rollout_id=21 + index, prompt_ids=[1, 2], **(identity | fields))
        for index in range(members)
    ]


def answered(prompts: Sequence[RolloutState]) -> list[RolloutState]:
    """The members that a correct loop returns."""
    _, working = prepare(prompts, partial=True)
    for state in working:
        answer(state)
    return working


def errors(members: Sequence[RolloutState]) -> list[str | None]:
    return [state.error_msg for state in members]


def test_a_loop_gets_copies_of_the_members() -> None:
    prompts = issued(extra_fields={"tool": {"calls": []}}, reward_model={"answer": [4]}, tools=[{"name": "python"}])
    kept, working = prepare(prompts, partial=False)
    for state in working:
        state.message.append({"role": "assistant"})
        state.extra_fields["tool"]["calls"].append(1)
        assert state.prompt_ids is not None
        assert state.reward_model is not None
        assert state.tools is not None
        state.prompt_ids.append(3)  # type: ignore[union-attr]
        state.reward_model["answer"].append(5)
        state.tools.append({})
    for state in kept:
        assert len(state.message) == 1
        assert state.extra_fields == {"tool": {"calls": []}}
        assert state.prompt_ids == [1, 2]
        assert state.reward_model == {"answer": [4]}
        assert state.tools == [{"name": "python"}]


def test_partial_rollout_keeps_tokens_and_without_it_members_start_again() -> None:
    def stopped() -> list[RolloutState]:
        return issued(1, status=Status.ABORTED, response_ids=[5], version_spans=((1, 1),), finish_reason="abort")

    for partial, tokens in ((True, [5]), (False, None)):
        (kept,), (working,) = prepare(stopped(), partial=partial)
        for state in (kept, working):
            assert (state.status, state.finish_reason, state.response_ids) == (Status.INIT, None, tokens)
            assert bool(state.version_spans) is partial


def test_tokens_of_later_weights_are_not_continued() -> None:
    """They are left from weights that were lost: the run was resumed from an earlier step, in the same store."""

    def stopped() -> list[RolloutState]:
        return issued(1, status=Status.ABORTED, response_ids=[5, 6], version_spans=((3, 1), (4, 1)))

    for model_step, tokens in ((3, None), (4, [5, 6]), (None, [5, 6])):
        (kept,), (working,) = prepare(stopped(), partial=True, model_step=model_step)
        assert kept.response_ids == working.response_ids == tokens
        assert bool(working.version_spans) is (tokens is not None)


def test_text_without_tokens_is_not_kept_without_partial_rollout() -> None:
    (kept,), _ = prepare(issued(1, status=Status.ABORTED, response="half"), partial=False)
    assert kept.response is None


def test_an_unjudged_member_is_not_generated_again() -> None:
    waiting = issued(1, status=Status.ABORTED, response_ids=[5], unjudged=True)
    assert is_answered(waiting[0])
    (kept,), (working,) = prepare(waiting, partial=False)
    assert (kept.status, working.status) == (Status.COMPLETED, Status.COMPLETED)
    assert (kept.response_ids, kept.unjudged) == ([5], False)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", None])
def test_g13_a_finish_reason_never_completes_a_stopped_member(reason: str | None, partial: bool) -> None:
    def stopped() -> list[RolloutState]:
        return issued(1, status=Status.ABORTED, response_ids=[5], version_spans=((1, 1),), finish_reason=reason)

    assert not is_answered(stopped()[0])
    (kept,), (working,) = prepare(stopped(), partial=partial)
    assert (kept.status, working.status) == (Status.INIT, Status.INIT)
    assert working.response_ids == ([5] if partial else None)
    (prompt,) = issued(1)
    (member,) = collect([prompt], stopped(), partial=partial)
    assert member.status is Status.ABORTED
    assert member.response_ids == ([5] if partial else None)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("status", [Status.INIT, Status.EXPIRED])
def test_g13_a_response_that_was_not_generated_is_dropped(status: Status, partial: bool) -> None:
    brought = issued(1, status=status, response_ids=[5], response="gold", finish_reason="stop")
    assert untrusted_responses(brought) == 1
    (kept,), (working,) = prepare(brought, partial=partial)
    assert (kept.status, working.response_ids, working.response) == (Status.INIT, None, None)


def test_g13_segments_of_one_rollout_start_again_together() -> None:
    first, second = issued(1)[0], issued(1)[0]
    first.status, first.response_ids = Status.COMPLETED, [1]
    second.status, second.response_ids, second.segment = Status.ABORTED, [2], 1
    (kept,), (working,) = prepare([second, first], partial=True)
    assert (kept.status, working.response_ids, kept.segment) == (Status.INIT, None, 0)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"response_ids": []}, Status.FAILED),
        ({"response_ids": np.zeros(0, np.int64), "response": ""}, Status.FAILED),
        ({}, Status.FAILED),
        ({"response_ids": [1, 2], "response_mask": [1]}, Status.FAILED),
        ({"response_ids": [1, 2], "logprobs": [-0.5]}, Status.FAILED),
        ({"response": ""}, Status.COMPLETED),
        ({"input_ids": [1, 2], "labels": [1, 2]}, Status.COMPLETED),
        ({"response_ids": [1]}, Status.COMPLETED),
    ],
)
def test_g13_a_completed_member_without_tokens_is_failed(fields: dict[str, Any], status: Status) -> None:
    prompts = issued(2)
    answers = prepare(prompts, partial=False)[1]
    for state in answers:
        state.status, state.response_ids = Status.COMPLETED, [7]
    answers[1].response_ids = None
    for name, value in fields.items():
        setattr(answers[1], name, value)
    members = collect(prompts, answers, partial=False)
    assert statuses(members) == [Status.COMPLETED, status]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_ids": [*np.array([1, 2, 3])], "logprobs": [*np.array([-0.5, 0.0, -1.0], np.float32)]},
        {"logprobs": [1e-5, -float("inf"), 0]},  # as engines round
        {"logprobs": np.array([1e-5, -0.5, 0.0], ml_dtypes.bfloat16)},
        {"response_mask": [True, 0, 1.0]},
        {"response_mask": np.array([True, False, True])},
        {"response_mask": np.array([1.0, 0.0, 1.0])},
        {"version_spans": ((5, 3),)},
        {"logprobs": [7.0] * 4, "input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]},  # an agent trace has its own
    ],
)
def test_values_that_an_engine_may_return_are_kept(fields: dict[str, Any]) -> None:
    (prompt,) = prompts = issued(1)
    (state,) = answers = answered(prompts)
    for name, value in fields.items():
        setattr(state, name, value)
    assert errors(collect([prompt], answers, partial=True, model_step=5)) == [None]


def test_complete_answers_are_kept() -> None:
    prompts = issued()
    members = collect(prompts, answered(prompts), partial=False)
    assert statuses(members) == [Status.COMPLETED] * 3


Spoil = Callable[[list[RolloutState]], Any]


def without(index: int) -> Spoil:
    return lambda returned: returned[:index] + returned[index + 1 :]


def change(**fields: Any) -> Spoil:
    def spoil(returned: list[RolloutState]) -> list[RolloutState]:
        for name, value in fields.items():
            setattr(returned[1], name, value)
        return returned

    return spoil


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (without(1), "did not return it"),
        (change(group_id=8), "group 8"),
        (change(rollout_id=99), "did not return it"),
        (change(rollout_id=None), "did not return it"),
        (change(rollout_id=[22]), "did not return it"),
        (change(rollout_id=23), "did not return it"),
        (change(task_name="code"), "'code'"),
        (change(logprobs=[0.5]), "logprobs"),
        (change(response_mask=[1] * 9), "response_mask"),
        (change(response_ids="text"), "str"),
        (change(version_spans=((1, 99),)), "99 tokens"),
        (change(version_spans=5), "version_spans"),
        (change(response_ids=[1, -2, 3]), "response_ids[1] of rollout 22 of group 7 is -2; expected token ids"),
        (change(response_ids=[1, 2, 3.5]), "response_ids[2] of rollout 22 of group 7 is 3.5"),
        (change(response_ids=np.array([1, 2, -3])), "response_ids[2] of rollout 22 of group 7 is -3"),
        (change(response_ids=np.ones(3)), "response_ids[0] of rollout 22 of group 7 is 1.0"),
        (change(logprobs=[-0.5, float("nan"), -0.5]), "logprobs[1] of rollout 22 of group 7 is nan"),
        (change(logprobs=[-0.5, -0.5, 0.25]), "logprobs[2] of rollout 22 of group 7 is 0.25; expected"),
        (change(logprobs=np.array([-0.5, -0.5, np.nan], np.float32)), "logprobs[2] of rollout 22 of group 7 is nan"),
        (change(logprobs=np.array([0.5, -0.5, -0.5])), "logprobs[0] of rollout 22 of group 7 is 0.5"),
        (change(response_mask=[1, 2, 0]), "response_mask[1] of rollout 22 of group 7 is 2; expected only 0 and 1"),
        (change(response_mask=np.array([1, 0, 0.5])), "response_mask[2] of rollout 22 of group 7 is 0.5"),
        (change(version_spans=((4, 2), (6, 1))), "contain model step 6, but the engine has the weights of step 5"),
        (change(status=Status.INIT), "without a status"),
        (change(status=Status.EXPIRED), "expired"),
        (change(status=Status.ARCHIVED), "archived"),
        (change(status="nonsense"), "nonsense"),
        (change(finish_reason=5), "finish_reason"),
        (change(message=None), "message"),
        (change(extra_fields=None), "extra_fields"),
        (change(reward={"score": float("nan")}), "score"),
        (change(reward=0.5), "reward"),
        (change(status=Status.FAILED, error_msg="the tool crashed"), "the tool crashed"),
        (change(status=Status.FAILED, finish_reason="content_filter"), "content_filter"),
        (lambda returned: [returned[0], returned[1], returned[1], returned[2]], "appears twice"),
        (lambda returned: [returned[0], "no sample", returned[2]], "did not return it"),
    ],
)
def test_an_invalid_answer_fails_its_member_only(spoil: Spoil, error: str) -> None:
    prompts = issued()
    members = collect(prompts, spoil(answered(prompts)), partial=True, model_step=5)
    bad = members[1]
    assert (bad.status, bad.rollout_id, bad.group_id, bad.response_ids) == (Status.FAILED, 22, 7, None)
    assert error in (bad.error_msg or "")
    assert members[0].status is Status.COMPLETED
    if members[2].status is not Status.COMPLETED:  # another member was returned under its id
        assert "appears twice" in (members[2].error_msg or "")


@pytest.mark.parametrize("returned", [None, 5, "text", {}, [], [None]])
def test_a_result_that_is_not_a_list_of_samples_fails_all_members(returned: object) -> None:
    members = collect(issued(), returned, partial=True)
    assert statuses(members) == [Status.FAILED] * 3
    assert errors(members) == ["the agent loop did not return it"] * 3


def test_samples_of_other_groups_are_ignored() -> None:
    prompts = issued()
    strange = issued(1)[0]
    strange.rollout_id, strange.group_id = 77, 25
    members = collect(prompts, [strange, *answered(prompts)], partial=True)
    assert [state.rollout_id for state in members] == [21, 22, 23]


def test_kept_members_are_unchanged_whatever_the_loop_returns() -> None:
    prompts = issued()
    answer(prompts[0], 5)
    kept, working = prepare(prompts, partial=True)
    for state in working:
        state.response_ids = [9]
        state.logprobs = None
        state.status = Status.COMPLETED
    members = collect(kept, working[1:], partial=True)  # not even returned
    assert members[0] is kept[0]
    assert members[0].response_ids == [0, 1, 2, 3, 4]


def test_a_rollout_may_be_returned_as_several_segments() -> None:
    prompts = issued(2)
    returned = answered(prompts)
    more = returned[0].__copy__()
    more.segment = 1
    members = collect(prompts, [*returned, more], partial=False)
    assert [(state.rollout_id, state.segment) for state in members] == [(21, 0), (21, 1), (22, 0)]


@pytest.mark.parametrize("status", [Status.ABORTED, Status.FAILED])
def test_segments_with_an_incomplete_one_are_replaced_by_the_issued_sample(status: Status) -> None:
    prompts = issued(1)
    returned = answered(prompts)
    more = returned[0].__copy__()
    more.segment, more.status, more.finish_reason = 1, status, None
    (member,) = collect(prompts, [*returned, more], partial=True)
    assert (member.status, member.segment, member.response_ids) == (status, 0, None)


def test_stopped_members_keep_their_tokens_only_with_partial_rollout() -> None:
    for partial, tokens in ((True, [4, 5]), (False, None)):
        prompts = issued(1)
        _, (working,) = prepare(prompts, partial=partial)
        working.response_ids, working.status, working.finish_reason = [4, 5], Status.ABORTED, "abort"
        (member,) = collect(prompts, [working], partial=partial)
        assert (member.status, member.response_ids) == (Status.ABORTED, tokens)


def test_earlier_versions_are_kept_when_the_loop_creates_a_new_sample() -> None:
    """Otherwise old tokens would be recorded with the new weights."""
    prompts = issued(2, response_ids=[7, 8], version_spans=((1, 2),), status=Status.ABORTED)
    kept, _ = prepare(prompts, partial=True)
    anew = [
        RolloutState(message=[], rollout_id=21, response_ids=np.array([7, 8, 9]), status=Status.COMPLETED),
        RolloutState(message=[], rollout_id=22, response_ids=[5, 6, 7], status=Status.COMPLETED),
    ]
    continued, begun_again = collect(kept, anew, partial=True)
    assert continued.version_spans == ((1, 2),)
    assert begun_again.version_spans == ()


def test_a_new_sample_of_the_loop_keeps_its_prompt() -> None:
    """The prompt is needed to generate it again after it expires."""
    prompts = issued(1, extra_fields={"gold": "4"}, reward_model={"style": "rule"}, data_source="gsm8k")
    anew = RolloutState(message=[{"role": "user"}], rollout_id=21, extra_fields={"turns": 3}, status=Status.COMPLETED)
    anew.response = "4"
    (member,) = collect(prompts, [anew], partial=False)
    assert member.prompt_ids == [1, 2]
    assert (member.reward_model, member.data_source) == ({"style": "rule"}, "gsm8k")
    assert member.extra_fields == {"turns": 3, "gold": "4"}


def test_messages_may_contain_arrays() -> None:
    prompts = issued(2)
    returned = answered(prompts)
    for state in returned:
        state.message = [{"role": "user", "image": np.zeros(3)}]
    assert statuses(collect(prompts, returned, partial=False)) == [Status.COMPLETED] * 2


def test_tries_are_counted_per_member_and_the_last_one_is_final() -> None:
    prompts = issued()
    prompts[1].num_tries = 1
    members = collect(prompts, answered(prompts)[:1], partial=False)
    assert settle_tries(members, prompts, 2) == "the agent loop did not return it"
    assert [(state.status, state.num_tries) for state in members] == [
        (Status.COMPLETED, 0),
        (Status.FAILED, 2),
        (Status.ABORTED, 1),
    ]
    assert errors(members)[2] == "the agent loop did not return it"  # kept, although it is generated again


def test_a_stop_from_outside_costs_no_try() -> None:
    prompts = issued(2, num_tries=1)
    members = collect(prompts, [], partial=False, missing="stopped")
    settle_tries(members, prompts, 3, spend=False)
    assert [(state.status, state.num_tries, state.error_msg) for state in members] == [(Status.ABORTED, 1, None)] * 2


def test_new_tokens_are_counted_beyond_the_earlier_ones() -> None:
    """The lost tokens of a failed member are not subtracted from those of the others."""
    prompts = issued(2, response_ids=[1, 2, 3, 4], version_spans=((0, 4),))
    members = [state.__copy__() for state in prompts]
    members[0].response_ids = None
    members[1].response_ids = [1, 2, 3, 4, 5, 6]
    assert new_tokens(members, prompts) == 2


# --- through a strategy -----------------------------------------------------------------------------------


class Grouped(AgentLoop):
    """Generates whole groups: the first attempts as a function says, later ones correctly."""

    def __init__(self, first: Callable[[list[RolloutState]], Any], times: int = 1) -> None:
        self.first = first
        self.times = times
        self.calls: list[list[RolloutState]] = []

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        raise AssertionError("not called")

    async def generate_group(
        self, group: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        self.calls.append([state.__copy__() for state in group])
        if len(self.calls) <= self.times:
            result = self.first(group)
            if asyncio.iscoroutine(result):
                result = await result
            return result  # type: ignore[no-any-return]
        for state in group:
            if state.status is not Status.COMPLETED:
                answer(state, 3)
        return group


def all_but_the_second(group: list[RolloutState]) -> None:
    for state in group:
        if state is not group[1]:
            answer(state, 7)


def spoiled(**fields: Any) -> Callable[[list[RolloutState]], list[RolloutState]]:
    def first(group: list[RolloutState]) -> list[RolloutState]:
        all_but_the_second(group)
        answer(group[1])
        for name, value in fields.items():
            setattr(group[1], name, value)
        return group

    return first


def returns_fewer(group: list[RolloutState]) -> list[RolloutState]:
    all_but_the_second(group)
    return [group[0], group[2]]


def raises(group: list[RolloutState]) -> list[RolloutState]:
    all_but_the_second(group)
    group[1].response_ids = [1]
    group[1].message.clear()
    group[1].extra_fields["half"] = True
    raise RuntimeError("in the middle")


async def raises_later(group: list[RolloutState]) -> list[RolloutState]:
    await asyncio.sleep(1)
    return raises(group)


async def hangs(group: list[RolloutState]) -> list[RolloutState]:
    all_but_the_second(group)
    await asyncio.Event().wait()
    return group


async def cancels_itself(group: list[RolloutState]) -> list[RolloutState]:
    all_but_the_second(group)
    raise asyncio.CancelledError


async def ignores_the_cancel(group: list[RolloutState]) -> list[RolloutState]:
    all_but_the_second(group)
    for _ in range(100):
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            continue
    for state in group:
        answer(state, 50)
        state.extra_fields["zombie"] = True
        state.message.append({"role": "zombie"})
    return group


async def stored_group(producer: Producer, group_id: int) -> list[RolloutState]:
    return next(group for group in await producer.buffered(Status.COMPLETED) if group[0].group_id == group_id)


@pytest.mark.parametrize(
    "first",
    [
        returns_fewer,
        raises,
        raises_later,
        hangs,
        ignores_the_cancel,
        cancels_itself,
        spoiled(group_id=5),
        spoiled(rollout_id=55),
        spoiled(task_name="code"),
        spoiled(logprobs=[0.5]),
        spoiled(status=Status.INIT),
        spoiled(status=Status.FAILED),
        spoiled(reward={"score": float("inf")}),
        spoiled(rollout_id=[1]),
    ],
    ids=lambda first: first.__name__,
)
def test_only_the_failed_member_is_generated_again(first: Any) -> None:
    @simulated
    async def main() -> None:
        loop = Grouped(first)
        producer = Producer(loop, members=3)
        production = await producer.produce(1)
        assert production.complete
        groups = 1
        while first in (hangs, ignores_the_cancel) and not await producer.records(group_id=0, status=Status.COMPLETED):
            # It waited before its retry, and another group was used for the batch.
            groups += 1
            await asyncio.sleep(1)
            assert (await producer.produce(groups)).complete
        calls = [call for call in loop.calls if call[0].group_id == 0]
        assert [[state.status for state in call] for call in calls] == [
            [Status.INIT] * 3,
            [Status.COMPLETED, Status.INIT, Status.COMPLETED],
        ]
        assert calls[1][1].response_ids is None
        group = await stored_group(producer, 0)
        assert [len(state.response_ids or ()) for state in group] == [7, 3, 7]
        assert [state.num_tries for state in group] == [0, 1, 0]
        assert [state.error_msg for state in group] == [None] * 3
        assert group[1].message == [{"role": "user", "content": "question 0"}]
        assert "half" not in group[1].extra_fields
        ledger = await producer.ledger()
        assert ledger["buffered"] == ledger["issued"]
        await asyncio.sleep(1_000_000)  # loops that were left behind have ended
        group = await stored_group(producer, 0)
        assert [len(state.response_ids or ()) for state in group] == [7, 3, 7]
        assert all("zombie" not in state.extra_fields and len(state.message) == 1 for state in group)
        await producer.check_idle()

    main()


@pytest.mark.parametrize("returned", [None, 5, "text", {}, []])
def test_a_loop_that_returns_no_list_costs_every_member_a_try(returned: Any) -> None:
    @simulated
    async def main() -> None:
        producer = Producer(Grouped(lambda group: returned), members=2)
        await producer.produce(1)
        assert [state.num_tries for state in await producer.only(Status.COMPLETED)] == [1, 1]

    main()


@simulated
async def test_a_loop_that_is_not_a_coroutine_function_costs_a_try() -> None:
    """The group does not stay in flight."""

    class Plain(Grouped):
        def generate_group(self, group: list[RolloutState], *, enable_partial_rollout: bool = False) -> Any:
            self.calls.append(group)
            if len(self.calls) == 1:
                raise ValueError("before there was anything to await")
            return group

    producer = Producer(Plain(len), members=1)
    with pytest.raises(TooManyFailures, match="TypeError"):
        await producer.produce(1)
    await producer.check_idle()


@simulated
async def test_extra_segments_are_stored_with_their_group() -> None:
    async def two(state: RolloutState) -> list[RolloutState]:
        answer(state)
        more = RolloutState(message=state.message)
        answer(more, 5)
        return [state, more]

    producer = Producer(two, members=2)
    await producer.produce(1)
    group = await producer.only(Status.COMPLETED)
    assert [(state.rollout_id, state.segment) for state in group] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert producer.strategy.figures(TASK).samples == 4


@simulated
async def test_a_group_fails_after_max_tries_with_the_last_error_as_the_reason() -> None:
    """The reference drops a group with all of its members at the first failure."""
    calls = Counted()

    async def bad(state: RolloutState) -> None:
        if state.rollout_id == 1:
            raise RuntimeError(f"try {state.num_tries}")
        answer(state)

    calls.function = bad
    producer = Producer(calls, members=3)
    await producer.produce(1)
    assert calls.rollout_ids.count(1) == 3
    assert calls.rollout_ids.count(0) == calls.rollout_ids.count(2) == 1
    assert (await producer.buffer.reasons())[TASK] == {"RuntimeError: try 2": 1}
    assert await producer.ledger() == {"issued": 2, "buffered": 1, "failed": 1}
    assert producer.strategy.figures(TASK).failures == 3


@simulated
async def test_a_member_that_failed_waits_as_aborted_with_its_error() -> None:
    async def bad(state: RolloutState) -> None:
        if state.rollout_id == 0 and not state.num_tries:
            raise RuntimeError("a bad day")
        await asyncio.sleep(1)
        answer(state)

    # With a trigger of 5 the failed group waits for later batches.
    producer = running_ahead(bad, members=2, tail_batch_trigger_size=5)
    await producer.produce(1)
    group = await producer.only(Status.ABORTED)
    assert [(state.status, state.num_tries, state.error_msg) for state in group] == [
        (Status.ABORTED, 1, "RuntimeError: a bad day"),
        (Status.COMPLETED, 0, None),
    ]
    assert group[0].response_ids is None
    assert group[0].finish_reason is None


@simulated
async def test_a_loop_that_does_not_return_is_cancelled_and_spends_a_try() -> None:
    calls = Counted(never)
    producer = Producer(calls, members=1, max_tries=2, timeouts=Timeouts(member_timeout_s=60))
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(61)
    assert [(state.group_id, state.num_tries) for state in calls.samples] == [(0, 0), (1, 0), (0, 1)]
    await asyncio.sleep(60)
    assert (await producer.buffer.reasons())[TASK] == {"not generated within member_timeout_s=60": 1}
    producing.cancel()
    await asyncio.wait((producing,))
    await producer.check_idle()


@simulated
async def test_members_have_half_an_hour_by_default() -> None:
    producer = Producer(Grouped(hangs), members=2)
    assert (await producer.produce(1)).seconds == 1800


@simulated
async def test_the_group_of_a_loop_that_ignores_its_cancel_is_returned() -> None:
    producer = Producer(
        Grouped(ignores_the_cancel), members=3, timeouts=Timeouts(member_timeout_s=60, cancel_timeout_s=3)
    )
    assert (await producer.produce(1)).seconds == 63


@simulated
async def test_a_loop_that_ignores_its_cancel_cannot_change_stored_samples() -> None:
    """The stored samples are copies, also when the strategy is cancelled."""
    producer = running_ahead(Grouped(ignores_the_cancel), members=3, enable_partial_rollout=True)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(5)
    producing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await producing
    assert now() == 15
    before = await producer.only(Status.ABORTED)
    assert statuses(before) == [Status.COMPLETED, Status.ABORTED, Status.COMPLETED]
    await asyncio.sleep(1_000_000)
    group = await producer.only(Status.ABORTED)
    assert group == before
    assert [state.num_tries for state in group] == [0, 0, 0]


class RaisesAfterASegment(AgentLoop):
    """Its first attempt leaves an ABORTED segment and a COMPLETED one in the list, and raises."""

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        answer(state)
        return state

    async def generate_group(
        self, group: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        if group[0].num_tries:
            return await super().generate_group(group, enable_partial_rollout=enable_partial_rollout)
        other = group[0].__copy__()
        answer(other)
        other.segment, group[0].status = 1, Status.ABORTED
        group.append(other)
        raise RuntimeError("no answer")


@simulated
async def test_a_complete_segment_of_an_aborted_rollout_is_not_kept_when_the_loop_raises() -> None:
    producer = Producer(RaisesAfterASegment(), members=1)
    await producer.produce(1)
    (state,) = await producer.only(Status.COMPLETED)
    assert (state.segment, state.num_tries) == (0, 1)


class LeavesItsTool(AgentLoop):
    """Returns ABORTED in a pause although its tool, which has the sample, still runs."""

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        state.response_ids, state.loop_state = [0, 1], {"calls": 1}
        self.tool = asyncio.create_task(self.call_tool(state))
        await self.until_paused()
        state.status = Status.ABORTED
        return state

    async def call_tool(self, state: RolloutState) -> None:
        await asyncio.sleep(100)
        assert isinstance(state.response_ids, list)
        assert state.loop_state is not None
        state.response_ids.append(666)
        state.message.append({"role": "tool", "content": "late"})
        state.loop_state["calls"] = 2
        state.finish_reason = "stop"


@simulated
async def test_a_tool_that_outlives_its_attempt_cannot_change_what_is_stored() -> None:
    loop = LeavesItsTool()
    producer = running_ahead(loop, enable_partial_rollout=True, members=1)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(1)
    await producer.strategy.pause()
    await producing
    await loop.tool
    (state,) = await producer.only(Status.ABORTED)
    assert (state.response_ids, state.loop_state, len(state.message)) == ([0, 1], {"calls": 1}, 1)
    assert state.finish_reason is None


@simulated
async def test_a_result_that_arrives_after_the_group_was_lost_changes_nothing() -> None:
    producer = Producer(after(10), members=1)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(5)
    await producer.buffer.storage.release(producer.buffer.owner)
    await producing
    assert (await producer.records())[0].attempt == 2


@simulated
async def test_a_member_completed_before_a_cancel_is_not_generated_again() -> None:
    calls = Counted()

    async def one_is_quick(state: RolloutState) -> None:
        await asyncio.sleep(1 if state.rollout_id == 0 else 10)
        answer(state)

    calls.function = one_is_quick
    producer = Producer(calls, members=2)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(5)
    producing.cancel()
    await asyncio.wait((producing,))
    assert statuses(await producer.only(Status.ABORTED)) == [Status.COMPLETED, Status.ABORTED]
    await producer.produce(1)
    assert calls.rollout_ids.count(0) == 1
    assert calls.rollout_ids.count(1) == 2


@simulated
async def test_a_list_that_a_loop_returns_at_the_moment_of_the_cancel_is_used() -> None:
    """Also if it is not the list that the loop was given."""

    async def anew(group: list[RolloutState]) -> list[RolloutState]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            returned = [state.__copy__() for state in group]
            for state in returned:
                answer(state, 9)
            return returned
        return group

    producer = Producer(Grouped(anew), members=2)
    producing = asyncio.create_task(producer.produce(1))
    await asyncio.sleep(5)
    producing.cancel()
    await asyncio.wait((producing,))
    group = await producer.only(Status.COMPLETED)
    assert [len(state.response_ids or ()) for state in group] == [9, 9]


@simulated
async def test_a_pause_a_cancel_and_expiry_spend_no_try() -> None:
    calls = Counted(after(10))
    producer = running_ahead(calls, members=1, max_staleness=0)
    for step in range(1, 8):
        producing = asyncio.create_task(producer.produce(1, step))
        await asyncio.sleep(5)
        if step % 2:
            await producer.strategy.pause()
        else:
            producing.cancel()
        await asyncio.wait((producing,))
    assert {state.num_tries for state in calls.samples} == {0}
    await producer.produce(1, 8)
    await producer.produce(1, 20)  # groups that were not trained have expired, and are generated again
    assert ids(await producer.train(1, 20)) == [0]
    assert {state.num_tries for state in calls.samples} == {0}
    assert await producer.ledger() == {"issued": 1, "trained": 1}


@simulated
async def test_expired_members_are_generated_again_and_fresh_siblings_are_not() -> None:
    calls = Counted()
    producer = running_ahead(calls, members=2, max_staleness=1)
    drawn = await producer.sampler.with_buffer(producer.buffer).draw(1, TASK)
    for state, model_step in zip(drawn[0], (0, 3), strict=True):
        answer(state)
        state.version_spans = ((model_step, 3),)
    await producer.buffer.put(drawn[0], TASK)
    await producer.produce(1, 5, 4)
    assert calls.rollout_ids == [0]
    group = await producer.only(Status.COMPLETED)
    assert [state.version_spans for state in group] == [((4, 3),), ((3, 3),)]


@simulated
async def test_a_group_that_is_too_old_when_it_arrives_does_not_count_as_completed() -> None:
    """It does not reset the count of consecutive failures either."""

    async def with_old_weights(state: RolloutState) -> None:
        await asyncio.sleep(1)
        answer(state)
        state.version_spans = ((0, 3),)  # versions from the engine take precedence

    producer = Producer(with_old_weights, members=1)
    producing = asyncio.create_task(producer.produce(1, 5))
    await asyncio.sleep(3.5)
    producing.cancel()
    await asyncio.wait((producing,))
    figures = producer.strategy.figures(TASK)
    assert (figures.completed, figures.failed, figures.failures) == (0, 0, 0)
    assert figures.returned == 4


@simulated
async def test_the_prompt_is_stored_once_for_a_group() -> None:
    producer = Producer(members=4, buffer=ReplayBuffer())
    await producer.produce(1)
    (record,) = await producer.records()
    group = await producer.only(Status.COMPLETED)
    assert all(state.message is group[0].message for state in group)
    assert record.bytes == group_bytes(group)
