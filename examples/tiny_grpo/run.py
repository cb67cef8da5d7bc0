"""The whole loop: a loader draws prompts, has them answered and judged; the policy learns; the engine gets its weights.

`run` prints nothing: callbacks get the warm start and every step. `forebay demo` is its command line.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from forebay import AsyncBatch, AsyncReplayBufferConfig, AsyncRolloutLoader, ReplayBuffer, Task, reject_zero_std
from tiny_grpo.agent_loop import TinyAgentLoop, make_agent_loop
from tiny_grpo.checkpoint import has_checkpoint, read_weights, save
from tiny_grpo.grpo import train_step
from tiny_grpo.model import Policy, PolicyConfig
from tiny_grpo.tasks import CONTEXT, END, TASKS, VOCABULARY, reward, task_records
from tiny_grpo.warm_start import warm_start

if TYPE_CHECKING:
    from forebay.ray import RayAgentLoop  # needs ray, which only `engine_actors` needs

__all__ = ["Outcome", "Settings", "StepRecord", "WarmStart", "run"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of; the defaults take one to two minutes on two cores."""

    steps: int = 400
    seed: int = 0
    tasks: tuple[str, ...] = tuple(TASKS)
    mode: Literal["in_turns", "ahead"] = "ahead"  # generate and train in turns, on-policy; or at the same time
    engine_actors: int = 0  # on Ray: the number of engines, each in an actor, and the buffer in one; 0: no Ray
    storage: str = "memory"  # or "sqlite": in `out`, survives a crash without a checkpoint
    out: Path | None = None  # the directory of checkpoints; None: none are written
    resume: bool = False  # continue from the checkpoint in `out`
    save_every: int = 50  # steps
    groups_per_step: int = 24
    samples_per_group: int = 8
    prompts_per_task: int = 5000
    evaluated_prompts: int = 256  # of each task, never trained on
    learning_rate: float = 3e-4
    temperature: float = 1.0
    over_issue: float = 0.5  # ahead: groups in flight beyond those needed, as a share of a batch
    max_staleness: int = 1  # weight updates
    filter_zero_std: bool = False  # replace groups whose members all did equally well
    warm_start_steps: int = 100  # supervised

    def __post_init__(self) -> None:
        unknown = set(self.tasks) - set(TASKS)
        if unknown or not self.tasks:
            raise ValueError(f"tasks are {self.tasks}; expected some of {', '.join(TASKS)}")
        if self.storage not in ("memory", "sqlite"):
            raise ValueError(f"storage is {self.storage!r}; expected 'memory' or 'sqlite'")
        if self.engine_actors < 0:
            raise ValueError(f"engine_actors is {self.engine_actors}; expected 0 (no Ray) or more")
        if self.out is None and (self.resume or self.storage == "sqlite"):
            raise ValueError("resume and storage='sqlite' need a directory; give one as out")


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The supervised warm start: optimiser steps, seconds, and the reward of every task on prompts never trained on."""

    steps: int
    seconds: float
    rewards: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The figures of one train step."""

    step: int
    rewards: dict[str, float]  # mean of every task, over everything that was judged since the step before
    staleness: float  # mean over the groups of the batch, in steps
    lengths: dict[str, float]  # mean response tokens of every task
    tokens_per_s: float  # generated
    seconds: float  # since the step before
    in_flight: int  # groups being generated when the batch was handed out
    training: dict[str, float]  # the trainer's own figures


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended. `ledger`: for every task, `issued` and where those groups are now."""

    last_step: int
    ledger: Mapping[str, Mapping[str, int]]
    reasons: Mapping[str, Mapping[str, int]]  # why groups left without being trained on
    held: Mapping[str, list[int]]  # ids of the groups that are still there
    records: list[StepRecord] = field(repr=False)
    evaluated: Mapping[str, float] = field(default_factory=dict)  # rewards on prompts never trained on, at the end


async def run(
    settings: Settings,
    *,
    on_open: Callable[[AsyncRolloutLoader], None] | None = None,
    on_warm_start: Callable[[WarmStart], None] | None = None,
    on_step: Callable[[StepRecord, AsyncBatch], None] | None = None,
) -> Outcome:
    """Train up to step `settings.steps`; a resumed run continues from its checkpoint.

    `on_open` gets the loader: its `stop()` ends the run after the current step, with a checkpoint. `on_step` gets the
    figures of a step and its batch, after it was trained on. Engine and trainer use one torch thread each.
    """
    if settings.out is not None and not settings.resume and has_checkpoint(settings.out):
        raise FileExistsError(f"{settings.out} contains a run already; resume it, or give another directory")
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    policy = Policy(PolicyConfig(vocabulary=VOCABULARY, context=CONTEXT))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    records: list[StepRecord] = []
    evaluated: dict[str, float] = {}

    async with started_buffer(settings) as buffer:
        agent_loop = await started_agent_loop(settings)

        async def push(step: int) -> None:
            """The trainer's weights into the engine."""
            await push_weights(agent_loop, policy, step)

        async def restore(step: int) -> None:
            """The weights of a checkpoint into trainer and engine."""
            assert settings.out is not None
            read_weights(settings.out, policy, optimizer, step)
            await push(step)

        async with build_loader(settings, buffer, agent_loop) as loader:
            if on_open is not None:
                on_open(loader)
            start = None if settings.out is None else await loader.resume(restore)
            if start is None:
                seconds = await asyncio.to_thread(warm_up, policy, settings)
                await loader.update_weights(push, 0)
                if on_warm_start is not None:
                    rewards = await evaluate(settings, loader)
                    on_warm_start(WarmStart(steps=settings.warm_start_steps, seconds=seconds, rewards=rewards))
                if settings.out is not None:
                    await save(loader, settings.out, policy, optimizer, 0)

            ended = time.monotonic()
            async for batch in loader.batches((start or 0) + 1, settings.steps):
                in_flight = sum(line["in_flight"] for line in (await loader.ledger()).values())
                tensors = batch.padded(pad_id=END, shifted=True)
                figures = await asyncio.to_thread(
                    train_step, policy, optimizer, tensors, temperature=settings.temperature
                )
                began, ended = ended, time.monotonic()
                records.append(describe(batch, ended - began, in_flight, figures))
                if on_step is not None:
                    on_step(records[-1], batch)  # before the checkpoint: a log of steps is never behind it
                if settings.out is not None and batch.step % settings.save_every == 0:
                    await save(loader, settings.out, policy, optimizer, batch.step)
                await loader.update_weights(push)

            last_step = loader.next_step - 1
            if settings.out is not None and loader.state_dict()["step"] != last_step:
                await save(loader, settings.out, policy, optimizer, last_step)
            if last_step == settings.steps:
                evaluated = await evaluate(settings, loader)
        ledger, reasons = await buffer.ledger(), await buffer.reasons()  # nothing is in flight any more
        there = await buffer.query({"place": {"$ne": "archived"}})
    held = {name: [record.group_id for record in there if record.task_name == name] for name in ledger}
    return Outcome(last_step=last_step, ledger=ledger, reasons=reasons, held=held, records=records, evaluated=evaluated)


