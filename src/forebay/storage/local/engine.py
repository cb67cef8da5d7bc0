"""The state of a storage that lives in this process: rows in a table, accounts, owners, the archive.

`Engine` decides what may move, who may move it and what is counted; a `Table` only finds, keeps and counts rows. Every
method is synchronous, so each is one step on an event loop, and returns or notes the tasks that changed: `changed` is
taken by the storage around the engine, which makes the change durable and calls the listeners. `_keep`, `_status_of`
and `_handed` are the places where the payload matters. Use an engine from one event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from forebay.core.capacity import Settings, check_room, note_size, response_size
from forebay.core.ledger import (
    Account,
    Clock,
    End,
    Event,
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
from forebay.core.query import Node, predicate
from forebay.core.rollout import Group, Status, group_status
from forebay.core.staleness import EXPIRABLE, NO_FLOORS, Floors
from forebay.errors import BufferClosed, CursorMoved, InvalidConfig
from forebay.storage.base import (
    Arrival,
    Claim,
    Claimed,
    Content,
    Holding,
    Purpose,
    Reaped,
    Revision,
    Rows,
    Summary,
    TaskSummary,
)
from forebay.storage.idempotency import is_held, taken_for_good
from forebay.storage.local.outbox import Outbox
from forebay.storage.local.table import Table
from forebay.storage.rules import (
    abandoned_record,
    archived_record,
    check_return,
    claim_event,
    claimed_record,
    copied,
    drawn_by_hand,
    duplicate_in_put,
    ended_record,
    fitting,
    lost_lease,
    nacked_record,
    new_record,
    restored_accounts,
    returned_record,
    revised_record,
    rewound_record,
    same_settings,
    unclaimed_record,
)

__all__ = ["Engine"]

_NO_TIMES: Mapping[int, float] = {}
Chosen = list[tuple[str, Status, list[Row]]]


class Engine:
    """Rows, accounts and owners. `durable`: trained groups are archived until their weights are saved."""

    def __init__(
        self, make_table: Callable[[Settings], Table], *, durable: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self.clock = clock
        # Setting the wall clock must not end leases; a clock that a test gives serves for both.
        self.deadline_clock = time.monotonic if clock is time.time else clock
        self.settings = Settings()
        self.table = make_table(self.settings)
        self.accounts: dict[str, Account] = {}
        self.next_uid = 1
        self.next_timestamp_id = 1
        self.archived: deque[int] = deque()
        self.saved_step: int | None = None  # the model step of the last checkpoint
        self.outbox = Outbox(bounded=not durable)
        self.open: set[str] = set()
        self.deadlines: dict[str, tuple[float, float]] = {}  # owner: (lease_s, deadline)
        self.streams = 0  # open snapshots; they still see groups that have left
        self._changed: dict[str, None] = {}
        self._closed: set[str] = set()
        self._durable = durable
        self._make_table = make_table

    def changed(self) -> list[str]:
        """The tasks whose waiters may continue since the last call."""
        changed, self._changed = self._changed, {}
        return list(changed)

    def _change(self, tasks: Iterable[str]) -> None:
        self._changed.update(dict.fromkeys(tasks))

    def empty_table(self) -> Table:
        """A table for rows that are to be adopted."""
        return self._make_table(self.settings)

    def adopt(
        self, table: Table, accounts: Mapping[str, Account], archived: deque[int], next_uid: int, next_timestamp_id: int
    ) -> None:
        """Replace rows and accounts by restored ones."""
        self.table, self.archived = table, archived
        self.accounts = restored_accounts(accounts, self.accounts)
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

    def configure(self, settings: Settings) -> None:
        """Use other settings; InvalidConfig while an owner has the storage open."""
        if same_settings(settings, self.settings):
            return
        if self.open:
            raise InvalidConfig(
                f"this storage is open with {self.settings}, and was to be opened with {settings}; all buffers on one "
                "storage need the same policy and limits"
            )
        rows = self.table.rows()
        self.settings = settings
        self.table = self._make_table(settings)
        for row in rows:
            self.table.add(row)

    def enter(self, owner: str, lease_s: float | None) -> None:
        """Register an owner."""
        self.open.add(owner)
        self._closed.discard(owner)
        if lease_s is None:
            self.deadlines.pop(owner, None)
        else:
            self.deadlines[owner] = (lease_s, self.deadline_clock() + lease_s)

    def leave(self, owner: str) -> None:
        """Release the groups of an owner; it can claim nothing afterwards."""
        self._closed.add(owner)
        self.release(owner)
        self.open.discard(owner)
        self.deadlines.pop(owner, None)
        self.outbox.release(owner)

    def beat(self, owner: str) -> None:
        """Renew the deadline of an owner."""
        known = self.deadlines.get(owner)
        if known is not None:
            self.deadlines[owner] = (known[0], self.deadline_clock() + known[0])

    def check_owner(self, owner: str) -> None:
        """BufferClosed for an owner that was closed."""
        if owner in self._closed:
            raise BufferClosed(f"{owner} was closed, and can hold nothing any more")

    def reap(self) -> Reaped:
        """Release the groups of owners whose deadline has passed."""
        if not self.deadlines:
            return Reaped({}, None)
        now = self.deadline_clock()
        returned: dict[str, int] = {}
        pending = []
        for owner, (_, deadline) in list(self.deadlines.items()):
            if deadline > now:
                pending.append(deadline)
                continue
            self.open.discard(owner)
            self.outbox.release(owner)
            for task_name, groups in self.release(owner).items():
                returned[task_name] = returned.get(task_name, 0) + groups
        return Reaped(returned, min(pending) - now if pending else None)

    def release(self, owner: str) -> dict[str, int]:
        """Give back the groups of an owner; groups by task."""
        released: dict[str, int] = {}
        for row in self.table.held(owner):
            record = row.record
            if record.place is Place.LEASED:
                self._nack(row)
            else:
                check_move(Event.ABANDONED, record.place)
                abandoned = abandoned_record(record, self._take_timestamp_id(), self.clock())
                self.table.replace(record, Row(abandoned, row.group))
            released[record.task_name] = released.get(record.task_name, 0) + 1
        self._change(released)
        return released

    # --- arriving -------------------------------------------------------------------------------------

    def issue(
        self, task_name: str, contents: Sequence[Content], owner: str, cursor: int, source_state: bytes | None
    ) -> list[Record]:
        """See `Storage.issue`."""
        self.check_owner(owner)
        account = self.accounts.get(task_name) or Account()
        if account.cursor != cursor:
            raise CursorMoved(task_name, cursor, account.cursor)
        for group_id in range(cursor, cursor + len(contents)):
            if self.table.find(task_name, group_id) is not None:
                raise drawn_by_hand(task_name, group_id)
        reserved = fitting(contents, account.sizes, self.table.usage(), self.settings, self._in_flight())
        if not reserved:
            return []
        account = self.account(task_name)
        records = []
        for group_id, (content, size) in enumerate(zip(contents, reserved, strict=False), cursor):
            check_move(Event.DRAWN, None)
            row = self._add(task_name, group_id, content, Place.IN_FLIGHT, owner=owner, attempt=1, reserved_bytes=size)
            records.append(row.record)
            account.issued_tokens += content.facts.tokens
        account.issued += len(records)
        account.cursor += len(records)
        if source_state is not None:
            account.source_state = source_state
        return records

    def _in_flight(self) -> int:
        return sum(self.table.places(name, tokens=False).get(Place.IN_FLIGHT, 0) for name in self.accounts)

    def put(self, arrivals: Sequence[Arrival], owner: str) -> list[Record]:
        """See `Storage.put`."""
        rows = self._returning(arrivals, owner)
        named = {(arrival.task_name, arrival.group_id) for arrival in arrivals}
        records = [self._arrive(arrival, row, named) for arrival, row in zip(arrivals, rows, strict=True)]
        self._change(arrival.task_name for arrival in arrivals)
        return records

    def _returning(self, arrivals: Sequence[Arrival], owner: str) -> list[Row | None]:
        """The rows in flight that the arrivals bring back (None: by hand), or an error before anything changed."""
        rows: list[Row | None] = []
        named: set[tuple[str, int]] = set()
        new_groups = new_bytes = 0
        for arrival in arrivals:
            group_id, row = arrival.group_id, None
            if group_id is not None:
                identity = (arrival.task_name, group_id)
                if identity in named:
                    raise duplicate_in_put(*identity)
                named.add(identity)
                row = self.table.find(*identity)
                account = self.accounts.get(arrival.task_name)
                if not check_return(arrival, group_id, None if row is None else row.record, account, owner):
                    row = None
            rows.append(row)
            if row is None and not arrival.stale:
                new_groups += 1
                new_bytes += arrival.content.facts.bytes
        if new_groups and (self.settings.max_groups is not None or self.settings.max_bytes is not None):
            check_room(self.table.usage(), self.settings, new_groups, new_bytes)
        return rows

    def _arrive(self, arrival: Arrival, row: Row | None, named: Collection[tuple[str, int | None]]) -> Record:
        task_name, content = arrival.task_name, arrival.content
        account = self.account(task_name)
        place = None if row is None else row.record.place
        issued_tokens, reset_tokens = arrival.tokens(0 if row is None else row.record.tokens)
        account.issued_tokens += issued_tokens
        account.reset_tokens += reset_tokens
        target = check_move(arrival_event(place, content.facts.status, stale=arrival.stale), place)
        if row is None:
            group_id = arrival.group_id
            if group_id is None:
                group_id = self._hand_id(task_name, account, named)
            account.issued += 1
            row = self._add(task_name, group_id, content, Place.BUFFERED)
            if isinstance(target, End):
                self._end(row, target, arrival.reason)
            return row.record
        if self.settings.max_bytes is not None and (size := response_size(content.facts)) is not None:
            note_size(account.sizes, size)
        if isinstance(target, End):
            last = Row(ended_record(row.record, content), row.group)
            self.table.replace(row.record, last)
            self._end(last, target, arrival.reason)
            return last.record
        record = returned_record(row.record, content, self._take_timestamp_id(), self.clock())
        self.table.replace(row.record, Row(record, self._keep(record, content)))
        return record

    def _hand_id(self, task_name: str, account: Account, named: Collection[tuple[str, int | None]]) -> int:
        # A user may have put negative ids of its own, earlier or in this very call.
        while (task_name, account.next_hand_id) in named or self.table.find(task_name, account.next_hand_id):
            account.next_hand_id -= 1
        account.next_hand_id -= 1
        return account.next_hand_id + 1

    def _take_timestamp_id(self) -> int:
        self.next_timestamp_id += 1
        return self.next_timestamp_id - 1

    def _add(
        self,
        task_name: str,
        group_id: int,
        content: Content,
        place: Place,
        *,
        owner: str | None = None,
        attempt: int = 0,
        reserved_bytes: int = 0,
    ) -> Row:
        record = new_record(
            content,
            uid=self.next_uid,
            timestamp_id=self._take_timestamp_id(),
            task_name=task_name,
            group_id=group_id,
            place=place,
            now=self.clock(),
            owner=owner,
            attempt=attempt,
            reserved_bytes=reserved_bytes,
        )
        self.next_uid += 1
        row = Row(record, self._keep(record, content))
        self.table.add(row)
        return row

    # --- claiming -------------------------------------------------------------------------------------

    def choose(self, claim: Claim) -> Chosen | None:
        """The rows of a claim by task and status; None if `whole` and not everything is there.

        Reaps dead owners and advances the clocks of the claim first.
        """
        self.check_owner(claim.owner)
        self.reap()
        self.advance(claim.clocks)
        table, choose = self.table, self.settings.choose
        by_group = claim.purpose is Purpose.DRAW
        chosen: Chosen = []
        for task_name, wanted in claim.wants.items():
            if claim.whole and sum(table.count(task_name, status) for status in claim.statuses) < wanted:
                return None
            floors = self._floors(task_name)
            missing = wanted
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
        found = [self.table.find(task_name, group_id) for group_id in sorted(group_ids)]
        return [
            row
            for row in found
            if row is not None
            and (row.record.place, row.record.status) == (Place.BUFFERED, status)
            and is_fresh(row.record, floors)
        ]

    def take(self, claim: Claim, chosen: Chosen | None) -> Claimed:
        """Move chosen rows to where the claim takes them."""
        rows: Rows | None = None
        if chosen is not None:
            rows = {task_name: [] for task_name in claim.wants}
            for task_name, status, found in chosen:
                rows[task_name] += self._claim_rows(task_name, status, found, claim)
            if claim.purpose is Purpose.TAKE:  # taking makes room; leasing and drawing let no waiter continue
                self._change(task_name for task_name, taken in rows.items() if taken)
        accounts = {task_name: self.accounts.get(task_name) for task_name in claim.wants}
        limits = {task_name: account.limits for task_name, account in accounts.items() if account is not None}
        return Claimed(rows, tuple([task_name for task_name in claim.wants if self._is_due(task_name)]), limits)

    def _is_due(self, task_name: str) -> bool:
        floors = self._floors(task_name)
        return floors is not NO_FLOORS and any(self.table.stale(task_name, status, floors, 1) for status in EXPIRABLE)

    def _claim_rows(self, task_name: str, status: Status, rows: list[Row], claim: Claim) -> list[Row]:
        target = check_move(claim_event(claim.purpose, status), Place.BUFFERED)
        if isinstance(target, End):
            self._end_rows(task_name, rows, target, None)
            return self._handed(rows)
        now = self.clock()
        moved = []
        for row in rows:
            claimed = Row(claimed_record(row.record, claim, now), row.group)
            self.table.replace(row.record, claimed)
            moved.append(claimed)
        return moved

    def undo(self, rows: Rows, moved_at: Mapping[int, float] = _NO_TIMES) -> None:
        """Put back claimed rows that have not moved since. `moved_at`: from before the claim."""
        self._change(
            row.record.task_name
            for claimed in rows.values()
            for row in claimed
            if (self._undo_end(row) if taken_for_good(row.record) else self._undo_hold(row.record, moved_at))
        )

    def _undo_hold(self, claimed: Record, moved_at: Mapping[int, float]) -> bool:
        row = self.table.get(claimed.uid)
        if row is None or not is_held(row.record, claimed):
            return False
        now = row.record
        back = unclaimed_record(now, moved_at.get(now.uid, now.moved_at))
        self.table.replace(now, Row(back, row.group))
        return True

    def _undo_end(self, row: Row) -> bool:
        record = row.record
        now = self.table.get(record.uid)
        if now is not None:
            if now.record.place is not Place.ARCHIVED:
                return False  # it is back already
            self.archived.remove(record.uid)
            self.table.replace(now.record, Row(record, now.group))
        elif self.table.find(record.task_name, record.group_id) is not None:
            return False  # its identity was put again by hand
        else:
            self.table.add(row)
        end = check_move(take_event(record.status), Place.BUFFERED)
        assert isinstance(end, End)
        self.account(record.task_name).end(end, -record.tokens, None, groups=-1)
        self.outbox.retract(group_end(record, end, None))
        return True

    # --- leaving --------------------------------------------------------------------------------------

    def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None) -> None:
        """See `Storage.settle`."""
        rows = [row for uid in uids if (row := self.table.get(uid)) is not None and row.record.lease_id == lease_id]
        if len(rows) < len(uids):
            raise lost_lease(len(uids) - len(rows), len(uids), lease_id)
        for row in rows:
            target = check_move(event, row.record.place)
            if isinstance(target, End):
                self._end(row, target, reason)
            else:
                self._nack(row)
        self._change(row.record.task_name for row in rows)

    def _nack(self, row: Row) -> None:
        record = row.record
        check_move(Event.NACKED, record.place)
        self.table.replace(record, Row(nacked_record(record, self.clock()), row.group))

    def revise(self, revisions: Sequence[Revision]) -> list[bool]:
        """See `Storage.revise`."""
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
                target = check_move(Event.STALE, record.place)
                assert isinstance(target, End)
                self._end(row, target, "stale")
            else:
                account = self.account(record.task_name)
                account.reset_tokens += max(0, record.tokens - revision.content.facts.tokens)
                revised = revised_record(record, revision.content)
                self.table.replace(record, Row(revised, self._keep(revised, revision.content)))
        return applied

    def discard(self, uids: Iterable[int], node: Node, reason: str, discarded: dict[str, int]) -> None:
        """End those of these rows that are buffered and match; adds to the counts by task."""
        matches = predicate(node)
        for uid in uids:
            row = self.table.get(uid)
            if row is None or row.record.place is not Place.BUFFERED or not matches(row.record):
                continue
            target = check_move(Event.DISCARDED, row.record.place)
            assert isinstance(target, End)
            self._end(row, target, reason)
            task_name = row.record.task_name
            discarded[task_name] = discarded.get(task_name, 0) + 1
            self._change((task_name,))

    def fail(self, reasons: Mapping[int, str]) -> dict[str, int]:
        """See `Storage.fail`."""
        failed: dict[str, int] = {}
        for uid, reason in reasons.items():
            row = self.table.get(uid)
            if row is None:
                continue
            record = row.record
            if record.place is Place.ARCHIVED:  # it has already ended
                self.archived.remove(uid)
                self.table.remove((record,))
            else:
                self._end(row, End.FAILED, reason)
                failed[record.task_name] = failed.get(record.task_name, 0) + 1
        self._change(failed)
        return failed

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
        if end is not End.TRAINED or not any(self.settings.keep_trained or self._unsaved(row.record) for row in rows):
            self.table.remove([row.record for row in rows])
            return
        now = self.clock()
        for row in rows:
            archived = archived_record(row.record, now)
            self.table.replace(row.record, Row(archived, row.group))
            self.archived.append(archived.uid)
        self._trim_archive()

    # --- the archive ----------------------------------------------------------------------------------

    def _unsaved(self, record: Record) -> bool:
        """Whether the weights that were trained on a group could still be lost, and the group be needed again."""
        return (
            self._durable
            and self.saved_step is not None
            and record.train_step is not None
            and record.train_step > self.saved_step
        )

    def _trim_archive(self) -> None:
        while len(self.archived) > self.settings.keep_trained:
            oldest = self.table.get(self.archived[0])
            if oldest is not None and self._unsaved(oldest.record):
                return
            self.archived.popleft()
            if oldest is not None:
                self.table.remove((oldest.record,))

    def saved(self, model_step: int) -> None:
        """See `Storage.saved`."""
        self.saved_step = model_step
        self._trim_archive()

    def trained_after(self, model_step: int) -> list[Row]:
        """The archived rows that a rewind to these weights brings back."""
        archived = [row for uid in self.archived if (row := self.table.get(uid)) is not None]
        return [row for row in archived if row.record.train_step is not None and row.record.train_step > model_step]

    def rewind(self, rows: Sequence[Row], model_step: int) -> dict[str, int]:
        """Bring archived rows (with their payload) back; see `Storage.rewind`."""
        rewound: dict[str, int] = {}
        for row in rows:
            record = row.record
            check_move(Event.REWOUND, record.place)
            self.account(record.task_name).end(End.TRAINED, -record.tokens, None, groups=-1)
            back = rewound_record(record, self._status_of(row), self.clock())
            self.table.replace(record, Row(back, row.group))
            self.archived.remove(record.uid)
            rewound[record.task_name] = rewound.get(record.task_name, 0) + 1
        for account in self.accounts.values():
            account.rewind(model_step)
        self.saved_step = model_step
        self._change(rewound)
        return rewound

    # --- clocks, priorities, reads --------------------------------------------------------------------

    def account(self, task_name: str) -> Account:
        """The account of a task, made if there is none."""
        account = self.accounts.get(task_name)
        if account is None:
            account = self.accounts[task_name] = Account()
        return account

    def _floors(self, task_name: str) -> Floors:
        account = self.accounts.get(task_name)
        return NO_FLOORS if account is None else account.floors

    def advance(self, clocks: Mapping[str, Clock]) -> None:
        """See `Storage.advance`."""
        self._change([task_name for task_name, clock in clocks.items() if self.account(task_name).advance(clock)])

    def due(self, task_name: str, statuses: Collection[Status], limit: int) -> list[Row]:
        """See `Storage.due`."""
        floors = self._floors(task_name)
        rows: list[Row] = []
        for status in statuses:
            if len(rows) < limit:
                rows += self.table.stale(task_name, status, floors, limit - len(rows))
        return rows

    def set_priority(self, priorities: Mapping[int, float]) -> int:
        """See `Storage.set_priority`."""
        rows = [(row, priority) for uid, priority in priorities.items() if (row := self.table.get(uid)) is not None]
        for row, priority in rows:
            self.table.replace(row.record, Row(replace(row.record, priority=priority), row.group))
        return len(rows)

    def summary(self, tasks: Collection[str] | None, holdings: bool) -> Summary:
        """See `Storage.summary`."""
        names = self.accounts if tasks is None else [name for name in tasks if name in self.accounts]
        return Summary(
            {task_name: self._task_summary(task_name) for task_name in names},
            self.table.usage(),
            self._holdings() if holdings else (),
            self.saved_step,
        )

    def _task_summary(self, task_name: str) -> TaskSummary:
        table, account = self.table, self.accounts[task_name]
        statuses = {status: n for status in Status if (n := table.count(task_name, status))}
        fresh = statuses
        floors = account.floors
        if floors is not NO_FLOORS:
            fresh = dict(statuses)
            for status in EXPIRABLE:
                if status in fresh:
                    fresh[status] = table.count_fresh(task_name, status, floors)
        places, tokens = (table.places(task_name, tokens=tokens) for tokens in (False, True))
        return TaskSummary(copied(account), statuses, fresh, places, tokens)

    def _holdings(self) -> list[Holding]:
        now = self.clock()
        held: dict[tuple[str, Place, str], list[Record]] = {}
        for owner in self.table.owners():
            for row in self.table.held(owner):
                held.setdefault((row.record.task_name, row.record.place, owner), []).append(row.record)
        holdings = []
        for (task_name, place, owner), records in held.items():
            oldest = min(records, key=lambda record: (record.moved_at, record.uid))
            age_s = max(0.0, now - oldest.moved_at)
            holdings.append(Holding(task_name, place, owner, len(records), oldest.group_id, age_s))
        return sorted(holdings, key=lambda holding: -holding.oldest_age_s)
