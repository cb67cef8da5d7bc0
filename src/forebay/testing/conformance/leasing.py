"""Leases are settled by their holder only; what is too old is not handed out."""

from __future__ import annotations

from forebay.core.capacity import Settings
from forebay.core.ledger import Clock, Event, Place
from forebay.core.rollout import Status
from forebay.core.staleness import EXPIRABLE, Limits
from forebay.errors import LostLease
from forebay.storage.base import Claim, Purpose, Revision
from forebay.testing.conformance.suite import (
    ABORTED,
    COMPLETED,
    EXPIRED,
    ME,
    OTHER,
    Store,
    Suite,
    arrival,
    content,
    raises,
    uids,
)
from forebay.testing.samples import make_group

__all__ = ["Leasing"]


class Leasing(Suite):
    """Leases are settled by their holder only; what is too old is not handed out."""

    def test_a_lease_is_acknowledged_given_back_or_rejected(self) -> None:
        async def test(store: Store) -> None:
            await store.put(*(make_group() for _ in range(3)))
            rows = await store.lease(3)
            assert {(r.record.place, r.record.lease_id, r.record.train_step) for r in rows} == {
                (Place.LEASED, "lease", 5)
            }
            assert [row.record.deliveries for row in rows] == [1, 1, 1]
            acked, nacked, rejected = uids(rows)
            await store.storage.settle("lease", [acked], Event.ACKED)
            await store.storage.settle("lease", [nacked], Event.NACKED)
            await store.storage.settle("lease", [rejected], Event.REJECTED, "too long")
            assert await store.line() == {"issued": 3, "buffered": 1, "trained": 1, "discarded": 1}
            assert (await store.account()).reasons == {"too long": 1}

        self.run(test)

    def test_a_lease_is_whole_or_not_at_all(self) -> None:
        async def test(store: Store) -> None:
            await store.put(make_group())
            claim = Claim(
                wants={"math": 2},
                statuses=(COMPLETED,),
                purpose=Purpose.LEASE,
                owner=ME,
                whole=True,
                lease_id="lease",
                train_step=1,
            )
            assert (await store.storage.claim(claim)).rows is None
            assert await store.line() == {"issued": 1, "buffered": 1}

        self.run(test)

    def test_what_is_given_back_returns_to_its_old_place(self) -> None:
        async def test(store: Store) -> None:
            records = await store.put(*(make_group() for _ in range(3)))
            await store.lease(2)
            await store.storage.settle("lease", [records[0].uid, records[1].uid], Event.NACKED)
            rows = await store.claim(3)
            assert uids(rows) == [record.uid for record in records]
            assert [row.record.deliveries for row in rows] == [1, 1, 0]

        self.run(test)

    def test_g05_a_lost_lease_cannot_be_settled(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_releasing_an_owner_gives_back_what_it_holds_and_nothing_else(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_an_owner_that_stops_beating_loses_what_it_holds(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_g06_nothing_that_is_too_old_is_claimed(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_a_lease_advances_the_clock_and_names_the_tasks_that_have_rows_due(self) -> None:
        async def test(store: Store) -> None:
            (old,) = await store.put(make_group(model_step=1))
            await store.storage.advance({"math": Clock(limits=Limits(stale_threshold=2))})
            claim = Claim(
                wants={"math": 1},
                statuses=(COMPLETED,),
                purpose=Purpose.LEASE,
                owner=ME,
                whole=True,
                lease_id="lease",
                train_step=4,
            )
            claimed = await store.storage.claim(claim)
            assert (claimed.rows, claimed.due, claimed.limits) == (None, ("math",), {"math": Limits(2)})
            assert (await store.account()).train_step == 4
            assert (await store.summary()).due
            assert uids(await store.storage.due("math", EXPIRABLE, 9)) == [old.uid]

        self.run(test)

    def test_a_claim_brings_back_the_groups_of_dead_owners(self) -> None:
        async def test(store: Store) -> None:
            await store.storage.open(OTHER, Settings(), self.lease_s)
            await store.put(make_group())
            await store.lease(1, owner=OTHER)
            self.advance_clock(store.storage, self.lease_s * 2)
            assert len(await store.lease(1, "mine")) == 1
            await store.storage.close(OTHER)

        self.run(test)

    def test_g06_groups_that_are_drawn_again_are_not_too_old_either(self) -> None:
        async def test(store: Store) -> None:
            old, new = await store.put(*(make_group(status=ABORTED, model_step=step) for step in (1, 5)))
            await store.storage.advance({"math": Clock(train_step=7, limits=Limits(stale_threshold=3))})
            assert uids(await store.claim(2, ABORTED, purpose=Purpose.DRAW)) == [new.uid]
            assert uids(await store.storage.due("math", EXPIRABLE, 9)) == [old.uid]

        self.run(test)

    def test_due_finds_groups_that_are_too_old_by_either_key(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_a_revision_keeps_the_place_in_the_order_and_applies_once(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_trained_groups_come_back_when_their_weights_are_lost(self) -> None:
        async def test(store: Store) -> None:
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
            assert len(await store.records(place="archived")) == 2, "what the saved weights do not know is kept"
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

        self.run(test)

    def test_a_leased_group_is_not_revised(self) -> None:
        async def test(store: Store) -> None:
            (record,) = await store.put(make_group())
            await store.lease(1)
            assert await store.storage.revise([Revision(record.uid, record.revision, None)]) == [False]

        self.run(test)
