"""The managers for synchronous code: the producer in the background, batches in the training thread.

Each method does what that of the native manager does. A batch is requested when its request is entered (`with`: a
lease, acknowledged after the block, returned if the block raises) or taken (`take()`: for good). A batch that is
granted while the caller is interrupted is returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Generic, TypeVar

from msgspec.structs import asdict

from forebay import manager as native
from forebay.blocking.buffer import Lease
from forebay.blocking.facade import LoopOwner, blocking, result_of
from forebay.blocking.thread import LoopThread
from forebay.buffer.buffer import ReplayBuffer
from forebay.core.aio import ignore_exception
from forebay.errors import InvalidInput
from forebay.manager.base import Manager

__all__ = ["AgentLoopManager", "Batch", "BatchRequest", "DisaggregatedAgentLoopManager"]

M = TypeVar("M", bound=Manager)


class Batch(native.ProduceBatchResult, kw_only=True, eq=False, weakref=True):
    """A batch for one train step; see `forebay.ProduceBatchResult`.

    `lease` settles it from any thread. It is None if the batch was taken for good, or is empty (EXPIRED_BATCH).
    """

    lease: Lease | None = None  # type: ignore[assignment]  # its methods block, so it is no native lease

    def __repr__(self) -> str:
        leased = "" if self.lease is None else ", held" if self.lease.open else ", settled"
        return f"<Batch for train step {self.train_step}: {len(self.groups)} groups, {self.status}{leased}>"


class BatchRequest:
    """What `produce_batch` and `get_batch` return. Nothing is requested before it is entered or taken, once.

    with manager.get_batch(64, step) as batch:       # a lease: acknowledged after the block, returned if it raises
        train(batch.groups)

    batch = manager.get_batch(64, step).take()       # taken for good
    """

    def __init__(self, request: native.BatchRequest, thread: LoopThread) -> None:
        self._request = request
        self._thread = thread
        self._lease: Lease | None = None

    def take(self) -> Batch:
        """Wait for the batch, and take it for good: a later interrupt does not return it to the buffer."""
        return self._thread.call(self._take)

    async def _take(self) -> Batch:
        return self._batch(await self._request)

    def __enter__(self) -> Batch:
        return self._thread.call(self._enter, undo=_return)

    async def _enter(self) -> Batch:
        batch = self._batch(await self._request.__aenter__())
        self._lease = batch.lease
        return batch

    def _batch(self, result: native.ProduceBatchResult) -> Batch:
        lease = None if result.lease is None else Lease(result.lease, self._thread)
        return Batch(**{**asdict(result), "lease": lease})

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._lease is not None:
            self._lease.__exit__(kind, error, trace)


async def _return(batch: Batch) -> None:
    if batch.lease is not None:
        await batch.lease.native.nack()


class _Manager(LoopOwner[M], Generic[M]):
    """What both managers are: a native manager on its own event loop."""

    _native_type: ClassVar[type[Manager]]

    def __init__(self, manager: M | Callable[[], M]) -> None:
        if not callable(manager):
            self._check(manager)
        thread = LoopThread("manager")
        try:
            built = thread.call(partial(self._build, manager), undo=_end) if callable(manager) else manager
        except BaseException:
            thread.stop(wait=False)  # after an interrupt the caller does not wait for a build that hangs
            raise
        thread.cleanup = partial(_end, built)
        super().__init__(built, thread)

    async def _build(self, build: Callable[[], M]) -> M:
        manager = build()
        self._check(manager)
        return manager

    def _check(self, manager: M) -> None:
        if not isinstance(manager, self._native_type):
            name = self._native_type.__name__
            raise InvalidInput(
                f"blocking.{name} got {manager!r:.80}; expected a forebay.{name}, or a function without arguments that "
                "builds one"
            )

    def __repr__(self) -> str:
        return f"<blocking {type(self).__name__} of tasks {', '.join(self.native.tasks)}>"

    @property
    def buffer(self) -> ReplayBuffer:
        """The native buffer, for coroutines on the manager's event loop."""
        return self.native.replay_buffer

    @property
    def model_step(self) -> int:
        """The step of the weights that generate."""
        return self.native.model_step

    @property
    def next_train_step(self) -> int:
        """The first step that was not acknowledged."""
        return self.native.next_train_step

    def _request(self, request: native.BatchRequest) -> BatchRequest:
        self._thread.check_open()
        return BatchRequest(request, self._thread)

    save = blocking(Manager.save)
    resume = blocking(Manager.resume)
    ledger = blocking(Manager.ledger)
    stats = blocking(Manager.stats)
    explain_wait = blocking(Manager.explain_wait)
    shutdown = blocking(Manager.shutdown)


async def _end(manager: Manager) -> None:
    try:
        await manager.shutdown()
    finally:
        await manager.replay_buffer.close()


class AgentLoopManager(_Manager[native.AgentLoopManager]):
    """A `forebay.AgentLoopManager` for synchronous code, safe to share between threads.

    It takes a manager that is not in use yet (nor its buffer), or a function that builds one on the loop's thread.
    """

    _native_type = native.AgentLoopManager

    @result_of(native.AgentLoopManager.produce_batch)
    def produce_batch(self, request: native.BatchRequest) -> BatchRequest:
        """A batch for one train step, produced when it is entered with `with` (a lease), or taken with `take()`."""
        return self._request(request)


class DisaggregatedAgentLoopManager(_Manager[native.DisaggregatedAgentLoopManager]):
    """A `forebay.DisaggregatedAgentLoopManager` for synchronous code, safe to share between threads.

    It takes a manager that is not in use yet (nor its buffer), or a function that builds one on the loop's thread.
    """

    _native_type = native.DisaggregatedAgentLoopManager
    _producer: asyncio.Task[None] | None = None  # asyncio itself holds tasks only weakly

    @property
    def bound(self) -> int:
        """The last train step for which the present weights are fresh enough, for every task."""
        return self.native.bound

    @property
    def producer_state(self) -> native.ProducerState:
        """Whether the producer runs, is paused or is closed."""
        return self.native.producer_state

    def start(self, batch_size: int) -> None:
        """Run `produce_loop` in the background until `shutdown` or `close`.

        An error at its start is raised here; a later one by the next `get_batch`, after which it may be started again.
        """
        self._producer = self._thread.call(partial(self._start, batch_size), undo=_cancel)

    async def _start(self, batch_size: int) -> asyncio.Task[None]:
        producer = asyncio.create_task(self.native.produce_loop(batch_size), name="produce_loop")
        producer.add_done_callback(ignore_exception)
        try:
            await asyncio.sleep(0)  # its first step, which checks its arguments
        except asyncio.CancelledError:
            await _cancel(producer)
            raise
        if producer.done():
            producer.result()
        return producer

    @result_of(native.DisaggregatedAgentLoopManager.get_batch)
    def get_batch(self, request: native.BatchRequest) -> BatchRequest:
        """The batch of a train step, waited for when it is entered with `with` (a lease), or taken with `take()`."""
        return self._request(request)

    pause_produce = blocking(native.DisaggregatedAgentLoopManager.pause_produce)
    continue_produce = blocking(native.DisaggregatedAgentLoopManager.continue_produce)


async def _cancel(producer: asyncio.Task[None]) -> None:
    producer.cancel()
    await asyncio.wait((producer,))