def build_loader(
    settings: Settings, buffer: ReplayBuffer, agent_loop: TinyAgentLoop | RayAgentLoop
) -> AsyncRolloutLoader:
    """Every task with its prompts, around one agent loop and one buffer."""
    tasks = [
        Task(
            name,
            task_records(name, settings.prompts_per_task, settings.seed),
            agent_loop,
            reward=reward,
            group_size=settings.samples_per_group,
            filters=[reject_zero_std] if settings.filter_zero_std else (),
            seed=settings.seed,
            over_issue=settings.over_issue if settings.mode == "ahead" else 0.0,  # in turns: all of it is on-policy
            partial_rollout=True,  # answers that new weights interrupt continue after their tokens
        )
        for name in settings.tasks
    ]
    return AsyncRolloutLoader(
        tasks,
        batch_groups=settings.groups_per_step,
        max_staleness=settings.max_staleness,
        mode=settings.mode,
        storage=buffer,
        checkpoints=settings.out,
        keep_checkpoints=1,
        timeout_s=600,
        progress=None,
    )


@asynccontextmanager
async def started_buffer(settings: Settings) -> AsyncIterator[ReplayBuffer]:
    """Where groups are between the engine and the trainer: in this process, or in an actor."""
    storage = "memory"
    if settings.storage == "sqlite" and settings.out is not None:
        settings.out.mkdir(parents=True, exist_ok=True)
        storage = f"sqlite:///{settings.out.resolve()}/buffer.db"  # an actor works in another directory
    config = AsyncReplayBufferConfig(storage=storage)
    if not settings.engine_actors:
        async with config.build() as buffer:
            yield buffer
        return
    from forebay.ray import RayReplayBuffer

    name = f"tiny-grpo-{uuid.uuid4().hex}"
    created = RayReplayBuffer.create(name, config)
    try:
        async with created as buffer:
            yield buffer
    finally:
        RayReplayBuffer.destroy(name)


