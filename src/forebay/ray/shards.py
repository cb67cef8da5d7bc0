"""Tasks spread over several hosts, as one storage.

A task lives on one host, found by its name, so everything that is promised of a task stays as exact as on one. What
spans tasks: a claim is granted on all of its hosts or on none (in one order for all, so that claimers do not wait in a
circle); reads and checkpoints are exact per task, and of different hosts within milliseconds of each other. Uids tell
their host; when a checkpoint is restored, groups get new ones.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from msgspec.structs import replace

from forebay.core.aio import see_through
from forebay.core.ledger import Account, Event, GroupEnd, LedgerLine, Place, Watermark
from forebay.core.query import And, Compare, Member, Node
from forebay.core.record import Record, Row
from forebay.core.rollout import Status
from forebay.errors import ForebayError, InvalidInput, LostLease, StorageError
from forebay.ray.link import heard
from forebay.ray.operations import UID_BITS
from forebay.ray.storage import RayStorage
from forebay.storage.base import (
    Arrival,
    Claim,
    Claimed,
    Content,
    Holding,
    Listener,
    Ready,
    Reaped,
    Revision,
    Settings,
    Snapshot,
    Storage,
    Usage,
)
from forebay.storage.urls import IN_MEMORY, SQLITE_URL

__all__ = ["MAX_SHARDS", "ShardedStorage", "shard_of", "shard_url"]

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

MAX_SHARDS = 128
_RESTORED_UIDS = 1 << 36
"""Uids that a restored checkpoint may use on a shard; new groups are numbered after them."""
_QUEUE_ROWS = 64


def shard_of(task_name: str, shards: int) -> int:
    """Which of so many hosts has a task; the same for ever."""
    return zlib.crc32(task_name.encode("utf-8", "surrogatepass")) % shards


def shard_url(url: str, shard: int) -> str:
    """The storage of a shard: a file or a schema of its own beside the first one's.

    Paths are those of the process that asks: an actor has another working directory.
    """
    if url.startswith(SQLITE_URL):
        url = f"{SQLITE_URL}{Path(url.removeprefix(SQLITE_URL)).absolute()}"
        return url if shard == 0 else f"{url}.shard{shard}"
    if shard == 0 or url in IN_MEMORY:
        return url
    dsn, _, name = url.partition("#")
    return f"{dsn}#{name or 'forebay'}_shard{shard}"


class ShardedStorage(Storage):
    """Several hosts as one storage."""

    shared: ClassVar[bool] = True
    reaps_itself: ClassVar[bool] = True
    claims_with_watermarks: ClassVar[bool] = True

    def __init__(self, shards: Sequence[RayStorage]) -> None:
        self._shards = list(shards)

    def __repr__(self) -> str:
        return f"<ShardedStorage of {self._shards!r}>"

    @property
    def durable(self) -> bool:  # type: ignore[override]
        return self._shards[0].durable

    @property
    def store_id(self) -> str | None:
        ids = [shard.store_id for shard in self._shards]
        return None if None in ids else "+".join(str(store_id) for store_id in ids)

    # --- which shard ----------------------------------------------------------------------------------

    def _of(self, task_name: str) -> RayStorage:
        return self._shards[shard_of(task_name, len(self._shards))]

    def _by_task(self, items: Iterable[T], task_name: Callable[[T], str]) -> list[tuple[RayStorage, list[T]]]:
        """Items by shard, in the order of the shards."""
        parts: dict[int, list[T]] = {}
        for item in items:
            parts.setdefault(shard_of(task_name(item), len(self._shards)), []).append(item)
        return [(self._shards[index], parts[index]) for index in sorted(parts)]

    def _by_uid(self, uids: Iterable[int]) -> list[tuple[RayStorage, list[int]]]:
        parts: dict[int, list[int]] = {}
        for uid in uids:
            index = uid >> UID_BITS
            parts.setdefault(index if index < len(self._shards) else 0, []).append(uid)
        return [(self._shards[index], parts[index]) for index in sorted(parts)]

    async def _all(self, ask: Callable[[RayStorage], Any]) -> list[Any]:
        return list(await asyncio.gather(*[ask(shard) for shard in self._shards]))

    # --- life -----------------------------------------------------------------------------------------

    async def open(self, owner: str, settings: Settings, lease_s: float | None) -> None:
        await self._all(lambda shard: shard.open(owner, settings, lease_s))

    async def close(self, owner: str) -> None:
        await self._all(lambda shard: shard.close(owner))

    def beat(self, owner: str) -> None:
        # All are sent before any answer is waited for: a host that is away must not cost what is held on the others.
        heard([shard.send_beat(owner) for shard in self._shards], self._shards[0].beat_timeout_s)

    async def reap(self) -> Reaped:
        returned: dict[str, int] = {}
        pending = []
        for reaped in await self._all(lambda shard: shard.reap()):
            returned |= reaped.returned
            if reaped.next_s is not None:
                pending.append(reaped.next_s)
        return Reaped(returned, min(pending, default=None))

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        ends = [shard.subscribe(listener) for shard in self._shards]

        def end() -> None:
            for each in ends:
                each()

        return end

    def watch(self, ready: Ready | None) -> asyncio.Future[None] | None:
        return asyncio.ensure_future(self._watch(ready))

    async def _watch(self, ready: Ready | None) -> None:
        """Until something changed on some shard, and then until each has its part."""
        wants = {} if ready is None else ready.wants
        parts = self._by_task(wants, str) if wants else [(shard, []) for shard in self._shards]
        anything = [asyncio.ensure_future(shard.watch_since(None)) for shard, _ in parts]
        try:
            done, _ = await asyncio.wait(anything, return_when=asyncio.FIRST_COMPLETED)
            for watching in done:
                watching.result()
        finally:
            for watching in anything:
                watching.cancel()
        if ready is not None and wants:
            waits = [
                asyncio.ensure_future(shard.watch_since(replace(ready, wants={name: wants[name] for name in names}), 0))
                for shard, names in parts
            ]
            try:
                await asyncio.gather(*waits)
            finally:
                for waiting in waits:
                    waiting.cancel()

    def may_be_due(self, task_name: str) -> bool:
        return self._of(task_name).may_be_due(task_name)

    # --- moves ----------------------------------------------------------------------------------------

    async def issue(
        self, task_name: str, contents: Sequence[Content], *, owner: str, cursor: int, source_state: bytes | None = None
    ) -> list[Record]:
        return await self._of(task_name).issue(
            task_name, contents, owner=owner, cursor=cursor, source_state=source_state
        )

    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        parts = self._by_task(enumerate(arrivals), lambda numbered: numbered[1].task_name)
        if len(parts) == 1:
            return await parts[0][0].put(arrivals, owner=owner)
        # A put of the buffer is of one task; of several, those of one shard are stored in one step.
        records: dict[int, Record] = {}
        for shard, numbered in parts:
            stored = await shard.put([arrival for _, arrival in numbered], owner=owner)
            records |= {index: record for (index, _), record in zip(numbered, stored, strict=True)}
        return [records[index] for index in range(len(arrivals))]

    async def claim(self, claim: Claim) -> Claimed | None:
        parts = [
            (
                shard,
                replace(
                    claim,
                    wants={name: claim.wants[name] for name in names},
                    floors={name: claim.floors[name] for name in names if name in claim.floors},
                    watermarks={name: claim.watermarks[name] for name in names if name in claim.watermarks},
                ),
            )
            for shard, names in self._by_task(claim.wants, str)
        ]
        if len(parts) == 1:
            return await parts[0][0].claim(claim)
        if claim.watermarks:
            for shard, part in parts:
                await shard.mark(part.watermarks)  # on all of them, also if it comes to nothing
        if claim.whole and not await self._all_there(claim):
            return None
        granted: list[tuple[RayStorage, Claim, Claimed]] = []
        try:
            for shard, part in parts:
                claimed = await shard.claim(part)
                if claimed is None:
                    await self._undo(granted)
                    return None
                granted.append((shard, part, claimed))
        except BaseException:
            await self._undo(granted)
            raise
        found = {name: rows for _, _, claimed in granted for name, rows in claimed.items()}
        return {name: found.get(name, []) for name in claim.wants}

    async def _all_there(self, claim: Claim) -> bool:
        """Whether it is worth a try: claims that are undone wake everybody."""
        wanted = {name: n for name, n in claim.wants.items() if n > 0}
        totals = dict.fromkeys(wanted, 0)
        for status in claim.statuses:
            for name, n in (await self.available(list(wanted), status)).items():
                totals[name] += n
        return all(totals[name] >= n for name, n in wanted.items())

    async def _undo(self, granted: Sequence[tuple[RayStorage, Claim, Claimed]]) -> None:
        async def undo() -> None:
            for shard, part, claimed in granted:
                await shard.undo(part, claimed)

        undoing = asyncio.ensure_future(undo())
        cancelled = await see_through(undoing)
        undoing.result()
        if cancelled is not None:
            raise cancelled

    async def undo(self, claim: Claim, claimed: Claimed) -> None:
        for shard, names in self._by_task(claimed, str):
            await shard.undo(claim, {name: claimed[name] for name in names})

    async def fail(self, reasons: Mapping[int, str]) -> dict[str, int]:
        failed: dict[str, int] = {}
        for shard, uids in self._by_uid(reasons):
            failed |= await shard.fail({uid: reasons[uid] for uid in uids})
        return failed

    async def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None = None) -> None:
        parts = self._by_uid(uids)
        if len(parts) > 1:
            await self._check_held(lease_id, parts)
        for index, (shard, part) in enumerate(parts):
            try:
                await shard.settle(lease_id, part, event, reason)
            except LostLease as error:
                if index == 0:
                    raise
                raise LostLease(
                    f"{error} (of one shard; the groups of {index} others were settled before it was noticed)"
                ) from error

    async def _check_held(self, lease_id: str, parts: Sequence[tuple[RayStorage, list[int]]]) -> None:
        """Nothing is settled anywhere if something was taken away somewhere."""
        for shard, uids in parts:
            node = And((Member("uid", tuple(uids), negated=False), Compare("place", "eq", Place.LEASED)))
            held = [record for record in await shard.records(node, None) if record.lease_id == lease_id]
            if len(held) < len(uids):
                raise LostLease(
                    f"{len(uids) - len(held)} of {len(uids)} groups of lease {lease_id} on one shard were taken away: "
                    "nothing was settled, and these groups are handed out again"
                )

    async def release(self, owner: str) -> dict[str, int]:
        return _merged(await self._all(lambda shard: shard.release(owner)))

    async def set_watermark(self, watermarks: Mapping[str, Watermark]) -> None:
        for shard, names in self._by_task(watermarks, str):
            await shard.set_watermark({name: watermarks[name] for name in names})

    async def due(self, task_name: str, statuses: Collection[Status], limit: int) -> list[Row]:
        return await self._of(task_name).due(task_name, statuses, limit)

    async def revise(self, revisions: Sequence[Revision]) -> list[bool]:
        by_uid = {revision.uid: revision for revision in revisions}
        applied: dict[int, bool] = {}
        for shard, uids in self._by_uid(by_uid):
            applied |= dict(zip(uids, await shard.revise([by_uid[uid] for uid in uids]), strict=True))
        return [applied[revision.uid] for revision in revisions]

    async def discard(self, node: Node, reason: str) -> dict[str, int]:
        return _merged(await self._all(lambda shard: shard.discard(node, reason)))

    async def set_priority(self, priorities: Mapping[int, float]) -> int:
        changed = 0
        for shard, uids in self._by_uid(priorities):
            changed += await shard.set_priority({uid: priorities[uid] for uid in uids})
        return changed

    async def saved(self, model_step: int) -> None:
        await self._all(lambda shard: shard.saved(model_step))

    async def saved_step(self) -> int | None:
        steps = await self._all(lambda shard: shard.saved_step())
        return None if None in steps else max(steps)  # of the shard that has dropped most

    async def rewind(self, model_step: int) -> dict[str, int]:
        return _merged(await self._all(lambda shard: shard.rewind(model_step)))

    # --- ends -----------------------------------------------------------------------------------------

    async def note_ends(self) -> None:
        await self._all(lambda shard: shard.note_ends())

    async def ends(self, owner: str, limit: int) -> list[tuple[int, GroupEnd]]:
        found = await self._all(lambda shard: shard.ends(owner, limit))
        count = len(found)  # a number tells its shard
        return [(number * count + index, end) for index, part in enumerate(found) for number, end in part]

    async def forget_ends(self, numbers: Sequence[int]) -> None:
        count = len(self._shards)
        for index, shard in enumerate(self._shards):
            mine = [number // count for number in numbers if number % count == index]
            if mine:
                await shard.forget_ends(mine)

    # --- reads ----------------------------------------------------------------------------------------

    async def count_statuses(
        self, tasks: Collection[str], statuses: Collection[Status]
    ) -> dict[str, dict[Status, int]]:
        parts = self._by_task(tasks, str)
        return _merged(await asyncio.gather(*[shard.count_statuses(names, statuses) for shard, names in parts]))

    async def available(self, tasks: Collection[str], status: Status) -> dict[str, int]:
        parts = self._by_task(tasks, str)
        return _merged(await asyncio.gather(*[shard.available(names, status) for shard, names in parts]))

    async def ledger(self, *, tokens: bool = False) -> dict[str, LedgerLine]:
        return _merged(await self._all(lambda shard: shard.ledger(tokens=tokens)))

    async def account(self, task_name: str) -> Account:
        return await self._of(task_name).account(task_name)

    async def accounts(self) -> dict[str, Account]:
        return _merged(await self._all(lambda shard: shard.accounts()))

    async def usage(self) -> Usage:
        used = await self._all(lambda shard: shard.usage())
        return Usage(
            sum(usage.groups for usage in used),
            sum(usage.bytes for usage in used),
            sum(usage.reserved for usage in used),
        )

    async def holdings(self) -> list[Holding]:
        found = [holding for part in await self._all(lambda shard: shard.holdings()) for holding in part]
        return sorted(found, key=lambda holding: -holding.oldest_age_s)

    async def records(self, node: Node, limit: int | None) -> list[Record]:
        found = [record for part in await self._all(lambda shard: shard.records(node, limit)) for record in part]
        found.sort(key=lambda record: record.uid)
        return found if limit is None else found[:limit]

    async def read(self, uid: int) -> Row | None:
        ((shard, _),) = self._by_uid((uid,))
        return await shard.read(uid)

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    # --- streams --------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        snapshots: list[Snapshot] = await self._all(lambda shard: shard.snapshot())
        return Snapshot(
            _merged([snapshot.accounts for snapshot in snapshots]),
            max(snapshot.next_uid for snapshot in snapshots),
            max(snapshot.next_timestamp_id for snapshot in snapshots),
            _chained([snapshot.rows for snapshot in snapshots]),
        )

    async def restore(
        self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
    ) -> None:
        count = len(self._shards)
        queues: list[asyncio.Queue[Row | ForebayError | None]] = [asyncio.Queue(_QUEUE_ROWS) for _ in range(count)]
        restores = [
            asyncio.ensure_future(
                shard.restore(
                    {name: account for name, account in accounts.items() if shard_of(name, count) == index},
                    (index << UID_BITS) + _RESTORED_UIDS,
                    next_timestamp_id,
                    _renumbered(queue, index),
                )
            )
            for index, (shard, queue) in enumerate(zip(self._shards, queues, strict=True))
        ]
        failure: BaseException | None = None
        last_uid = 0
        try:
            async for row in rows:
                if not last_uid < row.record.uid < next_uid:
                    raise InvalidInput(
                        f"row {row.record.uid} does not follow row {last_uid} below {next_uid}; nothing restored"
                    )
                last_uid = row.record.uid
                index = shard_of(row.record.task_name, count)
                await _pass_on(queues[index], row, restores)
        except BaseException as error:
            failure = error
        stopped = ForebayError("the stream of another shard failed") if failure is not None else None
        for queue, restore in zip(queues, restores, strict=True):
            await _pass_on(queue, stopped, [restore], always=True)
        outcomes = await asyncio.gather(*restores, return_exceptions=True)
        if failure is not None:
            raise failure
        refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        used = {shard_of(name, count) for name in accounts}
        if refused and any(outcomes[index] is None for index in used):
            raise StorageError(
                f"{len(refused)} of {count} shards could not be restored, and others were ({refused[0]}); destroy the "
                "buffer, create it again, and resume once more"
            ) from refused[0]
        if refused:
            raise refused[0]


async def _pass_on(
    queue: asyncio.Queue[Any], item: Any, restores: Sequence[asyncio.Future[None]], *, always: bool = False
) -> None:
    """Put into a queue, unless the one who reads it has ended."""
    putting = asyncio.ensure_future(queue.put(item))
    await asyncio.wait((putting, *restores), return_when=asyncio.FIRST_COMPLETED)
    if not putting.done():
        putting.cancel()
        for restore in restores:
            if restore.done() and not always:
                restore.result()


async def _renumbered(queue: asyncio.Queue[Any], index: int) -> AsyncIterator[Row]:
    uid = index << UID_BITS
    while (item := await queue.get()) is not None:
        if isinstance(item, ForebayError):
            raise item
        uid += 1
        yield Row(replace(item.record, uid=uid), item.group)


async def _chained(streams: Sequence[AsyncGenerator[Row, None]]) -> AsyncGenerator[Row, None]:
    try:
        for stream in streams:
            async for row in stream:
                yield row
    finally:
        for stream in streams:
            await stream.aclose()


def _merged(parts: Iterable[Mapping[K, V]]) -> dict[K, V]:
    """Mappings without a key in common as one."""
    return {key: value for part in parts for key, value in part.items()}
