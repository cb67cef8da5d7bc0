"""The producer: an actor that draws prompts, has them answered by a pool of engine actors, and fills the buffer.

It knows the trainer by the weights that it is sent only. With the weights of step m it fills the buffer for the steps
that may be trained on what those weights generate, and then waits for the next ones. What a step needs is read from the
ledger, so nothing is lost or made twice when producer or trainer start anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from forebay import AsyncProduceStrategy, NoProgress, Sampler
from forebay.ray import RayAgentLoop, RayReplayBuffer
from tiny_grpo.agent_loop import make_agent_loop
from tiny_grpo.tasks import reward, task_records

__all__ = ["MAX_STALENESS", "Producer"]

MAX_STALENESS = 1  # weight updates between generating and training
PROMPTS, SAMPLES = 5_000, 8  # prompts of a task; answers to each


class Producer:
    """Made with `ray.remote(Producer).remote(...)`. `batch`: groups of each task that a train step takes."""

    def __init__(self, buffer_name: str, batch: Mapping[str, int], *, engines: int, seed: int) -> None:
        self.batch = batch
        self.buffer = RayReplayBuffer.connect(buffer_name)
        self.engines = RayAgentLoop(partial(make_agent_loop, 1.0, seed), actors=engines)
        self.strategy = AsyncProduceStrategy(
            self.buffer,
            over_sample_threshold=0.5,
            enable_partial_rollout=True,  # what new weights interrupt goes on with them
            max_staleness=MAX_STALENESS,
            reward_fn=reward,
            progress=NoProgress(),
        )
        self.samplers = {
            name: Sampler(task_records(name, PROMPTS, seed), prompt_repeat_k=SAMPLES, seed=seed) for name in batch
        }
        self.model_step = 0
        self.stopped = False
        self.producing = asyncio.Lock()
        self.weights_came = asyncio.Event()

    async def update_weights(self, weights: Sequence[Any], model_step: int) -> None:
        """Generate with these weights: a list of one reference, which is sent on to the engines as it is."""
        await self.strategy.pause()  # what is under way ends, and is kept
        await self.engines.call_all("load_weights", weights[0], model_step, keep=True)  # also for restarted actors
        self.model_step = model_step
        self.weights_came.set()

    async def produce(self) -> None:
        """Fill the buffer as far as the weights reach, again and again, until `stop`."""
        async with self.producing:
            while not self.stopped:
                await self.weights_came.wait()
                self.weights_came.clear()
                async with asyncio.TaskGroup() as tasks:  # one that fails ends the others
                    for name, groups in self.batch.items():
                        tasks.create_task(self._produce(name, groups))

    async def _produce(self, task_name: str, groups: int) -> None:
        """Up to all that the steps which these weights reach need: trained, leased or ready. New weights end it."""
        if not self.stopped:
            await self.strategy.produce_batch(
                self.engines,
                self.samplers[task_name],
                groups,
                task_name,
                train_step=self.model_step + 1,
                model_step=self.model_step,
                target=groups * (self.model_step + self.strategy.reach),
            )

    async def stop(self) -> None:
        """End what is under way, and the engines; all groups are in the buffer afterwards."""
        self.stopped = True
        self.weights_came.set()
        await self.strategy.close()
        async with self.producing:  # it has ended
            await self.engines.close()
            await self.buffer.close()