async def started_agent_loop(settings: Settings) -> TinyAgentLoop | RayAgentLoop:
    """What answers prompts: an engine in this process, or a pool of actors with one each. The loader closes it."""
    make = partial(make_agent_loop, settings.temperature, settings.seed)
    if not settings.engine_actors:
        return make()
    from forebay.ray import RayAgentLoop

    pool = RayAgentLoop(make, actors=settings.engine_actors)
    await pool.start()
    return pool


async def push_weights(agent_loop: TinyAgentLoop | RayAgentLoop, policy: Policy, step: int) -> None:
    """Have the engines generate with the weights of `step`."""
    if isinstance(agent_loop, TinyAgentLoop):
        await agent_loop.load_weights(policy.state_dict(), step)
    else:
        import ray

        weights = ray.put(policy.state_dict())  # once, for all actors; also for those that are restarted
        await agent_loop.call_all("load_weights", weights, step, keep=True)


# --- figures ------------------------------------------------------------------------------------------


def warm_up(policy: Policy, settings: Settings) -> float:
    """The supervised warm start; its seconds."""
    began = time.monotonic()
    warm_start(policy, settings.tasks, steps=settings.warm_start_steps, seed=settings.seed)
    return time.monotonic() - began


async def evaluate(settings: Settings, loader: AsyncRolloutLoader) -> dict[str, float]:
    """The mean reward of each task on prompts that are never trained on, sampled as in training."""
    rewards = {}
    for name in settings.tasks:
        records = task_records(name, settings.evaluated_prompts, settings.seed + 2_000_000)
        evaluation = await loader.evaluate(Task(name, records, loader.tasks[name].generate, reward=reward))
        rewards[name] = evaluation.reward_mean(failed=0.0) or 0.0
    return rewards


def describe(batch: AsyncBatch, seconds: float, in_flight: int, figures: dict[str, float]) -> StepRecord:
    """The record of a step."""
    results = {name: result for name, result in batch.task_results.items() if result.batch_size}
    means = {name: (result.raw_reward_mean, result.reward_mean) for name, result in results.items()}
    return StepRecord(
        step=batch.step,
        # Nothing was judged since the step before if the whole batch was there already.
        rewards={name: judged if judged is not None else trained or 0.0 for name, (judged, trained) in means.items()},
        staleness=sum((result.staleness_mean or 0.0) * result.batch_size for result in results.values())
        / len(batch.groups),
        lengths={name: result.response_tokens_mean or 0.0 for name, result in results.items()},
        tokens_per_s=batch.total("produced_tokens") / seconds,
        seconds=seconds,
        in_flight=in_flight,
        training=figures,
    )
