"""MemoryStorage: groups in this process, found through indexes only.

The buffered groups of one task and status have an index for each order: that of the policy, of their oldest model step,
of their newest trainable step, and (for those that can be drawn again) of their group_id. So the cost
of a claim grows with the claimed groups, that of expiry with the expired ones, and counting is free at any size.
Rows are not tracked by Python's cycle collector: its pauses stay short at a million groups.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, TypeAlias

from forebay.core.capacity import Usage
from forebay.core.ledger import Place, Record, Row, is_fresh
from forebay.core.policy import Order, order_key
from forebay.core.query import Pins
from forebay.core.rollout import DRAWABLE, Status
from forebay.core.staleness import EXPIRABLE, Floors
from forebay.storage.local.engine import Engine
from forebay.storage.local.storage import LocalStorage
from forebay.storage.local.table import Table

Key: TypeAlias = Any


class SortedKeys:
    """Distinct keys in sorted order.

    >>> keys = SortedKeys([31, 12])
    >>> keys.add(23)
    >>> list(keys), keys.count_below(20)
    ([12, 23, 31], 1)
    """

    LOAD = 512
    """Blocks hold up to 2 * LOAD keys. Tests make it tiny, so that edges appear early."""

    __slots__ = ("_blocks", "_lasts", "_size")

    def __init__(self, keys: list[Key] | None = None) -> None:
        self._blocks: list[list[Key]] = []
        self._lasts: list[Key] = []
        self._size = 0
        for key in keys or ():
            self.add(key)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Key]:
        """All keys in order. The collection must not change meanwhile."""
        for block in self._blocks:
            yield from block

    def add(self, key: Key) -> None:
        """Add a new key. O(log n + LOAD) with a tiny constant."""
        lasts = self._lasts
        if not lasts:
            self._blocks.append([key])
            lasts.append(key)
        else:
            if key > lasts[-1]:  # most keys arrive in order
                index = len(lasts) - 1
                block = self._blocks[index]
                block.append(key)
                lasts[index] = key
            else:
                index = bisect_left(lasts, key)
                block = self._blocks[index]
                insort(block, key)
            if len(block) > 2 * self.LOAD:
                self._split(index)
        self._size += 1

    def remove(self, key: Key) -> None:
        """Remove a key; KeyError if it is missing. O(log n + LOAD) with a tiny constant."""
        index = bisect_left(self._lasts, key)
        if index == len(self._lasts):
            raise KeyError(key)
        block = self._blocks[index]
        position = bisect_left(block, key)
        if block[position] != key:
            raise KeyError(key)
        del block[position]
        self._size -= 1
        if not block:
            del self._blocks[index], self._lasts[index]
        elif len(block) * 2 < self.LOAD and len(self._blocks) > 1:
            self._merge(index)
        else:
            self._lasts[index] = block[-1]

    def drop_first(self, count: int) -> None:
        """Remove the first `count` keys, which must exist."""
        self._size -= count
        while count:
            block = self._blocks[0]
            if count < len(block):
                del block[:count]
                return
            del self._blocks[0], self._lasts[0]
            count -= len(block)

    def first_below(self, key: Key, limit: int) -> list[Key]:
        """The first `limit` keys that sort before `key`."""
        found: list[Key] = []
        for block in self._blocks:
            if len(found) >= limit or block[0] >= key:
                break
            end = len(block) if block[-1] < key else bisect_left(block, key)
            found += block[: min(end, limit - len(found))]
        return found

    def count_below(self, key: Key) -> int:
        """How many keys sort before `key`."""
        index = bisect_left(self._lasts, key)
        below = sum(len(block) for block in self._blocks[:index])
        return below if index == len(self._blocks) else below + bisect_left(self._blocks[index], key)

    def _split(self, index: int) -> None:
        block = self._blocks[index]
        half = len(block) // 2
        self._blocks[index : index + 1] = [block[:half], block[half:]]
        self._lasts[index : index + 1] = [block[half - 1], block[-1]]

    def _merge(self, index: int) -> None:
        """Join a small block with its neighbour, so that scattered removals do not leave many small blocks."""
        left = index - 1 if index else 0
        joined = self._blocks[left] + self._blocks[left + 1]
        self._blocks[left : left + 2] = [joined]
        self._lasts[left : left + 2] = [joined[-1]]
        if len(joined) > 2 * self.LOAD:
            self._split(left)

    def _check(self) -> None:
        """Assert every invariant."""
        keys = list(self)
        assert keys == sorted(set(keys)), "sorted and distinct"
        assert len(keys) == self._size, "the size is right"
        assert self._lasts == [block[-1] for block in self._blocks], "lasts are the last keys"
        assert all(1 <= len(block) <= 2 * self.LOAD for block in self._blocks), "blocks are within bounds"


_UID_BITS = 48
_UID = (1 << _UID_BITS) - 1


def _packed(number: int, uid: int) -> int:
    """A key that sorts by a number, then by uid: half the size of a pair, and twice as fast to compare."""
    return number << _UID_BITS | uid


class MemoryStorage(LocalStorage):
    """The default storage: fast, indexed, gone with the process."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(Engine(lambda settings: MemoryTable(settings.order), clock=clock))


