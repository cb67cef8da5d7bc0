"""A batch that several ranks of one trainer share, each with a manager on the shared store.

Rank 0 leases the batch and says which groups each rank gets; the others read their groups from the store. Rank 0
acknowledges the batch when all ranks have acknowledged their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from forebay.buffer.internal import Internals
from forebay.buffer.lease import Lease
from forebay.core.aio import Deadline
from forebay.core.ledger import Event
from forebay.errors import InvalidInput, LostLease, WaitTimeout
from forebay.manager.agreement import Handout
from forebay.manager.patience import Patience
from forebay.manager.results import AsyncBatch
from forebay.manager.run import Run


async def take_part(
    run: Run, internals: Internals, patiently: Patience, step: int, rank: int, world_size: int, timeout_s: float | None
) -> Lease:
    """Wait for rank 0 to lease the batch of a step, and read the groups of another rank."""

    async def settle(lease_id: str, uids: Sequence[int], event: Event, reason: str | None) -> None:
        if event is Event.REJECTED:
            raise InvalidInput("groups are rejected by rank 0, which holds the lease")
        await run.settle_part(lease_id, step, rank, trained=event is Event.ACKED)

    deadline, void, lease = Deadline(timeout_s), None, None
    while lease is None:
        handout = await patiently(partial(run.take_part, step, rank, world_size, deadline.left_s(), void))
        read = partial(internals.read_lease, handout.lease_id, handout.shards[rank], step, settle)
        with suppress(LostLease):  # rank 0 gave it back meanwhile; it will lease another one
            lease = await patiently(read)
        void = handout.lease_id
    return lease


async def divide(run: Run, patiently: Patience, batch: AsyncBatch, world_size: int, timeout_s: float | None) -> None:
    """Let the other ranks have their parts of a batch, and keep that of rank 0."""
    lease = batch.lease
    shards = [lease.shard(rank, world_size) for rank in range(world_size)]
    await run.hand_out(Handout(batch.step, lease.id, run.owner, [lease.uids_of(groups) for groups in shards]))
    kept, batch.whole = set(map(id, shards[0])), False
    batch.groups_by_task = {
        name: [group for group in groups if id(group) in kept] for name, groups in batch.groups_by_task.items()
    }
    acknowledged = lease.on_ack

    async def when_all_have(began: bool) -> None:
        if began:
            try:
                await patiently(lambda: run.until_trained(batch.step, timeout_s))
            except (LostLease, WaitTimeout):
                await lease.nack()
                raise
        if acknowledged is not None:
            await acknowledged(began)

    lease.on_ack = when_all_have
