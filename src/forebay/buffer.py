"""ReplayBuffer: policy x storage, with limits, leases and waiting.

It owns no group: rows, counts and positions live in the storage, which moves them in single steps. This file
orders those steps: what comes in passes `intake`, what is asked for is judged for age before it is claimed,
what is not there yet is waited for on the event itself (G11). Anything that could hold the event loop for long is cut
into slices (G10). A buffer lives on one event loop at a time; `forebay.blocking` serves other threads.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forebay import report
from forebay.ageing import Ageing
from forebay.arguments import (
    batch_name,
    checked_many,
    checked_mapping,
    checked_reason,
    checked_status,
    checked_statuses,
    checked_task,
    checked_wants,
)
from forebay.checks import check_group, whole_number
from forebay.errors import InvalidConfig, InvalidInput
from forebay.group_ends import GroupEnds, OnGroupEnd
from forebay.intake import admit, content_of
from forebay.lease import Lease, LeaseRequest
from forebay.ledger import LedgerLine, Place
from forebay.outlet import Outlet, asked
from forebay.policy import FIFOReplayPolicy, ReplayPolicy
from forebay.query import And, Compare, Node, parse, resolve_staleness
from forebay.record import Record, Row, Tags, check_tags, identify, present
from forebay.resolving import lost_reason, needs_values, resolve_arrivals, resolve_contents
from forebay.rollout import RolloutState, Status
from forebay.session import Session
from forebay.staleness import EXPIRABLE, Limits, check_step
from forebay.storage.base import EXPECT_GROUP_BYTES, Arrival, Claimed, Ready, Settings, Storage
from forebay.storage.memory import MemoryStorage

if TYPE_CHECKING:
    from forebay.checkpoint import Manifest

__all__ = ["ReplayBuffer", "checkpoint_exists"]

Groups = list[list[RolloutState]]
T = TypeVar("T")

_SLICE_GROUPS = 64
"""Groups that are checked, expired or copied before the event loop gets its turn: a few milliseconds."""


class ReplayBuffer:
    """Groups of rollouts between those who generate and those who train.

    `max_groups` and `max_bytes` bound what is in flight, buffered and leased together. A group that is being generated
    counts with the size that it is expected to have: its prompt, and for each member the 99th percentile of the
    responses of its task (before the first ones are back, `expect_group_bytes` for all its members). So what is held
    exceeds `max_bytes` by at most what groups grow beyond that. `lease_s`: how long a holder that stopped beating keeps
    its groups (None: as long as its process lives; 60 s on shared storages).
    `keep_trained`: so many of the last trained groups stay readable as ARCHIVED. `on_group_end`: a function, plain or
    async, that is told of every group that leaves for good, with a `GroupEnd`; see `group_ends`.
    """

    def __init__(
        self,
        policy: ReplayPolicy | None = None,
        storage: Storage | None = None,
        *,
        max_groups: int | None = None,
        max_bytes: int | None = None,
        expect_group_bytes: int = EXPECT_GROUP_BYTES,
        lease_s: float | None = None,
        keep_trained: int = 0,
        on_group_end: OnGroupEnd | None = None,
    ) -> None:
        self.policy = FIFOReplayPolicy() if policy is None else policy
        self.storage = MemoryStorage() if storage is None else storage
        if not isinstance(self.policy, ReplayPolicy) or not isinstance(self.storage, Storage):
            raise InvalidConfig(
                f"ReplayBuffer(policy, storage) got ({policy!r}, {storage!r}); expected a ReplayPolicy and a Storage"
            )
        for name, limit in (("max_groups", max_groups), ("max_bytes", max_bytes)):
            if limit is not None:
                whole_number(name, limit, least=1)
        if lease_s is not None and not (isinstance(lease_s, (int, float)) and 0 < lease_s < float("inf")):
            raise InvalidConfig(f"lease_s is {lease_s!r}; expected a positive number of seconds")
        if self.policy.choose is not None and self.policy.order.columns:
            raise InvalidConfig(f"{self.policy!r} has an order and a choose; expected one of them")
        settings = Settings(
            order=self.policy.order,
            choose=self.policy.choose,
            max_groups=max_groups,
            max_bytes=max_bytes,
            expect_group_bytes=whole_number("expect_group_bytes", expect_group_bytes, least=0),
            keep_trained=whole_number("keep_trained", keep_trained, least=0),
        )
        self._ageing = Ageing(self.storage)
        self._session = Session(self.storage, settings, lease_s, self._ageing.recall)
        if on_group_end is not None:
            self._session.group_ends = GroupEnds(self.storage, self.owner, on_group_end)
        self._outlet = Outlet(self._session, self._ageing)

    @property
    def owner(self) -> str:
        """The name under which this buffer holds groups."""
        return self._session.owner

    def __repr__(self) -> str:
        return f"<ReplayBuffer {self.policy!r} on {type(self.storage).__name__}: {len(self)} buffered groups>"

    # --- life -----------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End every wait, give back what this buffer holds. Closing twice is allowed."""
        await self._session.close()

    async def __aenter__(self) -> ReplayBuffer:
        await self._session.ready()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # --- limits ---------------------------------------------------------------------------------------

    def set_limits(
        self,
        task_name: str,
        *,
        stale_threshold: int | None = None,
        token_stale_threshold: int | None = None,
        retryable: bool = True,
    ) -> None:
        """How old the groups of a task may grow. Kept; arguments of a call override it for that call."""
        self._ageing.keep(checked_task(task_name), Limits(stale_threshold, token_stale_threshold, retryable))

    # --- in -------------------------------------------------------------------------------------------

    async def put(
        self,
        items: Sequence[RolloutState],
        task_name: str,
        *,
        model_step: int | None = None,
        current_train_step: int | None = None,
        stale_threshold: int | None = None,
        token_stale_threshold: int | None = None,
        expired_groups_retryable: bool | None = None,
        tags: Tags | None = None,
        priority: float | None = None,
        timeout_s: float | None = None,
    ) -> int | None:
        """Store one group, which is the buffer's from then on; returns its uid (None for an empty list).

        Tokens without a version are stamped with `model_step`; with `current_train_step` the group is judged for
        age. A group that was drawn comes back; any other is put by hand, and waits for room.
        """
        if isinstance(items, Sized) and not len(items):
            return None
        uids = await self.put_many(
            (items,),
            task_name,
            model_step=model_step,
            current_train_step=current_train_step,
            stale_threshold=stale_threshold,
            token_stale_threshold=token_stale_threshold,
            expired_groups_retryable=expired_groups_retryable,
            tags=tags,
            priority=priority,
            timeout_s=timeout_s,
        )
        return uids[0]

    async def put_many(
        self,
        groups: Sequence[Sequence[RolloutState]],
        task_name: str,
        *,
        model_step: int | None = None,
        current_train_step: int | None = None,
        stale_threshold: int | None = None,
        token_stale_threshold: int | None = None,
        expired_groups_retryable: bool | None = None,
        tags: Tags | None = None,
        priority: float | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Store several groups of one task, all of them or none; returns their uids. See `put`."""
        await self._session.ready()
        checked_task(task_name)
        check_step("model_step", model_step, least=0)
        check_step("current_train_step", current_train_step, least=1)
        if expired_groups_retryable not in (None, True, False):
            raise InvalidInput(f"expired_groups_retryable is {expired_groups_retryable!r}; expected True or False")
        if current_train_step is None and (stale_threshold is not None or token_stale_threshold is not None):
            raise InvalidInput(
                f"put with stale_threshold={stale_threshold}, token_stale_threshold={token_stale_threshold} and no "
                "current_train_step; pass the train step to judge by"
            )
        limits = self._ageing.limits_of_call(
            task_name, stale_threshold, token_stale_threshold, expired_groups_retryable
        )
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
                    train_step=current_train_step,
                    limits=limits,
                    tags=checked_tags,
                    priority=priority,
                )
            )
        if not arrivals:
            return []
        if needs_values(self.storage):
            arrivals = await self._valued(resolve_arrivals(arrivals), task_name)
        if current_train_step is not None:
            self._ageing.see(current_train_step)
        records = await self._session.with_room(
            lambda: self.storage.put(arrivals, owner=self.owner),
            f"room for {len(arrivals)} groups of task {task_name!r}",
            task_name,
            timeout_s,
        )
        self._ageing.remember(task_name, limits)
        return [record.uid for record in records]

    async def issue(
        self,
        groups: Sequence[Sequence[RolloutState]],
        task_name: str,
        *,
        cursor: int,
        source_state: bytes | None = None,
        timeout_s: float | None = None,
    ) -> Groups:
        """For samplers: write newly drawn prompts as in flight, and advance the task's position, in one step.

        Waits for room. They get the group ids from `cursor` on; CursorMoved if the task stands elsewhere. A group that
        refers to a lost value ends as failed at once, and is not among those returned.
        """
        await self._session.ready()
        checked_task(task_name)
        whole_number("cursor", cursor, least=0)
        contents = []
        for group in checked_many("groups", groups):
            check_group(group, task_name)
            contents.append(content_of(tuple(group), None, None, task_name))
        drawn = contents
        if needs_values(self.storage):
            contents = await self._valued(resolve_contents(contents), task_name)
        records = await self._session.with_room(
            lambda: self.storage.issue(task_name, contents, owner=self.owner, cursor=cursor, source_state=source_state),
            f"room to draw {len(contents)} groups of task {task_name!r}",
            task_name,
            timeout_s,
            [content.facts for content in contents],
        )
        lost = {}
        for record, content, before in zip(records, contents, drawn, strict=True):
            if content is not before:
                identify(before.group, task_name, record.group_id)
                if (reason := lost_reason(before, content)) is not None:
                    lost[record.uid] = reason
        if lost:
            await self.storage.fail(lost)
        return [
            present(Row(record, content.group))
            for record, content in zip(records, drawn, strict=True)
            if record.uid not in lost
        ]

    async def _valued(self, resolving: Awaitable[T], task_name: str) -> T:
        """Wait until references have their values: as long as whoever makes those needs."""
        with self._session.waits.listed(f"the values of references in groups of task {task_name!r}", (task_name,)):
            return await resolving

    async def position(self, task_name: str) -> tuple[int, bytes | None]:
        """For samplers: how many groups were drawn for a task, and the state of its data set, if known."""
        await self._session.ready()
        account = await self.storage.account(checked_task(task_name))
        return account.cursor, account.source_state

    async def redraw(
        self,
        n: int,
        task_name: str,
        statuses: Sequence[Status] = (Status.INIT, Status.EXPIRED, Status.ABORTED),
        *,
        group_ids: Collection[int] = (),
    ) -> Groups:
        """For samplers: up to n groups to be generated again, an earlier status first, then by group_id.

        `group_ids`: only these groups, if any are given.
        """
        await self._session.ready()
        chosen = checked_statuses(statuses)
        for status in chosen:
            if status not in (Status.INIT, Status.EXPIRED, Status.ABORTED):
                raise InvalidInput(f"{status} groups cannot be drawn again; expected init, expired or aborted")
        return await self._outlet.draw(n, checked_task(task_name), chosen, tuple(sorted(group_ids)))

    # --- for producers --------------------------------------------------------------------------------

    async def room(self) -> int | None:
        """How many more groups fit just now; None without a limit in groups."""
        await self._session.ready()
        limit = self.max_groups
        if limit is None:
            return None
        room = max(0, limit - (await self.storage.usage()).groups)
        if not room:
            await self._session.refused(())
        return room

    def produces(self, producer: object, tasks: Collection[str]) -> None:
        """For managers: which tasks they produce from now on. The groups of all others count as kept aside."""
        if tasks:
            self._session.producers[producer] = frozenset(tasks)
        else:
            self._session.producers.pop(producer, None)

    def asking(self, wants: Mapping[str, int]) -> AbstractContextManager[None]:
        """For managers that produce and wait for a batch in turns: producing fails if the batch can never come."""
        return self._session.asking(wants)

    @property
    def max_groups(self) -> int | None:
        """How many groups it holds at most, in flight, buffered and leased together."""
        return self._session.settings.max_groups

    @property
    def bounded_bytes(self) -> bool:
        """Whether there is a limit in bytes: then it depends on a group's size whether it fits."""
        return self._session.settings.max_bytes is not None

    async def until(
        self,
        attempt: Callable[[], Awaitable[T | None]],
        what: str,
        tasks: Collection[str],
        *,
        timeout_s: float | None = None,
        wants: Mapping[str, int] | None = None,
    ) -> T:
        """Repeat an attempt after every change of the storage, until it returns something; `explain_wait` lists it.

        `wants`: the batch of completed groups that it is for; InvalidConfig as soon as that can never come.
        """
        return await self._session.until(attempt, what, tasks, timeout_s, wants=wants)

    async def produced(self, task_name: str) -> int:
        """Groups of a task that count towards its target: buffered COMPLETED (and fresh), leased, trained."""
        return sum(await self.completed_and_taken(task_name))

    async def completed_and_taken(self, task_name: str) -> tuple[int, int]:
        """Groups of a task that are buffered as COMPLETED (and fresh), and those that are leased or trained."""
        await self._session.ready()
        line = (await self.storage.ledger()).get(task_name)
        if line is None:
            return 0, 0
        completed = (await self.storage.available((task_name,), Status.COMPLETED))[task_name]
        return completed, line["leased"] + line["trained"]

    async def train_steps(self) -> dict[str, int]:
        """The latest train step that each task was judged for, by anybody: the clock of the storage."""
        await self._session.ready()
        accounts = await self.storage.accounts()
        return {name: account.watermark.train_step for name, account in accounts.items() if account.watermark}

    async def others_hold(self) -> bool:
        """Whether groups are held by other users of the storage (who may be dead since less than their `lease_s`)."""
        await self._session.ready()
        return any(holding.owner != self.owner for holding in await self.storage.holdings())

    async def give_back_owed(self) -> None:
        """For managers: return groups that were claimed for a batch which an outage kept from being handed out."""
        await self._session.ready()
        await self._outlet.give_back_owed()

    def nudge(self) -> None:
        """Let every wait look again: something that it depends on changed outside the storage."""
        self._session.nudge()

    # --- out ------------------------------------------------------------------------------------------

    async def get(self, batch_size: int, task_name: str, group_status: Status) -> Groups:
        """At most `batch_size` groups of a task, in policy order, taken for good. Never waits."""
        groups, _ = await self.take_batch({task_name: batch_size}, group_status=group_status)
        return groups[task_name]

    async def take_batch(
        self, wants: Mapping[str, int], *, group_status: Status = Status.COMPLETED
    ) -> tuple[dict[str, Groups], dict[str, int]]:
        """Groups of several tasks in one step, taken for good, and how many of each. Never waits."""
        await self._session.ready()
        groups = await self._outlet.take(wants, checked_status(group_status))
        return groups, {task_name: len(taken) for task_name, taken in groups.items()}

    def lease_batch(
        self,
        wants: Mapping[str, int],
        *,
        train_step: int,
        group_status: Status = Status.COMPLETED,
        timeout_s: float | None = None,
    ) -> LeaseRequest:
        """Wait for a full batch and hold it until it is acknowledged: `await` it, or enter it with `async with`.

        Nothing that is stale for `train_step` is handed out (G6). WaitTimeout explains what was missing.
        """
        return LeaseRequest(lambda: self._lease(wants, train_step, group_status, timeout_s))

    async def try_lease(self, wants: Mapping[str, int], *, train_step: int) -> Lease | None:
        """A full batch of COMPLETED groups if it is there, else None; never waits. For managers."""
        await self._session.ready()
        attempt, grant = await self.lease_attempt(wants, train_step=train_step)
        claimed = await attempt()
        return None if claimed is None else await grant(claimed)

    async def _lease(
        self, wants: Mapping[str, int], train_step: int, group_status: Status, timeout_s: float | None
    ) -> Lease:
        status = checked_status(group_status)
        attempt, grant = await self.lease_attempt(wants, train_step=train_step, group_status=status)
        wants = checked_wants(wants)
        claimed = await self._session.until(
            attempt,
            f"{batch_name(wants, status)} for train step {train_step}",
            asked(wants),
            timeout_s,
            Ready(wants=wants, status=status),
            wants if status is Status.COMPLETED else None,
        )
        return await grant(claimed)

    async def lease_attempt(
        self, wants: Mapping[str, int], *, train_step: int, group_status: Status = Status.COMPLETED
    ) -> tuple[Callable[[], Awaitable[Claimed | None]], Callable[[Claimed], Awaitable[Lease]]]:
        """How to try to claim a batch, for `until`, and how to make a lease of what was claimed. For managers."""
        await self._session.ready()
        return await self._outlet.lease_attempt(wants, train_step, checked_status(group_status))

    async def wait_ready(
        self, wants: Mapping[str, int], *, group_status: Status = Status.COMPLETED, timeout_s: float | None = None
    ) -> None:
        """Wait until every task has as many groups as asked; takes nothing."""
        await self._session.ready()
        status = checked_status(group_status)
        wants = checked_wants(wants)
        self._outlet.refuse_more_than_fits(wants)

        async def attempt() -> bool | None:
            return await self._is_ready(wants, status) or None

        ready = Ready(wants=wants, status=status)
        completed = wants if status is Status.COMPLETED else None
        await self._session.until(attempt, batch_name(wants, status), asked(wants), timeout_s, ready, completed)

    async def is_ready(self, wants: Mapping[str, int], *, group_status: Status = Status.COMPLETED) -> bool:
        """Whether every task has as many groups as asked; tasks asked for 0 or less do not count."""
        await self._session.ready()
        return await self._is_ready(checked_wants(wants), checked_status(group_status))

    async def _is_ready(self, wants: Mapping[str, int], status: Status) -> bool:
        await self._session.reap()
        available = await self.storage.available(wants, status)
        return all(available[task_name] >= n for task_name, n in wants.items())

    async def explain_wait(self) -> str:
        """What is being waited for, what there is of it, and who holds the rest."""
        return await self._session.explain()

    # --- age ------------------------------------------------------------------------------------------

    async def refresh_staleness(
        self,
        *,
        task_stale_thresholds: Mapping[str, int | None],
        current_train_step: int,
        statuses: Collection[Status] | None = None,
        task_token_stale_thresholds: Mapping[str, int | None] | None = None,
        expired_groups_retryable_by_task: Mapping[str, bool] | None = None,
    ) -> dict[str, int]:
        """Expire what is too old for a train step; returns how many groups newly expired, by task.

        Costs in proportion to what expires. From its start on nothing that is too old leaves the buffer.
        """
        await self._session.ready()
        whole_number("current_train_step", current_train_step, least=1)
        chosen = EXPIRABLE if statuses is None else checked_statuses(statuses)
        for status in chosen:
            if status not in EXPIRABLE:
                raise InvalidInput(f"{status} groups do not expire; expected some of {', '.join(EXPIRABLE)}")
        thresholds = checked_mapping("task_stale_thresholds", task_stale_thresholds)
        token_thresholds = checked_mapping("task_token_stale_thresholds", task_token_stale_thresholds)
        retryable = checked_mapping("expired_groups_retryable_by_task", expired_groups_retryable_by_task)
        limits = {
            checked_task(task_name): self._ageing.limits_of_call(
                task_name, thresholds.get(task_name), token_thresholds.get(task_name), retryable.get(task_name)
            )
            for task_name in {**thresholds, **token_thresholds}
        }
        for task_name, limit in limits.items():
            self._ageing.remember(task_name, limit)
        await self._ageing.advance(current_train_step, limits)
        expired = await self._ageing.expire(limits, chosen)
        for task_name, limit in limits.items():
            if not limit.retryable and Status.EXPIRED in chosen:
                await self._ageing.drop_expired(task_name)  # left from a time when they could be retried
        return expired

    # --- looking --------------------------------------------------------------------------------------

    async def count(self, task_name: str, group_status: Status) -> int:
        """Buffered groups of a task and status; 0 for an unknown task."""
        await self._session.ready()
        status = checked_status(group_status)
        counts = await self.storage.count_statuses((checked_task(task_name),), (status,))
        return counts[task_name][status]

    async def count_statuses(
        self, tasks: Collection[str], statuses: Collection[Status]
    ) -> dict[str, dict[Status, int]]:
        """Buffered groups by task and status, zeros included."""
        await self._session.ready()
        return await self.storage.count_statuses(checked_many("tasks", tasks), checked_statuses(statuses))

    def __len__(self) -> int:
        """Buffered groups, as last seen by this process."""
        return len(self.storage)

    async def query(self, query: Mapping[str, Any], *, limit: int | None = None) -> list[Record]:
        """The metadata of the groups that match, at any place, oldest first. Never moves anything."""
        await self._session.ready()
        if limit is not None:
            whole_number("limit", limit, least=0)
        return await self.storage.records(self._resolved(query), limit)

    async def read(self, uid: int) -> list[RolloutState] | None:
        """The samples of a group, as copies; None if it is no longer there. Never moves anything."""
        await self._session.ready()
        row = await self.storage.read(whole_number("uid", uid))
        return None if row is None else present(row)

    async def discard(self, query: Mapping[str, Any], reason: str) -> int:
        """End every buffered group that matches, for a reason that is counted; returns how many."""
        await self._session.ready()
        checked_reason(reason)
        node = And((self._resolved(query), Compare("place", "eq", Place.BUFFERED)))
        return sum((await self.storage.discard(node, reason)).values())

    def _resolved(self, query: Mapping[str, Any]) -> Node:
        return resolve_staleness(parse(query), self._ageing.last_train_step)

    async def set_priority(self, priorities: Mapping[int, float]) -> int:
        """Set priorities by uid; returns how many of these groups are still there."""
        await self._session.ready()
        for uid, priority in checked_mapping("priorities", priorities).items():
            whole_number("uid", uid)
            if not isinstance(priority, (int, float)) or not abs(priority) <= 1e300:
                raise InvalidInput(f"priority of uid {uid} is {priority!r:.80}; expected a finite number")
        return await self.storage.set_priority({uid: float(p) for uid, p in priorities.items()})

    async def ledger(self, *, tokens: bool = False) -> dict[str, LedgerLine]:
        """Per task: issued = in_flight + buffered + leased + trained + filtered + failed + discarded (G1).

        In groups, or in generated tokens, of which those thrown away while their group stayed are `reset`.
        """
        await self._session.ready()
        return await self.storage.ledger(tokens=tokens)

    async def reasons(self) -> dict[str, dict[str, int]]:
        """Why groups were filtered, failed or discarded, by task."""
        await self._session.ready()
        return {task_name: account.reasons for task_name, account in (await self.storage.accounts()).items()}

    async def stats(self) -> dict[str, int]:
        """Flat figures for any logger."""
        ledger = await self.ledger()
        return report.figures(
            ledger,
            await self.storage.ledger(tokens=True),
            await self.storage.count_statuses(list(ledger), list(Status)),
            await self.storage.accounts(),
            await self.storage.usage(),
            self._session.settings,
            len(self._session.waits),
            self._session.produced,
            self._session.group_ends,
        )

    # --- checkpoints ----------------------------------------------------------------------------------

    async def save(
        self, path: str | os.PathLike[str], *, model_step: int | None = None, no_save_replay_buffer: bool = False
    ) -> None:
        """Write a checkpoint of everything, at any moment, while everything goes on.

        `model_step` says which weights it goes with: leases for steps up to it are saved as trained. The checkpoint
        that was at the path stays until the new one is complete. `no_save_replay_buffer`: prompts only, which are
        generated anew after `resume`.
        """
        await self.save_with(path, model_step=model_step, prompts_only=no_save_replay_buffer, extra=dict)

    async def save_with(
        self,
        path: str | os.PathLike[str],
        *,
        model_step: int | None,
        prompts_only: bool,
        extra: Callable[[], dict[str, Any]],
    ) -> None:
        """As `save`, with more in the manifest: `extra()` is asked in the moment of the snapshot. For managers."""
        await self._session.ready()
        check_step("model_step", model_step, least=0)
        from forebay.saving import save_storage  # imported here: it would double the time of `import forebay`

        await save_storage(
            self.storage,
            path,
            model_step=model_step,
            prompts_only=prompts_only,
            extra=lambda: {**extra(), "limits": self._ageing.state()},
        )

    async def resume(self, path: str | os.PathLike[str]) -> int | None:
        """Take up a checkpoint, under any policy and in any storage; returns its model step.

        Into another storage than it was made from: that must be empty. Into the same durable store: what was
        acknowledged for steps after the model step is handed out again; CheckpointTooOld if the store has dropped some.
        """
        return (await self.resume_with(path)).model_step

    async def resume_with(self, path: str | os.PathLike[str]) -> Manifest:
        """As `resume`; the whole manifest. For managers."""
        await self._session.ready()
        from forebay.saving import resume_storage

        manifest = await resume_storage(self.storage, path)
        self._ageing.load_state(manifest.extra.get("limits", {}))
        await self._ageing.recall()
        return manifest


def checkpoint_exists(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint was saved at a path, by a buffer or a manager. `resume` says whether it is whole."""
    from forebay.publish import MANIFEST  # imported here: it would double the time of `import forebay`

    return (Path(path) / MANIFEST).is_file()
