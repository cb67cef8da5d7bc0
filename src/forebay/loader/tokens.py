"""How many groups a step has: a fixed number, or as many as fit into a number of tokens."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from forebay.core.rollout import RolloutState
from forebay.core.validate import checked_integer
from forebay.manager.results import AsyncBatch

log = logging.getLogger(__name__)

_MAX_GROWTH = 8.0
"""A step grows at most this much at once: the first groups may be unusually short."""


class TokenSize:
    """The size of a step. `groups` is what is planned; with `batch_tokens` it follows the sizes of groups."""

    def __init__(self, batch_groups: int | None, batch_tokens: int | None) -> None:
        self.groups = 1 if batch_groups is None else checked_integer("batch_groups", batch_groups, least=1)
        self.tokens = None if batch_tokens is None else checked_integer("batch_tokens", batch_tokens, least=1)

    async def fill(
        self,
        request: Callable[[int], Awaitable[AsyncBatch]],
        resize: Callable[[int], Awaitable[bool]],
        shrink: Callable[[int, dict[str, int]], Awaitable[None]],
    ) -> AsyncBatch:
        """Lease a batch. With `batch_tokens`: as many groups as fit, at least one; the others are given back.

        If there is space for more groups of the mean size, the batch is given back, and a larger one is leased.
        """
        while True:
            batch = await request(self.groups)
            if self.tokens is None:
                return batch
            groups = _in_proportion(batch)
            sizes = [sum(state.num_tokens for state in group) for group in groups]
            total, kept = 0, 0
            while kept < len(groups) and (not kept or total + sizes[kept] <= self.tokens):
                total += sizes[kept]
                kept += 1
            fits = max(1, int(self.tokens * len(sizes) / max(1, sum(sizes))))
            grown = min(fits, int(self.groups * _MAX_GROWTH))
            if kept == len(groups) == self.groups < grown and await resize(grown):
                self.groups = grown
                await batch.nack()
                continue
            if total > self.tokens:
                log.warning("group_too_large step=%d tokens=%d batch_tokens=%d", batch.step, total, self.tokens)
            if kept < len(groups):
                await batch.give_back(groups[kept:])
                await shrink(batch.step, {name: len(left) for name, left in batch.groups_by_task.items()})
            if fits * 2 < self.groups and await resize(fits):
                self.groups = fits
            return batch


def _in_proportion(batch: AsyncBatch) -> list[list[RolloutState]]:
    """The groups of a batch, in an order in which every beginning has about the mix of the whole."""
    placed = [
        ((index + 0.5) / len(groups), number, group)
        for number, groups in enumerate(batch.groups_by_task.values())
        for index, group in enumerate(groups)
    ]
    return [group for _, _, group in sorted(placed, key=lambda place: place[:2])]
