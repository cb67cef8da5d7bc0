"""Limits that change, watermarks that move, groups that are touched where they should not be."""

from __future__ import annotations

import asyncio

import pytest

from forebay import ReplayBuffer, Status
from forebay.testing import make_group
from tests.support import closed_ledger, turns


async def test_raising_a_limit_saves_what_the_old_one_would_have_expired() -> None:
    buffer = ReplayBuffer()
    await buffer.set_limits("math", stale_threshold=1)
    await buffer.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=10)
    await buffer.set_limits("math", stale_threshold=8)
    await buffer.put(make_group(), "math", model_step=5, current_train_step=10)
    assert len(await buffer.get(1, "math", Status.COMPLETED)) == 1


async def test_lowering_a_limit_reaches_what_is_stored() -> None:
    buffer = ReplayBuffer()
    await buffer.set_limits("math", stale_threshold=8)
    await buffer.put(make_group(), "math", model_step=5)
    await buffer.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=10)
    await buffer.set_limits("math", stale_threshold=1)
    assert await buffer.get(1, "math", Status.COMPLETED) == []
    assert await buffer.count("math", Status.EXPIRED) == 1


async def test_the_thresholds_of_a_put_that_was_refused_do_not_stay() -> None:
    buffer = ReplayBuffer()
    bad = make_group()
    bad[0].logprobs = [0.0]
    with pytest.raises(ValueError, match="logprobs"):
        await buffer.put(bad, "math", model_step=0, current_train_step=1, stale_threshold=1)
    await buffer.put(make_group(), "math", model_step=0)
    async with buffer.lease_batch({"math": 1}, train_step=9, timeout_s=0) as lease:
        assert len(lease.groups) == 1


async def test_masks_go_by_the_step_that_the_task_was_judged_for() -> None:
    buffer = ReplayBuffer()
    await buffer.set_limits("math", token_stale_threshold=2)
    await buffer.put(make_group(1), "math", model_step=0)
    await buffer.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=2)
    await buffer.put(make_group(), "code", model_step=8, current_train_step=9)  # another task is further on
    ((state,),) = await buffer.get(1, "math", Status.COMPLETED)
    assert state.response_mask == [1, 1, 1]


async def test_a_lease_that_wants_nothing_of_a_task_leaves_its_stale_groups_alone() -> None:
    buffer = ReplayBuffer()
    await buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=2)
    await buffer.put(make_group(), "math", model_step=0)
    async with buffer.lease_batch({"math": 0}, train_step=3):
        assert await buffer.count("math", Status.COMPLETED) == 1
    assert await buffer.get(1, "math", Status.COMPLETED) == []
    assert await buffer.count("math", Status.EXPIRED) == 1


async def test_a_lowered_watermark_cannot_be_and_a_relaxed_one_wakes_waiters() -> None:
    buffer = ReplayBuffer()
    await buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=9)
    await buffer.put(make_group(), "math", model_step=6)
    waiting = asyncio.ensure_future(buffer.wait_ready({"math": 1}))
    await turns()
    assert not waiting.done()
    await buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=3)
    await turns()
    assert not waiting.done(), "the train step went back"
    assert await buffer.count("math", Status.EXPIRED) == 1
    await buffer.put(make_group(), "math", model_step=6)
    await buffer.refresh_staleness(task_stale_thresholds={"math": 5}, current_train_step=9)
    await asyncio.wait_for(waiting, 5)


async def test_a_trainer_that_touches_a_mask_in_place_does_not_block_the_task() -> None:
    buffer = ReplayBuffer()
    await buffer.set_limits("math", token_stale_threshold=2)
    group = make_group(1)
    group[0].response_mask = [1, 1, 1]
    await buffer.put(group, "math", model_step=5)
    lease = await buffer.lease_batch({"math": 1}, train_step=6)
    mask = lease.groups[0][0].response_mask
    assert isinstance(mask, list)
    mask[:] = [0, 0, 0]
    await lease.nack()
    # Masked out by itself: nothing for a token threshold to expire.
    async with buffer.lease_batch({"math": 1}, train_step=20, timeout_s=0) as again:
        assert len(again.groups) == 1


async def test_a_threshold_for_tokens_alone_is_a_threshold() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math", model_step=0)
    expired = await buffer.refresh_staleness(
        task_stale_thresholds={}, task_token_stale_thresholds={"math": 2}, current_train_step=9
    )
    assert expired == {"math": 1}
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}
