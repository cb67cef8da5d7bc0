"""The buffer behind blocking calls, and the lease that it hands out. Each verb is that of `forebay.ReplayBuffer`.

What producers and managers on the loop use of a buffer (waiting for room, attempts, hooks of checkpoints) is not here.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from forebay import buffer as native
from forebay.blocking.thread import LoopThread, seen_through
from forebay.config import ReplayBufferConfig
from forebay.errors import BufferClosed, ForebayError
from forebay.lease import Lease as NativeLease
from forebay.ledger import LedgerLine
from forebay.record import Record, Tags
from forebay.rollout import RolloutState, Status

__all__ = ["Lease", "ReplayBuffer"]

log = logging.getLogger(__name__)

T = TypeVar("T")
Groups = list[list[RolloutState]]


class ReplayBuffer:
    """A `forebay.ReplayBuffer` behind blocking calls. See there for what each one does.

    Takes a buffer that is not in use yet, or a config to build one from.
    """

    def __init__(self, buffer: native.ReplayBuffer | ReplayBufferConfig) -> None:
        self.native = buffer.build() if isinstance(buffer, ReplayBufferConfig) else buffer
        self._thread = LoopThread("buffer", self.native.close)

    def __repr__(self) -> str:
        return f"<blocking ReplayBuffer {self.native.policy!r} on {type(self.native.storage).__name__}>"

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine (a producer, say) on the buffer's event loop; cancelled when the buffer closes."""
        return self._thread.submit(work)

    async def _give_back(self, groups: Groups) -> None:
        """Groups that nobody will generate, because the caller that drew them was interrupted."""
        for group in groups:
            for state in group:
                if state.status is not Status.COMPLETED:
                    state.status = Status.ABORTED
            await self.native.put(group, group[0].task_name or "")

    def close(self) -> None:
        """End every wait, give back what is held, stop the loop. Closing twice is allowed."""
        self._thread.stop()

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def set_limits(
        self,
        task_name: str,
        *,
        stale_threshold: int | None = None,
        token_stale_threshold: int | None = None,
        retryable: bool = True,
    ) -> None:
        async def set_limits() -> None:
            self.native.set_limits(
                task_name,
                stale_threshold=stale_threshold,
                token_stale_threshold=token_stale_threshold,
                retryable=retryable,
            )

        self._thread.call(set_limits())

    def put(
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
        return self._thread.call(
            self.native.put(
                items,
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
        )

    def put_many(
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
        return self._thread.call(
            self.native.put_many(
                groups,
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
        )

    def issue(
        self,
        groups: Sequence[Sequence[RolloutState]],
        task_name: str,
        *,
        cursor: int,
        source_state: bytes | None = None,
        timeout_s: float | None = None,
    ) -> Groups:
        return self._thread.call(
            self.native.issue(groups, task_name, cursor=cursor, source_state=source_state, timeout_s=timeout_s),
            undo=self._give_back,
        )

    def position(self, task_name: str) -> tuple[int, bytes | None]:
        return self._thread.call(self.native.position(task_name))

    def redraw(
        self,
        n: int,
        task_name: str,
        statuses: Sequence[Status] = (Status.INIT, Status.EXPIRED, Status.ABORTED),
        *,
        group_ids: Collection[int] = (),
    ) -> Groups:
        return self._thread.call(self.native.redraw(n, task_name, statuses, group_ids=group_ids), undo=self._give_back)

    def get(self, batch_size: int, task_name: str, group_status: Status) -> Groups:
        return self._thread.call(self.native.get(batch_size, task_name, group_status))

    def take_batch(
        self, wants: Mapping[str, int], *, group_status: Status = Status.COMPLETED
    ) -> tuple[dict[str, Groups], dict[str, int]]:
        return self._thread.call(self.native.take_batch(wants, group_status=group_status))

    def lease_batch(
        self,
        wants: Mapping[str, int],
        *,
        train_step: int,
        group_status: Status = Status.COMPLETED,
        timeout_s: float | None = None,
    ) -> Lease:
        """Waits at once, and returns a lease that can be entered with `with`."""

        async def lease() -> Lease:
            request = self.native.lease_batch(
                wants, train_step=train_step, group_status=group_status, timeout_s=timeout_s
            )
            return Lease(await request, self._thread)

        return self._thread.call(lease(), undo=lambda lease: lease.native.nack())

    def wait_ready(
        self, wants: Mapping[str, int], *, group_status: Status = Status.COMPLETED, timeout_s: float | None = None
    ) -> None:
        self._thread.call(self.native.wait_ready(wants, group_status=group_status, timeout_s=timeout_s))

    def is_ready(self, wants: Mapping[str, int], *, group_status: Status = Status.COMPLETED) -> bool:
        return self._thread.call(self.native.is_ready(wants, group_status=group_status))

    def refresh_staleness(
        self,
        *,
        task_stale_thresholds: Mapping[str, int | None],
        current_train_step: int,
        statuses: Collection[Status] | None = None,
        task_token_stale_thresholds: Mapping[str, int | None] | None = None,
        expired_groups_retryable_by_task: Mapping[str, bool] | None = None,
    ) -> dict[str, int]:
        return self._thread.call(
            self.native.refresh_staleness(
                task_stale_thresholds=task_stale_thresholds,
                current_train_step=current_train_step,
                statuses=statuses,
                task_token_stale_thresholds=task_token_stale_thresholds,
                expired_groups_retryable_by_task=expired_groups_retryable_by_task,
            )
        )

    def count(self, task_name: str, group_status: Status) -> int:
        return self._thread.call(self.native.count(task_name, group_status))

    def count_statuses(self, tasks: Collection[str], statuses: Collection[Status]) -> dict[str, dict[Status, int]]:
        return self._thread.call(self.native.count_statuses(tasks, statuses))

    def __len__(self) -> int:
        async def count() -> int:
            return len(self.native)

        return self._thread.call(count())

    def query(self, query: Mapping[str, Any], *, limit: int | None = None) -> list[Record]:
        return self._thread.call(self.native.query(query, limit=limit))

    def read(self, uid: int) -> list[RolloutState] | None:
        return self._thread.call(self.native.read(uid))

    def discard(self, query: Mapping[str, Any], reason: str) -> int:
        return self._thread.call(self.native.discard(query, reason))

    def set_priority(self, priorities: Mapping[int, float]) -> int:
        return self._thread.call(self.native.set_priority(priorities))

    def ledger(self, *, tokens: bool = False) -> dict[str, LedgerLine]:
        return self._thread.call(self.native.ledger(tokens=tokens))

    def reasons(self) -> dict[str, dict[str, int]]:
        return self._thread.call(self.native.reasons())

    def stats(self) -> dict[str, int]:
        return self._thread.call(self.native.stats())

    def explain_wait(self) -> str:
        return self._thread.call(self.native.explain_wait())

    def save(
        self, path: str | os.PathLike[str], *, model_step: int | None = None, no_save_replay_buffer: bool = False
    ) -> None:
        self._thread.call(self.native.save(path, model_step=model_step, no_save_replay_buffer=no_save_replay_buffer))

    def resume(self, path: str | os.PathLike[str]) -> int | None:
        return self._thread.call(self.native.resume(path))


class Lease:
    """A lease behind blocking calls; `with` acknowledges it on a clean exit, and gives it back on an exception.

    Settling it is seen through: an interrupt surfaces when that is done, not in the middle of it.
    """

    def __init__(self, lease: NativeLease, thread: LoopThread) -> None:
        self.native = lease
        self._thread = thread

    def __repr__(self) -> str:
        return repr(self.native)

    @property
    def train_step(self) -> int:
        return self.native.train_step

    @property
    def groups_by_task(self) -> dict[str, Groups]:
        return self.native.groups_by_task

    @property
    def groups(self) -> Groups:
        return self.native.groups

    @property
    def open(self) -> bool:
        return self.native.open

    def shard(self, rank: int, world_size: int) -> Groups:
        return self.native.shard(rank, world_size)

    def ack(self) -> None:
        self._thread.call(seen_through(self.native.ack))

    def nack(self) -> None:
        self._thread.call(seen_through(self.native.nack))

    def reject(self, groups: Sequence[Sequence[RolloutState]], reason: str) -> None:
        self._thread.call(seen_through(lambda: self.native.reject(groups, reason)))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.leave(error)
        except ForebayError:
            raise
        except BaseException:
            self.leave(error)  # an interrupt, which the lease may not have heard of; settling it twice is harmless
            raise

    def leave(self, error: BaseException | None) -> None:
        """What leaving a `with` block does: acknowledge, or give back if the block raised."""
        if not self.native.open:
            return
        try:
            self._thread.call(self.native.settle_on_exit(error))
        except BufferClosed as closed:
            if error is None:
                raise
            log.warning("lease_lost lease=%s %s", self.native.id, closed)  # the block's own error matters more
