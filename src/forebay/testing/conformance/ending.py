"""Ends are noted in the step that brings them, for whoever tells of them."""

from __future__ import annotations

from forebay.core.capacity import Settings
from forebay.core.ledger import End, Event, GroupEnd
from forebay.core.query import parse
from forebay.core.rollout import Status
from forebay.storage.base import Claim, Purpose
from forebay.testing.conformance.suite import COMPLETED, ME, OTHER, Store, Suite
from forebay.testing.samples import make_group

__all__ = ["Ending"]


async def noted(store: Store, owner: str = ME, limit: int = 100) -> list[GroupEnd]:
    return [end for _, end in await store.storage.ends(owner, limit)]


class Ending(Suite):
    """Ends are noted in the step that brings them, for whoever tells of them."""

    def test_no_end_is_noted_until_somebody_asks_for_it(self) -> None:
        async def test(store: Store) -> None:
            await store.put(make_group())
            await store.claim(1)
            assert await noted(store) == []
            await store.storage.note_ends()
            await store.put(make_group(group_id=-50))
            await store.claim(1)
            assert [end.group_id for end in await noted(store)] == [-50]

        self.run(test)

    def test_every_way_to_end_is_noted_once_with_its_reason_and_sessions(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_ends_stay_noted_until_they_are_forgotten(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_one_owner_tells_of_an_end_and_another_only_when_that_is_gone(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_an_end_that_is_undone_is_not_told(self) -> None:
        async def test(store: Store) -> None:
            await store.storage.note_ends()
            await store.put(make_group(), make_group())
            claim = Claim(wants={"math": 1}, statuses=(COMPLETED,), purpose=Purpose.TAKE, owner=ME)
            claimed = (await store.storage.claim(claim)).rows
            assert claimed is not None
            assert len(await noted(store)) == 1
            await store.storage.undo(claim, claimed)
            assert await noted(store) == []
            assert await store.line() == {"issued": 2, "buffered": 2}

        self.run(test)
