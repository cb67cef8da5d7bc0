"""How many groups a step has: a fixed number, or as many as fit into a number of tokens."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from forebay.core.aio import uncancelled
from forebay.core.rollout import RolloutState
from forebay.core.validate import checked_integer
from forebay.loader.plane import Plane
from forebay.manager.results import AsyncBatch

log = logging.getLogger(__name__)

_MAX_GROWTH = 8.0
"""A step grows at most this much at once: the first groups may be unusually short."""


class TokenSize:
    """The size of a step. `groups` is what is planned; with `batch_tokens` it follows the sizes of groups."""

    def __init__(self, batch_groups: int | None, batch_tokens: int | None) -> None:
        self.least = 1
        self.groups = 1 if batch_groups is None else checked_integer("batch_groups", batch_groups, least=1)
        self.tokens = None if batch_tokens is None else checked_integer("batch_tokens", batch_tokens, least=1)

    def at_least(self, groups: int) -> None:
        """Every step has at least this number of groups: one for each rank."""
        self.least, self.groups = groups, max(self.groups, groups)

    async def fill(self, request: Callable[[int], Awaitable[AsyncBatch]], plane: Plane) -> AsyncBatch:
        """Lease a batch. With `batch_tokens`: as many groups as fit, at least `least`; the others are given back.

        If there is space for more groups of the mean size, the batch is given back, and a larger one is leased.
        """
        while True:
            batch = await request(self.groups)
            try:
                fits = self.groups if self.tokens is None else await self._cut(batch, self.tokens, plane)
            except BaseException:
                await uncancelled(batch.nack())  # nobody else knows of it
                raise
            if fits <= self.groups:
                return batch
            await uncancelled(batch.nack())
            await plane.resize(fits)
            self.groups = fits

    async def _cut(self, batch: AsyncBatch, tokens: int, plane: Plane) -> int:
        """Cut a batch down to a number of tokens. A number of groups above `self.groups`: lease so many instead."""
        groups = _in_proportion(batch)
        sizes = [sum(state.num_tokens for state in group) for group in groups]
        total, kept = 0, 0
        while kept < len(groups) and (kept < self.least or total + sizes[kept] <= tokens):
            total += sizes[kept]
            kept += 1
        fits = max(self.least, int(tokens * len(sizes) / max(1, sum(sizes))))
        grown = min(fits, int(self.groups * _MAX_GROWTH))
        if kept == len(groups) == self.groups < grown and plane.fits(grown):
            return grown
        if total > tokens:
            log.warning("group_too_large step=%d tokens=%d batch_tokens=%d", batch.step, total, tokens)
        if kept < len(groups):
            await batch.give_back(groups[kept:])
            await plane.shrink(batch.step, {name: len(left) for name, left in batch.groups_by_task.items()})
        if fits * 2 < self.groups:
            await plane.resize(fits)
            self.groups = fits
        return self.groups


def _in_proportion(batch: AsyncBatch) -> list[list[RolloutState]]:
    """The groups of a batch, in an order in which every beginning has about the mix of the whole."""
    placed = [
        ((index + 0.5) / len(groups), number, group)
        for number, groups in enumerate(batch.groups_by_task.values())
        for index, group in enumerate(groups)
    ]
    return [group for _, _, group in sorted(placed, key=lambda place: place[:2])]
