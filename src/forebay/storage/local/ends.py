"""How groups leave a storage that lives in this process, and how they come back if nobody learned of it.

A row that ends is booked out of its account in the same step, and removed or archived. `local` decides when.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice

from msgspec.structs import replace

from forebay.core.ledger import End, Event, GroupEnd, Place, check_move, take_event
from forebay.core.record import Record, Row, group_end
from forebay.core.rollout import Status
from forebay.storage.base import Claim, Claimed, Purpose
from forebay.storage.idempotency import is_held, taken_for_good
from forebay.storage.local.base import LocalBase

__all__ = ["LocalEnds", "claim_event"]

log = logging.getLogger(__name__)

_UNKNOWN: Mapping[int, float] = {}
_MAX_ENDS = 100_000
"""Ends that are noted in memory while nobody is told of them; older ones are dropped."""


class LocalEnds(LocalBase):
    """A storage over a table in this process: how its rows end."""

    async def fail(self, reasons: Mapping[int, str]) -> dict[str, int]:
        failed: dict[str, int] = {}
        for uid, reason in reasons.items():
            row = self._table.get(uid)
            if row is None:
                continue
            record = row.record
            if record.place is Place.ARCHIVED:  # it has ended already
                self._archived.remove(uid)
                self._table.remove((record,))
            else:
                self._end(row, End.FAILED, reason)
                failed[record.task_name] = failed.get(record.task_name, 0) + 1
        await self._finish(failed)
        return failed

    async def note_ends(self) -> None:
        self._notes_ends = True
        await self._finish(())

    async def ends(self, owner: str, limit: int) -> list[tuple[int, GroupEnd]]:
        self._check_owner(owner)
        taken = {number for other, numbers in self._ends_of.items() if other != owner for number in numbers}
        free = ((number, end) for number, end in self._ends.items() if number not in taken)
        found = list(islice(free, limit))
        if found:
            self._ends_of.setdefault(owner, set()).update(number for number, _ in found)
        return found

    async def forget_ends(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._drop_end(number)
        for held in self._ends_of.values():
            held.difference_update(numbers)
        await self._finish(())

    def _note_end(self, end: GroupEnd) -> None:
        self._ends[self._next_end] = end
        self._next_end += 1
        if not self.durable and len(self._ends) > _MAX_ENDS:
            if not self._next_end % 1_000:
                log.warning("group_ends_dropped: more than %d wait for on_group_end, which is too slow", _MAX_ENDS)
            self._drop_end(next(iter(self._ends)))

    def _drop_end(self, number: int) -> None:
        self._ends.pop(number, None)

    async def undo(self, claim: Claim, claimed: Claimed) -> None:
        await self._finish(self._undo(claimed))

    def _undo(self, claimed: Claimed, moved_at: Mapping[int, float] = _UNKNOWN) -> set[str]:
        """Put back what was claimed and has not moved on; the tasks concerned.

        The groups of rows that were taken for good are as this storage keeps them. `moved_at`: from before the claim.
        """
        return {
            row.record.task_name
            for rows in claimed.values()
            for row in rows
            if (self._undo_end(row) if taken_for_good(row.record) else self._undo_hold(row.record, moved_at))
        }

    def _undo_hold(self, claimed: Record, moved_at: Mapping[int, float]) -> bool:
        row = self._table.get(claimed.uid)
        if row is None or not is_held(row.record, claimed):
            return False
        now = row.record
        back = replace(
            now,
            place=Place.BUFFERED,
            owner=None,
            lease_id=None,
            train_step=None,
            deliveries=now.deliveries - (now.place is Place.LEASED),
            moved_at=moved_at.get(now.uid, now.moved_at),
        )
        self._table.replace(now, Row(back, row.group))
        return True

    def _undo_end(self, row: Row) -> bool:
        record = row.record
        now = self._table.get(record.uid)
        if now is not None:
            if now.record.place is not Place.ARCHIVED:
                return False  # it is back already
            self._archived.remove(record.uid)
            self._table.replace(now.record, Row(record, now.group))
        elif self._table.find(record.task_name, record.group_id) is not None:
            return False  # its identity was put again by hand
        else:
            self._table.add(row)
        end = check_move(take_event(record.status), Place.BUFFERED)
        assert isinstance(end, End)
        self._account(record.task_name).end(end, -record.tokens, None, groups=-1)
        if self._notes_ends:
            unsaid = group_end(record, end, None)
            for number in [number for number, noted in self._ends.items() if noted == unsaid]:
                self._drop_end(number)
        return True

    def _end(self, row: Row, end: End, reason: str | None) -> None:
        self._end_rows(row.record.task_name, (row,), end, reason)

    def _end_rows(self, task_name: str, rows: Sequence[Row], end: End, reason: str | None) -> None:
        """Book rows out, and remove or archive them."""
        if not rows:
            return
        tokens = sum([row.record.tokens for row in rows])
        self._account(task_name).end(end, tokens, reason, groups=len(rows))
        if self._notes_ends:
            for row in rows:
                self._note_end(group_end(row.record, end, reason))
        kept = [
            row for row in rows if end is End.TRAINED and (self._settings.keep_trained or self._unsaved(row.record))
        ]
        if not kept:
            self._table.remove([row.record for row in rows])
            return
        now = self._clock()
        for row in rows:
            archived = replace(
                row.record,
                place=Place.ARCHIVED,
                status=Status.ARCHIVED,
                owner=None,
                lease_id=None,
                revision=row.record.revision + 1,
                moved_at=now,
            )
            self._table.replace(row.record, Row(archived, row.group))
            self._archived.append(archived.uid)
        self._trim_archive()

    def _unsaved(self, record: Record) -> bool:
        """Whether the weights that were trained on a group could still be lost, and the group be needed again."""
        return (
            self.durable
            and self._saved_step is not None
            and record.train_step is not None
            and record.train_step > self._saved_step
        )

    def _trim_archive(self) -> None:
        while len(self._archived) > self._settings.keep_trained:
            oldest = self._table.get(self._archived[0])
            if oldest is not None and self._unsaved(oldest.record):
                return
            self._archived.popleft()
            if oldest is not None:
                self._table.remove((oldest.record,))


def claim_event(purpose: Purpose, status: Status) -> Event:
    """What claiming a group of this status does to it."""
    if purpose is Purpose.LEASE:
        return Event.LEASED
    return Event.REDRAWN if purpose is Purpose.DRAW else take_event(status)
