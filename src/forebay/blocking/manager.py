"""The managers behind blocking calls: the producer in the background, batches in the training thread.

Each verb is that of the native manager. A batch is asked for when its request is entered (`with`: a lease, acknowledged
after the block, given back if it raises) or taken (`take()`: for good). What a request was granted in the moment of an
interrupt goes back.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from forebay import manager as native
from forebay.blocking.buffer import Groups, Lease
from forebay.blocking.thread import LoopThread
from forebay.buffer import ReplayBuffer
from forebay.errors import ForebayError, InvalidInput
from forebay.ledger import LedgerLine
from forebay.manager.base import Manager
from forebay.manager.results import BatchRequest as NativeRequest
from forebay.manager.results import ProduceBatchResult, ProduceStatus, TaskResult
from forebay.produce.work import look_at

__all__ = ["AgentLoopManager", "Batch", "BatchRequest", "DisaggregatedAgentLoopManager"]

T = TypeVar("T")
M = TypeVar("M", bound=Manager)

log = logging.getLogger(__name__)


class Batch:
    """A batch for one train step; see `forebay.ProduceBatchResult`.

    `lease` settles it from any thread; None if it was taken for good, or is empty (EXPIRED_BATCH).
    """

    def __init__(self, result: ProduceBatchResult, thread: LoopThread) -> None:
        self.native = result
        self.lease = None if result.lease is None else Lease(result.lease, thread)

    def __repr__(self) -> str:
        held = "" if self.lease is None else ", held" if self.lease.open else ", settled"
        return f"<Batch for train step {self.train_step}: {len(self.groups)} groups, {self.status}{held}>"

    @property
    def train_step(self) -> int:
        return self.native.train_step

    @property
    def status(self) -> ProduceStatus:
        return self.native.status

    @property
    def groups(self) -> Groups:
        return self.native.groups

    @property
    def groups_by_task(self) -> dict[str, Groups]:
        return self.native.groups_by_task

    @property
    def task_batch_sizes(self) -> dict[str, int]:
        return self.native.task_batch_sizes

    @property
    def task_results(self) -> dict[str, TaskResult]:
        return self.native.task_results

    @property
    def wait_s(self) -> float:
        return self.native.wait_s

    @property
    def group_gen_p50_s(self) -> float | None:
        return self.native.group_gen_p50_s

    @property
    def group_gen_p99_s(self) -> float | None:
        return self.native.group_gen_p99_s

    @property
    def raw_reward_mean(self) -> float | None:
        return self.native.raw_reward_mean

    def shard(self, rank: int, world_size: int) -> Groups:
        """Whole groups for one trainer rank; see `forebay.lease.shard`."""
        return self.native.shard(rank, world_size)

    def total(self, name: str) -> float:
        """The sum of a count over the tasks: `total("produced_tokens")`."""
        return self.native.total(name)

    def stats(self) -> dict[str, float]:
        """Flat figures for any logger: `forebay/<task>/batch/...`."""
        return self.native.stats()


class BatchRequest:
    """What `produce_batch` and `get_batch` return; nothing is asked for before it is entered or taken, once.

    with manager.get_batch(64, step) as batch:       # a lease: acknowledged after the block, given back if it raises
        train(batch.groups)

    batch = manager.get_batch(64, step).take()       # taken for good
    """

    def __init__(self, request: NativeRequest, thread: LoopThread) -> None:
        self._request = request
        self._thread = thread
        self._batch: Batch | None = None

    def take(self) -> Batch:
        """Wait for the batch, and take it for good: once that is done, an interrupt does not bring it back."""
        return self._thread.call(self._taken())

    async def _taken(self) -> Batch:
        return Batch(await self._request, self._thread)

    def __enter__(self) -> Batch:
        # No call after this one: an interrupt there would find nobody who gives it back.
        self._batch = self._thread.call(self._granted(), undo=_give_back)
        return self._batch

    async def _granted(self) -> Batch:
        return Batch(await self._request.__aenter__(), self._thread)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        lease = None if self._batch is None else self._batch.lease
        if lease is None:
            return
        try:
            lease.leave(error)
        except ForebayError:
            raise
        except BaseException:
            lease.leave(error)  # an interrupt, which the lease may not have heard of; settling it twice is harmless
            raise


async def _give_back(batch: Batch) -> None:
    if batch.native.lease is not None:
        await batch.native.lease.nack()


class _Manager(Generic[M]):
    """What both are: a native manager on a loop of its own."""

    _native_type: ClassVar[type[Manager]]

    def __init__(self, manager: M | Callable[[], M]) -> None:
        if not callable(manager):
            self.native: M = self._checked(manager)
        self._thread = LoopThread("manager")
        try:
            if callable(manager):
                self.native = self._thread.call(self._built(manager), undo=_end)
        except BaseException:
            self._thread.stop(wait=False)  # an interrupt does not wait for whatever is being built
            raise
        self._thread.last = partial(_end, self.native)

    async def _built(self, build: Callable[[], M]) -> M:
        return self._checked(build())

    def _checked(self, manager: M) -> M:
        if not isinstance(manager, self._native_type):
            name = self._native_type.__name__
            raise InvalidInput(
                f"blocking.{name} got {manager!r:.80}; expected a forebay.{name}, or a function without arguments that "
                "builds one"
            )
        return manager

    def __repr__(self) -> str:
        return f"<blocking {type(self).__name__} of tasks {', '.join(self.native.tasks)}>"

    @property
    def buffer(self) -> ReplayBuffer:
        """The native buffer, for coroutines on the manager's event loop."""
        return self.native.replay_buffer

    @property
    def model_step(self) -> int:
        return self.native.model_step

    @property
    def next_train_step(self) -> int:
        return self.native.next_train_step

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the manager's event loop; cancelled when the manager closes."""
        return self._thread.submit(work)

    def _request(self, request: NativeRequest) -> BatchRequest:
        self._thread.check_open()
        return BatchRequest(request, self._thread)

    def save(self, path: str | os.PathLike[str], model_step: int, *, no_save_replay_buffer: bool = False) -> None:
        self._thread.call(self.native.save(path, model_step, no_save_replay_buffer=no_save_replay_buffer))

    def resume(self, path: str | os.PathLike[str]) -> int:
        return self._thread.call(self.native.resume(path))

    def ledger(self) -> dict[str, LedgerLine]:
        return self._thread.call(self.native.ledger())

    def stats(self) -> dict[str, float]:
        return self._thread.call(self.native.stats())

    def explain_wait(self) -> str:
        return self._thread.call(self.native.explain_wait())

    def shutdown(self) -> None:
        """Stop producing; what is in flight is back in the buffer when this returns. The buffer stays open."""
        self._thread.call(self.native.shutdown())

    def close(self) -> None:
        """Shut down, close the buffer, stop the loop: every wait ends with BufferClosed. Closing twice is allowed."""
        self._thread.stop()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise
            log.exception("close_failed: after another error, which is raised")


