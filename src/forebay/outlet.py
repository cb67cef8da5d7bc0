"""How groups leave a buffer: what is too old expires first, then a claim in one step, then copies for the caller.

The buffer's other half of `intake`. Nothing waits here; `session` does. A claim that cannot be handed out goes back.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from forebay.ageing import Ageing
from forebay.arguments import checked_wants
from forebay.checks import whole_number
from forebay.errors import BufferClosed, InvalidConfig, LostLease, StorageUnavailable
from forebay.lease import Lease
from forebay.ledger import Event, Place
from forebay.record import present, separate_extra_fields
from forebay.rollout import RolloutState, Status
from forebay.session import Session
from forebay.staleness import apply_token_mask, sample_staleness
from forebay.storage.base import Claim, Claimed, Purpose

__all__ = ["Outlet", "asked"]

Groups = list[list[RolloutState]]

_SLICE_GROUPS = 64
"""Groups that are copied before the event loop gets its turn: a few milliseconds."""


class Outlet:
    """Claims groups for takers, trainers and producers."""

    def __init__(self, session: Session, ageing: Ageing) -> None:
        self._session = session
        self._storage = session.storage
        self._ageing = ageing
        self._owed: dict[str, list[int]] = {}  # leases that could be neither handed out nor given back

    async def prepare(self, wants: Mapping[str, int]) -> None:
        """What is too old expires, and what a dead holder had comes back, before anything is claimed."""
        await self._session.reap()
        await self._ageing.expire(asked(wants))
        self._session.check_open()

    async def take(self, wants: Mapping[str, int], status: Status) -> dict[str, Groups]:
        """At most so many groups, for good."""
        wants = checked_wants(wants)
        await self.prepare(wants)
        claim = Claim(wants=wants, statuses=(status,), purpose=Purpose.TAKE, owner=self._session.owner)
        claimed = await self._storage.claim(claim)
        assert claimed is not None
        return await self.hand_out(claimed, None)

    async def draw(
        self, n: int, task_name: str, statuses: tuple[Status, ...], group_ids: tuple[int, ...] = ()
    ) -> Groups:
        """At most n groups to be generated again."""
        wants = checked_wants({task_name: n})
        await self.prepare(wants)
        claim = Claim(
            wants=wants, statuses=statuses, purpose=Purpose.DRAW, owner=self._session.owner, group_ids=group_ids
        )
        claimed = await self._storage.claim(claim)
        assert claimed is not None
        return [present(row) for row in claimed[task_name]]

    async def lease_attempt(
        self, wants: Mapping[str, int], train_step: int, status: Status
    ) -> tuple[Callable[[], Awaitable[Claimed | None]], Callable[[Claimed], Awaitable[Lease]]]:
        """How to try to claim a batch, and how to make a lease of what was claimed."""
        wants = checked_wants(wants)
        whole_number("train_step", train_step, least=1)
        self.refuse_more_than_fits(wants)
        limits = {task_name: self._ageing.limits(task_name) for task_name in asked(wants)}
        lease_id = uuid.uuid4().hex
        claim = Claim(
            wants=wants,
            statuses=(status,),
            purpose=Purpose.LEASE,
            owner=self._session.owner,
            whole=True,
            floors={task_name: limit.floors(train_step) for task_name, limit in limits.items()},
            lease_id=lease_id,
            train_step=train_step,
            watermarks=self._ageing.watermarks(train_step, limits) if self._storage.claims_with_watermarks else {},
        )
        if self._storage.claims_with_watermarks:
            self._ageing.advanced(train_step, limits)
        else:
            await self._ageing.advance(train_step, limits)

        async def attempt() -> Claimed | None:
            await self.give_back_owed()
            await self.prepare(wants)
            claimed = await self._storage.claim(claim)
            if claimed is None and claim.watermarks:
                await self._ageing.expire(claim.watermarks)  # what only the claim itself made too old
            return claimed

        async def grant(claimed: Claimed) -> Lease:
            uids = {
                (task_name, row.record.group_id): row.record.uid for task_name, rows in claimed.items() for row in rows
            }
            try:
                if claim.watermarks:
                    await self._ageing.expire(claim.watermarks)
                groups = await self.hand_out(claimed, train_step)
            except BaseException:
                self._owed[lease_id] = list(uids.values())
                with suppress(StorageUnavailable):  # the next attempt gives it back
                    await self.give_back_owed()
                raise
            return Lease(lease_id, train_step, groups, uids, self.settle)

        return attempt, grant

    async def give_back_owed(self) -> None:
        """Return groups that were claimed and could not be handed out."""
        for lease_id, uids in list(self._owed.items()):
            with suppress(LostLease, BufferClosed):  # then they are back already
                await self.settle(lease_id, uids, Event.NACKED, None)
            self._owed.pop(lease_id, None)

    async def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None) -> None:
        await self._session.ready()
        await self._storage.settle(lease_id, uids, event, reason)

    async def hand_out(self, claimed: Claimed, train_step: int | None) -> dict[str, Groups]:
        """Copies of what was claimed, token masks applied to what will be trained on."""
        handed: dict[str, Groups] = {}
        copied = 0
        for task_name, rows in claimed.items():
            threshold = self._ageing.limits(task_name).token_stale_threshold
            step = self._ageing.step_of(task_name) if train_step is None else train_step
            groups: Groups = []
            for row in rows:
                copied += 1
                if copied % _SLICE_GROUPS == 0 and train_step is not None:
                    await asyncio.sleep(0)
                # What was taken for good is ours alone; everything else stays in the storage, and is copied.
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
        wanted, limit = sum(wants.values()), self._session.settings.max_groups
        if limit is not None and wanted > limit:
            raise InvalidConfig(
                f"waiting for {wanted} groups in a buffer of max_groups={limit} would never end; raise max_groups or "
                "ask for less"
            )


def asked(wants: Mapping[str, int]) -> list[str]:
    """The tasks of which something is wanted."""
    return [task_name for task_name, n in wants.items() if n > 0]
