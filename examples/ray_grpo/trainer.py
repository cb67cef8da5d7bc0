"""The trainer: leases batches from the buffer, trains, acknowledges, saves, and sends weights to the producer.

The order within a step is that of every loop: train, leave the lease (that acknowledges it), save weights and then the
buffer that goes with them, send the weights. A crash between any two of these costs nothing that was acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from forebay import AsyncReplayBufferConfig, ProducerStopped, RolloutState, sample_staleness, stale_threshold
from forebay.core.ledger import LedgerLine
from forebay.errors import NameTaken
from forebay.ray import RayReplayBuffer
from ray_grpo.producer import MAX_STALENESS, Producer
from tiny_grpo.checkpoint import Checkpoints
from tiny_grpo.grpo import train_step
from tiny_grpo.model import Policy, PolicyConfig
from tiny_grpo.tasks import CONTEXT, VOCABULARY
from tiny_grpo.warm_start import warm_start

__all__ = ["Settings", "Trainer"]

GROUPS_PER_STEP = 24
LEARNING_RATE = 3e-4


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of."""

    steps: int
    tasks: tuple[str, ...]
    engines: int  # actors
    seed: int
    warm_start: int  # supervised steps before the first one
    name: str  # of the buffer in the cluster
    storage: str
    keep: bool  # leave the buffer in the cluster
    out: Path | None  # where checkpoints go; None: nowhere
    resume: bool  # go on with the checkpoint in `out`
    save_every: int  # steps


class Trainer:
    """Policy and optimiser, and how far they are. `show(step, rewards, staleness)` is told of every step."""

    def __init__(self, settings: Settings, show: Callable[[int, dict[str, float], float], None]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(settings.seed)
        self.settings, self.show = settings, show
        share, rest = divmod(GROUPS_PER_STEP, len(settings.tasks))
        self.batch = {name: share + (index < rest) for index, name in enumerate(settings.tasks)}
        self.policy = Policy(PolicyConfig(vocabulary=VOCABULARY, context=CONTEXT))
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.checkpoints = None if settings.out is None else Checkpoints(settings.out)
        self.step = 0
        self.saved = -1  # the step of the last checkpoint
        self.rewards: list[dict[str, float]] = []  # of every step of this run, by task

    async def run(self, stop: asyncio.Event) -> dict[str, LedgerLine]:
        """Train up to `steps`, or end after the step in which `stop` is set, with a checkpoint; the ledger."""
        buffer = self._open_buffer()
        try:
            async with buffer:
                for name in self.batch:  # every process that leases says how old a group may be
                    await buffer.set_limits(name, stale_threshold=stale_threshold(MAX_STALENESS, 1))
                await self._begin(buffer)
                await self._train_steps(buffer, stop)
                return await buffer.ledger()
        finally:
            if not self.settings.keep:
                RayReplayBuffer.destroy(self.settings.name)

    def _open_buffer(self) -> RayReplayBuffer:
        """A new buffer; when resuming, it may also be the one that an earlier run kept."""
        try:
            return RayReplayBuffer.create(self.settings.name, AsyncReplayBufferConfig(storage=self.settings.storage))
        except NameTaken:
            if not self.settings.resume:
                raise
            return RayReplayBuffer.connect(self.settings.name)

    async def _begin(self, buffer: RayReplayBuffer) -> None:
        """Weights to begin with: those of the checkpoint, or some that know the form of an answer."""
        if self.checkpoints is not None and self.settings.resume:
            self.step = self.saved = await self.checkpoints.resume(buffer, self.policy, self.optimizer)
            return
        settings = self.settings
        await asyncio.to_thread(warm_start, self.policy, settings.tasks, steps=settings.warm_start, seed=settings.seed)
        await self._save(buffer)

    async def _train_steps(self, buffer: RayReplayBuffer, stop: asyncio.Event) -> None:
        settings = self.settings
        producer: Any = ray.remote(Producer).remote(
            settings.name, self.batch, engines=settings.engines, seed=settings.seed
        )
        async with asyncio.TaskGroup() as background:
            background.create_task(_answered(producer.produce.remote()))  # if it fails, training ends with that
            try:
                await self._send_weights(producer)
                while self.step < settings.steps and not stop.is_set():
                    await self._train_step(buffer, self.step + 1)
                    if self.step % settings.save_every == 0:
                        await self._save(buffer)
                    await self._send_weights(producer)
                await self._save(buffer)
            finally:
                with contextlib.suppress(RayError):  # it is gone; what it had comes back to the buffer by itself
                    await producer.stop.remote()

    async def _train_step(self, buffer: RayReplayBuffer, step: int) -> None:
        async with buffer.lease_batch(self.batch, train_step=step) as lease:  # an exception gives the batch back
            await asyncio.to_thread(train_step, self.policy, self.optimizer, lease.groups)
        self.step = step
        self.rewards.append({name: _mean_reward(groups) for name, groups in lease.groups_by_task.items()})
        samples = [state for group in lease.groups for state in group]
        self.show(step, self.rewards[-1], sum(sample_staleness(state, step) for state in samples) / len(samples))

    async def _save(self, buffer: RayReplayBuffer) -> None:
        """A checkpoint of this step, unless there is one."""
        if self.checkpoints is not None and self.saved != self.step:
            await self.checkpoints.save(buffer, self.policy, self.optimizer, self.step)
            self.saved = self.step

    async def _send_weights(self, producer: Any) -> None:
        weights = ray.put(self.policy.state_dict())  # once, for all engines
        await _answered(producer.update_weights.remote([weights], self.step))  # in a list: sent on as a reference


async def _answered(call: Any) -> None:
    try:
        await call
    except RayError as error:
        raise ProducerStopped(f"the producer failed: {error}") from error


def _mean_reward(groups: Sequence[Sequence[RolloutState]]) -> float:
    scores: list[float] = [(state.reward or {})["score"] for group in groups for state in group]
    return sum(scores) / len(scores)
