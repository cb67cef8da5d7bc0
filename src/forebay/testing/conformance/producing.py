"""Prompts are issued, come back once, and go out again; old attempts are fenced."""

from __future__ import annotations

from forebay.core.capacity import Settings
from forebay.core.ledger import Place
from forebay.core.policy import StalenessReplayPolicy
from forebay.core.rollout import Status
from forebay.errors import BufferClosed, CursorMoved, DuplicateGroup, LostLease
from forebay.storage.base import Purpose
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
)
from forebay.testing.samples import make_group

__all__ = ["Producing"]


class Producing(Suite):
    """Prompts are issued, come back once, and go out again; old attempts are fenced."""

    def test_issuing_writes_the_row_and_moves_the_cursor(self) -> None:
        async def test(store: Store) -> None:
            records = await store.storage.issue(
                "math", [content(make_group(status=INIT))], owner=ME, cursor=0, source_state=b"state"
            )
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

        self.run(test)

    def test_prompts_are_issued_as_far_as_there_is_room(self) -> None:
        async def test(store: Store) -> None:
            assert [record.group_id for record in await store.issue(5)] == [0, 1, 2]
            assert (await store.account()).cursor == 3
            assert await store.issue(2, cursor=3) == []
            assert await store.line() == {"issued": 3, "in_flight": 3}

        self.run(test, max_groups=3)

    def test_a_group_put_by_hand_keeps_its_id_from_being_drawn(self) -> None:
        async def test(store: Store) -> None:
            await store.put(make_group(group_id=1))
            with raises(DuplicateGroup):
                await store.issue(2, cursor=0)
            assert (await store.account()).cursor == 0

        self.run(test)

    def test_a_drawn_group_comes_back_under_its_attempt(self) -> None:
        async def test(store: Store) -> None:
            (issued,) = await store.issue()
            (back,) = await store.put(make_group(group_id=0, model_step=3), attempt=1)
            assert (back.uid, back.place, back.status, back.owner) == (issued.uid, Place.BUFFERED, COMPLETED, None)
            assert back.timestamp_id > issued.timestamp_id
            assert back.oldest_step == 3
            assert await store.line() == {"issued": 1, "buffered": 1}

        self.run(test)

    def test_the_owner_may_bring_a_group_back_without_naming_the_attempt(self) -> None:
        async def test(store: Store) -> None:
            await store.issue()
            with raises(LostLease):
                await store.storage.put([arrival(make_group(group_id=0))], owner=OTHER)
            await store.put(make_group(group_id=0))
            with raises(DuplicateGroup):
                await store.put(make_group(group_id=0))

        self.run(test)

    def test_an_owner_that_was_closed_can_hold_nothing(self) -> None:
        async def test(store: Store) -> None:
            await store.put(make_group())
            await store.storage.open(OTHER, Settings(), None)
            await store.storage.close(OTHER)
            for refused in (store.claim(1, owner=OTHER), store.lease(1, owner=OTHER), store.issue(owner=OTHER)):
                with raises(BufferClosed):
                    await refused
            assert await store.line() == {"issued": 1, "buffered": 1}

        self.run(test)

    def test_an_old_attempt_is_fenced(self) -> None:
        async def test(store: Store) -> None:
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

        self.run(test)

    def test_a_returning_group_ends_if_filtered_failed_or_stale(self) -> None:
        async def test(store: Store) -> None:
            await store.issue(3)
            await store.put(make_group(group_id=0, status=Status.FILTERED), reason="zero std")
            await store.put(make_group(group_id=1, status=Status.FAILED), reason="engine died")
            await store.put(make_group(group_id=2), stale=True, reason="stale")
            assert await store.line() == {"issued": 3, "filtered": 1, "failed": 1, "discarded": 1}
            reasons = (await store.account()).reasons
            assert reasons == {"zero std": 1, "engine died": 1, "stale": 1}
            assert await store.records() == []

        self.run(test)

    def test_a_group_put_by_hand_that_is_stale_is_issued_and_discarded(self) -> None:
        async def test(store: Store) -> None:
            await store.put(make_group(), stale=True, reason="stale")
            assert await store.line() == {"issued": 1, "discarded": 1}

        self.run(test)

    def test_g01_tokens_that_are_too_old_on_arrival_are_counted_as_reset(self) -> None:
        async def test(store: Store) -> None:
            await store.issue(2)
            await store.put(make_group(group_id=0, status=EXPIRED, tokens=0), reset_tokens=6)
            await store.put(make_group(status=EXPIRED, tokens=0), reset_tokens=6)
            assert await store.line(tokens=True) == {"issued": 12, "reset": 12}
            await store.put(make_group(group_id=1, status=ABORTED), attempt=1)
            assert await store.line(tokens=True) == {"issued": 18, "buffered": 6, "reset": 12}

        self.run(test)

    def test_g01_tokens_that_a_producer_drops_are_counted_as_reset(self) -> None:
        async def test(store: Store) -> None:
            await store.issue()
            await store.put(make_group(group_id=0, status=ABORTED))
            await store.claim(1, ABORTED, purpose=Purpose.DRAW)
            assert await store.line(tokens=True) == {"issued": 6, "in_flight": 6}
            await store.put(make_group(group_id=0, tokens=1), attempt=2)
            assert await store.line(tokens=True) == {"issued": 6, "buffered": 2, "reset": 4}
            await store.claim(1)
            assert await store.line(tokens=True) == {"issued": 6, "trained": 2, "reset": 4}

        self.run(test)

    def test_drawing_again_goes_by_status_then_group_id(self) -> None:
        async def test(store: Store) -> None:
            await store.issue(4)
            for group_id, status in ((3, EXPIRED), (1, ABORTED), (2, EXPIRED), (0, ABORTED)):
                await store.put(make_group(group_id=group_id, status=status))
            rows = await store.claim(3, INIT, EXPIRED, ABORTED, purpose=Purpose.DRAW)
            assert [row.record.group_id for row in rows] == [2, 3, 0]
            assert {(row.record.place, row.record.attempt, row.record.owner) for row in rows} == {
                (Place.IN_FLIGHT, 2, ME)
            }

        self.run(test, StalenessReplayPolicy())

    def test_a_draw_of_named_groups_leaves_all_others(self) -> None:
        async def test(store: Store) -> None:
            await store.issue(5)
            for group_id, status in ((0, ABORTED), (1, EXPIRED), (2, COMPLETED), (3, ABORTED)):
                await store.put(make_group(group_id=group_id, status=status))
            named = (4, 3, 2, 1)  # 4 is in flight, and 2 is completed
            rows = await store.claim(9, INIT, EXPIRED, ABORTED, purpose=Purpose.DRAW, group_ids=named)
            assert [row.record.group_id for row in rows] == [1, 3]
            assert await store.claim(9, ABORTED, purpose=Purpose.DRAW, group_ids=named) == []
            (left,) = await store.claim(9, INIT, EXPIRED, ABORTED, purpose=Purpose.DRAW)
            assert left.record.group_id == 0

        self.run(test)

    def test_tags_and_priority_stay_unless_given_anew(self) -> None:
        async def test(store: Store) -> None:
            await store.put(make_group(group_id=-5, status=ABORTED), tags={"a": 1}, priority=2.0)
            await store.claim(1, ABORTED)
            (kept,) = await store.put(make_group(group_id=-5, status=ABORTED))
            assert (dict(kept.tags), kept.priority) == ({"a": 1}, 2.0)
            await store.claim(1, ABORTED)
            (changed,) = await store.put(make_group(group_id=-5), tags={}, priority=0.0)
            assert (dict(changed.tags), changed.priority) == ({}, 0.0)

        self.run(test)
