"""The buffer for synchronous code, and its leases. Each method does what that of `forebay.ReplayBuffer` does.

The methods that samplers, producers and managers use on the event loop are not here; `native` has them.
"""

from __future__ import annotations

import logging

from forebay import buffer as native
from forebay.blocking.facade import Facade, LoopOwner, blocking, on_loop, result_of
from forebay.blocking.thread import LoopThread
from forebay.config import ReplayBufferConfig
from forebay.core.rollout import RolloutState
from forebay.errors import BufferClosed, ForebayError

__all__ = ["Lease", "ReplayBuffer"]

log = logging.getLogger(__name__)

Groups = list[list[RolloutState]]


class Lease(Facade[native.Lease]):
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

    ack = blocking(native.Lease.ack, uncancelled=True)
    nack = blocking(native.Lease.nack, uncancelled=True)
    reject = blocking(native.Lease.reject, uncancelled=True)

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


class ReplayBuffer(LoopOwner[native.ReplayBuffer]):
    """A `forebay.ReplayBuffer` for synchronous code, safe to share between threads.

    It takes a buffer that is not in use yet, or a config to build one from.
    """

    def __init__(self, buffer: native.ReplayBuffer | ReplayBufferConfig) -> None:
        built = buffer.build() if isinstance(buffer, ReplayBufferConfig) else buffer
        super().__init__(built, LoopThread("buffer", built.close))

    def __repr__(self) -> str:
        return f"<blocking ReplayBuffer {self.native.policy!r} on {type(self.native.storage).__name__}>"

    set_limits = blocking(native.ReplayBuffer.set_limits)
    put = blocking(native.ReplayBuffer.put)
    put_many = blocking(native.ReplayBuffer.put_many)
    get = blocking(native.ReplayBuffer.get)
    take_batch = blocking(native.ReplayBuffer.take_batch)

    @result_of(native.ReplayBuffer.lease_batch)
    def lease_batch(self, request: native.LeaseRequest) -> Lease:
        """Wait for a full batch and lease it; enter the lease with `with`, or settle it with `ack` or `nack`.

        No group is stale for `train_step` (G6). WaitTimeout explains what was missing.
        """

        async def grant() -> Lease:
            return Lease(await request, self._thread)

        return self._thread.call(grant, undo=lambda lease: lease.native.nack())

    wait_ready = blocking(native.ReplayBuffer.wait_ready)
    is_ready = blocking(native.ReplayBuffer.is_ready)
    refresh_staleness = blocking(native.ReplayBuffer.refresh_staleness)
    count = blocking(native.ReplayBuffer.count)
    count_statuses = blocking(native.ReplayBuffer.count_statuses)
    __len__ = on_loop(native.ReplayBuffer.__len__)
    query = blocking(native.ReplayBuffer.query)
    read = blocking(native.ReplayBuffer.read)
    discard = blocking(native.ReplayBuffer.discard)
    set_priority = blocking(native.ReplayBuffer.set_priority)
    ledger = blocking(native.ReplayBuffer.ledger)
    reasons = blocking(native.ReplayBuffer.reasons)
    stats = blocking(native.ReplayBuffer.stats)
    explain_wait = blocking(native.ReplayBuffer.explain_wait)
    save = blocking(native.ReplayBuffer.save)
    resume = blocking(native.ReplayBuffer.resume)
