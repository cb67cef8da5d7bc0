"""A small loader in virtual time: answers after some seconds, weights that remember their step."""

from __future__ import annotations

import asyncio
from typing import Any

from forebay import AsyncRolloutLoader, RolloutState, Task
from tests.test_strategy import simulated

__all__ = ["Engine", "ids", "loader_of", "prompts", "simulated", "task"]


def prompts(n: int = 1000, name: str = "question") -> list[dict[str, Any]]:
    return [{"prompt": f"{name} {number}", "prompt_ids": [number], "number": number} for number in range(n)]


class Engine:
    """Answers after `seconds`, with the step of its weights as the token."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.weights = 0
        self.running = 0
        self.calls = 0

    async def __call__(self, state: RolloutState) -> None:
        self.calls += 1
        self.running += 1
        weights = self.weights
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        assert self.weights == weights, "new weights while an answer was generated"
        state.response, state.response_ids, state.logprobs = "answer", [weights], [-0.5]

    def load(self, step: int) -> None:
        assert not self.running, "new weights while an answer is generated"
        self.weights = step


def task(engine: Any, name: str = "math", **options: Any) -> Task:
    chosen: dict[str, Any] = {"reward": lambda state: 1.0, "group_size": 2, "shuffle": False} | options
    return Task(name, chosen.pop("prompts", prompts(name=name)), engine, **chosen)


def loader_of(engine: Any, **options: Any) -> AsyncRolloutLoader:
    tasks = options.pop("tasks") if "tasks" in options else task(engine)
    return AsyncRolloutLoader(tasks, **({"batch_groups": 4, "progress": None} | options))


def ids(batch: Any) -> list[int]:
    """The ids of the groups of a batch, in order."""
    return sorted(group[0].group_id for group in batch.groups)
