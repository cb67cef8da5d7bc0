"""Tasks spread over several hosts, as one storage.

A task is on one host, found by its name, so all promises about one task are as exact as on one host. Across tasks: a
claim is granted on all of its hosts or on none (in one order for all, so that claims do not wait for each other in a
circle); summaries and checkpoints are exact per task, and of different hosts within milliseconds of each other. A uid
identifies its host; when a checkpoint is restored, groups get new uids.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from msgspec.structs import replace

from forebay.core.aio import uncancelled
from forebay.core.capacity import Usage
from forebay.core.ledger import Account, Event, GroupEnd, Place, Record, Row
from forebay.core.query import And, Compare, Member, Node
from forebay.errors import LostLease, StorageError
from forebay.ray.client.link import heard
from forebay.ray.client.storage import RayStorage, Restore
from forebay.ray.host.operations import UID_BITS
from forebay.ray.table import OPERATIONS, Operation, Route, TableStorage
from forebay.storage.base import Claim, Claimed, Listener, Rows, Summary
from forebay.storage.rules import StreamCheck, lost_lease
from forebay.storage.urls import IN_MEMORY, SQLITE_URL
from forebay.storage.values import Ready, Snapshot

MAX_SHARDS = 128
_RESTORED_UIDS = 1 << 36
"""Uids that a restored checkpoint may use on a shard; new groups are numbered after them."""


def shard_of(task_name: str, shards: int) -> int:
    """The number of the host that has a task; it never changes."""
    return zlib.crc32(task_name.encode("utf-8", "surrogatepass")) % shards


def shard_url(url: str, shard: int) -> str:
    """The storage of a shard: its own file or schema beside that of the first one.

    Paths are those of the process that asks: an actor has another working directory.
    """
    if url.startswith(SQLITE_URL):
        url = f"{SQLITE_URL}{Path(url.removeprefix(SQLITE_URL)).absolute()}"
        return url if shard == 0 else f"{url}.shard{shard}"
    if shard == 0 or url in IN_MEMORY:
        return url
    dsn, _, name = url.partition("#")
    return f"{dsn}#{name or 'forebay'}_shard{shard}"


class ShardedStorage(TableStorage):
    """Several hosts as one storage."""

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

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    # --- routing --------------------------------------------------------------------------------------

    async def _run(self, operation: Operation, arguments: tuple[Any, ...]) -> Any:
        """Run an operation on the hosts that it concerns; on several of them in order, unless it concerns all."""
        if operation.route is Route.ALL:
            return _merged(await asyncio.gather(*[operation.call(shard, arguments) for shard in self._shards]))
        whole = arguments[operation.split]
        if not isinstance(whole, (list, dict)):
            return await operation.call(self._shards[self._index(operation.route, whole)], arguments)
        if not whole:  # no host is concerned: an empty answer
            kind = get_origin(operation.result) or operation.result
            return None if kind is None else kind()
        before, after = arguments[: operation.split], arguments[operation.split + 1 :]
        if isinstance(whole, list):
            parts = self._by_shard(operation.route, range(len(whole)), whole.__getitem__)
        else:
            parts = self._by_shard(operation.route, whole)
        answers = []
        for shard, keys in parts:
            values = [whole[key] for key in keys]
            part = values if isinstance(whole, list) else dict(zip(keys, values, strict=True))
            answers.append(await operation.call(shard, (*before, part, *after)))
        if isinstance(answers[0], list):  # one item of the answer for each item of the argument
            indexes = [index for _, part in parts for index in part]
            found = dict(zip(indexes, _merged(answers), strict=True))
            return [found[index] for index in range(len(whole))]
        return _merged(answers)

    def _index(self, route: Route, item: Any) -> int:
        """The number of the host of a task or a row, given by itself or by something that names it."""
        if route is Route.TASK:
            return shard_of(item if isinstance(item, str) else item.task_name, len(self._shards))
        index: int = (item if isinstance(item, int) else item.uid) >> UID_BITS
        return index if index < len(self._shards) else 0

    def _by_shard(
        self, route: Route, items: Collection[Any], item_of: Callable[[Any], Any] = lambda item: item
    ) -> list[tuple[RayStorage, list[Any]]]:
        """Items by shard, in the order of the shards."""
        parts: dict[int, list[Any]] = {}
        for item in items:
            parts.setdefault(self._index(route, item_of(item)), []).append(item)
        return [(self._shards[index], parts[index]) for index in sorted(parts)]

    # --- heartbeats and waits -------------------------------------------------------------------------

    def beat(self, owner: str) -> None:
        # All are sent before any answer is awaited: a host that does not answer must not cost leases on the others.
        heard([shard.link.beat(owner) for shard in self._shards], self._shards[0].beat_timeout_s)

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
        parts = self._by_shard(Route.TASK, wants) if wants else [(shard, []) for shard in self._shards]
        await _watched([shard.watch_since(None) for shard, _ in parts], asyncio.FIRST_COMPLETED)
        if ready is not None and wants:
            waits = [(shard, replace(ready, wants={name: wants[name] for name in names})) for shard, names in parts]
            await _watched([shard.watch_since(part, 0) for shard, part in waits], asyncio.FIRST_EXCEPTION)

    # --- operations over several hosts ----------------------------------------------------------------

    async def claim(self, claim: Claim) -> Claimed:
        parts = [
            (shard, replace(claim, wants={name: claim.wants[name] for name in names}))
            for shard, names in self._by_shard(Route.TASK, claim.wants)
        ]
        if len(parts) == 1:
            return await parts[0][0].claim(claim)
        if claim.whole:
            missing = await self._missing(claim)
            if missing is not None:
                return missing
        granted: list[tuple[RayStorage, Claim, Claimed]] = []
        complete = False
        try:
            for shard, part in parts:
                claimed = await shard.claim(part)
                granted.append((shard, part, claimed))
                if claimed.rows is None:
                    break
            else:
                complete = True
        finally:
            if not complete:
                await uncancelled(_undo(granted))
        answers = [claimed for _, _, claimed in granted]
        rows: Rows = _merged([claimed.rows or {} for claimed in answers])
        return Claimed(
            {name: rows.get(name, []) for name in claim.wants} if complete else None,
            tuple(name for claimed in answers for name in claimed.due),
            _merged([claimed.limits for claimed in answers]),
        )

    async def _missing(self, claim: Claim) -> Claimed | None:
        """The answer to a claim that cannot be granted: a claim that is undone would wake every waiter."""
        await self.advance(claim.clocks)  # on all hosts, also if nothing is claimed
        summary = await self.summary(claim.wants)
        tasks = {name: summary.task(name) for name in claim.wants}
        if all(
            sum(tasks[name].fresh.get(status, 0) for status in claim.statuses) >= n for name, n in claim.wants.items()
        ):
            return None
        due = tuple(name for name, task in tasks.items() if task.due)
        return Claimed(None, due, {name: task.account.limits for name, task in tasks.items()})

    async def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None = None) -> None:
        parts = self._by_shard(Route.UID, uids)
        if len(parts) > 1:
            await self._check_held(lease_id, parts)
        for index, (shard, part) in enumerate(parts):
            try:
                await shard.settle(lease_id, part, event, reason)
            except LostLease as error:
                if index == 0:
                    raise
                raise LostLease(f"{error} (on one shard; {index} others had settled their groups before)") from error

    async def _check_held(self, lease_id: str, parts: Sequence[tuple[RayStorage, list[int]]]) -> None:
        """LostLease, before anything is settled, if one host no longer holds a group of the lease."""
        for shard, uids in parts:
            node = And((Member("uid", tuple(uids), negated=False), Compare("place", "eq", Place.LEASED)))
            held = [record for record in await shard.records(node, None) if record.lease_id == lease_id]
            if len(held) < len(uids):
                raise lost_lease(len(uids) - len(held), len(uids), lease_id)

    async def ends(self, owner: str, limit: int) -> list[tuple[int, GroupEnd]]:
        found = await asyncio.gather(*[shard.ends(owner, limit) for shard in self._shards])
        count = len(found)  # a number identifies its shard
        return [(number * count + index, end) for index, part in enumerate(found) for number, end in part]

    async def forget_ends(self, numbers: Sequence[int]) -> None:
        count = len(self._shards)
        for index, shard in enumerate(self._shards):
            mine = [number // count for number in numbers if number % count == index]
            if mine:
                await shard.forget_ends(mine)

    async def summary(
        self, tasks: Collection[str] | None = None, *, holdings: bool = False, owners: bool = False
    ) -> Summary:
        """See `Storage.summary`. If tasks are named, only their hosts are asked, and `usage` is of those hosts."""
        shards = [shard for shard, _ in self._by_shard(Route.TASK, tasks)] if tasks else self._shards
        found = await asyncio.gather(*[shard.summary(tasks, holdings=holdings, owners=owners) for shard in shards])
        used = [summary.usage for summary in found]
        steps = [summary.saved_step for summary in found if summary.saved_step is not None]
        return Summary(
            _merged([summary.tasks for summary in found]),
            Usage(
                sum(each.groups for each in used), sum(each.bytes for each in used), sum(each.reserved for each in used)
            ),
            sorted([each for summary in found for each in summary.holdings], key=lambda each: -each.oldest_age_s),
            max(steps) if len(steps) == len(found) else None,  # of the shard that has dropped most
            sorted({owner for summary in found for owner in summary.owners}),
        )

    async def saved(self, model_step: int, tasks: Collection[str] | None = None) -> None:
        for shard, names in self._hosting(tasks):
            await shard.saved(model_step, names)

    async def rewind(self, model_step: int, tasks: Collection[str] | None = None) -> dict[str, int]:
        rewound: dict[str, int] = {}
        for shard, names in self._hosting(tasks):
            rewound |= await shard.rewind(model_step, names)
        return rewound

    def _hosting(self, tasks: Collection[str] | None) -> list[tuple[RayStorage, list[str] | None]]:
        """The shards of tasks, each with its own ones (None: all)."""
        return [(shard, None) for shard in self._shards] if tasks is None else [*self._by_shard(Route.TASK, tasks)]

    async def records(self, node: Node, limit: int | None) -> list[Record]:
        found: list[Record] = await self._run(OPERATIONS["records"], (node, limit))
        return sorted(found, key=lambda record: record.uid)[:limit]

    # --- streams --------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        snapshots = await asyncio.gather(*[shard.snapshot() for shard in self._shards])
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
        restores: list[Restore] = []
        uids = [index << UID_BITS for index in range(count)]
        failure: BaseException | None = None
        complete, check = True, StreamCheck(accounts, next_uid, next_timestamp_id)
        try:
            for index, shard in enumerate(self._shards):
                mine = {name: account for name, account in accounts.items() if shard_of(name, count) == index}
                restores.append(await shard.begin_restore(mine, uids[index] + _RESTORED_UIDS, next_timestamp_id))
            async for row in rows:
                check.row(row.record)
                index = shard_of(row.record.task_name, count)
                uids[index] += 1
                complete = await restores[index].add(Row(replace(row.record, uid=uids[index]), row.group))
                if not complete:
                    break
            else:
                check.end()
        except BaseException as error:
            failure, complete = error, False
        ending = [restore.end(complete=complete) for restore in restores]
        outcomes = await uncancelled(asyncio.gather(*ending, return_exceptions=True))
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


def _merged(answers: Sequence[Any]) -> Any:
    """The answers of several hosts as one: lists, counts, mappings without a common key, or nothing."""
    first = answers[0] if answers else {}
    if first is None or isinstance(first, int):
        return None if first is None else sum(answers)
    if isinstance(first, list):
        return [item for answer in answers for item in answer]
    return {key: value for answer in answers for key, value in answer.items()}


async def _watched(watches: Sequence[Coroutine[Any, Any, None]], return_when: str) -> None:
    """Wait for the first of several watches, or for all of them or the first error; end the others."""
    watching = [asyncio.ensure_future(watch) for watch in watches]
    try:
        done, _ = await asyncio.wait(watching, return_when=return_when)
        for each in done:
            each.result()
    finally:
        for each in watching:
            each.cancel()


async def _undo(granted: Sequence[tuple[RayStorage, Claim, Claimed]]) -> None:
    for shard, part, claimed in granted:
        if claimed.rows is not None:
            await shard.undo(part, claimed.rows)


async def _chained(streams: Sequence[AsyncGenerator[Row, None]]) -> AsyncGenerator[Row, None]:
    try:
        for stream in streams:
            async for row in stream:
                yield row
    finally:
        for stream in streams:
            await stream.aclose()
