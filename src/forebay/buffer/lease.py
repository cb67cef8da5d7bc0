"""A lease: groups handed to a trainer that come back unless it confirms that it trained on them (G5).

    async with buffer.lease_batch({"math": 64}, train_step=7) as lease:
        train(lease.groups)
    # acknowledged here; given back if train() raised

A lease knows only ids; the storage decides whether they are still held. `Claims` is how groups leave a buffer, for a
lease or otherwise: one claim of the storage, then copies for the caller. Groups that a claim found to be too old are
expired right after it; groups that cannot be handed out go back.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from msgspec.structs import replace

from forebay.buffer.admission import Expiry
from forebay.buffer.session import Session
from forebay.collate.balance import shard
from forebay.core.aio import see_through, uncancelled
from forebay.core.capacity import check_ever_fits
from forebay.core.ledger import Event, Place, present, separate_extra_fields
from forebay.core.rollout import RolloutState, Status
from forebay.core.staleness import apply_token_mask, sample_staleness
from forebay.core.validate import checked_integer, checked_reason, checked_wants
from forebay.errors import BufferClosed, InvalidInput, LostLease, StorageError
from forebay.storage.base import Claim, Purpose, Rows, Share

log = logging.getLogger(__name__)

T = TypeVar("T")
Settle = Callable[[str, Sequence[int], Event, str | None], Awaitable[None]]


class Lease:
    """Groups of one batch, held for one train step until `ack`, `nack` or the end of the process.

    The samples are shallow copies with read-only arrays: assigning their fields changes nothing in the buffer.
    """

    def __init__(
        self,
        lease_id: str,
        train_step: int,
        groups_by_task: dict[str, list[list[RolloutState]]],
        uids: dict[tuple[str, int], int],
        settle: Settle,
    ) -> None:
        """`on_ack(began)` is awaited with True before it is acknowledged, and with False when that failed.

        `patiently(call)` makes a call of the storage; a manager's repeats one that finds the storage away. `owed` is
        the settlement that found it away for too long, for `settle_owed`.
        """
        self.on_ack: Callable[[bool], Awaitable[None]] | None = None
        self.patiently: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]] = lambda call: call()
        self.id = lease_id
        self.train_step = train_step
        self.groups_by_task = groups_by_task
        self._uids = uids
        self._settle = settle
        self._settled: Event | None = None
        self._lost = False  # the groups were taken away
        self.owed: Event | None = None

    def __repr__(self) -> str:
        return f"<Lease {self.id} for train step {self.train_step}: {len(self.groups)} groups, {self.state}>"

    @property
    def state(self) -> str:
        """Held, or how it was settled."""
        return "lost" if self._lost else "held" if self._settled is None else self._settled.name.lower()

    @property
    def groups(self) -> list[list[RolloutState]]:
        """The groups of all tasks, task after task."""
        return [group for groups in self.groups_by_task.values() for group in groups]

    @property
    def open(self) -> bool:
        """Whether it was neither acknowledged nor given back yet, nor found to be lost."""
        return self._settled is None and not self._lost

    @property
    def returned(self) -> bool:
        """Whether it was given back, or lost."""
        return self._lost or self._settled is Event.NACKED

    async def ack(self) -> None:
        """The trainer trained on these groups: they leave for good. LostLease if they were taken away."""
        await self._settle_all(Event.ACKED)

    async def nack(self) -> None:
        """Give the groups back, to their old place in the order."""
        await self._settle_all(Event.NACKED)

    async def _settle_all(self, event: Event) -> None:
        if self._settled is event:
            return
        if self._settled is not None:
            raise LostLease(f"{self!r}: it was already settled, and cannot be {event.name.lower()} now")
        watched = self.on_ack if event is Event.ACKED else None
        try:
            if watched is not None:
                await watched(True)
            await self.patiently(lambda: self._settle(self.id, list(self._uids.values()), event, None))
        except BaseException as error:
            if isinstance(error, StorageError):
                self.owed = event
            self._lost = self._settled is None and isinstance(error, LostLease)
            if watched is not None:
                await uncancelled(watched(False))
            raise
        self._settled, self._lost = event, False

    async def settle_owed(self) -> None:
        """Settle it as was asked for while the storage was away. Nothing to do if the groups were taken away."""
        if self.owed is None or not self.open:
            return
        try:
            await self._settle_all(self.owed)
        except LostLease as lost:
            self.owed = None
            log.warning("lease_lost lease=%s %s", self.id, lost)
        else:
            log.warning("lease_settled_late lease=%s train_step=%d event=%s", self.id, self.train_step, self.owed.name)

    def uids_of(self, groups: Sequence[Sequence[RolloutState]]) -> list[int]:
        """The uids of groups of this lease."""
        return [self._uids[group[0].task_name or "", group[0].group_id or 0] for group in groups]

    def shard(self, rank: int, world_size: int) -> list[list[RolloutState]]:
        """Whole groups for one trainer rank; see `forebay.collate.shard`."""
        return shard(self.groups, rank, world_size)

    async def reject(self, groups: Sequence[Sequence[RolloutState]], reason: str) -> None:
        """These groups are of no use: they leave as discarded, for this reason; the others stay leased."""
        await self._settle_some(groups, Event.REJECTED, checked_reason(reason))

    async def give_back(self, groups: Sequence[Sequence[RolloutState]]) -> None:
        """Give some of the groups back, to their old place in the order; the others stay leased."""
        await self._settle_some(groups, Event.NACKED, None)

    async def _settle_some(self, groups: Sequence[Sequence[RolloutState]], event: Event, reason: str | None) -> None:
        if self._settled is not None:
            raise LostLease(f"{self!r}: it was already settled, and none of its groups can be {event.name.lower()} now")
        chosen: dict[tuple[str, int], int] = {}
        for group in groups:
            first = group[0] if isinstance(group, (list, tuple)) and group else None
            identity = (first.task_name or "", first.group_id or 0) if isinstance(first, RolloutState) else None
            if identity is None or identity not in self._uids:
                raise InvalidInput(
                    f"{group!r:.80} is not a group of {self!r}; expected a list of groups as they were handed out"
                )
            chosen[identity] = self._uids[identity]
        await self._settle(self.id, list(chosen.values()), event, reason)
        for identity in chosen:
            del self._uids[identity]
        for task_name, held in self.groups_by_task.items():
            self.groups_by_task[task_name] = [group for group in held if (task_name, group[0].group_id) not in chosen]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.open:
            await self.settle_on_exit(error)

    async def settle_on_exit(self, error: BaseException | None) -> None:
        """What leaving a `with` block does: acknowledge, or give back if the block raised."""
        # A cancel that arrives now waits: it must not leave the groups leased, with nothing left to settle them.
        settling = asyncio.ensure_future(self.ack() if error is None else self.nack())
        cancelled = await see_through(settling)
        failure = settling.exception()
        if isinstance(failure, InvalidInput) and self.open:
            await uncancelled(self.nack())  # refused: out of order
        if failure is not None:
            if error is None or not isinstance(failure, (LostLease, BufferClosed)):
                raise failure
            log.warning("lease_lost lease=%s %s", self.id, failure)  # the block's own error matters more
        if cancelled is not None:
            raise cancelled


class Request(Coroutine[Any, Any, T]):
    """A batch that was asked for, and is granted when this is awaited or entered with `async with`; once.

    It is a coroutine, so `asyncio.run`, `create_task`, `gather` and `wait_for` take it; one that is never awaited costs
    nothing. Leaving the `async with` block settles the lease.
    """

    def __init__(self, grant: Callable[[], Awaitable[T]]) -> None:
        self._grant = grant
        self._used = False
        self._running: Coroutine[Any, Any, T] | None = None
        self._entered: T | None = None

    def _lease_of(self, granted: T) -> Lease:
        """The lease that leaving the block settles."""
        raise NotImplementedError

    async def _granted(self) -> T:
        if self._used:
            raise InvalidInput("this batch was already asked for; call again for another one")
        self._used = True
        return await self._grant()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._granted().__await__()

    def send(self, value: Any) -> Any:
        return self._started().send(value)

    def throw(self, *error: Any) -> Any:
        return self._started().throw(*error)

    def close(self) -> None:
        if self._running is not None:
            self._running.close()

    def _started(self) -> Coroutine[Any, Any, T]:
        if self._running is None:
            self._running = self._granted()
        return self._running

    async def __aenter__(self) -> T:
        self._entered = await self._granted()
        return self._entered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered is not None:
            await self._lease_of(self._entered).__aexit__(kind, error, trace)


class LeaseRequest(Request[Lease]):
    """What `lease_batch` returns: await it for a lease, or enter it as an async context manager."""

    def _lease_of(self, granted: Lease) -> Lease:
        return granted


Groups = list[list[RolloutState]]

_SLICE_GROUPS = 64
"""Groups that are copied before the event loop gets its turn: a few milliseconds."""


class Claims:
    """Claims groups for takers, trainers and producers."""

    def __init__(self, session: Session, expiry: Expiry) -> None:
        self._session = session
        self._storage = session.storage
        self._expiry = expiry
        self._owed: list[tuple[Claim, Rows]] = []  # claims whose groups could not be given back yet

    async def take(self, wants: Mapping[str, int], status: Status) -> dict[str, Groups]:
        """At most this many groups of each task, for good."""
        owner = self._session.owner
        claim = Claim(wants=checked_wants(wants), statuses=(status,), purpose=Purpose.TAKE, owner=owner)
        return await self.hand_out(await self.claim(claim) or {}, None)

    async def draw(
        self,
        n: int,
        task_name: str,
        statuses: tuple[Status, ...],
        group_ids: tuple[int, ...] = (),
        share: Share | None = None,
    ) -> Groups:
        """At most n groups to be generated again; `group_ids`: only these, if any are given."""
        claim = Claim(
            wants=checked_wants({task_name: n}),
            statuses=statuses,
            purpose=Purpose.DRAW,
            owner=self._session.owner,
            group_ids=group_ids,
            share=share,
        )
        rows = await self.claim(claim) or {}
        return [present(row) for row in rows.get(task_name, ())]

    async def claim(self, claim: Claim) -> Rows | None:
        """Claim groups; None if some of a whole batch are missing. If groups had to expire first, claim once more."""
        await self._session.ready()
        await self.give_back_owed()
        rows, due = await self._claim(claim)
        if rows is None and due:
            await self._expiry.expire(due)
            rows, due = await self._claim(claim)
        if rows is None or not due:
            return rows
        try:
            await self._expiry.expire(due)
            missing = {name: claim.wants[name] - len(rows[name]) for name in due}
            if Status.EXPIRED in claim.statuses and any(missing.values()):
                more, _ = await self._claim(replace(claim, wants=missing))
                assert more is not None
                rows = {name: found + more.get(name, []) for name, found in rows.items()}
        except BaseException:
            await self.give_back(claim, rows)
            raise
        return rows

    async def _claim(self, claim: Claim) -> tuple[Rows | None, list[str]]:
        """The rows of a claim, and the tasks whose groups have to expire: those of which it wants something."""
        claimed = await self._storage.claim(claim)
        self._expiry.learn_limits(claimed.limits)
        return claimed.rows, [task_name for task_name in claimed.due if claim.wants[task_name] > 0]

    async def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None) -> None:
        """Settle rows of a lease."""
        await self._session.ready()
        await self._storage.settle(lease_id, uids, event, reason)

    async def give_back(self, claim: Claim, rows: Rows) -> None:
        """Return groups that were claimed and cannot be handed out: now, or before the next claim."""
        self._owed.append((claim, rows))
        with suppress(StorageError):
            await self.give_back_owed()

    async def give_back_owed(self) -> None:
        """Return groups of earlier claims that could not be returned because the storage was away."""
        for owed in list(self._owed):
            with suppress(BufferClosed):  # then they are already back
                await self._storage.undo(*owed)
            self._owed = [other for other in self._owed if other is not owed]

    async def hand_out(self, claimed: Rows, train_step: int | None) -> dict[str, Groups]:
        """Copies of claimed groups, token masks applied to those that will be trained on."""
        handed: dict[str, Groups] = {}
        copied = 0
        for task_name, rows in claimed.items():
            threshold = self._expiry.limits(task_name).token_stale_threshold
            step = self._expiry.step_of(task_name) if train_step is None else train_step
            groups: Groups = []
            for row in rows:
                copied += 1
                if copied % _SLICE_GROUPS == 0 and train_step is not None:
                    await asyncio.sleep(0)
                # Groups that were taken for good belong to the caller; all others stay in the storage, and are copied.
                if row.record.place is Place.BUFFERED:
                    group = list(row.group)
                    separate_extra_fields(group)
                else:
                    group = present(row)
                if row.record.status is Status.COMPLETED:
                    if train_step is not None:
                        for state in group:
                            state.seq_staleness = sample_staleness(state, train_step)
                    if threshold is not None and step is not None:
                        for state in group:
                            apply_token_mask(state, step, threshold)
                groups.append(group)
            handed[task_name] = groups
        return handed


class LeaseAttempt:
    """One batch that is asked for: `claim` until it says True, then `grant`."""

    def __init__(
        self, claims: Claims, wants: Mapping[str, int], train_step: int, status: Status = Status.COMPLETED
    ) -> None:
        wants = checked_wants(wants)
        checked_integer("train_step", train_step, least=1)
        check_ever_fits(claims._session.settings, sum(wants.values()))
        self._claims = claims
        self._train_step = train_step
        self._lease_id = uuid.uuid4().hex
        self._rows: Rows = {}
        self._claim = Claim(
            wants=wants,
            statuses=(status,),
            purpose=Purpose.LEASE,
            owner=claims._session.owner,
            whole=True,
            lease_id=self._lease_id,
            train_step=train_step,
        )

    async def claim(self) -> bool:
        """Try to claim the batch; whether all of it was available."""
        self._claims._expiry.see(self._train_step, asked(self._claim.wants))
        rows = await self._claims.claim(self._claim)
        self._rows = rows or {}
        return rows is not None

    async def grant(self) -> Lease:
        """The lease of the batch that was claimed."""
        uids = {(name, row.record.group_id): row.record.uid for name, rows in self._rows.items() for row in rows}
        try:
            groups = await self._claims.hand_out(self._rows, self._train_step)
        except BaseException:
            await self._claims.give_back(self._claim, self._rows)
            raise
        return Lease(self._lease_id, self._train_step, groups, uids, self._claims.settle)


def asked(wants: Mapping[str, int]) -> list[str]:
    """The tasks of which something is wanted."""
    return [task_name for task_name, n in wants.items() if n > 0]