class _Shelf:
    """The buffered rows of one task and status.

    Nearly every group was generated by one version: its oldest and its newest trainable step are the same, and
    one key serves both questions of age. The others have a key for each.
    """

    __slots__ = ("by_age", "by_group", "by_order", "by_step", "by_token")

    def __init__(self) -> None:
        self.by_order = SortedKeys()
        self.by_step = SortedKeys()  # where oldest_step == token_step
        self.by_age = SortedKeys()  # of the others, by oldest_step
        self.by_token = SortedKeys()  # of the others, by token_step
        self.by_group = SortedKeys()  # of what can be drawn again

    def indexes(self) -> tuple[SortedKeys, ...]:
        return self.by_order, self.by_step, self.by_age, self.by_token, self.by_group

    def ages(self, record: Record) -> tuple[tuple[SortedKeys, int], ...]:
        """The indexes of age that a record is in, with its key there."""
        oldest, token, uid = record.oldest_step, record.token_step, record.uid
        if oldest is None:
            return ()
        if oldest == token:
            return ((self.by_step, _packed(oldest, uid)),)
        if token is None:
            return ((self.by_age, _packed(oldest, uid)),)
        return (self.by_age, _packed(oldest, uid)), (self.by_token, _packed(token, uid))


class _Tally:
    """Groups and tokens of one task at one place."""

    __slots__ = ("groups", "tokens")

    def __init__(self) -> None:
        self.groups = 0
        self.tokens = 0


