"""Leases: held until acknowledged, settled once, by their holder only."""

from __future__ import annotations

import asyncio
import logging

import pytest

from forebay import InvalidInput, LostLease, ReplayBuffer, Status
from forebay.testing import make_group
from tests.support import closed_ledger, turns


async def filled(groups: int = 3) -> ReplayBuffer:
    buffer = ReplayBuffer()
    await buffer.put_many([make_group(group_id=number) for number in range(groups)], "math")
    return buffer


async def test_a_clean_exit_acknowledges() -> None:
    buffer = await filled()
    async with buffer.lease_batch({"math": 2}, train_step=1) as lease:
        assert [group[0].group_id for group in lease.groups_by_task["math"]] == [0, 1]
        assert lease.open
    assert not lease.open
    assert await closed_ledger(buffer) == {"issued": 3, "buffered": 1, "trained": 2}


async def test_settling_by_hand_inside_the_block_is_respected() -> None:
    buffer = await filled()
    async with buffer.lease_batch({"math": 1}, train_step=1) as lease:
        await lease.nack()
    assert await closed_ledger(buffer) == {"issued": 3, "buffered": 3}


async def test_the_same_settlement_twice_is_one_and_another_is_refused() -> None:
    buffer = await filled()
    lease = await buffer.lease_batch({"math": 1}, train_step=1)
    await lease.ack()
    await lease.ack()
    with pytest.raises(LostLease, match="already settled"):
        await lease.nack()
    with pytest.raises(LostLease, match="already settled"):
        await lease.reject(lease.groups, "late")


async def test_rejected_groups_leave_and_the_others_stay_leased() -> None:
    buffer = await filled()
    async with buffer.lease_batch({"math": 3}, train_step=1) as lease:
        await lease.reject(lease.groups[1:2], "no gradient")
        assert [group[0].group_id for group in lease.groups] == [0, 2]
        assert await closed_ledger(buffer) == {"issued": 3, "leased": 2, "discarded": 1}
        with pytest.raises(InvalidInput, match="not a group of"):
            await lease.reject([make_group(group_id=77)], "not mine")
        with pytest.raises(InvalidInput, match="reason"):
            await lease.reject(lease.groups, "")
    assert await closed_ledger(buffer) == {"issued": 3, "trained": 2, "discarded": 1}


async def test_a_nacked_batch_is_back_at_its_old_place() -> None:
    buffer = await filled()
    lease = await buffer.lease_batch({"math": 2}, train_step=1)
    await buffer.put(make_group(group_id=3), "math")
    await lease.nack()
    groups = await buffer.get(4, "math", Status.COMPLETED)
    assert [group[0].group_id for group in groups] == [0, 1, 2, 3]


async def test_a_batch_of_nothing_is_granted_at_once() -> None:
    buffer = ReplayBuffer()
    async with buffer.lease_batch({"math": 0, "code": -3}, train_step=1) as lease:
        assert lease.groups == []


async def test_a_lease_over_tasks_is_granted_on_all_or_none() -> None:
    buffer = await filled(2)
    waiting = asyncio.ensure_future(buffer.lease_batch({"math": 2, "code": 1}, train_step=1).__aenter__())
    await turns()
    assert await closed_ledger(buffer) == {"issued": 2, "buffered": 2}
    await buffer.put(make_group(), "code")
    lease = await waiting
    assert {task: len(groups) for task, groups in lease.groups_by_task.items()} == {"math": 2, "code": 1}


async def test_a_lease_lost_during_an_exception_does_not_hide_it(caplog: pytest.LogCaptureFixture) -> None:
    buffer = await filled(1)

    async def train() -> None:
        async with buffer.lease_batch({"math": 1}, train_step=1):
            await buffer.storage.release(buffer.owner)
            raise RuntimeError("the real trouble")

    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="the real trouble"):
        await train()
    assert "lease_lost" in caplog.text


async def test_a_lease_lost_before_a_clean_exit_is_an_error() -> None:
    buffer = await filled(1)
    with pytest.raises(LostLease, match="1 of 1 groups"):
        async with buffer.lease_batch({"math": 1}, train_step=1):
            await buffer.storage.release(buffer.owner)
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}


async def test_a_cancelled_wait_for_a_lease_takes_nothing() -> None:
    buffer = await filled(1)
    waiting = asyncio.ensure_future(buffer.lease_batch({"math": 2}, train_step=1).__aenter__())
    await turns()
    waiting.cancel()
    await turns()
    await buffer.put(make_group(group_id=9), "math")
    await turns()
    assert await closed_ledger(buffer) == {"issued": 2, "buffered": 2}


async def test_a_large_lease_cancelled_while_it_is_handed_out_is_given_back() -> None:
    buffer = await filled(200)
    waiting = asyncio.ensure_future(buffer.lease_batch({"math": 200}, train_step=1).__aenter__())
    for _ in range(50):
        await asyncio.sleep(0)
        if (await closed_ledger(buffer)).get("leased"):
            break
    else:
        pytest.fail("the lease was never under way")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await closed_ledger(buffer) == {"issued": 200, "buffered": 200}


async def test_one_request_is_one_lease() -> None:
    buffer = await filled()
    request = buffer.lease_batch({"math": 1}, train_step=1)
    await request
    with pytest.raises(InvalidInput, match="already asked for"):
        await request


async def test_rejecting_a_group_instead_of_a_list_of_groups_says_so() -> None:
    buffer = await filled()
    lease = await buffer.lease_batch({"math": 1}, train_step=1)
    with pytest.raises(InvalidInput, match="expected a list of groups"):
        await lease.reject(lease.groups[0], "no gradient")  # type: ignore[arg-type]
    assert lease.open


async def test_an_error_in_the_block_of_a_closed_buffer_is_not_hidden() -> None:
    buffer = await filled(1)

    async def train() -> None:
        async with buffer.lease_batch({"math": 1}, train_step=1):
            await buffer.close()
            raise RuntimeError("the real trouble")

    with pytest.raises(RuntimeError, match="the real trouble"):
        await train()
