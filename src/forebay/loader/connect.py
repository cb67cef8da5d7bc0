"""A trainer on the run of other processes: its tasks are read from the store, where their producers left them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from forebay.agent_loop.base import AgentLoop
from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.internal import internals
from forebay.core.aio import Deadline
from forebay.core.policy import Order, ReplayPolicy
from forebay.core.rollout import RolloutState
from forebay.core.validate import checked_integer
from forebay.errors import InvalidConfig, InvalidInput, WaitTimeout
from forebay.loader.core import AsyncRolloutLoader
from forebay.loader.task import Task
from forebay.manager.agreement import Agreed, decode
from forebay.prompts.sampler import Sampler
from forebay.storage.urls import IN_MEMORY, build_storage

_LOOK_S = 0.5
"""How often a trainer looks whether a producer has opened the store."""


class _Elsewhere(AgentLoop):
    """Stands for an agent loop of another process."""

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        raise InvalidInput("this process only trains; another one generates")


class _PromptsElsewhere:
    """Stands for the prompts of another process."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


class _SamplerElsewhere(Sampler):
    async def compare_data(self, task_name: str, cursor: int, source_state: bytes | None) -> None:
        """The processes that draw compare their data with that of the store."""


class _TaskElsewhere(Task):
    def sampler(self, epochs: int | None = None) -> Sampler:
        return _SamplerElsewhere(self.prompts, group_size=self.group_size)


class _PresentPolicy(ReplayPolicy):
    """The policy that others have a buffer open with."""

    def __init__(self, order: Order) -> None:
        self.order = order


async def connect(
    store: str,
    *,
    rank: int = 0,
    world_size: int = 1,
    timeout_s: float = 3600.0,
    lease_s: float | None = None,
    **options: Any,
) -> AsyncRolloutLoader:
    """A loader that trains on what other processes produce: see `AsyncRolloutLoader.connect`."""
    checked_integer("world_size", world_size, least=1)
    if checked_integer("rank", rank, least=0) >= world_size:
        raise InvalidInput(f"rank is {rank} of world_size {world_size}; expected 0 to {world_size - 1}")
    deadline = Deadline(timeout_s)
    buffer = await _buffer(store, deadline, lease_s)
    try:
        run = await _find_run(buffer, deadline)
        return _loader(buffer, run, rank, world_size, options | {"timeout_s": timeout_s})
    except BaseException:
        await buffer.close()
        raise


async def _buffer(store: str, deadline: Deadline, lease_s: float | None) -> ReplayBuffer:
    """The buffer with the settings that the producers have; they are waited for."""
    if "://" not in store and store not in IN_MEMORY:
        from forebay.ray import RayReplayBuffer

        return RayReplayBuffer.connect(store)
    storage = build_storage(store)
    if not storage.shared:
        raise InvalidConfig(f"{store!r} belongs to one process; expected a PostgreSQL URL or the name of a Ray buffer")
    while (present := await storage.present_settings()) is None:  # type: ignore[attr-defined]
        if (deadline.left_s() or 0.0) <= 0:
            raise WaitTimeout(
                "a producer to begin", deadline.timeout_s or 0.0, f"nobody has {store.partition('@')[2]!r} open"
            )
        await asyncio.sleep(_LOOK_S)
    settings, present_lease_s = present
    return ReplayBuffer(
        _PresentPolicy(settings.order),
        storage,
        max_groups=settings.max_groups,
        max_bytes=settings.max_bytes,
        expect_group_bytes=settings.expect_group_bytes,
        keep_trained=settings.keep_trained,
        lease_s=lease_s or present_lease_s,
    )


async def _find_run(buffer: ReplayBuffer, deadline: Deadline) -> Agreed:
    """Wait for a producer to say what it produces."""

    async def attempt() -> Agreed | None:
        summary = await internals(buffer).summary(owners=True)
        plans = {name: task.account.plan for name, task in summary.tasks.items()}
        runs = {name: decode(plan) for name, plan in plans.items() if plan is not None}
        living = {
            min(run.terms.tasks): run
            for run in runs.values()
            if run.terms.batch_size is not None and any(owner in summary.owners for owner in run.members)
        }
        if len(living) > 1:
            raise InvalidInput(f"the store has runs of {', '.join(sorted(living))}; expected one: use a store for each")
        return next(iter(living.values()), None)

    return await internals(buffer).until(attempt, "a producer to begin", (), timeout_s=deadline.left_s())


def _loader(
    buffer: ReplayBuffer, run: Agreed, rank: int, world_size: int, options: Mapping[str, Any]
) -> AsyncRolloutLoader:
    interval = run.terms.sync_weights_interval
    tasks = [
        _TaskElsewhere(
            name,
            _PromptsElsewhere(),
            _Elsewhere(),
            group_size=terms.group_size,
            weight=terms.weight,
            tail_batch_trigger_size=0 if terms.limits.retryable else -1,
        )
        for name, terms in run.terms.tasks.items()
    ]
    limits = next(iter(run.terms.tasks.values())).limits  # all tasks of a loader have the same ages
    token = limits.token_stale_threshold
    loader = AsyncRolloutLoader(
        tasks,
        batch_groups=run.terms.batch_size,
        max_staleness=(limits.stale_threshold or interval) // interval - 1,
        max_token_staleness=None if token is None else token // interval - 1,
        mode="ahead",
        sync_weights_interval=interval,
        storage=buffer,
        produce=False,
        **options,
    )
    loader.closes_buffer = True
    if world_size > 1:
        loader.plane.ranks = {"rank": rank, "world_size": world_size}
    return loader
