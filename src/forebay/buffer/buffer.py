"""ReplayBuffer: policy and storage, with limits, leases and waiting.

It owns no group: rows, counts, clocks and limits are in the storage, which changes them in single steps. This file has
the methods that users call; they check arguments and order those steps: groups that come in pass `admission`, groups
that leave pass `lease`, and waits wake on the change itself (G11). Work that could hold the event loop for long is cut
into slices (G10). A buffer belongs to one event loop at a time; `forebay.blocking` serves other threads.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from forebay.buffer import explain
from forebay.buffer.admission import Expiry
from forebay.buffer.group_ends import GroupEnds, OnGroupEnd
from forebay.buffer.internal import Internals
from forebay.buffer.lease import Lease, LeaseAttempt, LeaseRequest, asked
from forebay.buffer.session import Session
from forebay.core.capacity import EXPECT_GROUP_BYTES, Settings, check_ever_fits
from forebay.core.ledger import Clock, LedgerLine, Place, Record, Tags, present
from forebay.core.policy import FIFOReplayPolicy, ReplayPolicy
from forebay.core.query import And, Compare, Node, parse, resolve_staleness
from forebay.core.rollout import RolloutState, Status
from forebay.core.staleness import EXPIRABLE, Limits
from forebay.core.validate import (
    checked_integer,
    checked_many,
    checked_mapping,
    checked_priority,
    checked_reason,
    checked_status,
    checked_statuses,
    checked_task,
    checked_wants,
    positive_seconds,
)
from forebay.errors import InvalidConfig, InvalidInput
from forebay.storage.base import Storage
from forebay.storage.local.memory import MemoryStorage
from forebay.storage.values import Ready

Groups = list[list[RolloutState]]


class ReplayBuffer:
    """Keeps groups of rollouts between producers and trainers.

    `max_groups` and `max_bytes` bound the groups in flight, buffered and leased together. A group that is being
    generated counts with the size that it is expected to have: its prompt, and for each member the 99th percentile of
    the responses of its task (before the first ones are back, `expect_group_bytes` for all its members). So groups
    exceed `max_bytes` by at most what they grow beyond that. `lease_s`: how long an owner keeps its groups without a
    heartbeat (None: until its process ends; 60 s on shared storages). `keep_trained`: the number of the last
    trained groups that stay readable as ARCHIVED. `on_group_end`: a function, plain or async, that gets a `GroupEnd`
    for every group that leaves for good; see `group_ends`.
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
                checked_integer(name, limit, least=1)
        if lease_s is not None:
            positive_seconds("lease_s", lease_s)
        if self.policy.choose is not None and self.policy.order.columns:
            raise InvalidConfig(f"{self.policy!r} has an order and a choose; expected one of them")
        settings = Settings(
            order=self.policy.order,
            choose=self.policy.choose,
            max_groups=max_groups,
            max_bytes=max_bytes,
            expect_group_bytes=checked_integer("expect_group_bytes", expect_group_bytes, least=0),
            keep_trained=checked_integer("keep_trained", keep_trained, least=0),
        )
        self._expiry = Expiry(self.storage)
        self._session = Session(self.storage, settings, lease_s, self._expiry.recall)
        self._internals = Internals(self._session, self._expiry)
        if on_group_end is not None:
            self._session.group_ends = GroupEnds(self.storage, self.owner, on_group_end)

    @property
    def owner(self) -> str:
        """The name under which this buffer holds groups."""
        return self._session.owner

    @property
    def max_groups(self) -> int | None:
        """The limit in groups."""
        return self._session.settings.max_groups

    def __repr__(self) -> str:
        return f"<ReplayBuffer {self.policy!r} on {type(self.storage).__name__}: {len(self)} buffered groups>"

    # --- opening and closing -----------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End every wait and give the groups of this buffer back. Closing twice is allowed."""
        await self._session.close()

    async def __aenter__(self) -> ReplayBuffer:
        await self._session.ready()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # --- limits ---------------------------------------------------------------------------------------

    async def set_limits(
        self,
        task_name: str,
        *,
        stale_threshold: int | None = None,
        token_stale_threshold: int | None = None,
        retryable: bool = True,
    ) -> None:
        """How old the groups of a task may grow. The storage keeps the limits, for every process that uses it."""
        limits = Limits(stale_threshold, token_stale_threshold, retryable)
        await self._internals.advance({checked_task(task_name): Clock(limits=limits)})

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
        """Store one group, which belongs to the buffer from then on; returns its uid (None for an empty list).

        Tokens without a version are stamped with `model_step`; with `current_train_step` the group is judged for
        age. A group that was drawn comes back; any other is put by hand, and waits for capacity.
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
        records = await self._internals.put(
            groups,
            task_name,
            model_step=model_step,
            train_step=current_train_step,
            limits=(stale_threshold, token_stale_threshold, expired_groups_retryable),
            tags=tags,
            priority=priority,
            timeout_s=timeout_s,
        )
        return [record.uid for record in records]

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
        groups = await self._internals.claims.take(wants, checked_status(group_status))
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

    async def _lease(
        self, wants: Mapping[str, int], train_step: int, group_status: Status, timeout_s: float | None
    ) -> Lease:
        await self._session.ready()
        status = checked_status(group_status)
        attempt = LeaseAttempt(self._internals.claims, wants, train_step, status)
        await self._until(attempt.claim, checked_wants(wants), status, timeout_s, f" for train step {train_step}")
        return await attempt.grant()

    async def wait_ready(
        self, wants: Mapping[str, int], *, group_status: Status = Status.COMPLETED, timeout_s: float | None = None
    ) -> None:
        """Wait until every task has the groups in `wants`; takes nothing."""
        await self._session.ready()
        status = checked_status(group_status)
        wants = checked_wants(wants)
        check_ever_fits(self._session.settings, sum(wants.values()))
        await self._until(lambda: self._is_ready(wants, status), wants, status, timeout_s)

    async def _until(
        self,
        attempt: Callable[[], Awaitable[bool]],
        wants: dict[str, int],
        status: Status,
        timeout_s: float | None,
        purpose: str = "",
    ) -> None:
        """Repeat an attempt until it finds the batch."""

        async def found() -> bool | None:
            return await attempt() or None

        tasks = asked(wants)
        what = f"{status} groups: {', '.join(f'{wants[name]} of task {name!r}' for name in tasks) or 'none'}{purpose}"
        completed = wants if status is Status.COMPLETED else None
        await self._session.until(
            found, what, tasks, timeout_s, lambda: Ready(wants=wants, status=status), completed, needs_room=False
        )

    async def is_ready(self, wants: Mapping[str, int], *, group_status: Status = Status.COMPLETED) -> bool:
        """Whether every task has the groups in `wants`; tasks with 0 or less do not count."""
        await self._session.ready()
        return await self._is_ready(checked_wants(wants), checked_status(group_status))

    async def _is_ready(self, wants: Mapping[str, int], status: Status) -> bool:
        await self.storage.reap()
        summary = await self.storage.summary(wants)
        return all(summary.task(task_name).fresh.get(status, 0) >= n for task_name, n in wants.items())

    async def explain_wait(self) -> str:
        """The waits in progress, the groups that their tasks have, and the owners of those that are not buffered."""
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
        """Expire groups that are too old for a train step; returns the number of newly expired groups by task.

        The cost grows with the groups that expire. From its start on, no group that is too old leaves the buffer.
        """
        await self._session.ready()
        checked_integer("current_train_step", current_train_step, least=1)
        chosen = EXPIRABLE if statuses is None else checked_statuses(statuses)
        for status in chosen:
            if status not in EXPIRABLE:
                raise InvalidInput(f"{status} groups do not expire; expected some of {', '.join(EXPIRABLE)}")
        thresholds = checked_mapping("task_stale_thresholds", task_stale_thresholds)
        token_thresholds = checked_mapping("task_token_stale_thresholds", task_token_stale_thresholds)
        retryable = checked_mapping("expired_groups_retryable_by_task", expired_groups_retryable_by_task)
        limits = {
            checked_task(task_name): self._expiry.limits_with(
                task_name, thresholds.get(task_name), token_thresholds.get(task_name), retryable.get(task_name)
            )
            for task_name in {**thresholds, **token_thresholds}
        }
        await self._expiry.advance(
            {task_name: Clock(train_step=current_train_step, limits=limit) for task_name, limit in limits.items()}
        )
        expired = await self._expiry.expire(limits, chosen)
        for task_name, limit in limits.items():
            if not limit.retryable and Status.EXPIRED in chosen:
                await self._expiry.drop_expired(task_name)  # from before: they could be retried then
        return expired

    # --- looking --------------------------------------------------------------------------------------

    async def count(self, task_name: str, group_status: Status) -> int:
        """Buffered groups of a task and status; 0 for an unknown task."""
        status = checked_status(group_status)
        return (await self._internals.summary((checked_task(task_name),))).task(task_name).statuses.get(status, 0)

    async def count_statuses(
        self, tasks: Collection[str], statuses: Collection[Status]
    ) -> dict[str, dict[Status, int]]:
        """Buffered groups by task and status, zeros included."""
        names, chosen = checked_many("tasks", tasks), checked_statuses(statuses)
        summary = await self._internals.summary(names)
        return {name: {status: summary.task(name).statuses.get(status, 0) for status in chosen} for name in names}

    def __len__(self) -> int:
        """Buffered groups, as last seen by this process."""
        return len(self.storage)

    async def query(self, query: Mapping[str, Any], *, limit: int | None = None) -> list[Record]:
        """The metadata of the groups that match, at any place, oldest first. Never moves anything."""
        await self._session.ready()
        if limit is not None:
            checked_integer("limit", limit, least=0)
        return await self.storage.records(self._resolved(query), limit)

    async def read(self, uid: int) -> list[RolloutState] | None:
        """The samples of a group, as copies; None if it no longer exists. Never moves anything."""
        await self._session.ready()
        row = await self.storage.read(checked_integer("uid", uid))
        return None if row is None else present(row)

    async def discard(self, query: Mapping[str, Any], reason: str) -> int:
        """End every buffered group that matches, for a reason that is counted; returns how many."""
        await self._session.ready()
        checked_reason(reason)
        node = And((self._resolved(query), Compare("place", "eq", Place.BUFFERED)))
        return sum((await self.storage.discard(node, reason)).values())

    def _resolved(self, query: Mapping[str, Any]) -> Node:
        return resolve_staleness(parse(query), self._expiry.last_train_step)

    async def set_priority(self, priorities: Mapping[int, float]) -> int:
        """Set priorities by uid; returns how many of these groups still exist."""
        await self._session.ready()
        checked = {
            checked_integer("uid", uid): checked_priority(f"priority of uid {uid}", priority)
            for uid, priority in checked_mapping("priorities", priorities).items()
        }
        return await self.storage.set_priority(checked)

    async def ledger(self, *, tokens: bool = False) -> dict[str, LedgerLine]:
        """Per task: issued = in_flight + buffered + leased + trained + filtered + failed + discarded (G1).

        In groups, or in generated tokens, of which those thrown away while their group stayed are `reset`.
        """
        return (await self._internals.summary()).ledger(tokens=tokens)

    async def reasons(self) -> dict[str, dict[str, int]]:
        """Why groups were filtered, failed or discarded, by task."""
        summary = await self._internals.summary()
        return {task_name: task.account.reasons for task_name, task in summary.tasks.items()}

    async def stats(self) -> dict[str, int]:
        """Flat figures for any logger."""
        summary, session = await self._internals.summary(), self._session
        return explain.figures(summary, session.settings, len(session.waits), session.produced, session.group_ends)

    # --- checkpoints ----------------------------------------------------------------------------------

    async def save(
        self, path: str | os.PathLike[str], *, model_step: int | None = None, no_save_replay_buffer: bool = False
    ) -> None:
        """Write a checkpoint of everything, at any moment, while producers and trainers continue.

        `model_step` says which weights it goes with: leases for steps up to it are saved as trained. The checkpoint
        that was at the path stays until the new one is complete. `no_save_replay_buffer`: prompts only, which are
        generated again after `resume`.
        """
        await self._internals.save(path, model_step=model_step, prompts_only=no_save_replay_buffer)

    async def resume(self, path: str | os.PathLike[str]) -> int | None:
        """Resume a checkpoint, under any policy and in any storage; returns its model step.

        A storage other than the one that was saved must be empty. In the same durable store, groups that were
        acknowledged for steps after the model step are handed out again; CheckpointTooOld if the store dropped some.
        """
        return (await self._internals.resume(path)).model_step


def checkpoint_exists(path: str | os.PathLike[str]) -> bool:
    """Whether a buffer or a manager saved a checkpoint at a path. `resume` checks whether it is complete."""
    from forebay.checkpoint.publish import MANIFEST  # imported here: it would double the time of `import forebay`

    return (Path(path) / MANIFEST).is_file()
