"""The whole loop: prompts are drawn, answered and judged through Forebay; the policy learns; the engine gets weights.

    cd examples && python -m tiny_grpo.run --steps 100 --tasks add,sort

`run` prints nothing: whoever calls it hears of the warm start and of every step by callbacks.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from forebay import (
    AgentLoop,
    AgentLoopManager,
    AsyncProduceStrategy,
    AsyncReplayBufferConfig,
    DisaggregatedAgentLoopManager,
    NoProgress,
    ProduceBatchResult,
    ProduceStrategy,
    ReplayBuffer,
    Sampler,
    SyncProduceStrategy,
    SyncReplayBufferConfig,
    Task,
    reject_zero_std,
    sample_staleness,
)
from tiny_grpo.agent_loop import TinyAgentLoop, make_agent_loop
from tiny_grpo.checkpoint import Checkpoints
from tiny_grpo.engine import Engine
from tiny_grpo.grpo import train_step
from tiny_grpo.model import Policy, PolicyConfig
from tiny_grpo.tasks import CONTEXT, END, TASKS, VOCABULARY, reward, task_records
from tiny_grpo.warm_start import sampled_rewards, warm_start

if TYPE_CHECKING:
    from forebay.ray import RayAgentLoop  # needs ray, which only `engine_actors` needs

Manager: TypeAlias = AgentLoopManager | DisaggregatedAgentLoopManager

__all__ = ["Outcome", "Settings", "StepRecord", "WarmStart", "run"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of; the defaults take one to two minutes on two cores."""

    steps: int = 400
    seed: int = 0
    tasks: tuple[str, ...] = tuple(TASKS)
    colocated: bool = False  # generate and train in turns, on-policy; otherwise both go on at the same time
    engine_actors: int = 0  # on Ray: so many engines, each in an actor, and the buffer in one; 0: all in this process
    storage: str = "memory"  # or "sqlite": in `out`, survives a crash without a checkpoint
    out: Path | None = None  # where checkpoints go; None: nowhere
    resume: bool = False  # go on where the checkpoint in `out` was written
    save_every: int = 50  # steps
    groups_per_step: int = 24
    samples_per_group: int = 8
    prompts_per_task: int = 5000
    learning_rate: float = 3e-4
    temperature: float = 1.0
    over_sample_threshold: float = 0.5  # groups in flight beyond what is missing, as a share of a batch
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
    """What the supervised warm start came to: optimiser steps, seconds, and the sampled reward of every task."""

    steps: int
    seconds: float
    rewards: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The figures of one train step."""

    step: int
    rewards: dict[str, float]  # mean of every task, over what was judged since the step before
    staleness: float  # mean over the samples trained on, in weight updates
    response_tokens: float  # mean over the samples trained on
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


async def run(
    settings: Settings,
    *,
    on_warm_start: Callable[[WarmStart], None] | None = None,
    on_step: Callable[[StepRecord, ProduceBatchResult], None] | None = None,
    stop: asyncio.Event | None = None,
) -> Outcome:
    """Train up to step `settings.steps`; a resumed run goes on from its checkpoint.

    `on_step` gets the figures of a step and its batch, after it was trained on. When `stop` is set, the run ends after
    the step under way, with a checkpoint. Engine and trainer take one torch thread each (set for the whole process).
    """
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    policy = Policy(PolicyConfig(vocabulary=VOCABULARY, context=CONTEXT))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    checkpoints = None if settings.out is None else Checkpoints(settings.out)
    step, records = 0, []

    async with (
        started_loop(settings) as agent_loop,
        started_buffer(settings) as buffer,
        build_manager(settings, buffer, agent_loop) as manager,
    ):
        if checkpoints is not None and checkpoints.exists():
            if not settings.resume:
                raise FileExistsError(f"{settings.out} holds a run already; resume it, or give another directory")
            step = await checkpoints.resume(manager, policy, optimizer)
        else:
            warmed = await asyncio.to_thread(prepare, policy, settings)
            if on_warm_start is not None:
                on_warm_start(warmed)
            if checkpoints is not None:
                await checkpoints.save(manager, policy, optimizer, step)
        await sync_weights(manager, agent_loop, policy, step)

        producer = start_producer(settings, manager)
        try:
            ended = time.monotonic()
            while step < settings.steps and not (stop is not None and stop.is_set()):
                step += 1
                # Weights are synced after every step, so a batch is never refused as EXPIRED_BATCH.
                async with next_batch(settings, manager, step) as batch:
                    in_flight = sum(line["in_flight"] for line in (await manager.ledger()).values())
                    figures = await asyncio.to_thread(
                        train_step, policy, optimizer, batch.groups, temperature=settings.temperature
                    )
                began, ended = ended, time.monotonic()
                records.append(describe(step, batch, ended - began, in_flight, figures))
                if on_step is not None:
                    on_step(records[-1], batch)  # before the checkpoint: what it tells is never behind that
                if checkpoints is not None and step % settings.save_every == 0:
                    await checkpoints.save(manager, policy, optimizer, step)
                await sync_weights(manager, agent_loop, policy, step)
            if checkpoints is not None and step % settings.save_every != 0:
                await checkpoints.save(manager, policy, optimizer, step)  # here: it may be stopped at any moment above
        finally:
            await manager.shutdown()
            if producer is not None:
                await asyncio.gather(producer, return_exceptions=True)  # get_batch has told what went wrong there
        ledger, reasons = await buffer.ledger(), await buffer.reasons()
        there = await buffer.query({"place": {"$ne": "archived"}})
        held = {name: [record.group_id for record in there if record.task_name == name] for name in ledger}
    return Outcome(last_step=step, ledger=ledger, reasons=reasons, held=held, records=records)


# --- the plane ----------------------------------------------------------------------------------------


@asynccontextmanager
async def started_loop(settings: Settings) -> AsyncIterator[TinyAgentLoop | RayAgentLoop]:
    """What answers prompts: an engine in this process, or a pool of actors that have one each."""
    make = partial(make_agent_loop, settings.temperature, settings.seed)
    if settings.engine_actors:
        from forebay.ray import RayAgentLoop

        async with RayAgentLoop(make, actors=settings.engine_actors) as pool:
            yield pool
    else:
        with closing(make()) as agent_loop:
            yield agent_loop


@asynccontextmanager
async def started_buffer(settings: Settings) -> AsyncIterator[ReplayBuffer]:
    """Where groups are between the engine and the trainer: in this process, or in an actor."""
    storage = "memory"
    if settings.out is not None:
        settings.out.mkdir(parents=True, exist_ok=True)
        if settings.storage == "sqlite":
            storage = f"sqlite:///{settings.out.resolve()}/buffer.db"  # an actor works in another directory
    config = SyncReplayBufferConfig if settings.colocated else AsyncReplayBufferConfig
    if settings.engine_actors:
        from forebay.ray import RayReplayBuffer

        name = f"tiny-grpo-{uuid.uuid4().hex}"
        created = RayReplayBuffer.create(name, config(storage=storage))
        try:
            async with created as buffer:
                yield buffer
        finally:
            RayReplayBuffer.destroy(name)
    else:
        async with config(storage=storage).build() as buffer:
            yield buffer


def build_manager(settings: Settings, buffer: ReplayBuffer, agent_loop: AgentLoop) -> Manager:
    """Every task with its prompts, around one agent loop and one buffer."""
    filters = [reject_zero_std] if settings.filter_zero_std else []
    strategy: ProduceStrategy
    if settings.colocated:
        strategy = SyncProduceStrategy(buffer, reward_fn=reward, is_valid_sample_fn=filters, progress=NoProgress())
    else:
        strategy = AsyncProduceStrategy(
            buffer,
            over_sample_threshold=settings.over_sample_threshold,
            enable_partial_rollout=True,
            max_staleness=settings.max_staleness,
            reward_fn=reward,
            is_valid_sample_fn=filters,
            progress=NoProgress(),
        )
    tasks = []
    for name in settings.tasks:
        records = task_records(name, settings.prompts_per_task, settings.seed)
        sampler = Sampler(records, prompt_repeat_k=settings.samples_per_group, seed=settings.seed)
        tasks.append(Task(name=name, sampler=sampler, agent_loop=agent_loop, strategy=strategy))
    return AgentLoopManager(tasks, buffer) if settings.colocated else DisaggregatedAgentLoopManager(tasks, buffer)


def start_producer(settings: Settings, manager: Manager) -> asyncio.Task[None] | None:
    """Generate in the background, if the manager does."""
    if isinstance(manager, AgentLoopManager):
        return None
    return asyncio.create_task(manager.produce_loop(settings.groups_per_step))


def next_batch(settings: Settings, manager: Manager, step: int) -> AbstractAsyncContextManager[ProduceBatchResult]:
    """The batch of a step: generated now (colocated), or waited for."""
    if isinstance(manager, AgentLoopManager):
        return manager.produce_batch(settings.groups_per_step, step, model_step=step - 1)
    return manager.get_batch(settings.groups_per_step, step, timeout_s=600)


async def sync_weights(manager: Manager, agent_loop: TinyAgentLoop | RayAgentLoop, policy: Policy, step: int) -> None:
    """Have engines generate with the weights of `step`; what is under way stops, is kept, and goes on with them."""
    if isinstance(manager, DisaggregatedAgentLoopManager):
        await manager.pause_produce()
    if isinstance(agent_loop, TinyAgentLoop):
        await agent_loop.load_weights(policy.state_dict(), step)
    else:
        import ray

        weights = ray.put(policy.state_dict())  # once, for all actors; also for those that are restarted
        await agent_loop.call_all("load_weights", weights, step, keep=True)
    if isinstance(manager, DisaggregatedAgentLoopManager):
        await manager.continue_produce(step)


# --- figures ------------------------------------------------------------------------------------------


def prepare(policy: Policy, settings: Settings) -> WarmStart:
    """The supervised warm start, and what it came to."""
    began = time.monotonic()
    warm_start(policy, settings.tasks, steps=settings.warm_start_steps, seed=settings.seed)
    seconds = time.monotonic() - began
    with closing(Engine(policy, end_token=END)) as engine:
        rewards = sampled_rewards(policy, engine, settings.tasks, seed=settings.seed)
    return WarmStart(steps=settings.warm_start_steps, seconds=seconds, rewards=rewards)


def describe(
    step: int, batch: ProduceBatchResult, seconds: float, in_flight: int, figures: dict[str, float]
) -> StepRecord:
    """The record of a step."""
    samples = [state for group in batch.groups for state in group]
    return StepRecord(
        step=step,
        rewards={name: task_reward(batch, name) for name in batch.task_results},
        staleness=sum(sample_staleness(state, step) for state in samples) / len(samples),
        response_tokens=sum(len(np.asarray(state.response_ids)) for state in samples) / len(samples),
        tokens_per_s=batch.total("produced_tokens") / seconds,
        seconds=seconds,
        in_flight=in_flight,
        training=figures,
    )


def task_reward(batch: ProduceBatchResult, task_name: str) -> float:
    """The mean reward of a task over all that was judged since the batch before, filtered or not.

    If that is nothing, because all of the batch was there already: over the batch.
    """
    result = batch.task_results[task_name]
    if result.raw_rewards_count:
        return result.raw_rewards_sum / result.raw_rewards_count
    scores: list[float] = [
        (state.reward or {})["score"] for group in batch.groups_by_task[task_name] for state in group
    ]
    return sum(scores) / len(scores)


# --- the command line ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="A small transformer learns by GRPO, through Forebay.")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--tasks", default=",".join(Settings.tasks), help="some of %(default)s")
    parser.add_argument("--colocated", action="store_true", help="generate and train in turns")
    parser.add_argument("--storage", choices=("memory", "sqlite"), default=Settings.storage)
    parser.add_argument("--out", type=Path, help="a directory for checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    options = vars(parser.parse_args())
    try:
        settings = Settings(**options | {"tasks": tuple(options["tasks"].split(","))})
    except ValueError as error:
        parser.error(str(error))
    asyncio.run(_report(settings))


async def _report(settings: Settings) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    outcome = await run(settings, on_warm_start=_print_warm_start, on_step=_print_step, stop=stop)
    print("\nmean reward        first ten steps   last ten")
    for name in settings.tasks:
        rewards = [record.rewards[name] for record in outcome.records]
        first, last = rewards[:10], rewards[-10:]
        if rewards:
            print(f"  {name:<20}{sum(first) / len(first):>10.2f}{sum(last) / len(last):>14.2f}")
    for name, line in outcome.ledger.items():
        closed = line["issued"] == sum(line.values()) - line["issued"]
        print(f"ledger of {name}, {'closed' if closed else 'OPEN'}: {dict(line)}")
    print(f"{time.process_time():.0f} s of CPU time")


def _print_warm_start(warmed: WarmStart) -> None:
    rewards = ", ".join(f"{name} {reward:.2f}" for name, reward in warmed.rewards.items())
    print(f"supervised warm start: {warmed.steps} steps, {warmed.seconds:.1f} s; sampled rewards: {rewards}")


def _print_step(record: StepRecord, batch: ProduceBatchResult) -> None:
    if record.step % 10 == 0:
        rewards = "  ".join(f"{name} {reward:.2f}" for name, reward in record.rewards.items())
        print(
            f"step {record.step:>4}  {rewards}  staleness {record.staleness:.2f}  {record.response_tokens:.1f} tokens  "
            f"{record.tokens_per_s:,.0f} tokens/s  {record.in_flight} groups in flight  {record.seconds:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
