"""The trainer: a loader that is connected to the buffer of the producer.

The order within a step: train, save the weights and then the loader, send the weights to the engines. `save` and
`update_weights` acknowledge the batch; a crash before that costs nothing but the step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from forebay import AsyncReplayBufferConfig, AsyncRolloutLoader, ProducerStopped
from forebay.core.ledger import LedgerLine
from forebay.errors import NameTaken
from forebay.ray import RayReplayBuffer
from ray_grpo.producer import Producer
from tiny_grpo.checkpoint import read_weights, save
from tiny_grpo.grpo import train_step
from tiny_grpo.model import Policy, PolicyConfig
from tiny_grpo.tasks import CONTEXT, END, VOCABULARY
from tiny_grpo.warm_start import warm_start

__all__ = ["Outcome", "Settings", "train"]

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
    out: Path | None  # the directory of checkpoints; None: none are written
    resume: bool  # continue from the checkpoint in `out`
    save_every: int  # steps


@dataclass
class Outcome:
    """How a run ended."""

    last_step: int = 0
    rewards: list[dict[str, float]] = field(default_factory=list)  # of every step of this run, by task
    ledger: dict[str, LedgerLine] = field(default_factory=dict)


async def train(
    settings: Settings,
    on_open: Callable[[AsyncRolloutLoader], None],
    on_step: Callable[[int, dict[str, float], float], None],
) -> Outcome:
    """Train up to `steps`. `on_open` gets the loader, which may `stop()` it; `on_step(step, rewards, staleness)`."""
    buffer = open_buffer(settings)
    outcome = Outcome()
    try:
        async with buffer:
            producer: Any = ray.remote(Producer).remote(
                settings.name, settings.tasks, engines=settings.engines, seed=settings.seed
            )
            async with asyncio.TaskGroup() as background:
                background.create_task(answered(producer.produce.remote()))  # if it fails, training ends with that
                try:
                    loader = await AsyncRolloutLoader.connect(
                        settings.name, checkpoints=settings.out, keep_checkpoints=1, progress=None
                    )
                    async with loader:
                        on_open(loader)
                        await train_steps(settings, loader, producer, outcome, on_step)
                finally:
                    with contextlib.suppress(RayError):  # it has died; its groups return to the buffer
                        await producer.stop.remote()
            outcome.ledger = await buffer.ledger()
            return outcome
    finally:
        if not settings.keep:
            RayReplayBuffer.destroy(settings.name)


def open_buffer(settings: Settings) -> RayReplayBuffer:
    """A new buffer; when resuming, it may also be the one that an earlier run kept."""
    try:
        return RayReplayBuffer.create(settings.name, AsyncReplayBufferConfig(storage=settings.storage))
    except NameTaken:
        if not settings.resume:
            raise
        return RayReplayBuffer.connect(settings.name)


async def train_steps(
    settings: Settings,
    loader: AsyncRolloutLoader,
    producer: Any,
    outcome: Outcome,
    on_step: Callable[[int, dict[str, float], float], None],
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    policy = Policy(PolicyConfig(vocabulary=VOCABULARY, context=CONTEXT))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    out = settings.out

    async def push(step: int) -> None:
        """The trainer's weights into the engines: put once, and sent on as a reference."""
        await answered(producer.load_weights.remote([ray.put(policy.state_dict())], step))

    async def restore(step: int) -> None:
        """The weights of a checkpoint into trainer and engines."""
        assert out is not None
        read_weights(out, policy, optimizer, step)
        await push(step)

    start = None if out is None else await loader.resume(restore)
    if start is None:
        await asyncio.to_thread(warm_start, policy, settings.tasks, steps=settings.warm_start, seed=settings.seed)
        await loader.update_weights(push, 0)
        if out is not None:
            await save(loader, out, policy, optimizer, 0)
    async for batch in loader.batches((start or 0) + 1, settings.steps):
        await asyncio.to_thread(train_step, policy, optimizer, batch.padded(pad_id=END, shifted=True))
        if out is not None and batch.step % settings.save_every == 0:
            await save(loader, out, policy, optimizer, batch.step)
        await loader.update_weights(push)
        results = batch.task_results
        outcome.rewards.append({name: result.reward_mean or 0.0 for name, result in results.items()})
        staleness = sum(result.staleness_mean or 0.0 for result in results.values()) / len(results)
        on_step(batch.step, outcome.rewards[-1], staleness)
    outcome.last_step = loader.next_step - 1
    if out is not None and loader.state_dict()["step"] != outcome.last_step:
        await save(loader, out, policy, optimizer, outcome.last_step)


async def answered(call: Any) -> None:
    try:
        await call
    except RayError as error:
        raise ProducerStopped(f"the producer failed: {error}") from error
