"""Queries, discards, the archive, listeners, streams to another storage, noted ends, and payloads."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.internal import internals
from forebay.core.capacity import Settings
from forebay.core.ledger import Clock, End, Event, GroupEnd, Row
from forebay.core.policy import StalenessReplayPolicy
from forebay.core.query import parse
from forebay.core.rollout import RolloutState, Status
from forebay.core.staleness import Limits
from forebay.errors import DuplicateGroup, InvalidConfig, InvalidInput, UnsupportedPayload
from forebay.prompts.sampler import Sampler
from forebay.storage.values import Revision
from forebay.testing.conformance.suite import (
    COMPLETED,
    EXPIRED,
    ME,
    OTHER,
    Store,
    Suite,
    arrival,
    claim_of,
    content,
    raises,
    storage_test,
    uids,
)
from forebay.testing.samples import make_group


async def noted(store: Store, owner: str = ME, limit: int = 100) -> list[GroupEnd]:
    return [end for _, end in await store.storage.ends(owner, limit)]


async def _stream(rows: Sequence[Row]) -> AsyncIterator[Row]:
    for row in rows:
        yield row


class Looking(Suite):
    """Queries, discards, the archive, listeners, streams to another storage, noted ends, and payloads."""

    @storage_test()
    async def test_queries_see_every_place_and_never_move(self, store: Store) -> None:
        await store.put(make_group(score=1.0), tags={"level": "hard"})
        await store.put(make_group(score=0.0), tags={"level": 3})
        await store.put(make_group(), task_name="code")
        await store.lease(1)
        await store.issue()
        expected: list[tuple[Mapping[str, Any], int]] = [
            ({}, 4),
            ({"task_name": "math"}, 3),
            ({"place": "leased"}, 1),
            ({"place": {"$in": ["in_flight", "leased"]}}, 2),
            ({"status": "init"}, 1),
            ({"task_name": "math", "status": "completed", "place": "buffered"}, 1),
            ({"tags.level": "hard"}, 1),
            ({"tags.level": {"$gt": 2}}, 1),
            ({"tags.level": None}, 2),
            ({"tags.level": {"$ne": "hard"}}, 0),
            ({"reward": {"$between": [0.5, 1.0]}}, 1),
            ({"reward": None}, 2),
            ({"$not": {"reward": {"$gte": 0.5}}}, 3),
            ({"$or": [{"task_name": "code"}, {"group_id": 0}]}, 2),
            ({"tokens": {"$gt": 5}, "samples": 2}, 3),
            ({"deliveries": {"$gte": 1}}, 1),
        ]
        for query, n in expected:
            records = await store.storage.records(parse(query), None)
            assert len(records) == n, query
            assert [record.uid for record in records] == sorted(record.uid for record in records)
            assert await store.storage.records(parse(query), 1) == records[:1]
        record = await store.only(task_name="code")
        assert await store.records(uid=record.uid, task_name="code", group_id=record.group_id) == [record]
        row = await store.storage.read(record.uid)
        assert row is not None
        assert row.record == record
        assert len(row.group) == 2
        assert await store.storage.read(10_000) is None

    @storage_test()
    async def test_discarding_ends_buffered_groups_that_match(self, store: Store) -> None:
        await store.put(*(make_group(tokens=tokens) for tokens in (1, 5, 9)))
        await store.put(make_group(tokens=9), task_name="code")
        await store.lease(1)
        assert await store.storage.discard(parse({"tokens": {"$gte": 2}}), "long") == {"math": 2, "code": 1}
        assert await store.line() == {"issued": 3, "leased": 1, "discarded": 2}
        assert (await store.account("code")).reasons == {"long": 1}

    @storage_test(keep_trained=2)
    async def test_the_last_trained_groups_stay_readable(self, store: Store) -> None:
        records = await store.put(*(make_group() for _ in range(4)))
        await store.claim(1)
        rows = await store.lease(3)
        await store.storage.settle("lease", uids(rows), Event.ACKED)
        archived = await store.records(place="archived")
        assert [record.uid for record in archived] == [record.uid for record in records[2:]]
        assert {record.status for record in archived} == {Status.ARCHIVED}
        assert len(store.storage) == 0
        assert (await store.usage()).groups == 0
        assert await store.count(Status.ARCHIVED) == 0
        assert await store.line() == {"issued": 4, "trained": 4}
        with raises(DuplicateGroup):
            await store.put(make_group(group_id=archived[0].group_id))

    @storage_test()
    async def test_listeners_are_told_of_every_change_that_a_waiter_could_wait_for(self, store: Store) -> None:
        heard: list[str] = []

        def listen(tasks: Collection[str]) -> None:
            heard.extend(tasks)

        async def after(change: Awaitable[object]) -> set[str]:
            heard.clear()
            await change
            for _ in range(200):
                if heard:
                    break
                await asyncio.sleep(0.01)
            return set(heard)

        stop = store.storage.subscribe(listen)
        storage = store.storage
        assert "math" in await after(store.put(*(make_group() for _ in range(7))))
        assert "math" in await after(store.claim(1))
        first, second, third, *_ = uids(await store.lease(4))
        assert "math" in await after(storage.settle("lease", [first], Event.NACKED))
        assert "math" in await after(storage.settle("lease", [second], Event.ACKED))
        assert "math" in await after(storage.settle("lease", [third], Event.REJECTED, "no use"))
        assert "math" in await after(storage.release(ME))
        record = (await store.records(place="buffered"))[0]
        revision = Revision(record.uid, record.revision, content(make_group(status=EXPIRED)))
        assert "math" in await after(storage.revise([revision]))
        assert "math" in await after(storage.advance({"math": Clock(train_step=9)}))
        assert "math" in await after(storage.discard(parse({}), "no reason"))
        stop()
        heard.clear()
        await store.put(make_group())
        assert not heard

    @storage_test()
    async def test_all_owners_need_the_same_settings(self, store: Store) -> None:
        with raises(InvalidConfig):
            await store.storage.open(OTHER, Settings(max_groups=5), None)
        await store.storage.open(OTHER, Settings(), None)
        await store.storage.close(OTHER)
        await store.storage.close(OTHER)

    @storage_test()
    async def test_a_snapshot_is_of_one_moment_and_restores_into_another_storage(self, store: Store) -> None:
        await store.put(*(make_group(model_step=step) for step in (3, 1)), tags={"a": 1}, priority=0.5)
        await store.put(make_group(group_id=7), task_name="code")
        await store.issue(2)
        await store.lease(1)
        await store.storage.advance({"math": Clock(train_step=3, limits=Limits(4))})
        snapshot = await store.storage.snapshot()
        before = {record.uid: record for record in await store.records()}
        ledger = (await store.storage.summary()).ledger()
        await store.claim(1)
        await store.put(make_group(group_id=0))
        await store.put(make_group(), task_name="late")

        other = self.make_storage()
        await other.open(ME, Settings(order=StalenessReplayPolicy().order), None)
        try:
            await other.restore(snapshot.accounts, snapshot.next_uid, snapshot.next_timestamp_id, snapshot.rows)
            assert {record.uid: record for record in await other.records(parse({}), None)} == before
            assert (await other.summary()).ledger() == ledger
            account = (await other.summary()).task("math").account
            assert (account.train_step, account.limits, account.cursor) == (5, Limits(4), 2)
            (new,) = await other.put([arrival(make_group())], owner=ME)
            assert new.uid not in before
            assert new.group_id not in {r.group_id for r in before.values()}
            with raises(InvalidInput):
                await other.restore({}, 1, 1, _stream([]))
        finally:
            await other.close(ME)

    @storage_test()
    async def test_a_stream_that_contradicts_itself_restores_nothing(self, store: Store) -> None:
        await store.put(make_group(), make_group())
        storage = store.storage
        rows = [row async for row in (await storage.snapshot()).rows]
        snapshot = await storage.snapshot()
        wrong: list[list[Row]] = [
            rows[:1],
            [*rows, rows[1]],
            rows[::-1],
            [rows[0], Row(replace(rows[1].record, group_id=rows[0].record.group_id), rows[1].group)],
            [rows[0], Row(replace(rows[1].record, task_name="unknown"), rows[1].group)],
        ]
        for stream in wrong:
            other = self.make_storage()
            await other.open(ME, Settings(), None)
            with raises(InvalidInput):
                await other.restore(snapshot.accounts, snapshot.next_uid, snapshot.next_timestamp_id, _stream(stream))
            assert await other.records(parse({}), None) == []
            assert (await other.summary()).ledger() == {}
            await other.close(ME)

    # --- noted ends -----------------------------------------------------------------------------------

    @storage_test()
    async def test_no_end_is_noted_before_note_ends(self, store: Store) -> None:
        await store.put(make_group())
        await store.claim(1)
        assert await noted(store) == []
        await store.storage.note_ends()
        await store.put(make_group(group_id=-50))
        await store.claim(1)
        assert [end.group_id for end in await noted(store)] == [-50]

    @storage_test()
    async def test_every_way_to_end_is_noted_once_with_its_reason_and_sessions(self, store: Store) -> None:
        await store.storage.note_ends()
        await store.issue(4)
        for group_id, status, more in (
            (0, Status.FILTERED, {"reason": "zero std"}),
            (1, Status.FAILED, {"reason": "engine died"}),
            (2, COMPLETED, {"stale": True, "reason": "stale"}),
            (3, COMPLETED, {}),
        ):
            group = make_group(group_id=group_id, status=status)
            group[1].session_id = f"session {group_id}"
            await store.put(group, attempt=1, **more)
        await store.put(make_group(group_id=-9), stale=True, reason="stale")
        (row,) = await store.lease(1)
        await store.storage.settle("lease", [row.record.uid], Event.ACKED)
        await store.put(make_group(group_id=-1), make_group(group_id=-2), make_group(group_id=-3))
        first, second = await store.lease(2, "other")
        await store.storage.settle("other", [first.record.uid], Event.REJECTED, "bad")
        await store.storage.settle("other", [second.record.uid], Event.NACKED)
        await store.storage.discard(parse({"group_id": -2}), "too long")
        await store.storage.fail({(await store.only(group_id=-3)).uid: "lost"})
        found = await noted(store)
        assert [(end.group_id, end.end, end.reason, end.delivery, end.train_step) for end in found] == [
            (0, End.FILTERED, "zero std", 0, None),
            (1, End.FAILED, "engine died", 0, None),
            (2, End.DISCARDED, "stale", 0, None),
            (-9, End.DISCARDED, "stale", 0, None),
            (3, End.TRAINED, None, 1, 5),
            (-1, End.DISCARDED, "bad", 1, 5),
            (-2, End.DISCARDED, "too long", 1, None),
            (-3, End.FAILED, "lost", 0, None),
        ]
        assert [end.session_ids for end in found[:5]] == [
            ("session 0",),
            ("session 1",),
            ("session 2",),
            (),
            ("session 3",),
        ]
        assert {end.task_name for end in found} == {"math"}

    @storage_test()
    async def test_ends_stay_noted_until_they_are_forgotten(self, store: Store) -> None:
        await store.storage.note_ends()
        await store.put(make_group(), make_group(), make_group())
        await store.claim(3)
        first, second = await store.storage.ends(ME, 2)
        assert await store.storage.ends(ME, 2) == [first, second]
        await store.storage.forget_ends([first[0], 10_000])
        left = await store.storage.ends(ME, 9)
        assert left[0] == second
        assert len(left) == 2
        await store.storage.forget_ends([number for number, _ in left])
        assert await store.storage.ends(ME, 9) == []

    @storage_test()
    async def test_one_owner_reports_an_end_and_another_only_after_the_first_died(self, store: Store) -> None:
        await store.storage.note_ends()
        await store.storage.open(OTHER, Settings(), self.lease_s)
        await store.put(make_group())
        await store.claim(1)
        assert len(await noted(store, OTHER)) == 1
        assert await noted(store) == []
        self.advance_clock(store.storage, 2 * self.lease_s)
        await store.storage.reap()
        assert len(await noted(store)) == 1
        await store.storage.close(OTHER)

    @storage_test()
    async def test_an_end_that_is_undone_is_not_reported(self, store: Store) -> None:
        await store.storage.note_ends()
        await store.put(make_group(), make_group())
        claim = claim_of(1)
        claimed = await store.claimed(claim)
        assert len(await noted(store)) == 1
        await store.storage.undo(claim, claimed)
        assert await noted(store) == []
        assert await store.line() == {"issued": 2, "buffered": 2}

    # --- payloads, through a buffer -------------------------------------------------------------------

    def test_g13_an_expired_group_comes_back_with_its_prompt_as_issued_also_after_a_reopen(self) -> None:
        sampler = Sampler([{"prompt": f"question {n}", "level": [n]} for n in range(3)], shuffle=False)

        def prompts(group: Sequence[RolloutState]) -> list[object]:
            return [(copy.deepcopy(s.message), copy.deepcopy(s.extra_fields), s.loop_state) for s in group]

        async def main() -> None:
            storage = self.make_storage()
            async with ReplayBuffer(storage=storage) as buffer:
                await buffer.set_limits("math", stale_threshold=3)
                groups = [await sampler.with_buffer(buffer).sample("math") for _ in range(3)]
                issued = {group[0].group_id: prompts(group) for group in groups}
                for group, model_step in zip(groups, (0, 0, 5), strict=True):
                    for state in group:
                        state.message[0]["content"] = "rewritten"
                        state.message.append({"role": "assistant", "content": "call"})
                        state.extra_fields["level"].append(9)
                        state.loop_state = {"turns": 1}
                        state.response_ids, state.status = [1, 2], COMPLETED
                    await buffer.put(group, "math", model_step=model_step, current_train_step=1)
                await buffer.refresh_staleness(task_stale_thresholds={"math": 3}, current_train_step=5)
                again = await internals(buffer).redraw(1, "math")
                assert [prompts(group) for group in again] == [issued[0]]
            async with ReplayBuffer(storage=storage) as buffer:
                await buffer.refresh_staleness(task_stale_thresholds={"math": 3}, current_train_step=9)
                again = await internals(buffer).redraw(9, "math")
                assert {group[0].group_id: prompts(group) for group in again} == issued

        asyncio.run(main())

    def test_a_payload_that_a_checkpoint_cannot_hold_is_refused_with_task_group_and_path(self) -> None:
        async def main() -> None:
            async with ReplayBuffer(storage=self.make_storage()) as buffer:
                for value in ({1}, object(), {1: "a key that is no string"}, 2**64, "\ud800"):
                    group = make_group(group_id=-7)
                    group[1].extra_fields = {"found": [1, value]}
                    with raises(UnsupportedPayload, "group -7", "task 'math'", "$[1].extra_fields"):
                        await buffer.put(group, "math")
                assert await buffer.ledger() == {}

        asyncio.run(main())
