"""The buffer for synchronous code: the same methods, safe to call from any thread. Trainers use `RolloutLoader`.

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

import logging

from forebay import buffer as buffers
from forebay.blocking.thread import Facade, LoopOwner, LoopThread, blocking, on_loop, result_of
from forebay.config import ReplayBufferConfig
from forebay.core.rollout import RolloutState
from forebay.errors import BufferClosed, ForebayError

__all__ = ["Lease", "ReplayBuffer"]

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
        """Whole groups for one trainer rank; see `forebay.collate.shard`."""
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
