"""The rules of a storage that lives in this process, over any table of rows.

`LocalStorage` decides what may move, who may move it and what is counted; a `Table` only finds, keeps and counts
rows. MemoryStorage brings a table with indexes, PandasStorage a plain one. No operation awaits between its
first look and its last change, which is what makes it one step on an event loop. Use it from one loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from forebay.capacity import check_room, note_size, reservations, response_size
from forebay.errors import CursorMoved, DuplicateGroup, LostLease
from forebay.ledger import Account, End, Event, Place, Watermark, arrival_event, check_move, rewound_watermark
from forebay.policy import CHOICE_ROWS, checked_choice
from forebay.query import Node, pins, predicate
from forebay.record import Record, Row, is_fresh, number_rollouts
from forebay.rollout import Status
from forebay.staleness import EXPIRABLE, Floors
from forebay.storage.base import Arrival, Claim, Claimed, Content, Purpose, Reaped, Revision
from forebay.storage.calls import Applied, Counted, Done, Stored
from forebay.storage.contents import new_record, revised_record
from forebay.storage.local_ends import LocalEnds, claim_event

__all__ = ["LocalStorage", "claim_event"]

log = logging.getLogger(__name__)

_ANY_AGE = Floors()

_SLICE = 512
"""Records looked at before the event loop gets its turn."""


class LocalStorage(LocalEnds):
    """A storage over a table in this process."""

    async def reap(self) -> Reaped:
        if not self._deadlines:
            return Reaped({}, None)
        now = self._deadline_clock()
        returned: dict[str, int] = {}
        for owner, (_, deadline) in list(self._deadlines.items()):
            if deadline <= now:
                self._open.discard(owner)
                self._ends_of.pop(owner, None)
                for task_name, groups in self._release(owner).items():
                    returned[task_name] = returned.get(task_name, 0) + groups
        await self._finish(returned)
        # An owner that is late holds nothing any more: only those who can still lose something have a deadline.
        pending = [deadline for _, deadline in list(self._deadlines.values()) if deadline > now]
        return Reaped(returned, min(pending) - now if pending else None)

    async def issue(
        self, task_name: str, contents: Sequence[Content], *, owner: str, cursor: int, source_state: bytes | None = None
    ) -> list[Record]:
        self._check_owner(owner)
        account = self._accounts.get(task_name) or Account()
        if account.cursor != cursor:
            raise CursorMoved(task_name, cursor, account.cursor)
        for group_id in range(cursor, cursor + len(contents)):
            if self._table.find(task_name, group_id) is not None:
                raise DuplicateGroup(
                    f"group {group_id} of task {task_name!r} is to be drawn, but was put by hand; groups that are "
                    "put by hand beside a sampler must have no group_id, or a negative one"
                )
        reserved = self._reservations(contents, account)
        self._check_room(len(contents), sum(reserved))
        account = self._account(task_name)
        records = []
        for group_id, (content, size) in enumerate(zip(contents, reserved, strict=True), cursor):
            check_move(Event.DRAWN, None)
            row = self._add(task_name, group_id, content, Place.IN_FLIGHT, owner=owner, attempt=1, reserved_bytes=size)
            records.append(row.record)
        account.issued += len(contents)
        account.issued_tokens += sum(content.facts.tokens for content in contents)
        account.cursor += len(contents)
        if source_state is not None:
            account.source_state = source_state
        await self._finish((), Stored(records))
        return records

    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        returning = self._check_arrivals(arrivals, owner)
        named = {(arrival.task_name, arrival.group_id) for arrival in arrivals}
        records = [self._arrive(arrival, row, named) for arrival, row in zip(arrivals, returning, strict=True)]
        await self._finish({arrival.task_name for arrival in arrivals}, Stored(records))
        return records

    def _check_arrivals(self, arrivals: Sequence[Arrival], owner: str) -> list[Row | None]:
        """The rows in flight that the arrivals bring back (None: by hand), or an error before anything changed."""
        rows: list[Row | None] = []
        named: set[tuple[str, int]] = set()
        new_groups = new_bytes = 0
        for arrival in arrivals:
            group_id = arrival.group_id
            row = None
            if group_id is not None:
                identity = (arrival.task_name, group_id)
                if identity in named:
                    raise DuplicateGroup(f"group {group_id} of task {arrival.task_name!r} stands twice in one put")
                named.add(identity)
                row = self._returning(arrival, group_id, owner)
            rows.append(row)
            if row is None and not arrival.stale:
                new_groups += 1
                new_bytes += arrival.content.facts.bytes
        if new_groups:
            self._check_room(new_groups, new_bytes)
        return rows

    def _returning(self, arrival: Arrival, group_id: int, owner: str) -> Row | None:
        task_name, attempt = arrival.task_name, arrival.attempt
        row = self._table.find(task_name, group_id)
        if row is not None and row.record.place is Place.IN_FLIGHT:
            if attempt == row.record.attempt or (attempt is None and row.record.owner == owner):
                return row
            raise LostLease(
                f"group {group_id} of task {task_name!r} is in flight under attempt {row.record.attempt}, held by "
                f"{row.record.owner}; attempt {attempt} of {owner} no longer holds it: drop this result"
            )
        if attempt is not None:
            where = "has ended" if row is None else f"is {row.record.place}"
            raise LostLease(
                f"group {group_id} of task {task_name!r} {where}; attempt {attempt} no longer holds it: drop "
                "this result"
            )
        if row is not None:
            raise DuplicateGroup(f"group {group_id} of task {task_name!r} is already there: it is {row.record.place}")
        account = self._accounts.get(task_name)
        if account is not None and 0 <= group_id < account.cursor:
            raise DuplicateGroup(f"group {group_id} of task {task_name!r} was drawn and has already ended")
        return None

    def _arrive(self, arrival: Arrival, row: Row | None, named: Collection[tuple[str, int | None]]) -> Record:
        task_name, content = arrival.task_name, arrival.content
        account = self._account(task_name)
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
        if self._settings.max_bytes is not None and (size := response_size(content.facts)) is not None:
            note_size(account.sizes, size)
        if isinstance(target, End):
            facts = content.facts
            ended = replace(row.record, tokens=facts.tokens, status=facts.status, session_ids=facts.session_ids)
            last = Row(ended, content.group)
            self._table.replace(row.record, last)
            self._end(last, target, arrival.reason)
            return last.record
        group = self._kept(content, task_name, row.record.group_id)
        record = replace(
            revised_record(row.record, content),
            timestamp_id=self._take_timestamp_id(),
            place=Place.BUFFERED,
            owner=None,
            moved_at=self._clock(),
        )
        self._table.replace(row.record, Row(record, group))
        return record

    async def claim(self, claim: Claim) -> Claimed | None:
        chosen = self._choose(claim)
        if chosen is None:
            return None
        claimed = self._claim(claim, chosen)
        # Taking makes room; leasing and drawing let nobody go on.
        taken = [task_name for task_name, rows in claimed.items() if rows] if claim.purpose is Purpose.TAKE else ()
        await self._finish(taken)
        return claimed

    def _claim(self, claim: Claim, chosen: list[tuple[str, Status, list[Row]]]) -> Claimed:
        claimed: Claimed = {task_name: [] for task_name in claim.wants}
        for task_name, status, rows in chosen:
            claimed[task_name] += self._claim_rows(task_name, status, rows, claim)
        return claimed

    def _choose(self, claim: Claim) -> list[tuple[str, Status, list[Row]]] | None:
        self._check_owner(claim.owner)
        table, choose = self._table, self._settings.choose
        by_group = claim.purpose is Purpose.DRAW
        chosen: list[tuple[str, Status, list[Row]]] = []
        for task_name, wanted in claim.wants.items():
            if claim.whole and sum(table.count(task_name, status) for status in claim.statuses) < wanted:
                return None
            floors = self._floors(task_name, claim.floors.get(task_name))
            missing = wanted
            for status in claim.statuses:
                if missing <= 0:
                    break
                fresh = floors if status in EXPIRABLE else _ANY_AGE
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
        found = [self._table.find(task_name, group_id) for group_id in sorted(group_ids)]
        return [
            row
            for row in found
            if row is not None
            and (row.record.place, row.record.status) == (Place.BUFFERED, status)
            and is_fresh(row.record, floors)
        ]

    def _claim_rows(self, task_name: str, status: Status, rows: list[Row], claim: Claim) -> list[Row]:
        """Move buffered rows of one task and status to where the claim takes them."""
        target = check_move(claim_event(claim.purpose, status), Place.BUFFERED)
        if isinstance(target, End):
            self._end_rows(task_name, rows, target, None)
            if self._streams or self._settings.keep_trained:
                rows = [Row(row.record, tuple([state.__copy__() for state in row.group])) for row in rows]
            for row in rows:
                if row.group:
                    number_rollouts(row.group, row.record.group_id)
            return rows
        now = self._clock()
        moved = []
        for row in rows:
            record = row.record
            if target is Place.LEASED:
                changed = replace(
                    record,
                    place=target,
                    owner=claim.owner,
                    lease_id=claim.lease_id,
                    train_step=claim.train_step,
                    deliveries=record.deliveries + 1,
                    moved_at=now,
                )
            else:
                changed = replace(record, place=target, owner=claim.owner, attempt=record.attempt + 1, moved_at=now)
            row = Row(changed, row.group)
            self._table.replace(record, row)
            moved.append(row)
        return moved

    async def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None = None) -> None:
        rows = [self._table.get(uid) for uid in uids]
        lost = sum(row is None or row.record.lease_id != lease_id for row in rows)
        if lost:
            raise LostLease(
                f"{lost} of {len(uids)} groups of lease {lease_id} were taken away (its holder was thought dead, or "
                "the buffer was closed or restored): nothing was settled, and these groups are handed out again"
            )
        tasks = set()
        for row in rows:
            assert row is not None
            tasks.add(row.record.task_name)
            target = check_move(event, row.record.place)
            if isinstance(target, End):
                self._end(row, target, reason)
            else:
                self._nack(row)
        await self._finish(tasks, Done())

    async def release(self, owner: str) -> dict[str, int]:
        released = self._release(owner)
        await self._finish(released)
        return released

    def _release(self, owner: str) -> dict[str, int]:
        released: dict[str, int] = {}
        for row in self._table.held(owner):
            record = row.record
            if record.place is Place.LEASED:
                self._nack(row)
            else:
                check_move(Event.ABANDONED, record.place)
                abandoned = replace(
                    record,
                    place=Place.BUFFERED,
                    status=Status.ABORTED,
                    owner=None,
                    timestamp_id=self._take_timestamp_id(),
                    revision=record.revision + 1,
                    moved_at=self._clock(),
                )
                self._table.replace(record, Row(abandoned, row.group))
            released[record.task_name] = released.get(record.task_name, 0) + 1
        return released

    def _nack(self, row: Row) -> None:
        record = row.record
        check_move(Event.NACKED, record.place)
        back = replace(record, place=Place.BUFFERED, owner=None, lease_id=None, train_step=None, moved_at=self._clock())
        self._table.replace(record, Row(back, row.group))

    async def set_watermark(self, watermarks: Mapping[str, Watermark]) -> None:
        moved = []
        for task_name, watermark in watermarks.items():
            account = self._account(task_name)
            if account.watermark is not None and account.watermark.train_step > watermark.train_step:
                watermark = replace(watermark, train_step=account.watermark.train_step)
            if account.watermark != watermark:
                account.watermark = watermark
                moved.append(task_name)
        await self._finish(moved)

    async def due(self, task_name: str, statuses: Collection[Status], limit: int) -> list[Row]:
        floors = self._floors(task_name, None)
        rows: list[Row] = []
        for status in statuses:
            if len(rows) < limit:
                rows += self._table.stale(task_name, status, floors, limit - len(rows))
        return await self._loaded(rows) if rows else rows

    async def revise(self, revisions: Sequence[Revision]) -> list[bool]:
        tasks = set()
        applied = []
        for revision in revisions:
            row = self._table.get(revision.uid)
            current = (
                row is not None and row.record.revision == revision.revision and row.record.place is Place.BUFFERED
            )
            applied.append(current)
            if not current:
                continue
            assert row is not None
            record = row.record
            tasks.add(record.task_name)
            if revision.content is None:
                target = check_move(Event.STALE, record.place)
                assert isinstance(target, End)
                self._end(row, target, "stale")
            else:
                account = self._account(record.task_name)
                account.reset_tokens += max(0, record.tokens - revision.content.facts.tokens)
                group = self._kept(revision.content, record.task_name, record.group_id)
                self._table.replace(record, Row(revised_record(record, revision.content), group))
        await self._finish(tasks, Applied(applied))
        return applied

    async def discard(self, node: Node, reason: str) -> dict[str, int]:
        matches = predicate(node)
        discarded: dict[str, int] = {}
        for looked_at, uid in enumerate(self._table.candidates(pins(node) | {"place": frozenset({Place.BUFFERED})})):
            if looked_at % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            row = self._table.get(uid)
            if row is None or row.record.place is not Place.BUFFERED or not matches(row.record):
                continue
            target = check_move(Event.DISCARDED, row.record.place)
            assert isinstance(target, End)
            self._end(row, target, reason)
            task_name = row.record.task_name
            discarded[task_name] = discarded.get(task_name, 0) + 1
        await self._finish(discarded, Counted(discarded))
        return discarded

    async def set_priority(self, priorities: Mapping[int, float]) -> int:
        changed = 0
        for uid, priority in priorities.items():
            row = self._table.get(uid)
            if row is not None:
                self._table.replace(row.record, Row(replace(row.record, priority=priority), row.group))
                changed += 1
        await self._finish(())
        return changed

    async def saved(self, model_step: int) -> None:
        self._saved_step = model_step
        self._trim_archive()
        await self._finish(())

    async def saved_step(self) -> int | None:
        return self._saved_step

    async def rewind(self, model_step: int) -> dict[str, int]:
        archived = [row for uid in self._archived if (row := self._table.get(uid)) is not None]
        lost = [row for row in archived if row.record.train_step is not None and row.record.train_step > model_step]
        rewound: dict[str, int] = {}
        for row in await self._loaded(lost) if lost else ():
            record = row.record
            check_move(Event.REWOUND, record.place)
            self._account(record.task_name).end(End.TRAINED, -record.tokens, None, groups=-1)
            back = replace(
                record,
                place=Place.BUFFERED,
                status=self._status_of(row),
                train_step=None,
                revision=record.revision + 1,
                moved_at=self._clock(),
            )
            self._table.replace(record, Row(back, row.group))
            self._archived.remove(record.uid)
            rewound[record.task_name] = rewound.get(record.task_name, 0) + 1
        for account in self._accounts.values():
            account.watermark = rewound_watermark(account.watermark, model_step)
        self._saved_step = model_step
        await self._finish(rewound)
        return rewound

    def _reservations(self, contents: Sequence[Content], account: Account) -> list[int]:
        if self._settings.max_bytes is None:
            return [0] * len(contents)
        in_flight = sum(self._table.places(name, tokens=False).get(Place.IN_FLIGHT, 0) for name in self._accounts)
        prompts = [content.facts for content in contents]
        return reservations(prompts, account.sizes, self._settings, self._table.usage(), in_flight)

    def _check_room(self, groups: int, size: int) -> None:
        if self._settings.max_groups is not None or self._settings.max_bytes is not None:
            check_room(self._table.usage(), self._settings, groups, size)

    def _hand_id(self, task_name: str, account: Account, named: Collection[tuple[str, int | None]]) -> int:
        # A user may have put negative ids of its own, earlier or in this very call.
        while (task_name, account.next_hand_id) in named or self._table.find(task_name, account.next_hand_id):
            account.next_hand_id -= 1
        account.next_hand_id -= 1
        return account.next_hand_id + 1

    def _take_timestamp_id(self) -> int:
        self._next_timestamp_id += 1
        return self._next_timestamp_id - 1

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
        group = self._kept(content, task_name, group_id)
        record = new_record(
            content,
            uid=self._next_uid,
            timestamp_id=self._take_timestamp_id(),
            task_name=task_name,
            group_id=group_id,
            place=place,
            now=self._clock(),
            owner=owner,
            attempt=attempt,
            reserved_bytes=reserved_bytes,
        )
        self._next_uid += 1
        row = Row(record, group)
        self._table.add(row)
        return row
