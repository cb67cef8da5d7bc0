"""Groups go in and come out whole, in order, within the capacity."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

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
from forebay.errors import DuplicateGroup, NoRoom, PolicyError
from forebay.storage.base import Claim, Purpose, Revision
from forebay.testing.conformance.suite import ABORTED, COMPLETED, ME, Store, Suite, content, raises, uids
from forebay.testing.samples import make_group

__all__ = ["Storing"]


class Storing(Suite):
    """Groups go in and come out whole, in order, within the capacity."""

    def test_a_group_that_was_put_comes_out_whole(self) -> None:
        async def test(store: Store) -> None:
            (record,) = await store.put(make_group(3, score=0.5), tags={"level": "hard"}, priority=2.0)
            assert (record.status, record.place, record.samples, record.tokens) == (COMPLETED, Place.BUFFERED, 3, 9)
            assert (record.reward, dict(record.tags), record.priority) == (0.5, {"level": "hard"}, 2.0)
            assert len(store.storage) == await store.count() == 1
            (row,) = await store.claim(5)
            assert [state.response_ids for state in row.group] == [[0, 1, 2]] * 3
            assert await store.claim(5) == []
            assert await store.line() == {"issued": 1, "trained": 1}
            assert await store.line(tokens=True) == {"issued": 9, "trained": 9}

        self.run(test)

    def test_ids_that_are_missing_are_given(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_a_put_of_several_groups_is_all_or_none(self) -> None:
        async def test(store: Store) -> None:
            await store.put(make_group(group_id=7))
            before = await store.usage()
            with raises(DuplicateGroup):
                await store.put(make_group(group_id=8), make_group(group_id=7))
            with raises(DuplicateGroup):
                await store.put(make_group(group_id=9), make_group(group_id=9))
            assert await store.usage() == before
            assert await store.line() == {"issued": 1, "buffered": 1}

        self.run(test)

    def test_tasks_are_apart(self) -> None:
        async def test(store: Store) -> None:
            await store.put(make_group(group_id=1))
            await store.put(make_group(group_id=1), task_name="code")
            assert len(await store.claim(5, task_name="code")) == 1
            assert await store.count() == 1
            assert await store.count(task_name="never heard of") == 0
            assert await store.claim(5, task_name="never heard of") == []

        self.run(test)

    def test_a_take_over_several_tasks_is_one_step(self) -> None:
        async def test(store: Store) -> None:
            await store.put(make_group(), make_group())
            await store.put(make_group(), task_name="code")
            claim = Claim(wants={"math": 2, "code": 2}, statuses=(COMPLETED,), purpose=Purpose.TAKE, owner=ME)
            assert (await store.storage.claim(replace(claim, whole=True))).rows is None
            assert (await store.count(), await store.count(task_name="code")) == (2, 1)
            claimed = (await store.storage.claim(claim)).rows
            assert claimed is not None
            assert {task_name: len(rows) for task_name, rows in claimed.items()} == {"math": 2, "code": 1}

        self.run(test)

    def test_taking_moves_by_status(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_first_in_first_out(self) -> None:
        async def test(store: Store) -> None:
            records = [record for step in (5, 1, 3) for record in await store.put(make_group(model_step=step))]
            assert uids(await store.claim(2)) == [record.uid for record in records[:2]]

        self.run(test)

    def test_oldest_first_then_unversioned_by_given_staleness_then_arrival(self) -> None:
        async def test(store: Store) -> None:
            groups = [make_group(tokens=0), make_group(model_step=5), make_group(model_step=1), make_group(tokens=0)]
            groups[3][0].seq_staleness = 2
            groups.append(make_group(model_step=1))
            records = await store.put(*groups)
            expected = [records[i].uid for i in (2, 4, 1, 3, 0)]
            assert uids(await store.claim(5)) == expected

        self.run(test, StalenessReplayPolicy())

    def test_newest_first(self) -> None:
        async def test(store: Store) -> None:
            records = await store.put(*(make_group(model_step=step) for step in (2, 7, 5)), make_group(tokens=0))
            assert uids(await store.claim(4)) == [records[i].uid for i in (1, 2, 0, 3)]

        self.run(test, FreshestReplayPolicy())

    def test_highest_priority_first_also_when_it_changes(self) -> None:
        async def test(store: Store) -> None:
            low, high, same = [(await store.put(make_group(), priority=priority))[0] for priority in (-1.5, 3.0, 3.0)]
            assert await store.storage.set_priority({low.uid: 9.0, 10_000: 1.0}) == 1
            assert uids(await store.claim(3)) == [low.uid, high.uid, same.uid]

        self.run(test, PriorityReplayPolicy())

    def test_a_policy_of_the_users_own_chooses_from_arrivals(self) -> None:
        class Shortest(ReplayPolicy):
            @staticmethod
            def choose(rows: Sequence[Record], n: int) -> list[int]:
                # It may run in another process: what it saw is told by what it chooses.
                assert [row.uid for row in rows] == sorted(row.uid for row in rows)
                if len(rows) >= 10:
                    return [row.uid for row in rows][-n:]
                return [row.uid for row in sorted(rows, key=lambda row: (row.tokens, row.uid))[:n]]

        async def test(store: Store) -> None:
            records = await store.put(*(make_group(tokens=tokens) for tokens in (9, 2, 5)))
            assert uids(await store.claim(2)) == [records[1].uid, records[2].uid]
            offered = [records[0]]
            for _ in range(3):
                offered += await store.put(*(make_group(1, tokens=1) for _ in range(CHOICE_ROWS // 2)))
            assert uids(await store.claim(1)) == [offered[CHOICE_ROWS - 1].uid]

        self.run(test, Shortest())

    def test_a_policy_of_the_users_own_is_not_shown_what_is_too_old(self) -> None:
        class Last(ReplayPolicy):
            @staticmethod
            def choose(rows: Sequence[Record], n: int) -> list[int]:
                return [row.uid for row in rows][-n:]

        async def test(store: Store) -> None:
            fresh, _ = await store.put(make_group(model_step=5), make_group(model_step=1))
            await store.storage.advance({"math": Clock(train_step=6, limits=Limits(stale_threshold=2))})
            assert uids(await store.claim(2)) == [fresh.uid]

        self.run(test, Last())

    def test_given_ids_and_ids_of_ones_own_never_meet(self) -> None:
        async def test(store: Store) -> None:
            records = await store.put(make_group(), make_group(group_id=-1), make_group(group_id=-2), make_group())
            assert len({record.group_id for record in records}) == 4
            assert len(await store.claim(9)) == 4
            assert await store.line() == {"issued": 4, "trained": 4}

        self.run(test)

    def test_a_cancelled_claim_leaves_nothing_claimed(self) -> None:
        kinds = ((COMPLETED, Purpose.TAKE), (COMPLETED, Purpose.LEASE), (ABORTED, Purpose.DRAW))

        async def test(store: Store) -> None:
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
                    await store.storage.discard(parse({}), "to begin anew")

        self.run(test)

    def test_a_put_that_happened_wakes_those_who_wait_even_if_it_was_cancelled(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_a_wrong_choice_moves_nothing(self) -> None:
        class Wrong(ReplayPolicy):
            @staticmethod
            def choose(rows: Sequence[Record], n: int) -> list[int]:
                return [rows[0].uid, rows[0].uid + 10_000]

        async def test(store: Store) -> None:
            await store.put(make_group(), make_group())
            with raises(PolicyError):
                await store.claim(2)
            assert await store.count() == 2

        self.run(test, Wrong())

    def test_capacity_is_reserved_at_issue_and_returns_never_wait(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test, max_groups=3)

    def test_bytes_count_too(self) -> None:
        async def test(store: Store) -> None:
            (record,) = await store.put(make_group())
            assert (await store.usage()).bytes == record.bytes > 0
            with raises(NoRoom):
                await store.put(make_group(64, tokens=100))
            assert await store.line() == {"issued": 1, "buffered": 1}

        self.run(test, max_bytes=10_000)

    def test_room_is_reserved_at_issue_and_kept_until_the_true_size_is_known(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test, max_bytes=10_000, expect_group_bytes=4_000)

    def test_one_group_starts_in_the_free_space_when_nothing_is_in_flight(self) -> None:
        async def test(store: Store) -> None:
            await store.issue(1)
            (long,) = await store.put(make_group(4, tokens=100, group_id=0))
            (alone,) = await store.issue(1, cursor=1)
            assert alone.bytes < alone.reserved_bytes == 10_000 - long.bytes
            assert await store.issue(1, cursor=2) == []
            await store.put(make_group(4, tokens=100, group_id=1))
            assert (await store.usage()).bytes > 10_000 - alone.bytes
            assert await store.issue(1, cursor=2) == []

        self.run(test, max_bytes=10_000, expect_group_bytes=4_000)

    def test_a_group_that_expires_keeps_its_room_to_be_generated_again(self) -> None:
        async def test(store: Store) -> None:
            (record,) = await store.put(make_group(model_step=0))
            await store.storage.advance({"math": Clock(train_step=9, limits=Limits(1))})
            (row,) = await store.storage.due("math", (COMPLETED,), 5)
            expired = content(make_group(group_id=record.group_id, status=Status.EXPIRED))
            await store.storage.revise([Revision(row.record.uid, row.record.revision, expired)])
            usage = await store.usage()
            assert (usage.bytes, usage.bytes + usage.reserved) == (expired.facts.bytes, record.bytes)

        self.run(test, max_bytes=10_000)
