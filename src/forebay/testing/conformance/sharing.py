"""Conformance: several producers share the work of a task, follow its epochs, and agree on a plan."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from forebay.core.capacity import Settings
from forebay.core.ledger import Clock, Event, Record
from forebay.core.policy import FIFOReplayPolicy
from forebay.core.staleness import Limits
from forebay.errors import CursorMoved, EpochMoved
from forebay.storage.base import Draw, Purpose, Share
from forebay.testing.conformance.suite import ABORTED, INIT, ME, OTHER, Store, Suite, content, raises, storage_test
from forebay.testing.samples import make_group


async def issue(store: Store, n: int, cursor: int, share: Share, owner: str = ME) -> list[Record]:
    contents = [content(make_group(status=INIT)) for _ in range(n)]
    return await store.storage.issue("math", contents, Draw(owner, cursor, share=share))


class Sharing(Suite):
    """Shares, epochs and plans."""

    @storage_test()
    async def test_no_more_groups_are_issued_than_the_share_allows(self, store: Store) -> None:
        assert len(await issue(store, 8, 0, Share(0, 5))) == 5
        assert await issue(store, 8, 5, Share(0, 5), OTHER) == []
        assert (await store.account()).cursor == 5
        await store.put(make_group(group_id=0), attempt=1)
        assert await issue(store, 1, 5, Share(0, 5)) == []  # a completed group counts like one in flight
        rows = await store.lease(1)
        await store.storage.settle("lease", [row.record.uid for row in rows], Event.ACKED)
        assert await issue(store, 1, 5, Share(0, 5)) == []  # and a trained one
        await store.put(make_group(group_id=1, status=ABORTED), attempt=1)
        assert len(await issue(store, 8, 5, Share(0, 5))) == 1  # one that waits to be drawn again does not
        assert await store.line() == {"issued": 6, "in_flight": 4, "buffered": 1, "trained": 1}

    @storage_test()
    async def test_no_more_groups_are_drawn_again_than_the_share_allows(self, store: Store) -> None:
        await store.issue(4)
        for group_id in range(4):
            await store.put(make_group(group_id=group_id, status=ABORTED), attempt=1)
        share: dict[str, Any] = {"purpose": Purpose.DRAW, "share": Share(0, 3)}
        assert [row.record.group_id for row in await store.claim(4, ABORTED, **share)] == [0, 1, 2]
        assert await store.claim(4, ABORTED, **share) == []
        assert await store.line() == {"issued": 4, "in_flight": 3, "buffered": 1}

    @storage_test()
    async def test_groups_that_are_too_old_leave_their_part_of_the_share(self, store: Store) -> None:
        await issue(store, 2, 0, Share(0, 2))
        await store.put(make_group(group_id=0, model_step=0), attempt=1)
        assert await issue(store, 1, 2, Share(0, 2)) == []
        await store.storage.advance({"math": Clock(train_step=9, limits=Limits(1))})
        assert len(await issue(store, 1, 2, Share(0, 2))) == 1

    @storage_test()
    async def test_producers_at_the_same_time_never_exceed_the_share(self, store: Store) -> None:
        async def produce(owner: str) -> int:
            drawn = 0
            for _ in range(6):
                cursor = (await store.account()).cursor
                with suppress(CursorMoved):
                    drawn += len(await issue(store, 2, cursor, Share(0, 7), owner))
            return drawn

        await asyncio.gather(*[produce(owner) for owner in (ME, OTHER, "third")])
        while len(await issue(store, 1, (await store.account()).cursor, Share(0, 7))):
            pass
        assert await store.line() == {"issued": 7, "in_flight": 7}

    @storage_test()
    async def test_draws_of_an_earlier_epoch_are_refused(self, store: Store) -> None:
        await issue(store, 1, 0, Share(0, 9))
        await store.put(make_group(group_id=0, status=ABORTED), attempt=1)
        await store.storage.advance({"math": Clock(epoch=3)})
        await store.storage.advance({"math": Clock(epoch=2, train_step=1)})  # an epoch never goes back
        assert (await store.account()).epoch == 3
        with raises(EpochMoved, "epoch 2", "epoch 3"):
            await issue(store, 1, 1, Share(2, 9))
        with raises(EpochMoved, "'math'"):
            await store.claim(1, ABORTED, purpose=Purpose.DRAW, share=Share(2, 9))
        assert await store.line() == {"issued": 1, "buffered": 1}
        assert len(await issue(store, 1, 1, Share(3, 9))) == 1

    @storage_test()
    async def test_a_plan_is_replaced_only_by_those_who_know_it(self, store: Store) -> None:
        heard: list[str] = []
        store.storage.subscribe(lambda tasks: heard.extend(tasks))
        assert (await store.account()).plan is None
        assert await store.storage.write_plan("math", b"one", revision=0)
        assert "math" in heard
        assert not await store.storage.write_plan("math", b"two", revision=0)
        account = await store.account()
        assert (account.plan, account.plan_revision) == (b"one", 1)
        assert await store.storage.write_plan("math", b"three", revision=1)
        assert (await store.account()).plan == b"three"
        assert (await store.account("code")).plan is None

    @storage_test()
    async def test_the_tasks_of_one_run_are_saved_and_rewound_without_those_of_another(self, store: Store) -> None:
        storage = store.storage
        if not storage.durable:
            return
        for task_name in ("math", "code"):
            await store.put(*(make_group(model_step=0) for _ in range(3)), task_name=task_name)
        await storage.saved(1, ["math"])
        await storage.saved(2, ["code"])
        for step in (1, 2, 3):
            for task_name in ("math", "code"):
                lease = f"{task_name}{step}"
                rows = await store.lease(1, lease, train_step=step, task_name=task_name)
                await storage.settle(lease, [row.record.uid for row in rows], Event.ACKED)
        kept = [(record.task_name, record.train_step) for record in await store.records(place="archived")]
        assert sorted(kept) == [("code", 3), ("math", 2), ("math", 3)]
        assert await storage.rewind(1, ["math"]) == {"math": 2}
        assert [record.task_name for record in await store.records(place="archived")] == ["code"]
        await storage.saved(3, ["code"])
        assert await store.records(place="archived") == []
        assert ((await store.account()).train_step, (await store.account("code")).train_step) == (2, 3)
        assert await store.line() == {"issued": 3, "trained": 1, "buffered": 2}
        assert await store.line("code") == {"issued": 3, "trained": 3}

    @storage_test()
    async def test_completed_groups_and_failed_attempts_are_counted(self, store: Store) -> None:
        await store.issue(3)
        await store.put(make_group(group_id=0), attempt=1)
        await store.put(make_group(group_id=1, status=ABORTED), attempt=1, failed=True)
        await store.put(make_group())  # by hand: no producer completed it
        account = await store.account()
        assert (account.completed, account.failures) == (1, 1)

    @storage_test()
    async def test_the_summary_names_the_living_owners(self, store: Store) -> None:
        storage = store.storage
        await storage.open(OTHER, Settings(order=FIFOReplayPolicy().order), self.lease_s)
        assert set((await storage.summary((), owners=True)).owners) == {ME, OTHER}
        self.advance_clock(storage, 2 * self.lease_s)
        assert set((await storage.summary((), owners=True)).owners) == {ME}
        await storage.close(OTHER)
