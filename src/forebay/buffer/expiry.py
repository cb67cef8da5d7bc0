"""Expiry: the limits in force as this process knows them, and expiring stored groups that exceed them.

Limits and clocks live in the storage, so that every process judges alike; what is kept here is a copy that every claim
and summary refreshes. The rules are in `core.staleness`. Expiring first advances the clock of a task in the storage, so
that nothing too old leaves meanwhile, and then revises the groups that are due in slices that leave the loop free. It
costs in proportion to the groups that expire.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from forebay.buffer.admission import expire_content, lost_reason, needs_values, resolve_contents
from forebay.core.ledger import Account, Clock
from forebay.core.query import And, Compare
from forebay.core.record import Row
from forebay.core.references import as_values
from forebay.core.rollout import Status
from forebay.core.staleness import EXPIRABLE, NO_LIMITS, Limits
from forebay.storage.base import Content, Revision, Storage, Summary

__all__ = ["Expiry"]

log = logging.getLogger(__name__)

_SLICE_GROUPS = 32  # a millisecond or two


class Expiry:
    """The limits of tasks, and the expiry of groups that exceed them."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._limits: dict[str, Limits] = {}
        self._steps: dict[str, int] = {}
        self.last_train_step: int | None = None

    async def recall(self) -> None:
        """Learn the steps and limits of a storage with a past."""
        self._limits.clear()
        self._steps.clear()
        self.learn(await self._storage.summary())

    def learn(self, summary: Summary) -> None:
        """Take over the clocks and limits that the storage reported."""
        for task_name, task in summary.tasks.items():
            self._limits[task_name] = task.account.limits
            if task.account.train_step is not None:
                self.see(task.account.train_step, (task_name,))

    def learn_limits(self, limits: Mapping[str, Limits]) -> None:
        """Take over limits that a claim reported."""
        self._limits.update(limits)

    def see(self, train_step: int, tasks: Iterable[str] = ()) -> None:
        """A train step was asked for, for these tasks."""
        if self.last_train_step is None or train_step > self.last_train_step:
            self.last_train_step = train_step
        for task_name in tasks:
            self._steps[task_name] = max(train_step, self._steps.get(task_name, 0))

    def limits(self, task_name: str) -> Limits:
        """The limits in force, as this process last heard of them."""
        return self._limits.get(task_name, NO_LIMITS)

    def limits_with(
        self, task_name: str, threshold: int | None, token_threshold: int | None, retryable: bool | None
    ) -> Limits:
        """The limits in force with what a call gives instead."""
        limits = self.limits(task_name)
        if threshold is None and token_threshold is None and retryable is None:
            return limits
        return Limits(
            limits.stale_threshold if threshold is None else threshold,
            limits.token_stale_threshold if token_threshold is None else token_threshold,
            limits.retryable if retryable is None else retryable,
        )

    def step_of(self, task_name: str) -> int | None:
        """The latest train step that a task was asked for, as far as this process knows."""
        return self._steps.get(task_name)

    async def advance(self, clocks: Mapping[str, Clock]) -> None:
        """Advance clocks and set limits in the storage: nothing that is too old by them leaves from now on."""
        await self._storage.advance(clocks)
        for task_name, clock in clocks.items():
            if clock.limits is not None:
                self._limits[task_name] = clock.limits
            if clock.train_step is not None:
                self.see(clock.train_step, (task_name,))

    async def expire(self, tasks: Iterable[str], statuses: Collection[Status] = EXPIRABLE) -> dict[str, int]:
        """Revise every group that is too old; groups that newly expired, by task."""
        return {task_name: await self._expire(task_name, statuses) for task_name in tasks}

    async def _expire(self, task_name: str, statuses: Collection[Status]) -> int:
        newly_expired = 0
        while True:
            with as_values():
                rows = await self._storage.due(task_name, statuses, _SLICE_GROUPS)
            if not rows:
                break
            account = (await self._storage.summary((task_name,))).task(task_name).account
            # The clock may have moved in between: a row that is not too old by the account that we read only gets its
            # facts computed again, and is due again.
            contents = [_expired(row, account) for row in rows]
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
        """Rows and their new contents with references resolved; rows with a lost value end here, as failed."""
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


def _expired(row: Row, account: Account) -> Content | None:
    assert account.train_step is not None, "nothing is due without a train step"
    return expire_content(row.group, account.limits, account.train_step)
