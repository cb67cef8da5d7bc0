"""Claims that nobody learned of are undone; groups whose payload is gone end as failed, wherever they are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from forebay.core.ledger import Event, Place
from forebay.core.policy import StalenessReplayPolicy
from forebay.core.rollout import Status
from forebay.errors import LostLease
from forebay.storage.base import Claim, Purpose, Rows
from forebay.testing.conformance.suite import ABORTED, COMPLETED, EXPIRED, INIT, ME, OTHER, Store, Suite, raises, uids
from forebay.testing.samples import make_group

__all__ = ["Undoing"]


def wanting(n: int, *statuses: Status, purpose: Purpose = Purpose.TAKE, task_name: str = "math", **more: Any) -> Claim:
    lease = {"lease_id": "lease", "train_step": 5} if purpose is Purpose.LEASE else {}
    wants = {task_name: n}
    return Claim(wants=wants, statuses=statuses or (COMPLETED,), purpose=purpose, **{"owner": ME, **lease, **more})


async def claimed_by(store: Store, claim: Claim) -> Rows:
    rows = (await store.storage.claim(claim)).rows
    assert rows is not None
    return rows


async def without_moves(store: Store, uid: int) -> dict[str, Any]:
    """The record of a group but for when it moved, which a storage need not know any more."""
    record = await store.only(uid=uid)
    return {name: getattr(record, name) for name in record.__struct_fields__ if name != "moved_at"}


class Undoing(Suite):
    """Claims that nobody learned of are undone; groups whose payload is gone end as failed, wherever they are."""

    def test_an_undone_lease_was_never_there(self) -> None:
        async def test(store: Store) -> None:
            records = await store.put(*(make_group() for _ in range(4)))
            before = [await without_moves(store, record.uid) for record in records]
            claim = wanting(2, purpose=Purpose.LEASE, whole=True)
            claimed = await claimed_by(store, claim)
            told: list[Collection[str]] = []
            end = store.storage.subscribe(told.append)
            await store.storage.undo(claim, claimed)
            end()
            assert any("math" in tasks for tasks in told), "waiters for groups continue"
            assert [await without_moves(store, record.uid) for record in records] == before
            assert await store.line() == {"issued": 4, "buffered": 4}
            with raises(LostLease):
                await store.storage.settle("lease", [records[0].uid], Event.ACKED)
            again = await store.lease(4, "another")
            assert uids(again) == [record.uid for record in records]
            assert [row.record.deliveries for row in again] == [1, 1, 1, 1]

        self.run(test)

    def test_an_undone_draw_gives_the_status_back_and_fences_the_attempt(self) -> None:
        async def test(store: Store) -> None:
            await store.issue(3)
            for group_id, status in enumerate((INIT, EXPIRED, ABORTED)):
                await store.put(make_group(group_id=group_id, status=status, model_step=1))
            order = [record.timestamp_id for record in await store.records()]
            claim = wanting(3, INIT, EXPIRED, ABORTED, purpose=Purpose.DRAW)
            await store.storage.undo(claim, await claimed_by(store, claim))
            records = await store.records()
            assert [(record.status, record.place, record.owner) for record in records] == [
                (status, Place.BUFFERED, None) for status in (INIT, EXPIRED, ABORTED)
            ]
            assert [record.timestamp_id for record in records] == order
            assert await store.line() == {"issued": 3, "buffered": 3}
            with raises(LostLease):
                await store.put(make_group(group_id=0), attempt=2)
            rows = await store.claim(3, INIT, EXPIRED, ABORTED, purpose=Purpose.DRAW)
            assert [row.record.attempt for row in rows] == [3, 3, 3], "an attempt is never given twice"

        self.run(test, StalenessReplayPolicy())

    def _check_take(self, keep_trained: int) -> None:
        async def test(store: Store) -> None:
            groups = [make_group(2, score=float(number), model_step=number) for number in range(4)]
            await store.put(*groups, tags={"level": "hard"}, priority=2.0)
            records = await store.records()
            payloads = [await store.storage.read(record.uid) for record in records]
            usage, tokens = await store.usage(), await store.line(tokens=True)
            claim = wanting(3)
            claimed = await claimed_by(store, claim)
            assert await store.line() == {"issued": 4, "buffered": 1, "trained": 3}
            await store.storage.undo(claim, claimed)
            await store.storage.undo(claim, claimed)
            assert await store.records() == records, "as if they had never left, in order of uid"
            assert await store.usage() == usage
            assert await store.line() == {"issued": 4, "buffered": 4}
            assert await store.line(tokens=True) == tokens
            assert len(store.storage) == 4
            for record, payload in zip(records, payloads, strict=True):
                row = await store.storage.read(record.uid)
                assert row is not None
                assert payload is not None
                assert [(s.reward, s.response_ids) for s in row.group] == [
                    (s.reward, s.response_ids) for s in payload.group
                ]
            snapshot = await store.storage.snapshot()
            assert [row.record.uid async for row in snapshot.rows] == [record.uid for record in records]
            assert uids(await store.claim(4)) == [record.uid for record in records]
            assert await store.line() == {"issued": 4, "trained": 4}

        self.run(test, keep_trained=keep_trained)

    def test_what_was_taken_for_good_is_booked_back(self) -> None:
        self._check_take(keep_trained=0)

    def test_what_was_taken_for_good_comes_back_from_the_archive_too(self) -> None:
        self._check_take(keep_trained=2)

    def test_every_end_of_a_take_is_undone(self) -> None:
        async def test(store: Store) -> None:
            statuses = (Status.FAILED, Status.FILTERED, ABORTED)
            records = await store.put(*(make_group(status=status) for status in statuses))
            claim = wanting(3, *statuses)
            claimed = await claimed_by(store, claim)
            assert await store.line() == {"issued": 3, "failed": 1, "filtered": 1, "in_flight": 1}
            await store.storage.undo(claim, claimed)
            assert await store.line() == {"issued": 3, "buffered": 3}
            assert not (await store.account()).reasons
            assert [(r.uid, r.status, r.place) for r in await store.records()] == [
                (record.uid, status, Place.BUFFERED) for record, status in zip(records, statuses, strict=True)
            ]

        self.run(test)

    def test_what_moved_on_is_not_undone(self) -> None:
        async def test(store: Store) -> None:
            acked, nacked, stolen, kept = await store.put(*(make_group() for _ in range(4)))
            claim = wanting(4, purpose=Purpose.LEASE)
            claimed = await claimed_by(store, claim)
            await store.storage.settle("lease", [acked.uid], Event.ACKED)
            await store.storage.settle("lease", [nacked.uid, stolen.uid], Event.NACKED)
            await store.storage.set_priority({stolen.uid: 1.0})
            (row,) = await store.claim(1, purpose=Purpose.LEASE, lease_id="other", train_step=6, owner=OTHER)
            await store.storage.undo(claim, claimed)
            places = {record.uid: (record.place, record.lease_id) for record in await store.records()}
            assert places == {
                nacked.uid: (Place.LEASED, "other"),
                stolen.uid: (Place.BUFFERED, None),
                kept.uid: (Place.BUFFERED, None),
            }
            assert [record.deliveries for record in await store.records()] == [2, 1, 0]
            await store.storage.settle("other", [row.record.uid], Event.ACKED)
            assert await store.line() == {"issued": 4, "trained": 2, "buffered": 2}

        self.run(test)

    def test_a_draw_that_came_back_or_went_to_another_is_not_undone(self) -> None:
        async def test(store: Store) -> None:
            await store.issue(3)
            await store.storage.release(ME)
            claim = wanting(3, ABORTED, purpose=Purpose.DRAW)
            claimed = await claimed_by(store, claim)
            await store.put(make_group(group_id=0), attempt=2)
            await store.put(make_group(group_id=1, status=ABORTED), attempt=2)
            await store.claim(1, ABORTED, purpose=Purpose.DRAW, owner=OTHER)
            await store.storage.undo(claim, claimed)
            found = [(r.group_id, r.place, r.status, r.attempt, r.owner) for r in await store.records()]
            assert found == [
                (0, Place.BUFFERED, COMPLETED, 2, None),
                (1, Place.IN_FLIGHT, ABORTED, 3, OTHER),
                (2, Place.BUFFERED, ABORTED, 2, None),
            ]
            assert await store.line() == {"issued": 3, "buffered": 2, "in_flight": 1}

        self.run(test)

    def test_a_taken_group_whose_identity_was_put_again_stays_taken(self) -> None:
        async def test(store: Store) -> None:
            await store.put(make_group(group_id=-7), make_group(group_id=-8))
            claim = wanting(2)
            claimed = await claimed_by(store, claim)
            (new,) = await store.put(make_group(group_id=-7))
            await store.storage.undo(claim, claimed)
            assert [record.uid for record in await store.records()] == [claimed["math"][1].record.uid, new.uid]
            assert await store.line() == {"issued": 3, "buffered": 2, "trained": 1}

        self.run(test)

    def test_an_undone_take_may_fill_the_storage_beyond_its_capacity(self) -> None:
        async def test(store: Store) -> None:
            await store.put(make_group(), make_group())
            claim = wanting(2)
            claimed = await claimed_by(store, claim)
            await store.put(make_group(), make_group())
            await store.storage.undo(claim, claimed)
            assert (await store.usage()).groups == 4

        self.run(test, max_groups=2)

    def test_g01_groups_fail_wherever_they_are(self) -> None:
        async def test(store: Store) -> None:
            await store.put(make_group(), task_name="code")
            (trained,) = await store.put(make_group())
            await store.claim(1)
            (leased,) = await store.put(make_group())
            (row,) = await store.lease(1)
            (flying, kept) = await store.issue(2)
            (buffered,) = await store.put(make_group())
            code = await store.only(task_name="code")
            told: set[str] = set()
            end = store.storage.subscribe(told.update)
            reasons = {flying.uid: "lost", leased.uid: "lost", buffered.uid: "gone", code.uid: "gone", 10_000: "no row"}
            assert await store.storage.fail(reasons) == {"math": 3, "code": 1}
            end()
            assert told == {"math", "code"}, "there is room"
            assert await store.line() == {"issued": 5, "trained": 1, "failed": 3, "in_flight": 1}
            assert await store.line(tokens=True)
            assert await store.line("code") == {"issued": 1, "failed": 1}
            assert (await store.account()).reasons == {"lost": 2, "gone": 1}
            assert (await store.usage()).groups == 1
            with raises(LostLease):
                await store.storage.settle("lease", [row.record.uid], Event.ACKED)
            with raises(LostLease):
                await store.put(make_group(group_id=flying.group_id), attempt=1)
            await store.put(make_group(group_id=kept.group_id), attempt=1)
            assert await store.storage.fail({trained.uid: "damaged"}) == {}
            assert await store.records(uid=trained.uid) == []
            assert await store.line() == {"issued": 5, "trained": 1, "failed": 3, "buffered": 1}
            assert await store.storage.fail(reasons) == {}

        self.run(test, keep_trained=1)

    def test_an_undo_leaves_alone_what_has_failed(self) -> None:
        async def test(store: Store) -> None:
            first, second = await store.put(make_group(), make_group())
            claim = wanting(2, purpose=Purpose.LEASE)
            claimed = await claimed_by(store, claim)
            await store.storage.fail({first.uid: "damaged"})
            await store.storage.undo(claim, claimed)
            assert [record.uid for record in await store.records()] == [second.uid]
            assert await store.line() == {"issued": 2, "buffered": 1, "failed": 1}

        self.run(test)