async def _end(manager: Manager) -> None:
    try:
        await manager.shutdown()
    finally:
        await manager.replay_buffer.close()


class AgentLoopManager(_Manager[native.AgentLoopManager]):
    """A `forebay.AgentLoopManager` behind blocking calls. See there for what each one does.

    Takes a manager that is not in use yet (its buffer neither), or a function that builds one on the loop's thread.
    """

    _native_type = native.AgentLoopManager

    def produce_batch(
        self, batch_size: int, train_step: int, *, model_step: int, timeout_s: float | None = None
    ) -> BatchRequest:
        """A batch for one train step, produced when it is entered with `with` (a lease), or taken with `take()`."""
        return self._request(
            self.native.produce_batch(batch_size, train_step, model_step=model_step, timeout_s=timeout_s)
        )

    def __enter__(self) -> AgentLoopManager:
        return self


class DisaggregatedAgentLoopManager(_Manager[native.DisaggregatedAgentLoopManager]):
    """A `forebay.DisaggregatedAgentLoopManager` behind blocking calls. See there for what each one does.

    Takes a manager that is not in use yet (its buffer neither), or a function that builds one on the loop's thread.
    """

    _native_type = native.DisaggregatedAgentLoopManager
    _producer: asyncio.Task[None] | None = None  # the loop itself does not keep it

    @property
    def bound(self) -> int:
        return self.native.bound

    @property
    def producer_state(self) -> native.ProducerState:
        return self.native.producer_state

    def start(self, batch_size: int) -> None:
        """Run `produce_loop` in the background until `shutdown` or `close`.

        What it refuses to begin with is raised here; what goes wrong later, by the next `get_batch`. It may then be
        started again.
        """
        self._producer = self._thread.call(self._begin(batch_size), undo=_cancel)

    async def _begin(self, batch_size: int) -> asyncio.Task[None]:
        producer = asyncio.create_task(self.native.produce_loop(batch_size), name="produce_loop")
        producer.add_done_callback(look_at)
        try:
            await asyncio.sleep(0)  # its first step, in which it looks at its arguments
        except asyncio.CancelledError:
            await _cancel(producer)
            raise
        if producer.done():
            producer.result()
        return producer

    def get_batch(self, batch_size: int, train_step: int, *, timeout_s: float | None = None) -> BatchRequest:
        """The batch of a train step, waited for when it is entered with `with` (a lease), or taken with `take()`."""
        return self._request(self.native.get_batch(batch_size, train_step, timeout_s=timeout_s))

    def pause_produce(self) -> float:
        return self._thread.call(self.native.pause_produce())

    def continue_produce(self, model_step: int) -> None:
        self._thread.call(self.native.continue_produce(model_step))

    def __enter__(self) -> DisaggregatedAgentLoopManager:
        return self


async def _cancel(producer: asyncio.Task[None]) -> None:
    producer.cancel()
    await asyncio.wait((producer,))
