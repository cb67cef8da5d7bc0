"""The part of a buffer that samplers, strategies and managers use, and users do not.

`internals(buffer)` gives access to it. Everything here follows the same rules as the public methods: one step of the
storage at a time, waits that explain themselves.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakMethod

from forebay.buffer.admission import (
    Expiry,
    admit,
    content_of,
    lost_reason,
    needs_values,
    resolve_arrival,
    resolve_content,
)
from forebay.buffer.lease import Claims, Lease, LeaseAttempt, Settle
from forebay.buffer.session import Session
from forebay.core.capacity import check_ever_fits
from forebay.core.ledger import Clock, Record, Row, Tags, check_tags, identify, present
from forebay.core.rollout import DRAWABLE, RolloutState, Status
from forebay.core.staleness import NO_LIMITS, check_step
from forebay.core.validate import check_group, checked_integer, checked_many, checked_statuses, checked_task
from forebay.errors import BufferClosed, ForebayError, InvalidInput, LostLease, NoRoom
from forebay.storage.base import Arrival, Draw, Rows, Share, Summary
from forebay.storage.values import Content, Ready

if TYPE_CHECKING:
    from forebay.buffer.buffer import ReplayBuffer
    from forebay.checkpoint.format import Manifest

log = logging.getLogger(__name__)

Groups = list[list[RolloutState]]
T = TypeVar("T")

_SLICE_GROUPS = 64
"""Groups that are checked before the event loop gets its turn: a few milliseconds."""


class Issued(NamedTuple):
    """Groups that were issued; `taken` also counts those that ended at once."""

    groups: Groups
    taken: int


class Internals:
    """The parts of a buffer, and the operations of its producers and managers."""

    def __init__(self, session: Session, expiry: Expiry) -> None:
        self.session = session
        self.expiry = expiry
        self.claims = Claims(session, expiry)
        self.until = session.until
        self.nudge = session.nudge
        self.hurry = session.hurry
        self.asking = session.asking
        self.on_summary: list[WeakMethod[Callable[[Summary], None]]] = []
        self.restores = 0  # positions that were read before the last resume no longer hold
        self.shared = session.storage.shared
        self._storage = session.storage

    # --- drawing --------------------------------------------------------------------------------------

    async def position(self, task_name: str) -> tuple[int, bytes | None]:
        """How many groups were drawn for a task, and the state of its data set, if known."""
        account = (await self.summary((checked_task(task_name),))).task(task_name).account
        return account.cursor, account.source_state

    async def issue(
        self,
        groups: Sequence[Sequence[RolloutState]],
        task_name: str,
        *,
        cursor: int,
        source_state: bytes | None = None,
        share: Share | None = None,
    ) -> Issued:
        """Write newly drawn prompts as in flight, and advance the task's position, in one step.

        Issues those that fit, from the first one on, and no more than `share` allows. They get the group ids from
        `cursor` on; CursorMoved if the task's cursor is another. A group that refers to a lost value ends as failed at
        once.
        """
        await self.session.ready()
        checked_task(task_name)
        checked_integer("cursor", cursor, least=0)
        drawn: list[Content] = []
        for group in checked_many("groups", groups):
            check_group(group, task_name)
            drawn.append(content_of(tuple(group), None, None, task_name))
        contents = drawn
        if needs_values(self._storage):
            contents = await self.valued([resolve_content(content) for content in contents], task_name)
        draw = Draw(self.session.owner, cursor, source_state, share)
        records = await self._storage.issue(task_name, contents, draw)
        if len(records) < len(contents):
            prompt = contents[len(records)].facts
            if not records:
                check_ever_fits(self.session.settings, 1, prompt.bytes)
            await self.session.refused(prompt)
        else:
            self.session.accepted()
        lost = {}
        for record, content, before in zip(records, contents, drawn, strict=False):
            if content is not before:
                identify(before.group, task_name, record.group_id)
                if (reason := lost_reason(before, content)) is not None:
                    lost[record.uid] = reason
        if lost:
            await self._storage.fail(lost)
        kept = [
            present(Row(record, content.group))
            for record, content in zip(records, drawn, strict=False)
            if record.uid not in lost
        ]
        return Issued(kept, len(records))

    async def redraw(
        self,
        n: int,
        task_name: str,
        statuses: Sequence[Status] = DRAWABLE,
        *,
        group_ids: Collection[int] = (),
        share: Share | None = None,
    ) -> Groups:
        """Up to n groups to be generated again, an earlier status first, then by group_id.

        `group_ids`: only these groups, if any are given. `share`: no more than it allows.
        """
        await self.session.ready()
        chosen = checked_statuses(statuses)
        for status in chosen:
            if status not in DRAWABLE:
                raise InvalidInput(f"{status} groups cannot be drawn again; expected init, expired or aborted")
        return await self.claims.draw(n, checked_task(task_name), chosen, tuple(sorted(group_ids)), share)

    async def valued(self, resolving: Sequence[Awaitable[T]], task_name: str) -> list[T]:
        """Wait for the values of references, however long they take to be produced."""
        with self.session.listed(f"the values of references in groups of task {task_name!r}", (task_name,)):
            return await asyncio.gather(*resolving)

    # --- storing --------------------------------------------------------------------------------------

    async def put(
        self,
        groups: Sequence[Sequence[RolloutState]],
        task_name: str,
        *,
        model_step: int | None,
        train_step: int | None,
        limits: tuple[int | None, int | None, bool | None] = (None, None, None),
        tags: Tags | None = None,
        priority: float | None = None,
        timeout_s: float | None = None,
        failed: bool = False,
    ) -> list[Record]:
        """Store several groups of one task, all of them or none; returns their records. See `ReplayBuffer.put`.

        `limits`: thresholds in versions and tokens, and whether expired groups are retried, as the call gives them.
        `failed`: they come from attempts that failed.
        """
        await self.session.ready()
        checked_task(task_name)
        check_step("model_step", model_step, least=0)
        check_step("current_train_step", train_step, least=1)
        threshold, token_threshold, retryable = limits
        if retryable not in (None, True, False):
            raise InvalidInput(f"expired_groups_retryable is {retryable!r}; expected True or False")
        if train_step is None and (threshold is not None or token_threshold is not None):
            raise InvalidInput(
                f"put with stale_threshold={threshold}, token_stale_threshold={token_threshold} and no "
                "current_train_step; pass the train step to judge by"
            )
        in_force = self.expiry.limits_with(task_name, threshold, token_threshold, retryable)
        checked_tags = None if tags is None else check_tags(tags)
        arrivals: list[Arrival] = []
        for items in checked_many("groups", groups):
            if len(arrivals) % _SLICE_GROUPS == _SLICE_GROUPS - 1:
                await asyncio.sleep(0)
            arrivals.append(
                admit(
                    items,
                    task_name,
                    model_step=model_step,
                    train_step=train_step,
                    limits=in_force,
                    tags=checked_tags,
                    priority=priority,
                    failed=failed,
                )
            )
        if not arrivals:
            return []
        if needs_values(self._storage):
            arrivals = await self.valued([resolve_arrival(arrival) for arrival in arrivals], task_name)
        if train_step is not None:
            self.expiry.see(train_step)
        ready = Ready()

        async def store() -> list[Record] | None:
            nonlocal ready
            try:
                return await self._storage.put(arrivals, owner=self.session.owner)
            except NoRoom as full:
                check_ever_fits(self.session.settings, full.groups, full.bytes)
                ready = Ready(room_groups=full.groups, room_bytes=full.bytes)
                return None

        what = f"capacity for {len(arrivals)} groups of task {task_name!r}"
        records = await self.session.until(store, what, (task_name,), timeout_s, lambda: ready)
        if in_force != NO_LIMITS and self.expiry.limits(task_name) == NO_LIMITS:
            await self.expiry.advance({task_name: Clock(limits=in_force)})
        return records

    async def give_back(self, groups: Groups, task_name: str) -> None:
        """Return groups in flight, as ABORTED with the tokens that they have. Skips groups that others hold by now."""
        failed: ForebayError | None = None
        for group in groups:
            mark_aborted(group)
            try:
                await self.put((group,), task_name, model_step=None, train_step=None)
            except (LostLease, BufferClosed) as gone:
                log.info("group_gone task=%s group=%s reason=%s", task_name, group[0].group_id, gone)
            except ForebayError as error:
                failed = failed or error  # the others go back all the same
        if failed is not None:
            raise failed

    # --- producing ------------------------------------------------------------------------------------

    async def summary(
        self, tasks: Collection[str] | None = None, *, holdings: bool = False, owners: bool = False
    ) -> Summary:
        """Every count of these tasks (None: of all), of one moment."""
        await self.session.ready()
        summary = await self._storage.summary(tasks, holdings=holdings, owners=owners or bool(self.on_summary))
        self.expiry.learn(summary)
        for reference in tuple(self.on_summary):
            if (see := reference()) is not None:
                see(summary)
            else:
                self.on_summary.remove(reference)
        return summary

    async def write_plan(self, task_name: str, content: bytes, *, revision: int) -> bool:
        """Replace the plan of a task if nobody else has since; whether it was replaced."""
        await self.session.ready()
        return await self._storage.write_plan(task_name, content, revision=revision)

    async def release(self, owner: str) -> None:
        """Give back the groups of another owner, which can no longer return them."""
        await self.session.ready()
        await self._storage.release(owner)

    async def advance(self, clocks: Mapping[str, Clock]) -> None:
        """Advance clocks and set limits of tasks."""
        await self.session.ready()
        await self.expiry.advance(clocks)

    def produces(self, producer: object, tasks: Collection[str]) -> None:
        """Which tasks a manager produces from now on. The groups of all others count as kept aside."""
        if tasks:
            self.session.producers[producer] = frozenset(tasks)
        else:
            self.session.producers.pop(producer, None)

    # --- leasing --------------------------------------------------------------------------------------

    def lease_attempt(self, wants: Mapping[str, int], train_step: int) -> LeaseAttempt:
        """A batch of COMPLETED groups that is asked for, for `until`."""
        return LeaseAttempt(self.claims, wants, train_step)

    async def try_lease(self, wants: Mapping[str, int], train_step: int) -> Lease | None:
        """A full batch of COMPLETED groups if it is available, else None; never waits."""
        await self.session.ready()
        attempt = self.lease_attempt(wants, train_step)
        return await attempt.grant() if await attempt.claim() else None

    async def read_lease(self, lease_id: str, uids: Sequence[int], train_step: int, settle: Settle) -> Lease:
        """Groups that another owner has leased, for one of its ranks, which settles them with `settle`."""
        await self.session.ready()
        rows: Rows = {}
        for uid in uids:
            row = await self._storage.read(uid)
            if row is None or row.record.lease_id != lease_id:
                raise LostLease(f"the batch of lease {lease_id} was given back before all ranks had their parts")
            rows.setdefault(row.record.task_name, []).append(row)
        found = {(name, row.record.group_id): row.record.uid for name, each in rows.items() for row in each}
        return Lease(lease_id, train_step, await self.claims.hand_out(rows, train_step), found, settle)

    async def give_back_owed(self) -> None:
        """Return groups that were claimed for a batch which an outage kept from being handed out."""
        await self.session.ready()
        await self.claims.give_back_owed()

    # --- checkpoints ----------------------------------------------------------------------------------

    async def save(
        self,
        path: str | os.PathLike[str],
        *,
        model_step: int | None,
        prompts_only: bool,
        extra: Callable[[], dict[str, Any]] = dict,
        tasks: Collection[str] | None = None,
    ) -> None:
        """Write a checkpoint, with more in the manifest: `extra()` is asked in the moment of the snapshot."""
        await self.session.ready()
        check_step("model_step", model_step, least=0)
        from forebay.buffer.checkpoints import save_storage  # here: it would double the time of `import forebay`

        save = partial(save_storage, self._storage, path, model_step=model_step, prompts_only=prompts_only)
        await save(extra=extra, tasks=tasks)

    async def resume(self, path: str | os.PathLike[str], tasks: Collection[str] | None = None) -> Manifest:
        """Resume a checkpoint; returns the whole manifest."""
        await self.session.ready()
        from forebay.buffer.checkpoints import resume_storage

        manifest = await resume_storage(self._storage, path, tasks=tasks)
        self.restores += 1
        await self.expiry.recall()
        return manifest

    async def start_over(self, tasks: Collection[str] | None) -> None:
        """A run begins with the weights of step 0: a durable store keeps what it trains from now on, until it is saved.

        If an earlier run began here and saved nothing, what it trained is lost with its weights, and comes back.
        """
        await self.session.ready()
        storage = self._storage
        if not storage.durable:
            return
        summary = await storage.summary(tasks)
        steps = {task.saved_step(summary.saved_step) for task in summary.tasks.values()} or {summary.saved_step}
        if steps == {0}:
            rewound = await storage.rewind(0, tasks)
            if rewound:
                log.warning("store_rewound model_step=0 %s: there is no checkpoint, so they are trained again", rewound)
            self.restores += 1
            await self.expiry.recall()
            await self.expiry.reset_newer(0, tasks)
        elif steps == {None} and not any(task.account.train_step for task in summary.tasks.values()):
            await storage.saved(0, tasks)


def mark_aborted(group: Iterable[RolloutState], reason: str | None = None) -> None:
    """Mark the members that are not COMPLETED as ABORTED, so that they are generated again from what they have."""
    for state in group:
        if state.status is not Status.COMPLETED:
            state.status = Status.ABORTED
            state.error_msg = reason or state.error_msg


def internals(buffer: ReplayBuffer) -> Internals:
    """The internals of a buffer."""
    return buffer._internals
