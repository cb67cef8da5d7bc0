"""Leases are settled by their owner only, expired groups are not handed out, and a claim can be undone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from forebay.core.capacity import Settings
from forebay.core.ledger import Clock, Event, Place
from forebay.core.policy import StalenessReplayPolicy
from forebay.core.rollout import Status
from forebay.core.staleness import EXPIRABLE, Limits
from forebay.errors import LostLease
from forebay.storage.base import Purpose
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
    claim_of,
    content,
    raises,
    storage_test,
    uids,
)
from forebay.testing.samples import make_group


async def without_moves(store: Store, uid: int) -> dict[str, Any]:
    """The record of a group without the time of its last move, which a storage need not restore."""
    record = await store.only(uid=uid)
    return {name: getattr(record, name) for name in record.__struct_fields__ if name != "moved_at"}


class Leasing(Suite):
    """Leases are settled by their owner only, expired groups are not handed out, and a claim can be undone."""

    @storage_test()
    async def test_a_lease_is_acknowledged_given_back_or_rejected(self, store: Store) -> None:
        await store.put(*(make_group() for _ in range(3)))
        rows = await store.lease(3)
        assert {(r.record.place, r.record.lease_id, r.record.train_step) for r in rows} == {(Place.LEASED, "lease", 5)}
        assert [row.record.deliveries for row in rows] == [1, 1, 1]
        acked, nacked, rejected = uids(rows)
        await store.storage.settle("lease", [acked], Event.ACKED)
        await store.storage.settle("lease", [nacked], Event.NACKED)
        await store.storage.settle("lease", [rejected], Event.REJECTED, "too long")
        assert await store.line() == {"issued": 3, "buffered": 1, "trained": 1, "discarded": 1}
        assert (await store.account()).reasons == {"too long": 1}

    @storage_test()
    async def test_a_lease_is_whole_or_not_at_all(self, store: Store) -> None:
        await store.put(make_group())
        claim = claim_of(2, purpose=Purpose.LEASE, whole=True)
        assert (await store.storage.claim(claim)).rows is None
        assert await store.line() == {"issued": 1, "buffered": 1}

    @storage_test()
    async def test_a_lease_that_is_given_back_keeps_its_place_in_the_order(self, store: Store) -> None:
        records = await store.put(*(make_group() for _ in range(3)))
        await store.lease(2)
        await store.storage.settle("lease", [records[0].uid, records[1].uid], Event.NACKED)
        rows = await store.claim(3)
        assert uids(rows) == [record.uid for record in records]
        assert [row.record.deliveries for row in rows] == [1, 1, 0]

    @storage_test()
    async def test_g05_a_lost_lease_cannot_be_settled(self, store: Store) -> None:
        first, second = await store.put(make_group(), make_group())
        await store.lease(2, "one")
        with raises(LostLease):
            await store.storage.settle("two", [first.uid], Event.ACKED)
        await store.storage.settle("one", [second.uid], Event.ACKED)
        for event in (Event.ACKED, Event.NACKED, Event.REJECTED):
            with raises(LostLease):
                await store.storage.settle("one", [first.uid, second.uid], event)
        assert (await store.only(uid=first.uid)).place is Place.LEASED
        assert await store.storage.release(ME) == {"math": 1}
        with raises(LostLease):
            await store.storage.settle("one", [first.uid], Event.ACKED)
        await store.lease(1, "three")
        with raises(LostLease):
            await store.storage.settle("one", [first.uid], Event.ACKED)

    @storage_test()
    async def test_releasing_an_owner_returns_its_groups_and_no_others(self, store: Store) -> None:
        await store.put(make_group())
        await store.lease(1, owner=OTHER)
        await store.issue(2, owner=OTHER)
        await store.issue(1, cursor=2)
        holdings = {(h.owner, h.place, h.groups) for h in (await store.storage.summary(holdings=True)).holdings}
        assert holdings == {(OTHER, Place.LEASED, 1), (OTHER, Place.IN_FLIGHT, 2), (ME, Place.IN_FLIGHT, 1)}
        assert await store.storage.release(OTHER) == {"math": 3}
        assert await store.line() == {"issued": 4, "buffered": 3, "in_flight": 1}
        assert (await store.count(), await store.count(ABORTED)) == (1, 2)
        assert await store.storage.release(OTHER) == {}

    @storage_test()
    async def test_an_owner_without_heartbeats_loses_its_groups(self, store: Store) -> None:
        await store.storage.open(OTHER, Settings(), self.lease_s)
        await store.issue(1, owner=OTHER)
        await store.put(make_group())
        (row,) = await store.lease(1, owner=OTHER)
        reaped = await store.storage.reap()
        assert not reaped.returned
        # A storage that reaps by itself does not know the next deadline.
        assert reaped.next_s is None or 0 < reaped.next_s <= self.lease_s
        self.advance_clock(store.storage, self.lease_s * 0.7)
        store.storage.beat(OTHER)
        self.advance_clock(store.storage, self.lease_s * 0.7)
        assert not (await store.storage.reap()).returned
        self.advance_clock(store.storage, self.lease_s * 0.7)
        reaped = await store.storage.reap()
        # A storage that reaps by itself has nothing left to bring back.
        assert dict(reaped.returned) in ({}, {"math": 2})
        assert reaped.next_s is None
        assert "in_flight" not in await store.line()
        with raises(LostLease):
            await store.storage.settle("lease", [row.record.uid], Event.ACKED)
        with raises(LostLease):
            await store.storage.put([arrival(make_group(group_id=0), attempt=1)], owner=OTHER)
        await store.storage.close(OTHER)

    @storage_test()
    async def test_g06_groups_that_are_too_old_are_not_claimed(self, store: Store) -> None:
        old, new = await store.put(make_group(model_step=2), make_group(model_step=5))
        assert await store.fresh() == 2
        await store.storage.advance({"math": Clock(train_step=6, limits=Limits(stale_threshold=3))})
        assert uids(await store.claim(2)) == [new.uid]
        await store.storage.advance({"math": Clock(train_step=9, limits=Limits(stale_threshold=6))})
        assert await store.fresh() == 0
        assert await store.claim(2) == []
        await store.storage.advance({"math": Clock(train_step=8, limits=Limits(stale_threshold=6))})
        assert await store.claim(2) == [], "a train step does not go back"
        await store.storage.advance({"math": Clock(train_step=9, limits=Limits(stale_threshold=7))})
        assert uids(await store.claim(2)) == [old.uid]

    @storage_test()
    async def test_a_lease_advances_the_clock_and_names_the_tasks_that_have_rows_due(self, store: Store) -> None:
        (old,) = await store.put(make_group(model_step=1))
        await store.storage.advance({"math": Clock(limits=Limits(stale_threshold=2))})
        claim = claim_of(1, purpose=Purpose.LEASE, whole=True, train_step=4)
        claimed = await store.storage.claim(claim)
        assert (claimed.rows, claimed.due, claimed.limits) == (None, ("math",), {"math": Limits(2)})
        assert (await store.account()).train_step == 4
        assert (await store.summary()).due
        assert uids(await store.storage.due("math", EXPIRABLE, 9)) == [old.uid]

    @storage_test()
    async def test_a_claim_brings_back_the_groups_of_dead_owners(self, store: Store) -> None:
        await store.storage.open(OTHER, Settings(), self.lease_s)
        await store.put(make_group())
        await store.lease(1, owner=OTHER)
        self.advance_clock(store.storage, self.lease_s * 2)
        assert len(await store.lease(1, "mine")) == 1
        await store.storage.close(OTHER)

    @storage_test()
    async def test_g06_groups_that_are_drawn_again_are_not_too_old_either(self, store: Store) -> None:
        old, new = await store.put(*(make_group(status=ABORTED, model_step=step) for step in (1, 5)))
        await store.storage.advance({"math": Clock(train_step=7, limits=Limits(stale_threshold=3))})
        assert uids(await store.claim(2, ABORTED, purpose=Purpose.DRAW)) == [new.uid]
        assert uids(await store.storage.due("math", EXPIRABLE, 9)) == [old.uid]

    @storage_test()
    async def test_due_finds_groups_that_are_too_old_by_either_key(self, store: Store) -> None:
        mixed = make_group(1, tokens=2)
        mixed[0].version_spans = ((1, 1), (6, 1))
        groups = [make_group(model_step=step) for step in (1, 6, 4)]
        old, _, middle, both = await store.put(*groups, mixed)
        aborted, _, unversioned = await store.put(
            make_group(status=ABORTED, model_step=0), make_group(status=Status.FAILED, model_step=0), make_group()
        )
        storage = store.storage
        assert await storage.due("math", EXPIRABLE, 9) == []
        await storage.advance({"math": Clock(train_step=7, limits=Limits(token_stale_threshold=2))})
        assert sorted(uids(await storage.due("math", EXPIRABLE, 9))) == [old.uid, middle.uid, aborted.uid]
        await storage.advance({"math": Clock(train_step=7, limits=Limits(4, 2))})
        due = uids(await storage.due("math", EXPIRABLE, 9))
        assert sorted(due) == [old.uid, middle.uid, both.uid, aborted.uid]
        assert uids(await storage.due("math", [ABORTED], 9)) == [aborted.uid]
        assert len(await storage.due("math", EXPIRABLE, 2)) == 2
        assert await Store(storage).fresh() == 2
        assert unversioned.uid in uids(await store.claim(9))

    @storage_test()
    async def test_a_revision_keeps_the_place_in_the_order_and_applies_once(self, store: Store) -> None:
        first, second = await store.put(make_group(), make_group())
        expired = make_group(status=EXPIRED)
        revision = Revision(first.uid, first.revision, content(expired))
        assert await store.storage.revise([revision]) == [True]
        assert await store.storage.revise([revision]) == [False]
        assert (await store.count(EXPIRED), await store.count()) == (1, 1)
        record = await store.only(uid=first.uid)
        assert record.timestamp_id == first.timestamp_id
        assert record.revision > first.revision
        assert (await store.account()).reset_tokens == 6
        drop = Revision(second.uid, second.revision, None)
        gone = Revision(10_000, 0, None)
        assert await store.storage.revise([gone, drop]) == [False, True]
        assert await store.line() == {"issued": 2, "buffered": 1, "discarded": 1}
        assert (await store.account()).reasons == {"stale": 1}

    @storage_test()
    async def test_trained_groups_come_back_when_their_weights_are_lost(self, store: Store) -> None:
        if not store.storage.durable:
            return
        await store.put(*(make_group(model_step=0) for _ in range(3)))
        await store.storage.advance({"math": Clock(train_step=9, limits=Limits(20))})
        assert (await store.storage.summary(())).saved_step is None
        await store.storage.saved(1)
        for train_step in (1, 2, 3):
            rows = await store.claim(
                1, purpose=Purpose.LEASE, lease_id=f"lease{train_step}", train_step=train_step, whole=True
            )
            await store.storage.settle(f"lease{train_step}", uids(rows), Event.ACKED)
        assert await store.line() == {"issued": 3, "trained": 3}
        assert len(await store.records(place="archived")) == 2, (
            "groups that the saved weights were not trained on are kept"
        )
        await store.storage.saved(2)
        assert (await store.storage.summary(())).saved_step == 2
        assert len(await store.records(place="archived")) == 1
        assert await store.storage.rewind(2) == {"math": 1}
        assert await store.line() == {"issued": 3, "trained": 2, "buffered": 1}
        account = await store.account()
        assert (account.train_step, account.limits) == (3, Limits(20))
        (row,) = await store.claim(1)
        assert [state.response_ids for state in row.group] == [[0, 1, 2]] * 2
        assert await store.storage.rewind(1) == {}
        assert (await store.storage.summary(())).saved_step == 1

    @storage_test()
    async def test_a_leased_group_is_not_revised(self, store: Store) -> None:
        (record,) = await store.put(make_group())
        await store.lease(1)
        assert await store.storage.revise([Revision(record.uid, record.revision, None)]) == [False]

    # --- undo and fail --------------------------------------------------------------------------------

    @storage_test()
    async def test_an_undone_lease_was_never_there(self, store: Store) -> None:
        records = await store.put(*(make_group() for _ in range(4)))
        before = [await without_moves(store, record.uid) for record in records]
        claim = claim_of(2, purpose=Purpose.LEASE, whole=True)
        claimed = await store.claimed(claim)
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

    @storage_test(StalenessReplayPolicy())
    async def test_an_undone_draw_gives_the_status_back_and_fences_the_attempt(self, store: Store) -> None:
        await store.issue(3)
        for group_id, status in enumerate((INIT, EXPIRED, ABORTED)):
            await store.put(make_group(group_id=group_id, status=status, model_step=1))
        order = [record.timestamp_id for record in await store.records()]
        claim = claim_of(3, INIT, EXPIRED, ABORTED, purpose=Purpose.DRAW)
        await store.storage.undo(claim, await store.claimed(claim))
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

    @storage_test()
    async def test_an_undone_take_returns_the_groups(self, store: Store) -> None:
        await self._check_take(store)

    @storage_test(keep_trained=2)
    async def test_an_undone_take_returns_the_groups_from_the_archive_too(self, store: Store) -> None:
        await self._check_take(store)

    async def _check_take(self, store: Store) -> None:
        groups = [make_group(2, score=float(number), model_step=number) for number in range(4)]
        await store.put(*groups, tags={"level": "hard"}, priority=2.0)
        records = await store.records()
        payloads = [await store.storage.read(record.uid) for record in records]
        usage, tokens = await store.usage(), await store.line(tokens=True)
        claim = claim_of(3)
        claimed = await store.claimed(claim)
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

    @storage_test()
    async def test_every_end_of_a_take_is_undone(self, store: Store) -> None:
        statuses = (Status.FAILED, Status.FILTERED, ABORTED)
        records = await store.put(*(make_group(status=status) for status in statuses))
        claim = claim_of(3, *statuses)
        claimed = await store.claimed(claim)
        assert await store.line() == {"issued": 3, "failed": 1, "filtered": 1, "in_flight": 1}
        await store.storage.undo(claim, claimed)
        assert await store.line() == {"issued": 3, "buffered": 3}
        assert not (await store.account()).reasons
        assert [(r.uid, r.status, r.place) for r in await store.records()] == [
            (record.uid, status, Place.BUFFERED) for record, status in zip(records, statuses, strict=True)
        ]

    @storage_test()
    async def test_a_group_that_moved_since_is_not_undone(self, store: Store) -> None:
        acked, nacked, stolen, kept = await store.put(*(make_group() for _ in range(4)))
        claim = claim_of(4, purpose=Purpose.LEASE)
        claimed = await store.claimed(claim)
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

    @storage_test()
    async def test_a_draw_that_came_back_or_went_to_another_is_not_undone(self, store: Store) -> None:
        await store.issue(3)
        await store.storage.release(ME)
        claim = claim_of(3, ABORTED, purpose=Purpose.DRAW)
        claimed = await store.claimed(claim)
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

    @storage_test()
    async def test_a_taken_group_whose_identity_was_put_again_stays_taken(self, store: Store) -> None:
        await store.put(make_group(group_id=-7), make_group(group_id=-8))
        claim = claim_of(2)
        claimed = await store.claimed(claim)
        (new,) = await store.put(make_group(group_id=-7))
        await store.storage.undo(claim, claimed)
        assert [record.uid for record in await store.records()] == [claimed["math"][1].record.uid, new.uid]
        assert await store.line() == {"issued": 3, "buffered": 2, "trained": 1}

    @storage_test(max_groups=2)
    async def test_an_undone_take_may_fill_the_storage_beyond_its_capacity(self, store: Store) -> None:
        await store.put(make_group(), make_group())
        claim = claim_of(2)
        claimed = await store.claimed(claim)
        await store.put(make_group(), make_group())
        await store.storage.undo(claim, claimed)
        assert (await store.usage()).groups == 4

    @storage_test(keep_trained=1)
    async def test_g01_groups_fail_wherever_they_are(self, store: Store) -> None:
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
        assert told == {"math", "code"}, "waiters for free space continue"
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

    @storage_test()
    async def test_an_undo_does_not_change_failed_groups(self, store: Store) -> None:
        first, second = await store.put(make_group(), make_group())
        claim = claim_of(2, purpose=Purpose.LEASE)
        claimed = await store.claimed(claim)
        await store.storage.fail({first.uid: "damaged"})
        await store.storage.undo(claim, claimed)
        assert [record.uid for record in await store.records()] == [second.uid]
        assert await store.line() == {"issued": 2, "buffered": 1, "failed": 1}
