"""The batch of a `RolloutLoader`: the content of a step, and how it is settled from any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from forebay.blocking import Lease
from forebay.core.rollout import RolloutState
from forebay.errors import InvalidInput
from forebay.loader.ranks import Ranks
from forebay.manager.results import BatchContent


class Batch(BatchContent, kw_only=True, eq=False, weakref=True):
    """A batch that is leased for one train step, until `ack` or `nack`. Leaving `with` settles it.

    With several ranks it has the groups of this rank, and is settled by all of them together.
    """

    ranks: Ranks
    lease: Lease | None  # of rank 0
    _settled: str | None = None  # on other ranks: how

    def __repr__(self) -> str:
        return f"<Batch for train step {self.step}: {len(self.groups)} groups, {'held' if self.open else 'settled'}>"

    @property
    def open(self) -> bool:
        """Whether it was neither acknowledged nor given back yet."""
        return self._settled is None if self.lease is None else self.lease.open

    @property
    def returned(self) -> bool:
        """Whether it was given back, or lost."""
        return self._settled == "nack" if self.lease is None else self.lease.native.returned

    def ack(self) -> None:
        """The trainer trained on this batch: its groups leave for good. Batches are acknowledged in order of steps."""
        self._settle("ack", Lease.ack)

    def nack(self) -> None:
        """Give the groups back, to their old place in the order."""
        self._settle("nack", Lease.nack)

    def _settle(self, call: str, settle: Callable[[Lease], None]) -> None:
        def on_rank_0() -> None:
            assert self.lease is not None
            settle(self.lease)

        self.ranks.run(call, on_rank_0)
        self._settled = call

    def reject(self, groups: Sequence[Sequence[RolloutState]], reason: str) -> None:
        """These groups are of no use: they leave as discarded, for this reason; the others stay leased."""
        if self.lease is None or self.ranks.world_size > 1:
            raise InvalidInput("groups of a batch that several ranks share cannot be rejected; use filters of the task")
        self.lease.reject(groups, reason)
        held = {id(group) for group in self.lease.groups}
        self.groups_by_task = {
            name: [group for group in found if id(group) in held] for name, found in self.groups_by_task.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.lease is not None and self.ranks.world_size == 1:
            self.lease.__exit__(None, error, trace)
        elif self.open:
            self.ack() if error is None else self.nack()
