"""Queries, discards, the archive, listeners, and the stream from one storage to another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from forebay.core.capacity import Settings
from forebay.core.ledger import Clock, Event, Row
from forebay.core.policy import StalenessReplayPolicy
from forebay.core.query import parse
from forebay.core.rollout import Status
from forebay.core.staleness import Limits
from forebay.errors import DuplicateGroup, InvalidConfig, InvalidInput
from forebay.storage.base import Revision
from forebay.testing.conformance.suite import EXPIRED, ME, OTHER, Store, Suite, arrival, content, raises, uids
from forebay.testing.samples import make_group

__all__ = ["Looking"]


class Looking(Suite):
    """Queries, discards, the archive, listeners, and the stream from one storage to another."""

    def test_queries_see_every_place_and_never_move(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_discarding_ends_what_is_buffered_and_matches(self) -> None:
        async def test(store: Store) -> None:
            await store.put(*(make_group(tokens=tokens) for tokens in (1, 5, 9)))
            await store.put(make_group(tokens=9), task_name="code")
            await store.lease(1)
            assert await store.storage.discard(parse({"tokens": {"$gte": 2}}), "long") == {"math": 2, "code": 1}
            assert await store.line() == {"issued": 3, "leased": 1, "discarded": 2}
            assert (await store.account("code")).reasons == {"long": 1}

        self.run(test)

    def test_the_last_trained_groups_stay_readable(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test, keep_trained=2)

    def test_listeners_hear_of_what_a_waiter_could_wait_for(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_all_owners_need_the_same_settings(self) -> None:
        async def test(store: Store) -> None:
            with raises(InvalidConfig):
                await store.storage.open(OTHER, Settings(max_groups=5), None)
            await store.storage.open(OTHER, Settings(), None)
            await store.storage.close(OTHER)
            await store.storage.close(OTHER)

        self.run(test)

    def test_a_snapshot_is_of_one_moment_and_restores_into_another_storage(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_a_stream_that_contradicts_itself_restores_nothing(self) -> None:
        async def test(store: Store) -> None:
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
                    await other.restore(
                        snapshot.accounts, snapshot.next_uid, snapshot.next_timestamp_id, _stream(stream)
                    )
                assert await other.records(parse({}), None) == []
                assert (await other.summary()).ledger() == {}
                await other.close(ME)

        self.run(test)


async def _stream(rows: Sequence[Row]) -> AsyncIterator[Row]:
    for row in rows:
        yield row
