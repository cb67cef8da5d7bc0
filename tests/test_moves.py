"""Every row of the table of moves, through the public interface of the buffer."""

from __future__ import annotations

import pytest

from forebay import ReplayBuffer, RolloutState, Status
from forebay.testing import make_group
from tests.support import closed_ledger, draw


def with_status(group: list[RolloutState], status: Status, error: str | None = None) -> list[RolloutState]:
    for state in group:
        state.status = status
        state.response = "x"
        state.error_msg = error
    return group


async def test_a_prompt_that_is_drawn_is_in_flight() -> None:
    buffer = ReplayBuffer()
    (group,) = await draw(buffer)
    assert [(state.group_id, state.rollout_id, state.attempt) for state in group] == [(0, 0, 1), (0, 1, 1)]
    assert await closed_ledger(buffer) == {"issued": 1, "in_flight": 1}


async def test_a_group_put_by_hand_is_issued_and_buffered() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math")
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}


async def test_a_drawn_group_comes_back() -> None:
    buffer = ReplayBuffer()
    (group,) = await draw(buffer)
    await buffer.put(with_status(group, Status.COMPLETED), "math")
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}


async def test_the_filter_rejects_a_drawn_group_with_its_reason() -> None:
    buffer = ReplayBuffer()
    (group,) = await draw(buffer)
    await buffer.put(with_status(group, Status.FILTERED, "all answers alike"), "math")
    assert await closed_ledger(buffer) == {"issued": 1, "filtered": 1}
    assert await buffer.reasons() == {"math": {"all answers alike": 1}}


async def test_a_drawn_group_whose_tries_are_spent_fails_with_its_last_error() -> None:
    buffer = ReplayBuffer()
    (group,) = await draw(buffer)
    await buffer.put(with_status(group, Status.FAILED, "engine died"), "math")
    assert await closed_ledger(buffer) == {"issued": 1, "failed": 1}
    assert await buffer.reasons() == {"math": {"engine died": 1}}


async def test_a_stale_group_that_cannot_be_retried_is_discarded_on_its_return() -> None:
    buffer = ReplayBuffer()
    await buffer.set_limits("math", stale_threshold=1, retryable=False)
    (group,) = await draw(buffer)
    for state in group:
        state.response_ids = [1]
    await buffer.put(with_status(group, Status.COMPLETED), "math", model_step=0, current_train_step=5)
    assert await closed_ledger(buffer) == {"issued": 1, "discarded": 1}
    assert await buffer.reasons() == {"math": {"stale": 1}}


async def test_a_stale_group_that_cannot_be_retried_is_discarded_from_the_buffer() -> None:
    buffer = ReplayBuffer()
    await buffer.set_limits("math", stale_threshold=1, retryable=False)
    await buffer.put(make_group(), "math", model_step=0)
    assert await buffer.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=2) == {"math": 1}
    assert await closed_ledger(buffer) == {"issued": 1, "discarded": 1}


async def test_a_closed_owner_gives_back_its_groups_as_aborted() -> None:
    buffer = ReplayBuffer()
    await draw(buffer)
    await buffer.close()
    again = ReplayBuffer(storage=buffer.storage)
    assert await again.count("math", Status.ABORTED) == 1
    assert await closed_ledger(again) == {"issued": 1, "buffered": 1}


async def test_a_lease_moves_and_counts_a_delivery() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math")
    await buffer.lease_batch({"math": 1}, train_step=1)
    assert await closed_ledger(buffer) == {"issued": 1, "leased": 1}
    (record,) = await buffer.query({"place": "leased"})
    assert record.deliveries == 1


@pytest.mark.parametrize(("how", "end"), [("ack", "trained"), ("nack", "buffered")])
async def test_a_lease_ends_with_ack_or_nack(how: str, end: str) -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math")
    lease = await buffer.lease_batch({"math": 1}, train_step=1)
    await (lease.ack() if how == "ack" else lease.nack())
    assert await closed_ledger(buffer) == {"issued": 1, end: 1}


async def test_a_rejected_group_is_discarded_with_its_reason() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math")
    lease = await buffer.lease_batch({"math": 1}, train_step=1)
    await lease.reject(lease.groups, "no gradient")
    assert await closed_ledger(buffer) == {"issued": 1, "discarded": 1}
    assert await buffer.reasons() == {"math": {"no gradient": 1}}


@pytest.mark.parametrize(
    ("status", "place"),
    [
        (Status.COMPLETED, "trained"),
        (Status.INIT, "in_flight"),
        (Status.ABORTED, "in_flight"),
        (Status.EXPIRED, "in_flight"),
        (Status.FAILED, "failed"),
        (Status.FILTERED, "filtered"),
    ],
)
@pytest.mark.parametrize("verb", ["get", "take_batch"])
async def test_taking_for_good_moves_by_status(verb: str, status: Status, place: str) -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(status=status), "math")
    if verb == "get":
        groups = await buffer.get(1, "math", status)
    else:
        by_task, counts = await buffer.take_batch({"math": 1}, group_status=status)
        groups = by_task["math"]
        assert counts == {"math": 1}
    assert [state.status for state in groups[0]] == [status] * 2
    assert await closed_ledger(buffer) == {"issued": 1, place: 1}


async def test_a_group_that_a_user_keeps_is_seen_in_explain_wait() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(status=Status.ABORTED), "math")
    (group,) = await buffer.get(1, "math", Status.ABORTED)
    assert "in flight: 1 groups" in await buffer.explain_wait()
    await buffer.put(with_status(group, Status.COMPLETED), "math")
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}


async def test_discarding_by_query_counts_its_reason() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(tokens=9), "math", tags={"source": "old"})
    await buffer.put(make_group(), "math")
    assert await buffer.discard({"tags.source": "old"}, "bad data") == 1
    assert await closed_ledger(buffer) == {"issued": 2, "buffered": 1, "discarded": 1}
    assert await buffer.reasons() == {"math": {"bad data": 1}}


async def test_trained_groups_stay_readable_as_archived() -> None:
    buffer = ReplayBuffer(keep_trained=1)
    for score in (0.0, 1.0):
        await buffer.put(make_group(score=score), "math")
        async with buffer.lease_batch({"math": 1}, train_step=1):
            pass
    (record,) = await buffer.query({"status": "archived"})
    group = await buffer.read(record.uid)
    assert group is not None
    assert [(state.status, state.reward) for state in group] == [(Status.ARCHIVED, {"score": 1.0})] * 2
    assert len(buffer) == 0
    assert await closed_ledger(buffer) == {"issued": 2, "trained": 2}
