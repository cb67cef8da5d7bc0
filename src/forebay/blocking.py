"""The buffer for trainers that are not async: the same verbs, safe to call from any thread.

    with blocking.ReplayBuffer(forebay.AsyncReplayBufferConfig()) as buffer:
        buffer.submit(produce(buffer.native))          # async producers run on the buffer's own loop
        with buffer.lease_batch({"math": 64}, train_step=1, timeout_s=600) as lease:
            train(lease.groups)

The buffer lives on an event loop in a thread of its own; every call is handed over to it and waited for. Ctrl-C (or
any exception) while a call waits cancels it there; what was leased or drawn in that very moment is given back. Only
`get` and `take_batch`, which take for good, have nothing to give back: prefer a lease.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from forebay import buffer as native
from forebay.config import ReplayBufferConfig
from forebay.errors import BufferClosed, WrongEventLoop
from forebay.lease import Lease as NativeLease
from forebay.ledger import LedgerLine
from forebay.record import Record, Tags
from forebay.rollout import RolloutState, Status

__all__ = ["Lease", "ReplayBuffer"]

T = TypeVar("T")
Groups = list[list[RolloutState]]


class _LoopThread:
    """An event loop in a thread of its own. Once it is closing, nothing new gets in, and everything in it ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._guard = threading.Lock()
        self.closing = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()
            self._stopped.set()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if threading.current_thread() is self._thread:
            work.close()
            raise WrongEventLoop(
                "a blocking call from the buffer's own event loop would wait for itself; use `.native` there"
            )
        with self._guard:
            if not self.closing:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise BufferClosed("this blocking buffer is closed; make a new one")

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one last coroutine, cancel everything else, end the thread. Later callers wait for the first."""
        with self._guard:
            first, self.closing = not self.closing, True
        if first:
            asyncio.run_coroutine_threadsafe(self._shut_down(last), self.loop)
        self._stopped.wait()

    async def _shut_down(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await last()
        finally:
            # What was submitted before is a task by now: callbacks run in order.
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.loop.call_soon(self.loop.stop)


class ReplayBuffer:
    """A `forebay.ReplayBuffer` behind blocking calls. See there for what each one does.

    Takes a buffer that is not in use yet, or a config to build one from.
    """

    def __init__(self, buffer: native.ReplayBuffer | ReplayBufferConfig) -> None:
        self.native = buffer.build() if isinstance(buffer, ReplayBufferConfig) else buffer
        self._thread = _LoopThread()

    def __repr__(self) -> str:
        return f"<blocking ReplayBuffer {self.native.policy!r} on {type(self.native.storage).__name__}>"

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine (a producer, say) on the buffer's event loop; cancelled when the buffer closes."""
        return self._thread.submit(work)

    def _call(self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]] | None = None) -> T:
        """Wait for work on the loop. If the caller is interrupted, cancel it, or undo what it brought."""
        decided = threading.Lock()  # whoever takes it first: the work with its result, or the caller by leaving

        async def guarded() -> T:
            result = await work
            if undo is not None and not decided.acquire(blocking=False):
                await undo(result)
            return result

        try:
            future = self._thread.submit(guarded())
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise BufferClosed("the buffer was closed while this call was under way") from None
        except BaseException:
            if decided.acquire(blocking=False):
                future.cancel()
            elif undo is not None:
                self._thread.submit(undo(future.result())).result()
            raise

    async def _give_back(self, groups: Groups) -> None:
        """Groups that nobody will generate, because the caller that drew them was interrupted."""
        for group in groups:
            for state in group:
                if state.status is not Status.COMPLETED:
                    state.status = Status.ABORTED
            await self.native.put(group, group[0].task_name or "")

    def close(self) -> None:
        """End every wait, give back what is held, stop the loop. Closing twice is allowed."""
        self._thread.stop(self.native.close)

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

        self._call(set_limits())

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
        return self._call(
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
        return self._call(
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
        return self._call(
            self.native.issue(groups, task_name, cursor=cursor, source_state=source_state, timeout_s=timeout_s),
            undo=self._give_back,
        )

    def position(self, task_name: str) -> tuple[int, bytes | None]:
        return self._call(self.native.position(task_name))

    def redraw(
        self, n: int, task_name: str, statuses: Sequence[Status] = (Status.INIT, Status.EXPIRED, Status.ABORTED)
    ) -> Groups:
        return self._call(self.native.redraw(n, task_name, statuses), undo=self._give_back)

    def get(self, batch_size: int, task_name: str, group_status: Status) -> Groups:
        return self._call(self.native.get(batch_size, task_name, group_status))

    def take_batch(
        self, wants: Mapping[str, int], *, group_status: Status = Status.COMPLETED
    ) -> tuple[dict[str, Groups], dict[str, int]]:
        return self._call(self.native.take_batch(wants, group_status=group_status))

    def lease_batch(
        self,
        wants: Mapping[str, int],
        *,
        train_step: int,
        group_status: Status = Status.COMPLETED,
        timeout_s: float | None = None,
    ) -> Lease:
        """Waits at once, and returns a lease that can be entered with `with`."""

        async def lease() -> NativeLease:
            return await self.native.lease_batch(
                wants, train_step=train_step, group_status=group_status, timeout_s=timeout_s
            )

        return Lease(self._call(lease(), undo=NativeLease.nack), self._call)

    def wait_ready(
        self, wants: Mapping[str, int], *, group_status: Status = Status.COMPLETED, timeout_s: float | None = None
    ) -> None:
        self._call(self.native.wait_ready(wants, group_status=group_status, timeout_s=timeout_s))

    def is_ready(self, wants: Mapping[str, int], *, group_status: Status = Status.COMPLETED) -> bool:
        return self._call(self.native.is_ready(wants, group_status=group_status))

    def refresh_staleness(
        self,
        *,
        task_stale_thresholds: Mapping[str, int | None],
        current_train_step: int,
        statuses: Collection[Status] | None = None,
        task_token_stale_thresholds: Mapping[str, int | None] | None = None,
        expired_groups_retryable_by_task: Mapping[str, bool] | None = None,
    ) -> dict[str, int]:
        return self._call(
            self.native.refresh_staleness(
                task_stale_thresholds=task_stale_thresholds,
                current_train_step=current_train_step,
                statuses=statuses,
                task_token_stale_thresholds=task_token_stale_thresholds,
                expired_groups_retryable_by_task=expired_groups_retryable_by_task,
            )
        )

    def count(self, task_name: str, group_status: Status) -> int:
        return self._call(self.native.count(task_name, group_status))

    def count_statuses(self, tasks: Collection[str], statuses: Collection[Status]) -> dict[str, dict[Status, int]]:
        return self._call(self.native.count_statuses(tasks, statuses))

    def __len__(self) -> int:
        async def count() -> int:
            return len(self.native)

        return self._call(count())

    def query(self, query: Mapping[str, Any], *, limit: int | None = None) -> list[Record]:
        return self._call(self.native.query(query, limit=limit))

    def read(self, uid: int) -> list[RolloutState] | None:
        return self._call(self.native.read(uid))

    def discard(self, query: Mapping[str, Any], reason: str) -> int:
        return self._call(self.native.discard(query, reason))

    def set_priority(self, priorities: Mapping[int, float]) -> int:
        return self._call(self.native.set_priority(priorities))

    def ledger(self, *, tokens: bool = False) -> dict[str, LedgerLine]:
        return self._call(self.native.ledger(tokens=tokens))

    def reasons(self) -> dict[str, dict[str, int]]:
        return self._call(self.native.reasons())

    def stats(self) -> dict[str, int]:
        return self._call(self.native.stats())

    def explain_wait(self) -> str:
        return self._call(self.native.explain_wait())

    def save(self, path: str | os.PathLike[str], *, model_step: int | None = None) -> None:
        self._call(self.native.save(path, model_step=model_step))

    def resume(self, path: str | os.PathLike[str]) -> int | None:
        return self._call(self.native.resume(path))


class Lease:
    """A lease behind blocking calls; `with` acknowledges it on a clean exit, and gives it back on an exception."""

    def __init__(self, lease: NativeLease, call: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self.native = lease
        self._call = call

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

    def ack(self) -> None:
        self._call(self.native.ack())

    def nack(self) -> None:
        self._call(self.native.nack())

    def reject(self, groups: Sequence[Sequence[RolloutState]], reason: str) -> None:
        self._call(self.native.reject(groups, reason))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.native.open:
            self._call(self.native.settle_on_exit(error))
