"""The state of a storage that lives in this process: rows in a table, accounts, owners, the archive.

`Engine` decides which rows may move, which owner may move them and what is counted; a `Table` only finds, keeps and
counts rows. Every method is synchronous, so each is one step on an event loop. Methods that are named like operations
of the contract are these operations: the storage around the engine calls them, makes the change durable, and calls the
listeners for the tasks in `changed`. `_keep`, `_status_of` and `_handed` are the places where the payload matters. Use
an engine from one event loop.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from forebay.core.capacity import Settings, check_room, note_size, response_size
from forebay.core.ledger import (
    Account,
    Clock,
    End,
    Event,
    GroupEnd,
    Place,
    Record,
    Row,
    arrival_event,
    check_move,
    group_end,
    identify,
    is_fresh,
    number_rollouts,
    take_event,
)
from forebay.core.policy import CHOICE_ROWS, checked_choice
from forebay.core.rollout import Group, Status, group_status
from forebay.core.staleness import EXPIRABLE, NO_FLOORS, Floors
from forebay.errors import BufferClosed, CursorMoved
from forebay.storage import rules
from forebay.storage.base import Arrival, Claim, Claimed, Draw, Purpose, Rows, Share
from forebay.storage.idempotency import is_held, taken_for_good
from forebay.storage.local.owners import Outbox, Owners
from forebay.storage.local.table import Archive, Table
from forebay.storage.values import Content, Reaped, Revision

Chosen = list[tuple[str, Status, list[Row]]]


class Engine:
    """Rows, accounts and owners. `durable`: trained groups are archived until their weights are saved."""

    def __init__(
        self, make_table: Callable[[Settings], Table], *, durable: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        self.settings = Settings()
        self.table = make_table(self.settings)
        self.accounts: dict[str, Account] = {}
        self.next_uid = 1
        self.next_timestamp_id = 1
        self.archive = Archive(durable=durable)
        self.owners = Owners(clock)
        self.outbox = Outbox(bounded=not durable)
        self.streams = 0  # open snapshots; they still see groups that have left
        self._changed: dict[str, None] = {}
        self.make_table = make_table

    def changed(self) -> list[str]:
        """The tasks whose waiters may continue since the last call."""
        changed, self._changed = self._changed, {}
        return list(changed)

    def _change(self, tasks: Iterable[str]) -> None:
        self._changed.update(dict.fromkeys(tasks))

    def adopt(
        self, table: Table, accounts: Mapping[str, Account], archived: deque[int], next_uid: int, next_timestamp_id: int
    ) -> None:
        """Replace rows and accounts by restored ones."""
        self.table, self.archive.uids = table, archived
        self.accounts = rules.restored_accounts(accounts, self.accounts)
        self.next_uid, self.next_timestamp_id = next_uid, next_timestamp_id
        self._change(accounts)

    # --- payloads -------------------------------------------------------------------------------------

    def _keep(self, record: Record, content: Content) -> Group:
        """The payload of a row that is stored."""
        identify(content.group, record.task_name, record.group_id)
        return content.group

    def _status_of(self, row: Row) -> Status:
        """The status that the samples of a row give it."""
        return group_status(row.group)

    def _handed(self, rows: list[Row]) -> list[Row]:
        """Rows that were taken for good, with groups that the caller may change."""
        if self.streams or self.settings.keep_trained:
            rows = [Row(row.record, tuple([state.__copy__() for state in row.group])) for row in rows]
        for row in rows:
            if row.group:
                number_rollouts(row.group, row.record.group_id)
        return rows

    # --- owners ---------------------------------------------------------------------------------------

    def open(self, owner: str, settings: Settings, lease_s: float | None) -> None:
        if not rules.same_settings(settings, self.settings):
            if self.owners.open:
                raise rules.other_settings("this storage", self.settings, settings)
            rows = self.table.rows()
            self.settings, self.table = settings, self.make_table(settings)
            for row in rows:
                self.table.add(row)
        self.owners.enter(owner, lease_s)

    def close(self, owner: str) -> None:
        self.owners.leave(owner)
        self.release(owner)
        self.outbox.release(owner)

    def _check_owner(self, owner: str) -> None:
        if owner in self.owners.closed:
            raise BufferClosed(f"{owner} was closed, and can no longer hold groups")

    def reap(self) -> Reaped:
        if not self.owners.deadlines:
            return Reaped({}, None)
        late, next_s = self.owners.late()
        returned: Counter[str] = Counter()
        for owner in late:
            self.owners.open.discard(owner)
            self.outbox.release(owner)
            returned.update(self.release(owner))
        return Reaped(dict(returned), next_s)

    def release(self, owner: str) -> dict[str, int]:
        released: Counter[str] = Counter()
        for row in self.table.held(owner):
            record = row.record
            if record.place is Place.LEASED:
                self._nack(row)
            else:
                check_move(Event.ABANDONED, record.place)
                abandoned = rules.abandoned_record(record, self._take_timestamp_id(), self.clock())
                self.table.replace(record, Row(abandoned, row.group))
            released[record.task_name] += 1
        self._change(released)
        return dict(released)

    # --- arriving -------------------------------------------------------------------------------------

    def issue(self, task_name: str, contents: Sequence[Content], draw: Draw) -> list[Record]:
        self._check_owner(draw.owner)
        account, cursor = self.accounts.get(task_name) or Account(), draw.cursor
        contents = contents[: self._share_left(draw.share, task_name)]
        if account.cursor != cursor:
            raise CursorMoved(task_name, cursor, account.cursor)
        for taken in (n for n in range(cursor, cursor + len(contents)) if self.table.find(task_name, n) is not None):
            raise rules.drawn_by_hand(task_name, taken)
        in_flight = sum(self.table.places(name, tokens=False).get(Place.IN_FLIGHT, 0) for name in self.accounts)
        reserved = rules.fitting(contents, account.sizes, self.table.usage(), self.settings, in_flight)
        if not reserved:
            return []
        account = self.account(task_name)
        records = []
        for group_id, (content, size) in enumerate(zip(contents, reserved, strict=False), cursor):
            check_move(Event.DRAWN, None)
            row = self._add(
                task_name, group_id, content, Place.IN_FLIGHT, owner=draw.owner, attempt=1, reserved_bytes=size
            )
            records.append(row.record)
            account.issued_tokens += content.facts.tokens
        account.issued += len(records)
        account.cursor += len(records)
        account.source_state = account.source_state if draw.source_state is None else draw.source_state
        return records

    def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        rows = self._returning(arrivals, owner)
        named = {(arrival.task_name, arrival.group_id) for arrival in arrivals}
        records = [self._arrive(arrival, row, named) for arrival, row in zip(arrivals, rows, strict=True)]
        self._change(arrival.task_name for arrival in arrivals)
        return records

    def _returning(self, arrivals: Sequence[Arrival], owner: str) -> list[Row | None]:
        """The rows in flight that the arrivals bring back (None: by hand), or an error before anything changed."""
        rows: list[Row | None] = []
        named: set[tuple[str, int]] = set()
        new_bytes: list[int] = []
        for arrival in arrivals:
            group_id, row = arrival.group_id, None
            if group_id is not None:
                identity = (arrival.task_name, group_id)
                if identity in named:
                    raise rules.duplicate_in_put(*identity)
                named.add(identity)
                row = self.table.find(*identity)
                account = self.accounts.get(arrival.task_name)
                if not rules.check_return(arrival, group_id, None if row is None else row.record, account, owner):
                    row = None
            rows.append(row)
            if row is None and not arrival.stale:
                new_bytes.append(arrival.content.facts.bytes)
        if new_bytes:
            check_room(self.table.usage(), self.settings, len(new_bytes), sum(new_bytes))
        return rows

    def _arrive(self, arrival: Arrival, row: Row | None, named: Collection[tuple[str, int | None]]) -> Record:
        task_name, content = arrival.task_name, arrival.content
        account = self.account(task_name)
        place = None if row is None else row.record.place
        issued_tokens, reset_tokens = arrival.tokens(0 if row is None else row.record.tokens)
        account.issued_tokens += issued_tokens
        account.reset_tokens += reset_tokens
        account.failures += arrival.failed
        target = check_move(arrival_event(place, content.facts.status, stale=arrival.stale), place)
        if row is None:
            group_id = self._hand_id(task_name, account, named) if arrival.group_id is None else arrival.group_id
            account.issued += 1
            row = self._add(task_name, group_id, content, Place.BUFFERED)
            if isinstance(target, End):
                self._end(row, target, arrival.reason)
            return row.record
        if self.settings.max_bytes is not None and (size := response_size(content.facts)) is not None:
            note_size(account.sizes, size)
        if isinstance(target, End):
            last = Row(rules.ended_record(row.record, content), row.group)
            self.table.replace(row.record, last)
            self._end(last, target, arrival.reason)
            return last.record
        account.completed += content.facts.status is Status.COMPLETED
        record = rules.returned_record(row.record, content, self._take_timestamp_id(), self.clock())
        self.table.replace(row.record, Row(record, self._keep(record, content)))
        return record

    def _hand_id(self, task_name: str, account: Account, named: Collection[tuple[str, int | None]]) -> int:
        # A user may have put negative ids, earlier or in this very call.
        while (task_name, account.next_hand_id) in named or self.table.find(task_name, account.next_hand_id):
            account.next_hand_id -= 1
        account.next_hand_id -= 1
        return account.next_hand_id + 1

    def _take_timestamp_id(self) -> int:
        self.next_timestamp_id += 1
        return self.next_timestamp_id - 1

    def _add(self, task_name: str, group_id: int, content: Content, place: Place, **held: Any) -> Row:
        record = rules.new_record(
            content,
            uid=self.next_uid,
            timestamp_id=self._take_timestamp_id(),
            task_name=task_name,
            group_id=group_id,
            place=place,
            now=self.clock(),
            **held,
        )
        self.next_uid += 1
        row = Row(record, self._keep(record, content))
        self.table.add(row)
        return row

    # --- claiming -------------------------------------------------------------------------------------

    def claim(self, claim: Claim) -> Claimed:
        self._check_owner(claim.owner)
        self.reap()
        self.advance(claim.clocks)
        chosen = self._choose(claim)
        rows: Rows | None = None
        if chosen is not None:
            rows = {task_name: [] for task_name in claim.wants}
            for task_name, status, found in chosen:
                rows[task_name] += self._claim_rows(task_name, status, found, claim)
            if claim.purpose is Purpose.TAKE:  # taking frees capacity; leasing and drawing let no waiter continue
                self._change(task_name for task_name, taken in rows.items() if taken)
        limits = {task_name: self.accounts[task_name].limits for task_name in claim.wants if task_name in self.accounts}
        return Claimed(rows, tuple([task_name for task_name in claim.wants if self._is_due(task_name)]), limits)

    def _choose(self, claim: Claim) -> Chosen | None:
        """The rows of a claim by task and status; None if `whole` and some are missing."""
        table, choose = self.table, self.settings.choose
        by_group = claim.purpose is Purpose.DRAW
        chosen: Chosen = []
        for task_name, wanted in claim.wants.items():
            if claim.whole and sum(table.count(task_name, status) for status in claim.statuses) < wanted:
                return None
            floors = self._floors(task_name)
            left = self._share_left(claim.share, task_name)
            missing = wanted if left is None else min(wanted, left)
            for status in claim.statuses:
                if missing <= 0:
                    break
                fresh = floors if status in EXPIRABLE else NO_FLOORS
                if claim.group_ids:
                    rows = self._named(task_name, status, claim.group_ids, fresh)[:missing]
                elif choose is None or by_group:
                    rows = table.first(task_name, status, missing, fresh, by_group=by_group)
                else:
                    offered = table.first(task_name, status, CHOICE_ROWS, fresh, by_group=False)
                    by_uid = {row.record.uid: row for row in offered}
                    uids = checked_choice(choose, [row.record for row in offered], missing)
                    rows = [by_uid[uid] for uid in uids]
                missing -= len(rows)
                chosen.append((task_name, status, rows))
            if claim.whole and missing > 0:
                return None
        return chosen

    def _named(self, task_name: str, status: Status, group_ids: Sequence[int], floors: Floors) -> list[Row]:
        """Those of these groups that are buffered with this status and fresh, in order of group_id."""
        found = [row for group_id in sorted(group_ids) if (row := self.table.find(task_name, group_id)) is not None]
        state = (Place.BUFFERED, status)
        return [r for r in found if (r.record.place, r.record.status) == state and is_fresh(r.record, floors)]

    def _share_left(self, share: Share | None, task_name: str) -> int | None:
        if share is None:
            return None
        account, places = self.accounts.get(task_name) or Account(), self.table.places(task_name, tokens=False)
        held = places.get(Place.LEASED, 0) + places.get(Place.IN_FLIGHT, 0) + account.ended.get(End.TRAINED, 0)
        fresh = self.table.count_fresh(task_name, Status.COMPLETED, account.floors)
        return rules.share_left(share, task_name, account.epoch, held + fresh)

    def _is_due(self, task_name: str) -> bool:
        floors = self._floors(task_name)
        return floors is not NO_FLOORS and any(self.table.stale(task_name, status, floors, 1) for status in EXPIRABLE)

    def _claim_rows(self, task_name: str, status: Status, rows: list[Row], claim: Claim) -> list[Row]:
        target = check_move(rules.claim_event(claim.purpose, status), Place.BUFFERED)
        if isinstance(target, End):
            self._end_rows(task_name, rows, target, None)
            return self._handed(rows)
        now = self.clock()
        moved = [Row(rules.claimed_record(row.record, claim, now), row.group) for row in rows]
        for row, claimed in zip(rows, moved, strict=True):
            self.table.replace(row.record, claimed)
        return moved

    def undo(self, claim: Claim, rows: Rows) -> None:
        claimed = [row for found in rows.values() for row in found]
        self._change([row.record.task_name for row in claimed if self._undo(row)])

    def _undo(self, row: Row) -> bool:
        """Put a claimed row back, unless it has moved since."""
        if taken_for_good(row.record):
            return self._undo_end(row)
        now = self.table.get(row.record.uid)
        if now is None or not is_held(now.record, row.record):
            return False
        self.table.replace(now.record, Row(rules.unclaimed_record(now.record), now.group))
        return True

    def _undo_end(self, row: Row) -> bool:
        record = row.record
        if not self.archive.take_back(self.table, row):
            return False
        end = rules.end_of(take_event(record.status), Place.BUFFERED)
        self.account(record.task_name).end(end, -record.tokens, None, groups=-1)
        self.outbox.retract(group_end(record, end, None))
        return True

    # --- leaving --------------------------------------------------------------------------------------

    def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None = None) -> None:
        rows = [row for uid in uids if (row := self.table.get(uid)) is not None and row.record.lease_id == lease_id]
        if len(rows) < len(uids):
            raise rules.lost_lease(len(uids) - len(rows), len(uids), lease_id)
        for row in rows:
            target = check_move(event, row.record.place)
            if isinstance(target, End):
                self._end(row, target, reason)
            else:
                self._nack(row)
        self._change(row.record.task_name for row in rows)

    def _nack(self, row: Row) -> None:
        check_move(Event.NACKED, row.record.place)
        self.table.replace(row.record, Row(rules.nacked_record(row.record, self.clock()), row.group))

    def revise(self, revisions: Sequence[Revision]) -> list[bool]:
        applied = []
        for revision in revisions:
            row = self.table.get(revision.uid)
            if row is None or row.record.revision != revision.revision or row.record.place is not Place.BUFFERED:
                applied.append(False)
                continue
            applied.append(True)
            record = row.record
            self._change((record.task_name,))
            if revision.content is None:
                self._end(row, rules.end_of(Event.STALE, record.place), "stale")
            else:
                account = self.account(record.task_name)
                account.reset_tokens += max(0, record.tokens - revision.content.facts.tokens)
                revised = rules.revised_record(record, revision.content)
                self.table.replace(record, Row(revised, self._keep(revised, revision.content)))
        return applied

    def discard_row(self, row: Row, reason: str) -> None:
        """End a buffered row as discarded."""
        self._end(row, rules.end_of(Event.DISCARDED, row.record.place), reason)
        self._change((row.record.task_name,))

    def fail(self, reasons: Mapping[int, str]) -> dict[str, int]:
        failed: Counter[str] = Counter()
        for uid, reason in reasons.items():
            row = self.table.get(uid)
            if row is not None and row.record.place is Place.ARCHIVED:  # it has already ended
                self.archive.uids.remove(uid)
                self.table.remove((row.record,))
            elif row is not None:
                self._end(row, End.FAILED, reason)
                failed[row.record.task_name] += 1
        self._change(failed)
        return dict(failed)

    def _end(self, row: Row, end: End, reason: str | None) -> None:
        self._end_rows(row.record.task_name, (row,), end, reason)

    def _end_rows(self, task_name: str, rows: Sequence[Row], end: End, reason: str | None) -> None:
        """Book rows out, and remove or archive them."""
        if not rows:
            return
        tokens = sum([row.record.tokens for row in rows])
        self.account(task_name).end(end, tokens, reason, groups=len(rows))
        if self.outbox.noting:
            for row in rows:
                self.outbox.note(group_end(row.record, end, reason))
        keep, archive = self.settings.keep_trained, self.archive
        kept = keep or (archive.is_used and any(archive.needs(row.record) for row in rows))
        if end is not End.TRAINED or not kept:
            self.table.remove([row.record for row in rows])
            return
        now = self.clock()
        for row in rows:
            self.table.replace(row.record, Row(rules.archived_record(row.record, now), row.group))
            archive.uids.append(row.record.uid)
        archive.trim(self.table, keep)

    # --- after the end --------------------------------------------------------------------------------

    def saved(self, model_step: int, tasks: Collection[str] | None = None) -> None:
        named = {task_name: self.account(task_name) for task_name in (self.accounts if tasks is None else tasks)}
        self.archive.save(model_step, named, whole=tasks is None)
        self.archive.trim(self.table, self.settings.keep_trained)

    def rewind_rows(self, rows: Sequence[Row], model_step: int, tasks: Collection[str] | None) -> dict[str, int]:
        """Bring archived rows (with their payload) back; see `Storage.rewind`."""
        for row in rows:
            record = row.record
            check_move(Event.REWOUND, record.place)
            self.account(record.task_name).end(End.TRAINED, -record.tokens, None, groups=-1)
            back = rules.rewound_record(record, self._status_of(row), self.clock())
            self.table.replace(record, Row(back, row.group))
            self.archive.uids.remove(record.uid)
        for task_name in self.accounts if tasks is None else tasks:
            self.account(task_name).rewind(model_step)
        self.saved(model_step, tasks)
        self._change(row.record.task_name for row in rows)
        return dict(Counter(row.record.task_name for row in rows))

    def note_ends(self) -> None:
        self.outbox.noting = True

    def ends(self, owner: str, limit: int) -> list[tuple[int, GroupEnd]]:
        self._check_owner(owner)
        return self.outbox.take(owner, limit)

    def forget_ends(self, numbers: Sequence[int]) -> None:
        self.outbox.forget(numbers)

    # --- clocks and priorities ------------------------------------------------------------------------

    def account(self, task_name: str) -> Account:
        """The account of a task, made if there is none."""
        return self.accounts.get(task_name) or self.accounts.setdefault(task_name, Account())

    def _floors(self, task_name: str) -> Floors:
        account = self.accounts.get(task_name)
        return NO_FLOORS if account is None else account.floors

    def advance(self, clocks: Mapping[str, Clock]) -> None:
        self._change([task_name for task_name, clock in clocks.items() if self.account(task_name).advance(clock)])

    def write_plan(self, task_name: str, content: bytes, *, revision: int) -> bool:
        account = self.account(task_name)
        if account.plan_revision != revision:
            return False
        account.plan, account.plan_revision = content, revision + 1
        self._change((task_name,))
        return True

    def set_priority(self, priorities: Mapping[int, float]) -> int:
        rows = [(row, priority) for uid, priority in priorities.items() if (row := self.table.get(uid)) is not None]
        for row, priority in rows:
            self.table.replace(row.record, Row(replace(row.record, priority=priority), row.group))
        return len(rows)
