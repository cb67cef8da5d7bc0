"""The buffer and the managers for synchronous trainers: the same methods, safe to call from any thread.

    with blocking.DisaggregatedAgentLoopManager(build) as manager:
        manager.start(64)                                        # produces in the background
        for step in range(1, 1001):
            with manager.get_batch(64, step, timeout_s=600) as batch:
                train(batch.groups)                              # acknowledged after the block, returned if it raises
            manager.pause_produce()
            load_weights(engine)
            manager.continue_produce(model_step=step)

    with blocking.ReplayBuffer(forebay.AsyncReplayBufferConfig()) as buffer:
        buffer.submit(produce(buffer.native))                    # async producers run on the buffer's own loop
        with buffer.lease_batch({"math": 64}, train_step=1, timeout_s=600) as lease:
            train(lease.groups)

The native object (`native`) runs on an event loop in its own thread. Every call runs there while the caller waits.
Each method does what the native one does; methods that producers use on the event loop are only on `native`. Ctrl-C (or
any exception) in the waiting caller cancels the call, and surfaces when the call has ended; groups leased at
that very moment are returned. Groups that are taken for good (`get`, `take_batch`, `take`) cannot be returned: prefer a
lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Generic, TypeVar

from msgspec.structs import asdict

from forebay import buffer as buffers
from forebay import manager as managers
from forebay.blocking.thread import Facade, LoopOwner, LoopThread, blocking, on_loop, result_of
from forebay.config import ReplayBufferConfig
from forebay.core.aio import ignore_exception
from forebay.core.rollout import RolloutState
from forebay.errors import BufferClosed, ForebayError, InvalidInput
from forebay.manager.base import Manager
from forebay.manager.disaggregated import LoadWeights

__all__ = ["AgentLoopManager", "Batch", "BatchRequest", "DisaggregatedAgentLoopManager", "Lease", "ReplayBuffer"]

log = logging.getLogger(__name__)

Groups = list[list[RolloutState]]


class Lease(Facade[buffers.Lease]):
    """A lease for synchronous code: `with` acknowledges it on a clean exit, and returns its groups on an exception.

    An interrupt does not stop it from being settled: the interrupt surfaces afterwards.
    """

    def __repr__(self) -> str:
        return repr(self.native)

    @property
    def train_step(self) -> int:
        """The train step that the groups were leased for."""
        return self.native.train_step

    @property
    def groups_by_task(self) -> dict[str, Groups]:
        """The leased groups of each task."""
        return self.native.groups_by_task

    @property
    def groups(self) -> Groups:
        """The groups of all tasks, task after task."""
        return self.native.groups

    @property
    def open(self) -> bool:
        """Whether it was neither acknowledged nor given back yet."""
        return self.native.open

    def shard(self, rank: int, world_size: int) -> Groups:
        """Whole groups for one trainer rank; see `forebay.buffer.lease.shard`."""
        return self.native.shard(rank, world_size)

    ack = blocking(buffers.Lease.ack, uncancelled=True)
    nack = blocking(buffers.Lease.nack, uncancelled=True)
    reject = blocking(buffers.Lease.reject, uncancelled=True)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self._settle(error)
        except ForebayError:
            raise
        except BaseException:
            self._settle(error)  # the interrupt may have come before the first attempt; settling twice is harmless
            raise

    def _settle(self, error: BaseException | None) -> None:
        if not self.native.open:
            return
        try:
            self._thread.call(lambda: self.native.settle_on_exit(error))
        except BufferClosed as closed:
            if error is None:
                raise
            log.warning("lease_lost lease=%s %s", self.native.id, closed)  # the error of the block is raised instead


class ReplayBuffer(LoopOwner[buffers.ReplayBuffer]):
    """A `forebay.ReplayBuffer` for synchronous code, safe to share between threads.

    It takes a buffer that is not in use yet, or a config to build one from.
    """

    def __init__(self, buffer: buffers.ReplayBuffer | ReplayBufferConfig) -> None:
        built = buffer.build() if isinstance(buffer, ReplayBufferConfig) else buffer
        super().__init__(built, LoopThread("buffer", built.close))

    def __repr__(self) -> str:
        return f"<blocking ReplayBuffer {self.native.policy!r} on {type(self.native.storage).__name__}>"

    set_limits = blocking(buffers.ReplayBuffer.set_limits)
    put = blocking(buffers.ReplayBuffer.put)
    put_many = blocking(buffers.ReplayBuffer.put_many)
    get = blocking(buffers.ReplayBuffer.get)
    take_batch = blocking(buffers.ReplayBuffer.take_batch)

    @result_of(buffers.ReplayBuffer.lease_batch)
    def lease_batch(self, request: buffers.LeaseRequest) -> Lease:
        """Wait for a full batch and lease it; enter the lease with `with`, or settle it with `ack` or `nack`.

        No group is stale for `train_step` (G6). WaitTimeout explains what was missing.
        """

        async def grant() -> Lease:
            return Lease(await request, self._thread)

        return self._thread.call(grant, undo=lambda lease: lease.native.nack())

    wait_ready = blocking(buffers.ReplayBuffer.wait_ready)
    is_ready = blocking(buffers.ReplayBuffer.is_ready)
    refresh_staleness = blocking(buffers.ReplayBuffer.refresh_staleness)
    count = blocking(buffers.ReplayBuffer.count)
    count_statuses = blocking(buffers.ReplayBuffer.count_statuses)
    __len__ = on_loop(buffers.ReplayBuffer.__len__)
    query = blocking(buffers.ReplayBuffer.query)
    read = blocking(buffers.ReplayBuffer.read)
    discard = blocking(buffers.ReplayBuffer.discard)
    set_priority = blocking(buffers.ReplayBuffer.set_priority)
    ledger = blocking(buffers.ReplayBuffer.ledger)
    reasons = blocking(buffers.ReplayBuffer.reasons)
    stats = blocking(buffers.ReplayBuffer.stats)
    explain_wait = blocking(buffers.ReplayBuffer.explain_wait)
    save = blocking(buffers.ReplayBuffer.save)
    resume = blocking(buffers.ReplayBuffer.resume)


M = TypeVar("M", bound=Manager)


class Batch(managers.ProduceBatchResult, kw_only=True, eq=False, weakref=True):
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

    def __init__(self, request: managers.BatchRequest, thread: LoopThread) -> None:
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

    def _batch(self, result: managers.ProduceBatchResult) -> Batch:
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
    def buffer(self) -> buffers.ReplayBuffer:
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

    def _request(self, request: managers.BatchRequest) -> BatchRequest:
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


class AgentLoopManager(_Manager[managers.AgentLoopManager]):
    """A `forebay.AgentLoopManager` for synchronous code, safe to share between threads.

    It takes a manager that is not in use yet (nor its buffer), or a function that builds one on the loop's thread.
    """

    _native_type = managers.AgentLoopManager

    @result_of(managers.AgentLoopManager.produce_batch)
    def produce_batch(self, request: managers.BatchRequest) -> BatchRequest:
        """A batch for one train step, produced when it is entered with `with` (a lease), or taken with `take()`."""
        return self._request(request)


class DisaggregatedAgentLoopManager(_Manager[managers.DisaggregatedAgentLoopManager]):
    """A `forebay.DisaggregatedAgentLoopManager` for synchronous code, safe to share between threads.

    It takes a manager that is not in use yet (nor its buffer), or a function that builds one on the loop's thread.
    """

    _native_type = managers.DisaggregatedAgentLoopManager
    _producer: asyncio.Task[None] | None = None  # asyncio itself holds tasks only weakly

    @property
    def bound(self) -> int:
        """The last train step for which the present weights are fresh enough, for every task."""
        return self.native.bound

    @property
    def producer_state(self) -> managers.ProducerState:
        """Whether the producer runs, is paused or is closed."""
        return self.native.producer_state

    def start(self, batch_size: int, *, load_weights: LoadWeights | None = None) -> None:
        """Run `produce_loop` in the background until `shutdown` or `close`.

        An error at its start is raised here; a later one by the next `get_batch`, after which it may be started again.
        """
        self._producer = self._thread.call(partial(self._start, batch_size, load_weights), undo=_cancel)

    async def _start(self, batch_size: int, load_weights: LoadWeights | None) -> asyncio.Task[None]:
        producing = self.native.produce_loop(batch_size, load_weights=load_weights)
        producer = asyncio.create_task(producing, name="produce_loop")
        producer.add_done_callback(ignore_exception)
        try:
            await asyncio.sleep(0)  # its first step, which checks its arguments
        except asyncio.CancelledError:
            await _cancel(producer)
            raise
        if producer.done():
            producer.result()
        return producer

    @result_of(managers.DisaggregatedAgentLoopManager.get_batch)
    def get_batch(self, request: managers.BatchRequest) -> BatchRequest:
        """The batch of a train step, waited for when it is entered with `with` (a lease), or taken with `take()`."""
        return self._request(request)

    pause_produce = blocking(managers.DisaggregatedAgentLoopManager.pause_produce)
    continue_produce = blocking(managers.DisaggregatedAgentLoopManager.continue_produce)


async def _cancel(producer: asyncio.Task[None]) -> None:
    producer.cancel()
    await asyncio.wait((producer,))