class MemoryTable(Table):
    """Rows with an index for every question."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._key: Callable[[Record], Any]
        self._uid_of: Callable[[Any], int]
        if order.columns:
            self._key, self._uid_of = order_key(order), itemgetter(-1)
        else:
            self._key, self._uid_of = lambda record: _packed(record.timestamp_id, record.uid), _UID.__and__
        self._rows: dict[int, Row] = {}
        self._uids: dict[str, dict[int, int]] = {}  # task: group_id: uid
        self._shelves: dict[str, dict[Status, _Shelf]] = {}
        self._tallies: dict[str, dict[Place, _Tally]] = {}
        self._held: dict[str, dict[int, None]] = {}
        self._groups = self._bytes = self._reserved = self._buffered = 0
        self._last_uid = 0
        self._ascending = True  # rows are in order of uid, unless one that had left was put back

    # --- change -------------------------------------------------------------------------------------

    def add(self, row: Row) -> None:
        record = row.record
        self._ascending = self._ascending and record.uid > self._last_uid
        self._last_uid = max(self._last_uid, record.uid)
        self._rows[record.uid] = row
        uids = self._uids.get(record.task_name)
        if uids is None:
            uids = self._uids[record.task_name] = {}
        uids[record.group_id] = record.uid
        self._enter(record)

    def replace(self, old: Record, row: Row) -> None:
        self._leave((old,))
        self._rows[old.uid] = row
        self._enter(row.record)

    def remove(self, records: Sequence[Record]) -> None:
        self._leave(records)
        task_name = records[0].task_name
        uids = self._uids[task_name]
        for record in records:
            del self._rows[record.uid]
            del uids[record.group_id]
        if not uids:
            del self._uids[task_name]  # a dict that once was large stays large

    def _enter(self, record: Record) -> None:
        place = record.place
        tally = self._tally(record.task_name, place)
        tally.groups += 1
        tally.tokens += record.tokens
        if place is Place.ARCHIVED:
            return
        self._groups += 1
        self._bytes += record.bytes
        self._reserved += record.reserve
        if place is not Place.BUFFERED:
            assert record.owner is not None
            self._held.setdefault(record.owner, {})[record.uid] = None
            return
        self._buffered += 1
        shelves = self._shelves.setdefault(record.task_name, {})
        shelf = shelves.get(record.status)
        if shelf is None:
            shelf = shelves[record.status] = _Shelf()
        shelf.by_order.add(self._key(record))
        if record.status in EXPIRABLE:
            for index, key in shelf.ages(record):
                index.add(key)
        if record.status in DRAWABLE:
            shelf.by_group.add(_packed(record.group_id, record.uid))

    def _leave(self, records: Sequence[Record]) -> None:
        """Rows of one task, place and status leave every index and count."""
        first = records[0]
        place = first.place
        tally = self._tally(first.task_name, place)
        tally.groups -= len(records)
        tally.tokens -= sum([record.tokens for record in records])
        if place is Place.ARCHIVED:
            return
        self._groups -= len(records)
        self._bytes -= sum([record.bytes for record in records])
        self._reserved -= sum([record.reserve for record in records])
        if place is not Place.BUFFERED:
            for record in records:
                assert record.owner is not None
                held = self._held[record.owner]
                del held[record.uid]
                if not held:
                    del self._held[record.owner]
            return
        self._buffered -= len(records)
        shelf = self._shelves[first.task_name][first.status]
        # Claimed groups are usually the first in the order: no need to look for them.
        uids = map(self._uid_of, shelf.by_order)
        if all(uid == record.uid for record, uid in zip(records, uids, strict=False)):
            shelf.by_order.drop_first(len(records))
        else:
            for record in records:
                shelf.by_order.remove(self._key(record))
        if first.status in EXPIRABLE:
            for record in records:
                for index, key in shelf.ages(record):
                    index.remove(key)
        if first.status in DRAWABLE:
            for record in records:
                shelf.by_group.remove(_packed(record.group_id, record.uid))

    def _tally(self, task_name: str, place: Place) -> _Tally:
        tallies = self._tallies.get(task_name)
        if tallies is None:
            tallies = self._tallies[task_name] = {each: _Tally() for each in Place}
        return tallies[place]

    # --- find ---------------------------------------------------------------------------------------

    def get(self, uid: int) -> Row | None:
        return self._rows.get(uid)

    def find(self, task_name: str, group_id: int) -> Row | None:
        uids = self._uids.get(task_name)
        uid = None if uids is None else uids.get(group_id)
        return None if uid is None else self._rows[uid]

    def held(self, owner: str) -> list[Row]:
        return [self._rows[uid] for uid in sorted(self._held.get(owner, ()))]

    def owners(self) -> Collection[str]:
        return list(self._held)

    def _shelf(self, task_name: str, status: Status) -> _Shelf | None:
        shelves = self._shelves.get(task_name)
        return None if shelves is None else shelves.get(status)

    def first(self, task_name: str, status: Status, n: int, floors: Floors, *, by_group: bool) -> list[Row]:
        shelf = self._shelf(task_name, status)
        if shelf is None:
            return []
        rows = self._rows
        uids = map(_UID.__and__, shelf.by_group) if by_group else map(self._uid_of, shelf.by_order)
        if not self._stale_uids(shelf, floors, 1):
            return [rows[uid] for uid in islice(uids, n)]
        fresh = (row for uid in uids if is_fresh((row := rows[uid]).record, floors))
        return list(islice(fresh, n))

    def stale(self, task_name: str, status: Status, floors: Floors, limit: int) -> list[Row]:
        shelf = self._shelf(task_name, status)
        if shelf is None:
            return []
        return [self._rows[uid] for uid in self._stale_uids(shelf, floors, limit)]

    def _stale_uids(self, shelf: _Shelf, floors: Floors, limit: int) -> list[int]:
        uids: dict[int, None] = {}
        for index, floor in self._ages(shelf, floors):
            uids.update((key & _UID, None) for key in index.first_below(_packed(floor, 0), limit))
            if len(uids) >= limit:
                break
        return list(islice(uids, limit))

    def _ages(self, shelf: _Shelf, floors: Floors) -> list[tuple[SortedKeys, int]]:
        """The indexes of age with the step below which their rows are stale."""
        oldest, token = floors.oldest, floors.token
        steps = [step for step in (oldest, token) if step is not None]
        found = [(shelf.by_step, max(steps))] if steps else []
        if oldest is not None:
            found.append((shelf.by_age, oldest))
        if token is not None:
            found.append((shelf.by_token, token))
        return found

    def count(self, task_name: str, status: Status) -> int:
        shelf = self._shelf(task_name, status)
        return 0 if shelf is None else len(shelf.by_order)

    def count_fresh(self, task_name: str, status: Status, floors: Floors) -> int:
        shelf = self._shelf(task_name, status)
        if shelf is None:
            return 0
        if floors.oldest is not None and floors.token is not None and len(shelf.by_token):
            stale = len(self._stale_uids(shelf, floors, len(shelf.by_order)))  # one may be in both indexes
        else:
            stale = sum(index.count_below(_packed(floor, 0)) for index, floor in self._ages(shelf, floors))
        return len(shelf.by_order) - stale

    def places(self, task_name: str, *, tokens: bool) -> dict[Place, int]:
        tallies = self._tallies.get(task_name, {})
        return {place: tally.tokens if tokens else tally.groups for place, tally in tallies.items()}

    def usage(self) -> Usage:
        return Usage(self._groups, self._bytes, self._reserved)

    def candidates(self, pins: Pins) -> Iterable[int]:
        if "uid" in pins:
            return sorted(uid for uid in pins["uid"] if uid in self._rows)
        if "task_name" not in pins:
            self._restore_order()
            return list(self._rows)
        if "group_id" in pins:
            known = [self._uids.get(task_name, {}) for task_name in pins["task_name"]]
            return sorted(uids[group_id] for uids in known for group_id in pins["group_id"] if group_id in uids)
        if not self._ascending:
            self._restore_order()
            return [uid for uid, row in self._rows.items() if row.record.task_name in pins["task_name"]]
        # A task's groups are in order of uid: merging them needs no sort.
        return heapq.merge(*[list(self._uids.get(task_name, {}).values()) for task_name in pins["task_name"]])

    def rows(self) -> list[Row]:
        self._restore_order()
        return list(self._rows.values())

    def _restore_order(self) -> None:
        if not self._ascending:
            self._rows = dict(sorted(self._rows.items()))
            self._ascending = True

    def __len__(self) -> int:
        return self._buffered

    # --- proof --------------------------------------------------------------------------------------

    def check(self) -> None:
        again = MemoryTable(self._order)
        identities = [(row.record.task_name, row.record.group_id) for row in self._rows.values()]
        assert len(set(identities)) == len(identities), "identities are unique"
        assert not self._ascending or list(self._rows) == sorted(self._rows), "rows are in order of uid"
        for row in self.rows():
            again.add(row)
        assert again._uids == self._uids
        assert again._held == self._held
        assert (again.usage(), again._buffered) == (self.usage(), self._buffered)
        for task_name in self._tallies | again._tallies:
            for tokens in (False, True):
                found, expected = (table.places(task_name, tokens=tokens) for table in (self, again))
                assert {p: n for p, n in found.items() if n} == {p: n for p, n in expected.items() if n}
        for task_name, shelves in self._shelves.items():
            for status, shelf in shelves.items():
                other = again._shelf(task_name, status) or _Shelf()
                for index, rebuilt in zip(shelf.indexes(), other.indexes(), strict=True):
                    index._check()
                    assert list(index) == list(rebuilt), f"an index of {task_name}/{status} is off"
