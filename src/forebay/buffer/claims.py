"""How groups leave a buffer: one claim of the storage, then copies for the caller.

The storage hands out nothing that is too old; groups that a claim found to be too old are expired right after it.
Nothing waits here; `session` does. Groups of a claim that cannot be handed out go back.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from forebay.buffer.expiry import Expiry
from forebay.buffer.lease import Lease
from forebay.buffer.session import Session
from forebay.core.ledger import Event, Place
from forebay.core.record import present, separate_extra_fields
from forebay.core.rollout import RolloutState, Status
from forebay.core.staleness import apply_token_mask, sample_staleness
from forebay.core.validate import checked_wants, whole_number
from forebay.errors import BufferClosed, InvalidConfig, LostLease, StorageUnavailable
from forebay.storage.base import Claim, Claimed, Purpose, Rows

__all__ = ["Claims", "LeaseAttempt", "asked"]

Groups = list[list[RolloutState]]

_SLICE_GROUPS = 64
"""Groups that are copied before the event loop gets its turn: a few milliseconds."""


class Claims:
    """Claims groups for takers, trainers and producers."""

    def __init__(self, session: Session, expiry: Expiry) -> None:
        self._session = session
        self._storage = session.storage
        self._expiry = expiry
        self._owed: list[Callable[[], Awaitable[None]]] = []  # return groups that could not be handed out

    async def take(self, wants: Mapping[str, int], status: Status) -> dict[str, Groups]:
        """At most this many groups of each task, for good."""
        wants = checked_wants(wants)
        rows = await self._claim_some(wants, (status,), Purpose.TAKE)
        return await self.hand_out(rows, None)

    async def draw(
        self, n: int, task_name: str, statuses: tuple[Status, ...], group_ids: tuple[int, ...] = ()
    ) -> Groups:
        """At most n groups to be generated again; `group_ids`: only these, if any are given."""
        rows = await self._claim_some(checked_wants({task_name: n}), statuses, Purpose.DRAW, group_ids)
        return [present(row) for row in rows[task_name]]

    async def _claim_some(
        self, wants: dict[str, int], statuses: tuple[Status, ...], purpose: Purpose, group_ids: tuple[int, ...] = ()
    ) -> Rows:
        """Claim what is there; if groups had to expire first, claim the rest once more."""
        self._session.check_open()
        await self.give_back_owed()
        owner = self._session.owner
        claim = Claim(wants=wants, statuses=statuses, purpose=purpose, owner=owner, group_ids=group_ids)
        claimed = await self._storage.claim(claim)
        rows = claimed.rows
        assert rows is not None
        self._expiry.learn_limits(claimed.limits)
        due = _due(claim, claimed)
        if not due:
            return rows
        try:
            await self._expiry.expire(due)
            missing = {name: wants[name] - len(rows[name]) for name in due}
            if Status.EXPIRED in statuses and any(missing.values()):
                more = (await self._storage.claim(replace(claim, wants=missing))).rows
                assert more is not None
                rows = {name: found + more.get(name, []) for name, found in rows.items()}
        except BaseException:
            await self.give_back(partial(self._storage.undo, claim, rows))
            raise
        return rows

    async def lease(self, wants: Mapping[str, int], train_step: int) -> Lease | None:
        """A full batch of COMPLETED groups if it is there, else None. Never waits."""
        attempt = LeaseAttempt(self, wants, train_step)
        return await attempt.grant() if await attempt.claim() else None

    async def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None) -> None:
        """Settle rows of a lease."""
        await self._session.ready()
        await self._storage.settle(lease_id, uids, event, reason)

    async def give_back(self, returning: Callable[[], Awaitable[None]]) -> None:
        """Return groups that were claimed and cannot be handed out: now, or before the next claim."""
        self._owed.append(returning)
        with suppress(StorageUnavailable):
            await self.give_back_owed()

    async def give_back_owed(self) -> None:
        """Return groups of earlier claims that could not be returned because the storage was away."""
        for returning in list(self._owed):
            with suppress(LostLease, BufferClosed):  # then they are back already
                await returning()
            if returning in self._owed:
                self._owed.remove(returning)

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

    def refuse_more_than_fits(self, wants: Mapping[str, int]) -> None:
        """InvalidConfig if a batch is larger than the buffer."""
        wanted, limit = sum(wants.values()), self._session.settings.max_groups
        if limit is not None and wanted > limit:
            raise InvalidConfig(
                f"waiting for {wanted} groups in a buffer of max_groups={limit} would never end; raise max_groups or "
                "ask for less"
            )


class LeaseAttempt:
    """One batch that is asked for: `claim` until it says True, then `grant`."""

    def __init__(
        self, claims: Claims, wants: Mapping[str, int], train_step: int, status: Status = Status.COMPLETED
    ) -> None:
        wants = checked_wants(wants)
        whole_number("train_step", train_step, least=1)
        claims.refuse_more_than_fits(wants)
        self._claims = claims
        self._train_step = train_step
        self._rows: Rows = {}
        self._claim = Claim(
            wants=wants,
            statuses=(status,),
            purpose=Purpose.LEASE,
            owner=claims._session.owner,
            whole=True,
            lease_id=uuid.uuid4().hex,
            train_step=train_step,
        )

    async def claim(self) -> bool:
        """Try to claim the batch; whether all of it was there."""
        session, expiry = self._claims._session, self._claims._expiry
        await session.ready()
        await self._claims.give_back_owed()
        expiry.see(self._train_step, asked(self._claim.wants))
        claimed = await session.storage.claim(self._claim)
        expiry.learn_limits(claimed.limits)
        if claimed.rows is None and (due := _due(self._claim, claimed)):
            await expiry.expire(due)
            claimed = await session.storage.claim(self._claim)
        if claimed.rows is None:
            return False
        self._rows = claimed.rows
        try:
            await expiry.expire(_due(self._claim, claimed))
        except BaseException:
            await self._give_back()
            raise
        return True

    async def grant(self) -> Lease:
        """The lease of the batch that was claimed."""
        uids = self._uids()
        try:
            groups = await self._claims.hand_out(self._rows, self._train_step)
        except BaseException:
            await self._give_back()
            raise
        assert self._claim.lease_id is not None
        return Lease(self._claim.lease_id, self._train_step, groups, uids, self._claims.settle)

    def _uids(self) -> dict[tuple[str, int], int]:
        return {(name, row.record.group_id): row.record.uid for name, rows in self._rows.items() for row in rows}

    async def _give_back(self) -> None:
        uids = list(self._uids().values())
        if uids:
            assert self._claim.lease_id is not None
            await self._claims.give_back(partial(self._claims.settle, self._claim.lease_id, uids, Event.NACKED, None))


def _due(claim: Claim, claimed: Claimed) -> list[str]:
    """The tasks whose groups have to expire: a claim leaves tasks alone of which it wants nothing."""
    return [task_name for task_name in claimed.due if claim.wants[task_name] > 0]


def asked(wants: Mapping[str, int]) -> list[str]:
    """The tasks of which something is wanted."""
    return [task_name for task_name, n in wants.items() if n > 0]
