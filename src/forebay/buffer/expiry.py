"""Ageing: which limits are in force, which train step was seen last, and expiring what is below them.

The rules are in `staleness`; this is their one user on stored groups. Expiring first moves the watermark of a task
in the storage, so that nothing too old leaves meanwhile, and then revises what is below it in slices that
leave the event loop free. It costs in proportion to what expires.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from forebay.buffer.admission import expire_content, lost_reason, needs_values, resolve_contents
from forebay.core.ledger import Watermark
from forebay.core.query import And, Compare
from forebay.core.record import Row
from forebay.core.references import as_values
from forebay.core.rollout import Status
from forebay.core.staleness import EXPIRABLE, Limits
from forebay.errors import DamagedData, InvalidInput
from forebay.storage.base import Content, Revision, Storage

__all__ = ["Ageing"]

log = logging.getLogger(__name__)

_NO_LIMITS = Limits()
_SLICE_GROUPS = 32  # a millisecond or two


class Ageing:
    """Limits by task, and the expiry of what exceeds them."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._kept: dict[str, Limits] = {}
        self._given: dict[str, Limits] = {}
        self._watermarks: dict[str, Watermark] = {}  # as this process last knew them
        self.last_train_step: int | None = None

    async def recall(self) -> None:
        """Take up the steps and limits that a storage with a past was last used with."""
        for task_name, account in (await self._storage.accounts()).items():
            if account.watermark is not None:
                self.see(account.watermark.train_step)
                self._given.setdefault(task_name, account.watermark.limits)
                self._watermarks[task_name] = account.watermark

    def see(self, train_step: int) -> None:
        if self.last_train_step is None or train_step > self.last_train_step:
            self.last_train_step = train_step

    def keep(self, task_name: str, limits: Limits) -> None:
        self._kept[task_name] = limits

    def limits(self, task_name: str) -> Limits:
        """The limits in force: those that are kept, else those last given with a call, else none."""
        return self._kept.get(task_name) or self._given.get(task_name) or _NO_LIMITS

    def limits_of_call(
        self, task_name: str, threshold: int | None, token_threshold: int | None, retryable: bool | None
    ) -> Limits:
        """The limits in force with what a call gives instead; `remember` them when the call has succeeded."""
        limits = self.limits(task_name)
        if threshold is None and token_threshold is None and retryable is None:
            return limits
        return Limits(
            limits.stale_threshold if threshold is None else threshold,
            limits.token_stale_threshold if token_threshold is None else token_threshold,
            limits.retryable if retryable is None else retryable,
        )

    def remember(self, task_name: str, limits: Limits) -> None:
        """Limits that were given with a call hold for later ones of a task that has none of its own."""
        if limits is not self.limits(task_name):
            self._given[task_name] = limits

    def step_of(self, task_name: str) -> int | None:
        """The train step that a task was last judged for, as far as this process knows."""
        watermark = self._watermarks.get(task_name)
        return None if watermark is None else watermark.train_step

    def state(self) -> dict[str, dict[str, int | bool | None]]:
        """The limits that are kept, as plain data for a checkpoint."""
        return {task_name: msgspec.structs.asdict(limits) for task_name, limits in self._kept.items()}

    def load_state(self, state: object) -> None:
        """Take up saved limits; those that were set since stay."""
        try:
            saved = msgspec.convert(state, dict[str, Limits])
        except (msgspec.ValidationError, InvalidInput) as error:
            raise DamagedData(f"the limits of a checkpoint cannot be read: {error}") from None
        self._kept = saved | self._kept

    async def advance(self, train_step: int, limits: Mapping[str, Limits]) -> None:
        """From now on nothing of these tasks leaves that is too old for the step."""
        await self._storage.set_watermark(self.watermarks(train_step, limits))
        self.advanced(train_step, limits)

    @staticmethod
    def watermarks(train_step: int, limits: Mapping[str, Limits]) -> dict[str, Watermark]:
        """The watermarks that a step and limits make."""
        return {task_name: Watermark(train_step, limit) for task_name, limit in limits.items()}

    def advanced(self, train_step: int, limits: Mapping[str, Limits]) -> None:
        """The watermarks were set in the storage."""
        self.see(train_step)
        for task_name, watermark in self.watermarks(train_step, limits).items():
            known = self._watermarks.get(task_name)
            step = train_step if known is None else max(train_step, known.train_step)
            self._watermarks[task_name] = replace(watermark, train_step=step)

    async def expire(self, tasks: Iterable[str], statuses: Collection[Status] = EXPIRABLE) -> dict[str, int]:
        """Revise everything that is below the watermarks; groups that newly expired, by task."""
        return {task_name: await self._expire(task_name, statuses) for task_name in tasks}

    async def _expire(self, task_name: str, statuses: Collection[Status]) -> int:
        known = self._watermarks.get(task_name)
        if known is not None and known.limits != self.limits(task_name):
            # The limits were changed since: what is stored is judged by the new ones.
            await self.advance(known.train_step, {task_name: self.limits(task_name)})
        newly_expired = 0
        while self._storage.may_be_due(task_name):
            with as_values():
                rows = await self._storage.due(task_name, statuses, _SLICE_GROUPS)
            if not rows:
                break
            watermark = (await self._storage.account(task_name)).watermark
            assert watermark is not None, "nothing is due without a watermark"
            # The watermark may have moved in between: what is not below the one we know only gets its facts anew
            # here, and is looked at again.
            contents = [expire_content(row.group, watermark.limits, watermark.train_step) for row in rows]
            if needs_values(self._storage):
                rows, contents = await self._valued(rows, contents)
            revisions = [
                Revision(row.record.uid, row.record.revision, content)
                for row, content in zip(rows, contents, strict=True)
            ]
            applied = await self._storage.revise(revisions)
            newly_expired += sum(
                done
                and row.record.status is not Status.EXPIRED
                and (content is None or content.facts.status is Status.EXPIRED)
                for row, content, done in zip(rows, contents, applied, strict=True)
            )
            await asyncio.sleep(0)
        if newly_expired:
            log.info("groups_expired task=%s groups=%d", task_name, newly_expired)
        return newly_expired

    async def _valued(
        self, rows: Sequence[Row], contents: Sequence[Content | None]
    ) -> tuple[list[Row], list[Content | None]]:
        """Rows with what they become, references resolved; those with a lost value end here, as failed."""
        kept: list[Row] = []
        valued: list[Content | None] = []
        lost: dict[int, str] = {}
        for row, content in zip(rows, contents, strict=True):
            after = content if content is None else (await resolve_contents((content,)))[0]
            reason = None if content is None or after is None else lost_reason(content, after)
            if reason is None:
                kept.append(row)
                valued.append(after)
            else:
                lost[row.record.uid] = reason
        if lost:
            await self._storage.fail(lost)
        return kept, valued

    async def drop_expired(self, task_name: str) -> None:
        """Discard the EXPIRED groups of a task that no longer retries them."""
        node = And((Compare("task_name", "eq", task_name), Compare("status", "eq", Status.EXPIRED)))
        await self._storage.discard(node, "stale")
