"""The producer: an actor whose loader draws prompts, has them answered by engine actors, and fills the buffer.

It fills steps as far as the weights that it has are fresh enough, and follows the pauses of the trainer. The buffer has
the plan of the steps, so nothing is lost or generated twice when the producer or the trainer starts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from forebay import AsyncRolloutLoader, Task
from forebay.ray import RayAgentLoop, RayReplayBuffer
from tiny_grpo.agent_loop import make_agent_loop
from tiny_grpo.tasks import reward, task_records

__all__ = ["Producer"]

GROUPS_PER_STEP, PROMPTS, SAMPLES = 24, 5_000, 8  # PROMPTS of each task; SAMPLES: answers to each


class Producer:
    """Made with `ray.remote(Producer).remote(...)`."""

    def __init__(self, buffer_name: str, tasks: Sequence[str], *, engines: int, seed: int) -> None:
        self.buffer = RayReplayBuffer.connect(buffer_name)
        self.engines = RayAgentLoop(partial(make_agent_loop, 1.0, seed), actors=engines)
        self.loader = AsyncRolloutLoader(
            [
                Task(
                    name,
                    task_records(name, PROMPTS, seed),
                    self.engines,
                    reward=reward,
                    group_size=SAMPLES,
                    seed=seed,
                    over_issue=0.5,
                    partial_rollout=True,  # answers that new weights interrupt continue after their tokens
                )
                for name in tasks
            ],
            batch_groups=GROUPS_PER_STEP,
            max_staleness=1,
            storage=self.buffer,
        )

    async def produce(self) -> None:
        """Fill the steps of the trainer until `stop`."""
        await self.engines.start()
        await self.loader.produce()

    async def load_weights(self, weights: Sequence[Any], step: int) -> None:
        """Generate with these weights: a list of one reference, which is passed on to the engines as it is."""
        await self.engines.call_all("load_weights", weights[0], step, keep=True)  # also for restarted actors

    async def stop(self) -> None:
        """Stop generating, and end the engines; all groups are in the buffer afterwards."""
        await self.loader.close()
        await self.buffer.close()
