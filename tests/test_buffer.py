"""What a buffer does with what it is given, and with what it should not have been given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forebay import (
    BufferClosed,
    CursorMoved,
    DuplicateGroup,
    FreshestReplayPolicy,
    InvalidConfig,
    InvalidGroup,
    InvalidInput,
    InvalidQuery,
    LostLease,
    PriorityReplayPolicy,
    Record,
    ReplayBuffer,
    ReplayPolicy,
    RolloutState,
    Sampler,
    Status,
)
from forebay.buffer.internal import internals
from forebay.testing import make_group
from tests.support import closed_ledger, draw


async def test_an_empty_group_is_nothing() -> None:
    buffer = ReplayBuffer()
    assert await buffer.put([], "math") is None
    assert await buffer.put_many([], "math") == []
    assert await buffer.ledger() == {}


async def test_put_stamps_what_has_no_version_and_keeps_what_has() -> None:
    buffer = ReplayBuffer()
    group = make_group(2, tokens=3)
    group[0].version_spans = ((1, 1),)
    await buffer.put(group, "math", model_step=4)
    ((first, second),) = await buffer.get(1, "math", Status.COMPLETED)
    assert first.response_model_steps == [1, 4, 4]
    assert second.response_model_steps == [4, 4, 4]


async def test_put_judges_by_the_current_train_step_and_expires_members() -> None:
    buffer = ReplayBuffer()
    group = make_group(2, tokens=2, score=1.0)
    group[0].version_spans = ((3, 2),)
    await buffer.put(group, "math", model_step=7, current_train_step=8, stale_threshold=4)
    ((stale, fresh),) = await buffer.get(1, "math", Status.EXPIRED)
    assert (stale.status, stale.response_ids, stale.reward, stale.tokens) == (Status.EXPIRED, None, None, [1, 2])
    assert (fresh.status, fresh.response_ids, fresh.reward) == (Status.COMPLETED, [0, 1], {"score": 1.0})
    assert fresh.seq_staleness == 0


async def test_limits_are_kept_and_overridden_by_a_call() -> None:
    buffer = ReplayBuffer()
    await buffer.set_limits("math", stale_threshold=1)
    await buffer.put(make_group(), "math", model_step=0, current_train_step=3)
    assert await buffer.count("math", Status.EXPIRED) == 1
    await buffer.put(make_group(), "math", model_step=0, current_train_step=3, stale_threshold=3)
    assert await buffer.count("math", Status.COMPLETED) == 1
    with pytest.raises(TimeoutError):
        await buffer.lease_batch({"math": 1}, train_step=3, timeout_s=0)
    assert await buffer.count("math", Status.EXPIRED) == 2


async def test_a_threshold_that_came_with_a_put_binds_later_leases() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math", model_step=0, current_train_step=1, stale_threshold=2)
    with pytest.raises(TimeoutError):
        await buffer.lease_batch({"math": 1}, train_step=9, timeout_s=0)


@pytest.mark.parametrize("arrays", [False, True])
async def test_a_lease_masks_stale_tokens_and_keeps_the_stored_mask(arrays: bool) -> None:
    buffer = ReplayBuffer()
    await buffer.set_limits("math", token_stale_threshold=4)
    group = make_group(1, tokens=2)
    group[0].version_spans = ((0, 1), (4, 1))
    if arrays:
        group[0].response_ids = np.array([5, 6])
        group[0].logprobs = np.array([0.0, 0.0])
    await buffer.put(group, "math")
    lease = await buffer.lease_batch({"math": 1}, train_step=5)
    mask = lease.groups[0][0].response_mask
    assert mask is not None
    assert list(mask) == [0, 1]
    assert isinstance(mask, np.ndarray) is arrays
    await lease.nack()
    (record,) = await buffer.query({})
    stored = await buffer.read(record.uid)
    assert stored is not None
    assert stored[0].response_mask is None


async def test_refresh_counts_only_what_newly_expired() -> None:
    buffer = ReplayBuffer()
    for step in (0, 0, 5):
        await buffer.put(make_group(), "math", model_step=step)
    thresholds = {"math": 3, "code": None}
    assert await buffer.refresh_staleness(task_stale_thresholds=thresholds, current_train_step=4) == {
        "math": 2,
        "code": 0,
    }
    assert await buffer.refresh_staleness(task_stale_thresholds=thresholds, current_train_step=5) == {
        "math": 0,
        "code": 0,
    }
    assert await buffer.refresh_staleness(task_stale_thresholds=thresholds, current_train_step=9) == {
        "math": 1,
        "code": 0,
    }
    assert (await buffer.stats())["forebay/math/tokens/reset"] == 18


async def test_g01_tokens_that_are_too_old_on_arrival_are_in_the_token_ledger() -> None:
    buffer = ReplayBuffer()
    await buffer.set_limits("math", stale_threshold=1)
    group = await Sampler([{"prompt": "q"}]).with_buffer(buffer).sample("math")
    group[0].response_ids, group[0].status = [1] * 10, Status.COMPLETED
    await buffer.put(group, "math", model_step=0, current_train_step=5)
    assert (await buffer.stats())["forebay/math/tokens/reset"] == 10
    line = (await buffer.ledger(tokens=True))["math"]
    assert line["issued"] == 10 == sum(line.values()) - 10


async def test_refresh_leaves_leased_groups_alone_and_they_are_judged_when_they_come_back() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math", model_step=0)
    lease = await buffer.lease_batch({"math": 1}, train_step=1)
    assert await buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=5) == {"math": 0}
    await lease.nack()
    assert await buffer.get(1, "math", Status.COMPLETED) == []
    assert await buffer.count("math", Status.EXPIRED) == 1


async def test_a_task_that_no_longer_retries_drops_its_expired_groups() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math", model_step=0)
    await buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=5)
    await buffer.refresh_staleness(
        task_stale_thresholds={"math": 1}, current_train_step=5, expired_groups_retryable_by_task={"math": False}
    )
    assert await closed_ledger(buffer) == {"issued": 1, "discarded": 1}


async def test_what_is_handed_out_cannot_change_what_is_stored() -> None:
    buffer = ReplayBuffer()
    group = make_group(1)
    group[0].response_ids = np.arange(3)
    group[0].logprobs = np.zeros(3)
    await buffer.put(group, "math")
    lease = await buffer.lease_batch({"math": 1}, train_step=1)
    state = lease.groups[0][0]
    state.response = "something else"
    state.response_mask = [1, 1, 1]
    assert isinstance(state.response_ids, np.ndarray)
    with pytest.raises(ValueError, match="read-only"):
        state.response_ids[0] = 9
    await lease.nack()
    ((again,),) = (await buffer.lease_batch({"math": 1}, train_step=1)).groups
    assert (again.response, again.response_mask) == ("391", None)


async def test_priority_decides_and_can_be_changed() -> None:
    buffer = ReplayBuffer(PriorityReplayPolicy())
    low = await buffer.put(make_group(group_id=1), "math", priority=0.1)
    await buffer.put(make_group(group_id=2), "math", priority=0.5)
    assert low is not None
    assert await buffer.set_priority({low: 0.9, 12345: 1.0}) == 1
    groups = await buffer.get(2, "math", Status.COMPLETED)
    assert [group[0].group_id for group in groups] == [1, 2]


async def test_the_freshest_leave_first() -> None:
    buffer = ReplayBuffer(FreshestReplayPolicy())
    for step in (3, 9, 6):
        await buffer.put(make_group(group_id=step), "math", model_step=step)
    groups = await buffer.get(3, "math", Status.COMPLETED)
    assert [group[0].group_id for group in groups] == [9, 6, 3]


async def test_a_policy_of_ones_own() -> None:
    class ShortestFirst(ReplayPolicy):
        def choose(self, rows: list[Record], n: int) -> list[int]:  # type: ignore[override]
            return [row.uid for row in sorted(rows, key=lambda row: row.tokens)[:n]]

    buffer = ReplayBuffer(ShortestFirst())
    for tokens in (5, 2, 9):
        await buffer.put(make_group(1, tokens=tokens), "math")
    async with buffer.lease_batch({"math": 2}, train_step=1) as lease:
        assert [len(group[0].response_ids or ()) for group in lease.groups] == [2, 5]


async def test_staleness_in_a_query_is_judged_by_the_last_train_step() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math", model_step=1)
    with pytest.raises(InvalidQuery, match="before a train step was seen"):
        await buffer.query({"staleness": {"$gte": 2}})
    await buffer.put(make_group(), "math", model_step=4, current_train_step=5)
    assert len(await buffer.query({"staleness": {"$gte": 2}})) == 1
    assert len(await buffer.query({"staleness": 0})) == 1


async def test_a_query_never_moves_anything_and_read_gives_copies() -> None:
    buffer = ReplayBuffer()
    uid = await buffer.put(make_group(), "math", tags={"difficulty": "hard"})
    records = await buffer.query({"tags.difficulty": "hard", "task_name": "math"}, limit=5)
    assert [record.uid for record in records] == [uid]
    group = await buffer.read(records[0].uid)
    assert group is not None
    group[0].status = Status.FAILED
    assert await buffer.count("math", Status.COMPLETED) == 1
    assert await buffer.read(999) is None
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}


async def test_stats_are_flat_and_name_every_place() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math")
    stats = await buffer.stats()
    assert stats["forebay/math/buffered/completed"] == stats["forebay/math/issued"] == stats["forebay/groups"] == 1
    assert stats["forebay/math/tokens/buffered"] == 6
    assert all(isinstance(value, int) for value in stats.values())


async def test_a_draw_that_lost_the_race_learns_where_the_cursor_is() -> None:
    buffer = ReplayBuffer()
    await draw(buffer, 3)
    with pytest.raises(CursorMoved, match="its position is 3") as caught:
        await internals(buffer).issue([make_group(status=Status.INIT)], "math", cursor=1)
    assert caught.value.cursor == 3
    assert (await internals(buffer).position("math")) == (3, None)


async def test_only_what_can_be_generated_again_is_redrawn() -> None:
    buffer = ReplayBuffer()
    with pytest.raises(InvalidInput, match="completed groups cannot be drawn again"):
        await internals(buffer).redraw(1, "math", [Status.COMPLETED])


def bad_groups() -> dict[str, Callable[[], list[RolloutState]]]:
    def change(**fields: Any) -> Callable[[], list[RolloutState]]:
        def make() -> list[RolloutState]:
            group = make_group(2, group_id=5)
            for name, value in fields.items():
                setattr(group[1], name, value)
            return group

        return make

    return {
        "two groups": change(group_id=6),
        "two tasks": change(task_name="code"),
        "some without group": change(group_id=None),
        "short logprobs": change(logprobs=[0.0]),
        "long mask": change(response_mask=[1] * 9),
        "too many versions": change(version_spans=((1, 9),)),
        "negative version": change(version_spans=((-1, 3),)),
        "unknown status": change(status="finished"),
        "negative tries": change(num_tries=-1),
        "bad reward": change(reward={"score": float("nan")}, status=Status.COMPLETED),
        "matrix": change(response_ids=np.zeros((2, 2)), logprobs=None),
    }


@pytest.mark.parametrize("name", list(bad_groups()))
async def test_a_bad_group_changes_nothing(name: str) -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(group_id=4, score=0.5), "math")
    bad = bad_groups()[name]()
    bad[0].reward = {"score": 0.5}
    with pytest.raises(InvalidGroup):
        await buffer.put_many([make_group(group_id=1), bad], "math")
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}


async def test_duplicate_rollout_ids_and_groups_are_refused() -> None:
    buffer = ReplayBuffer()
    twins = make_group(2)
    for state in twins:
        state.rollout_id = 3
    with pytest.raises(InvalidGroup, match="rollout_id 3"):
        await buffer.put(twins, "math")
    await buffer.put(make_group(group_id=1), "math")
    with pytest.raises(DuplicateGroup, match="already exists: it is buffered"):
        await buffer.put(make_group(group_id=1), "math")
    await buffer.lease_batch({"math": 1}, train_step=1)
    with pytest.raises(DuplicateGroup, match="it is leased"):
        await buffer.put(make_group(group_id=1), "math")
    assert await closed_ledger(buffer) == {"issued": 1, "leased": 1}


BAD_CALLS: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "negative model step": (InvalidInput, "model_step is -1", lambda b: b.put(make_group(), "math", model_step=-1)),
    "train step 0": (
        InvalidInput,
        "current_train_step is 0",
        lambda b: b.put(make_group(), "math", model_step=0, current_train_step=0),
    ),
    "threshold 0": (
        InvalidInput,
        "stale_threshold is 0",
        lambda b: b.put(make_group(), "math", model_step=0, current_train_step=1, stale_threshold=0),
    ),
    "threshold without step": (
        InvalidInput,
        "no current_train_step",
        lambda b: b.put(make_group(), "math", stale_threshold=1),
    ),
    "tokens without version": (
        InvalidInput,
        "pass model_step as well",
        lambda b: b.put(make_group(), "math", current_train_step=1),
    ),
    "priority nan": (InvalidInput, "priority", lambda b: b.put(make_group(), "math", priority=float("nan"))),
    "tag of a wrong type": (InvalidInput, "tag 'a'", lambda b: b.put(make_group(), "math", tags={"a": [1]})),
    "task without name": (InvalidInput, "task_name", lambda b: b.put(make_group(), "")),
    "n that is not whole": (InvalidInput, "expected an integer", lambda b: b.get(1.5, "math", Status.COMPLETED)),
    "n that is a bool": (InvalidInput, "expected an integer", lambda b: b.take_batch({"math": True})),
    "unknown status": (InvalidInput, "unknown status 'done'", lambda b: b.get(1, "math", "done")),
    "wants that are no dict": (InvalidInput, "expected a dict of task names", lambda b: b.is_ready([("math", 1)])),
    "lease for step 0": (InvalidInput, "train_step is 0", lambda b: b._lease({"math": 1}, 0, Status.COMPLETED, 0)),
    "refresh of what does not expire": (
        InvalidInput,
        "failed groups do not expire",
        lambda b: b.refresh_staleness(
            task_stale_thresholds={"math": 1}, current_train_step=1, statuses=[Status.FAILED]
        ),
    ),
    "refresh with threshold 0": (
        InvalidInput,
        "stale_threshold is 0",
        lambda b: b.refresh_staleness(task_stale_thresholds={"math": 0}, current_train_step=1),
    ),
    "unknown field": (InvalidQuery, "unknown field 'colour'", lambda b: b.query({"colour": 1})),
    "discard without reason": (InvalidInput, "reason", lambda b: b.discard({}, "")),
    "priority of infinity": (InvalidInput, "finite", lambda b: b.set_priority({1: float("inf")})),
    "more than can ever fit": (
        InvalidInput,
        "can never fit",
        lambda b: b.put_many([make_group() for _ in range(9)], "math"),
    ),
    "an error message that is an exception": (
        InvalidInput,
        "error_msg of rollout",
        lambda b: b.put([RolloutState(message=[], error_msg=ValueError("x"))], "math"),  # type: ignore[arg-type]
    ),
    "a response that is no text": (
        InvalidInput,
        "response of rollout",
        lambda b: b.put([RolloutState(message=[], response=5)], "math"),  # type: ignore[arg-type]
    ),
    "a sample alone": (InvalidInput, "a group is a list", lambda b: b.put(make_group()[0], "math")),
    "no groups": (InvalidInput, "groups are None", lambda b: b.put_many(None, "math")),
    "no prompts": (InvalidInput, "groups are None", lambda b: internals(b).issue(None, "math", cursor=0)),  # type: ignore[arg-type]
    "a timeout that is a text": (InvalidInput, "timeout_s is '5'", lambda b: b.wait_ready({"math": 2}, timeout_s="5")),
    "a priority that is a text": (InvalidInput, "priority is", lambda b: b.put(make_group(), "math", priority="high")),
    "tags that are a text": (InvalidInput, "tags are 'x'", lambda b: b.put(make_group(), "math", tags="x")),
    "tasks that are a text": (InvalidInput, "tasks are", lambda b: b.count_statuses("math", [Status.INIT])),
    "a task that is a list": (InvalidInput, "task_name is", lambda b: b.count(["math"], Status.INIT)),
    "statuses that are a number": (InvalidInput, "statuses are 5", lambda b: internals(b).redraw(1, "math", 5)),  # type: ignore[arg-type]
    "priorities that are a list": (InvalidInput, "priorities is", lambda b: b.set_priority([1])),
    "thresholds that are a list": (
        InvalidInput,
        "task_stale_thresholds is",
        lambda b: b.refresh_staleness(task_stale_thresholds=["math"], current_train_step=1),
    ),
    "retryable that is a text": (
        InvalidInput,
        "expired_groups_retryable is 'no'",
        lambda b: b.put(make_group(), "math", expired_groups_retryable="no"),
    ),
    "a wait for more than fits": (InvalidConfig, "can never fit", lambda b: b.wait_ready({"math": 9})),
    "a lease of more than fits": (
        InvalidConfig,
        "can never fit",
        lambda b: b._lease({"math": 5, "code": 4}, 1, Status.COMPLETED, None),
    ),
}


@pytest.mark.parametrize("name", list(BAD_CALLS))
async def test_a_bad_call_says_what_was_wrong_and_changes_nothing(name: str) -> None:
    kind, text, call = BAD_CALLS[name]
    buffer = ReplayBuffer(max_groups=8)
    await buffer.put(make_group(), "math")
    with pytest.raises(kind, match=text):
        await call(buffer)
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}


@pytest.mark.parametrize(
    "settings",
    [{"max_groups": 0}, {"max_bytes": -1}, {"max_groups": 1.5}, {"lease_s": 0}, {"keep_trained": -1}, {"policy": 3}],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        ReplayBuffer(**settings)


async def test_a_closed_buffer_says_so() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math")
    lease = await buffer.lease_batch({"math": 1}, train_step=1)
    await buffer.close()
    await buffer.close()
    for call in (buffer.put(make_group(), "math"), buffer.get(1, "math", Status.COMPLETED), buffer.ledger()):
        with pytest.raises(BufferClosed):
            await call
    with pytest.raises((BufferClosed, LostLease)):
        await lease.ack()


async def test_a_failed_group_with_a_strange_error_message_leaves_the_ledger_closed() -> None:
    buffer = ReplayBuffer()
    (group,) = await draw(buffer)
    for state in group:
        state.status = Status.FAILED
        state.error_msg = RuntimeError("engine died")  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(InvalidGroup, match="error_msg"):
            await buffer.put_many([make_group(), group], "math")
        assert await closed_ledger(buffer) == {"issued": 1, "in_flight": 1}


async def test_what_is_stale_on_arrival_needs_no_room() -> None:
    buffer = ReplayBuffer(max_groups=1)
    await buffer.set_limits("math", stale_threshold=1, retryable=False)
    await buffer.put(make_group(), "math", model_step=8)
    await buffer.put_many([make_group(), make_group()], "math", model_step=0, current_train_step=9)
    assert await closed_ledger(buffer) == {"issued": 3, "buffered": 1, "discarded": 2}


async def test_two_buffers_with_equal_policies_of_ones_own_share_a_storage() -> None:
    class First(ReplayPolicy):
        def choose(self, rows: list[Record], n: int) -> list[int]:  # type: ignore[override]
            return [row.uid for row in rows[:n]]

    one = ReplayBuffer(First())
    other = ReplayBuffer(First(), one.storage)
    await one.put(make_group(), "math")
    assert len(await other.get(1, "math", Status.COMPLETED)) == 1


@pytest.mark.parametrize("fields", [{"response_ids": []}, {"response_ids": [], "response": ""}, {}])
async def test_g13_a_completed_member_without_a_token_is_refused(fields: dict[str, Any]) -> None:
    buffer = ReplayBuffer()
    empty = RolloutState(message=[], status=Status.COMPLETED, **fields)
    with pytest.raises(InvalidGroup, match=r"member 1 .* COMPLETED without a token"):
        await buffer.put([*make_group(1), empty], "math")
    assert await buffer.ledger() == {}


@pytest.mark.parametrize("fields", [{"response": "text only"}, {"response_ids": [], "input_ids": [1], "labels": [1]}])
async def test_g13_texts_and_agent_traces_need_no_response_tokens(fields: dict[str, Any]) -> None:
    buffer = ReplayBuffer()
    await buffer.put([RolloutState(message=[], status=Status.COMPLETED, **fields)], "math")
    assert (await closed_ledger(buffer))["buffered"] == 1
