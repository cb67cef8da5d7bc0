"""Groups go in and come out whole, in order, within the capacity. Prompts are issued and come back once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from forebay.core.capacity import Settings
from forebay.core.ledger import Clock, Place, Record
from forebay.core.policy import (
    CHOICE_ROWS,
    FreshestReplayPolicy,
    PriorityReplayPolicy,
    ReplayPolicy,
    StalenessReplayPolicy,
)
from forebay.core.query import parse
from forebay.core.rollout import Status
from forebay.core.staleness import Limits
from forebay.errors import BufferClosed, CursorMoved, DuplicateGroup, LostLease, NoRoom, PolicyError
from forebay.storage.base import Claim, Draw, Purpose
from forebay.storage.values import Revision
from forebay.testing.conformance.suite import (
    ABORTED,
    COMPLETED,
    EXPIRED,
    INIT,
    ME,
    OTHER,
    Store,
    Suite,
    arrival,
    content,
    raises,
    storage_test,
    uids,
)
from forebay.testing.samples import make_group


class Shortest(ReplayPolicy):
    @staticmethod
    def choose(rows: Sequence[Record], n: int) -> list[int]:
        # It may run in another process, so its choice tells which rows it was given.
        assert [row.uid for row in rows] == sorted(row.uid for row in rows)
        if len(rows) >= 10:
            return [row.uid for row in rows][-n:]
        return [row.uid for row in sorted(rows, key=lambda row: (row.tokens, row.uid))[:n]]


class Last(ReplayPolicy):
    @staticmethod
    def choose(rows: Sequence[Record], n: int) -> list[int]:
        return [row.uid for row in rows][-n:]


class Wrong(ReplayPolicy):
    @staticmethod
    def choose(rows: Sequence[Record], n: int) -> list[int]:
        return [rows[0].uid, rows[0].uid + 10_000]


class Storing(Suite):
    """Groups go in and come out whole, in order, within the capacity. Prompts are issued and come back once."""

    @storage_test()
    async def test_a_group_that_was_put_comes_out_whole(self, store: Store) -> None:
        (record,) = await store.put(make_group(3, score=0.5), tags={"level": "hard"}, priority=2.0)
        assert (record.status, record.place, record.samples, record.tokens) == (COMPLETED, Place.BUFFERED, 3, 9)
        assert (record.reward, dict(record.tags), record.priority) == (0.5, {"level": "hard"}, 2.0)
        assert len(store.storage) == await store.count() == 1
        (row,) = await store.claim(5)
        assert [state.response_ids for state in row.group] == [[0, 1, 2]] * 3
        assert await store.claim(5) == []
        assert await store.line() == {"issued": 1, "trained": 1}
        assert await store.line(tokens=True) == {"issued": 9, "trained": 9}

    @storage_test()
    async def test_ids_that_are_missing_are_assigned(self, store: Store) -> None:
        first, second = await store.put(make_group(), make_group())
        assert first.group_id < 0
        assert second.group_id < 0
        assert first.group_id != second.group_id
        assert first.uid < second.uid
        assert first.timestamp_id < second.timestamp_id
        for row in await store.claim(2):
            assert {state.group_id for state in row.group} == {row.record.group_id}
            assert {state.task_name for state in row.group} == {"math"}
            assert len({state.rollout_id for state in row.group}) == 2

    @storage_test()
    async def test_a_put_of_several_groups_is_all_or_none(self, store: Store) -> None:
        await store.put(make_group(group_id=7))
        before = await store.usage()
        with raises(DuplicateGroup):
            await store.put(make_group(group_id=8), make_group(group_id=7))
        with raises(DuplicateGroup):
            await store.put(make_group(group_id=9), make_group(group_id=9))
        assert await store.usage() == before
        assert await store.line() == {"issued": 1, "buffered": 1}

    @storage_test()
    async def test_tasks_are_separate(self, store: Store) -> None:
        await store.put(make_group(group_id=1))
        await store.put(make_group(group_id=1), task_name="code")
        assert len(await store.claim(5, task_name="code")) == 1
        assert await store.count() == 1
        assert await store.count(task_name="unknown") == 0
        assert await store.claim(5, task_name="unknown") == []

    @storage_test()
    async def test_a_take_over_several_tasks_is_one_step(self, store: Store) -> None:
        await store.put(make_group(), make_group())
        await store.put(make_group(), task_name="code")
        claim = Claim(wants={"math": 2, "code": 2}, statuses=(COMPLETED,), purpose=Purpose.TAKE, owner=ME)
        assert (await store.storage.claim(replace(claim, whole=True))).rows is None
        assert (await store.count(), await store.count(task_name="code")) == (2, 1)
        claimed = (await store.storage.claim(claim)).rows
        assert claimed is not None
        assert {task_name: len(rows) for task_name, rows in claimed.items()} == {"math": 2, "code": 1}

    @storage_test()
    async def test_taking_moves_by_status(self, store: Store) -> None:
        ends = {
            Status.COMPLETED: "trained",
            Status.FAILED: "failed",
            Status.FILTERED: "filtered",
            Status.INIT: "in_flight",
            Status.ABORTED: "in_flight",
            Status.EXPIRED: "in_flight",
        }
        for status, end in ends.items():
            await store.put(make_group(status=status), task_name=status)
            (row,) = await store.claim(1, status, task_name=status)
            assert await store.line(status) == {"issued": 1, end: 1}, status
            assert row.record.attempt == (1 if end == "in_flight" else 0)

    @storage_test()
    async def test_first_in_first_out(self, store: Store) -> None:
        records = [record for step in (5, 1, 3) for record in await store.put(make_group(model_step=step))]
        assert uids(await store.claim(2)) == [record.uid for record in records[:2]]

    @storage_test(StalenessReplayPolicy())
    async def test_oldest_first_then_unversioned_by_given_staleness_then_arrival(self, store: Store) -> None:
        groups = [make_group(tokens=0), make_group(model_step=5), make_group(model_step=1), make_group(tokens=0)]
        groups[3][0].seq_staleness = 2
        groups.append(make_group(model_step=1))
        records = await store.put(*groups)
        expected = [records[i].uid for i in (2, 4, 1, 3, 0)]
        assert uids(await store.claim(5)) == expected

    @storage_test(FreshestReplayPolicy())
    async def test_newest_first(self, store: Store) -> None:
        records = await store.put(*(make_group(model_step=step) for step in (2, 7, 5)), make_group(tokens=0))
        assert uids(await store.claim(4)) == [records[i].uid for i in (1, 2, 0, 3)]

    @storage_test(PriorityReplayPolicy())
    async def test_highest_priority_first_also_when_it_changes(self, store: Store) -> None:
        low, high, same = [(await store.put(make_group(), priority=priority))[0] for priority in (-1.5, 3.0, 3.0)]
        assert await store.storage.set_priority({low.uid: 9.0, 10_000: 1.0}) == 1
        assert uids(await store.claim(3)) == [low.uid, high.uid, same.uid]

    @storage_test(Shortest())
    async def test_a_custom_policy_chooses_from_arrivals(self, store: Store) -> None:
        records = await store.put(*(make_group(tokens=tokens) for tokens in (9, 2, 5)))
        assert uids(await store.claim(2)) == [records[1].uid, records[2].uid]
        offered = [records[0]]
        for _ in range(3):
            offered += await store.put(*(make_group(1, tokens=1) for _ in range(CHOICE_ROWS // 2)))
        assert uids(await store.claim(1)) == [offered[CHOICE_ROWS - 1].uid]

    @storage_test(Last())
    async def test_a_custom_policy_is_not_shown_groups_that_are_too_old(self, store: Store) -> None:
        fresh, _ = await store.put(make_group(model_step=5), make_group(model_step=1))
        await store.storage.advance({"math": Clock(train_step=6, limits=Limits(stale_threshold=2))})
        assert uids(await store.claim(2)) == [fresh.uid]

    @storage_test()
    async def test_assigned_ids_and_ids_of_the_caller_never_collide(self, store: Store) -> None:
        records = await store.put(make_group(), make_group(group_id=-1), make_group(group_id=-2), make_group())
        assert len({record.group_id for record in records}) == 4
        assert len(await store.claim(9)) == 4
        assert await store.line() == {"issued": 4, "trained": 4}

    @storage_test()
    async def test_a_cancelled_claim_leaves_nothing_claimed(self, store: Store) -> None:
        kinds = ((COMPLETED, Purpose.TAKE), (COMPLETED, Purpose.LEASE), (ABORTED, Purpose.DRAW))
        for turns in range(10):
            for status, purpose in kinds:
                await store.put(make_group(status=status))
                claiming = asyncio.ensure_future(
                    store.claim(1, status, purpose=purpose, lease_id="lease", train_step=1)
                )
                for _ in range(turns):
                    await asyncio.sleep(0)
                claiming.cancel()
                try:
                    await claiming
                except asyncio.CancelledError:
                    (record,) = await store.records()
                    assert (record.place, record.status) == (Place.BUFFERED, status), f"{purpose}, {turns} turns"
                    row = await store.storage.read(record.uid)
                    assert row is not None
                    assert len(row.group) == 2
                await store.line()
                await store.storage.release(ME)
                await store.storage.discard(parse({}), "to begin again")

    @storage_test()
    async def test_a_put_that_happened_wakes_waiters_even_if_it_was_cancelled(self, store: Store) -> None:
        told: list[str] = []
        store.storage.subscribe(told.extend)
        for turns in range(30):
            before = await store.count()
            told.clear()
            putting = asyncio.create_task(store.put(make_group()))
            for _ in range(turns):
                await asyncio.sleep(0)
            putting.cancel()
            with suppress(asyncio.CancelledError):
                await putting
            if await store.count() > before:
                assert "math" in told, f"{turns} turns"

    @storage_test(Wrong())
    async def test_a_wrong_choice_moves_nothing(self, store: Store) -> None:
        await store.put(make_group(), make_group())
        with raises(PolicyError):
            await store.claim(2)
        assert await store.count() == 2

    @storage_test(max_groups=3)
    async def test_capacity_is_reserved_at_issue_and_returns_never_wait(self, store: Store) -> None:
        await store.issue(2)
        await store.put(make_group())
        with raises(NoRoom):
            await store.put(make_group())
        assert await store.issue(1, cursor=2) == []
        assert (await store.account()).cursor == 2
        await store.put(make_group(group_id=0), make_group(group_id=1))
        assert (await store.usage()).groups == 3
        await store.lease(1)
        with raises(NoRoom):
            await store.put(make_group())
        await store.claim(1)
        await store.put(make_group())

    @storage_test(max_bytes=10_000)
    async def test_bytes_count_too(self, store: Store) -> None:
        (record,) = await store.put(make_group())
        assert (await store.usage()).bytes == record.bytes > 0
        with raises(NoRoom):
            await store.put(make_group(64, tokens=100))
        assert await store.line() == {"issued": 1, "buffered": 1}

    @storage_test(max_bytes=10_000, expect_group_bytes=4_000)
    async def test_space_is_reserved_at_issue_and_kept_until_the_true_size_is_known(self, store: Store) -> None:
        issued = await store.issue(2)
        assert {record.reserved_bytes - record.bytes for record in issued} == {4_000}
        usage = await store.usage()
        assert (usage.bytes, usage.reserved) == (sum(record.bytes for record in issued), 8_000)
        assert await store.issue(1, cursor=2) == []
        await store.storage.release(ME)
        assert await store.usage() == usage
        rows = await store.claim(2, ABORTED, purpose=Purpose.DRAW)
        assert {row.record.reserved_bytes for row in rows} == {record.reserved_bytes for record in issued}
        assert await store.usage() == usage
        (back,) = await store.put(make_group(group_id=0), attempt=2)
        assert back.reserved_bytes == back.bytes
        assert (await store.usage()).reserved == 4_000
        (next_one,) = await store.issue(1, cursor=2)
        assert next_one.bytes < next_one.reserved_bytes < next_one.bytes + 4_000
        await store.put(make_group(group_id=1, status=Status.FILTERED), attempt=2, reason="dull")
        assert sum((await store.account()).sizes.values()) == 2
        assert (await store.usage()).reserved == next_one.reserved_bytes - next_one.bytes

    @storage_test(max_bytes=10_000, expect_group_bytes=4_000)
    async def test_one_group_starts_in_the_free_space_when_nothing_is_in_flight(self, store: Store) -> None:
        await store.issue(1)
        (long,) = await store.put(make_group(4, tokens=100, group_id=0))
        (alone,) = await store.issue(1, cursor=1)
        assert alone.bytes < alone.reserved_bytes == 10_000 - long.bytes
        assert await store.issue(1, cursor=2) == []
        await store.put(make_group(4, tokens=100, group_id=1))
        assert (await store.usage()).bytes > 10_000 - alone.bytes
        assert await store.issue(1, cursor=2) == []

    @storage_test(max_bytes=10_000)
    async def test_a_group_that_expires_keeps_its_space_to_be_generated_again(self, store: Store) -> None:
        (record,) = await store.put(make_group(model_step=0))
        await store.storage.advance({"math": Clock(train_step=9, limits=Limits(1))})
        (row,) = await store.storage.due("math", (COMPLETED,), 5)
        expired = content(make_group(group_id=record.group_id, status=Status.EXPIRED))
        await store.storage.revise([Revision(row.record.uid, row.record.revision, expired)])
        usage = await store.usage()
        assert (usage.bytes, usage.bytes + usage.reserved) == (expired.facts.bytes, record.bytes)

    # --- prompts --------------------------------------------------------------------------------------

    @storage_test()
    async def test_issuing_writes_the_row_and_moves_the_cursor(self, store: Store) -> None:
        records = await store.storage.issue("math", [content(make_group(status=INIT))], Draw(ME, 0, b"state"))
        account = await store.account()
        assert (account.cursor, account.issued, account.source_state) == (1, 1, b"state")
        assert [(record.group_id, record.place, record.attempt) for record in records] == [(0, Place.IN_FLIGHT, 1)]
        assert records[0].owner == ME
        assert await store.line() == {"issued": 1, "in_flight": 1}
        assert len(store.storage) == 0
        with raises(CursorMoved):
            await store.issue(cursor=0)
        assert (await store.account()).cursor == 1
        assert [record.group_id for record in await store.issue(2, cursor=1)] == [1, 2]

    @storage_test(max_groups=3)
    async def test_prompts_are_issued_as_far_as_they_fit(self, store: Store) -> None:
        assert [record.group_id for record in await store.issue(5)] == [0, 1, 2]
        assert (await store.account()).cursor == 3
        assert await store.issue(2, cursor=3) == []
        assert await store.line() == {"issued": 3, "in_flight": 3}

    @storage_test()
    async def test_a_group_put_by_hand_keeps_its_id_from_being_drawn(self, store: Store) -> None:
        await store.put(make_group(group_id=1))
        with raises(DuplicateGroup):
            await store.issue(2, cursor=0)
        assert (await store.account()).cursor == 0

    @storage_test()
    async def test_a_drawn_group_comes_back_under_its_attempt(self, store: Store) -> None:
        (issued,) = await store.issue()
        (back,) = await store.put(make_group(group_id=0, model_step=3), attempt=1)
        assert (back.uid, back.place, back.status, back.owner) == (issued.uid, Place.BUFFERED, COMPLETED, None)
        assert back.timestamp_id > issued.timestamp_id
        assert back.oldest_step == 3
        assert await store.line() == {"issued": 1, "buffered": 1}

    @storage_test()
    async def test_the_owner_may_bring_a_group_back_without_naming_the_attempt(self, store: Store) -> None:
        await store.issue()
        with raises(LostLease):
            await store.storage.put([arrival(make_group(group_id=0))], owner=OTHER)
        await store.put(make_group(group_id=0))
        with raises(DuplicateGroup):
            await store.put(make_group(group_id=0))

    @storage_test()
    async def test_an_owner_that_was_closed_can_hold_nothing(self, store: Store) -> None:
        await store.put(make_group())
        await store.storage.open(OTHER, Settings(), None)
        await store.storage.close(OTHER)
        for refused in (store.claim(1, owner=OTHER), store.lease(1, owner=OTHER), store.issue(owner=OTHER)):
            with raises(BufferClosed):
                await refused
        assert await store.line() == {"issued": 1, "buffered": 1}

    @storage_test()
    async def test_an_old_attempt_is_fenced(self, store: Store) -> None:
        await store.issue()
        await store.storage.release(ME)
        with raises(LostLease):
            await store.put(make_group(group_id=0), attempt=1)
        await store.claim(1, ABORTED, purpose=Purpose.DRAW, owner=OTHER)
        with raises(LostLease):
            await store.put(make_group(group_id=0), attempt=1)
        await store.put(make_group(group_id=0), attempt=2)
        await store.claim(1)
        with raises(LostLease):
            await store.put(make_group(group_id=0), attempt=2)
        with raises(DuplicateGroup):
            await store.put(make_group(group_id=0))
        assert await store.line() == {"issued": 1, "trained": 1}

    @storage_test()
    async def test_a_returning_group_ends_if_filtered_failed_or_stale(self, store: Store) -> None:
        await store.issue(3)
        await store.put(make_group(group_id=0, status=Status.FILTERED), reason="zero std")
        await store.put(make_group(group_id=1, status=Status.FAILED), reason="engine died")
        await store.put(make_group(group_id=2), stale=True, reason="stale")
        assert await store.line() == {"issued": 3, "filtered": 1, "failed": 1, "discarded": 1}
        reasons = (await store.account()).reasons
        assert reasons == {"zero std": 1, "engine died": 1, "stale": 1}
        assert await store.records() == []

    @storage_test()
    async def test_a_group_put_by_hand_that_is_stale_is_issued_and_discarded(self, store: Store) -> None:
        await store.put(make_group(), stale=True, reason="stale")
        assert await store.line() == {"issued": 1, "discarded": 1}

    @storage_test()
    async def test_g01_tokens_that_are_too_old_on_arrival_are_counted_as_reset(self, store: Store) -> None:
        await store.issue(2)
        await store.put(make_group(group_id=0, status=EXPIRED, tokens=0), reset_tokens=6)
        await store.put(make_group(status=EXPIRED, tokens=0), reset_tokens=6)
        assert await store.line(tokens=True) == {"issued": 12, "reset": 12}
        await store.put(make_group(group_id=1, status=ABORTED), attempt=1)
        assert await store.line(tokens=True) == {"issued": 18, "buffered": 6, "reset": 12}

    @storage_test()
    async def test_g01_tokens_that_a_producer_drops_are_counted_as_reset(self, store: Store) -> None:
        await store.issue()
        await store.put(make_group(group_id=0, status=ABORTED))
        await store.claim(1, ABORTED, purpose=Purpose.DRAW)
        assert await store.line(tokens=True) == {"issued": 6, "in_flight": 6}
        await store.put(make_group(group_id=0, tokens=1), attempt=2)
        assert await store.line(tokens=True) == {"issued": 6, "buffered": 2, "reset": 4}
        await store.claim(1)
        assert await store.line(tokens=True) == {"issued": 6, "trained": 2, "reset": 4}

    @storage_test(StalenessReplayPolicy())
    async def test_drawing_again_goes_by_status_then_group_id(self, store: Store) -> None:
        await store.issue(4)
        for group_id, status in ((3, EXPIRED), (1, ABORTED), (2, EXPIRED), (0, ABORTED)):
            await store.put(make_group(group_id=group_id, status=status))
        rows = await store.claim(3, INIT, EXPIRED, ABORTED, purpose=Purpose.DRAW)
        assert [row.record.group_id for row in rows] == [2, 3, 0]
        assert {(row.record.place, row.record.attempt, row.record.owner) for row in rows} == {(Place.IN_FLIGHT, 2, ME)}

    @storage_test()
    async def test_a_draw_of_named_groups_leaves_all_others(self, store: Store) -> None:
        await store.issue(5)
        for group_id, status in ((0, ABORTED), (1, EXPIRED), (2, COMPLETED), (3, ABORTED)):
            await store.put(make_group(group_id=group_id, status=status))
        named = (4, 3, 2, 1)  # 4 is in flight, and 2 is completed
        rows = await store.claim(9, INIT, EXPIRED, ABORTED, purpose=Purpose.DRAW, group_ids=named)
        assert [row.record.group_id for row in rows] == [1, 3]
        assert await store.claim(9, ABORTED, purpose=Purpose.DRAW, group_ids=named) == []
        (left,) = await store.claim(9, INIT, EXPIRED, ABORTED, purpose=Purpose.DRAW)
        assert left.record.group_id == 0

    @storage_test()
    async def test_tags_and_priority_stay_unless_given_again(self, store: Store) -> None:
        await store.put(make_group(group_id=-5, status=ABORTED), tags={"a": 1}, priority=2.0)
        await store.claim(1, ABORTED)
        (kept,) = await store.put(make_group(group_id=-5, status=ABORTED))
        assert (dict(kept.tags), kept.priority) == ({"a": 1}, 2.0)
        await store.claim(1, ABORTED)
        (changed,) = await store.put(make_group(group_id=-5), tags={}, priority=0.0)
        assert (dict(changed.tags), changed.priority) == ({}, 0.0)
