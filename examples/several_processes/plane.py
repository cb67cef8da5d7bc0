"""What all processes of the run share: the task, its data, and the store. Producers and the trainer import it.

The environment says where things are: STORE (a postgresql:// URL, or ray:NAME), ENGINE (the URL of this process's
engine).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import urllib.request
from typing import Any

from forebay import (
    AsyncProduceStrategy,
    DisaggregatedAgentLoopManager,
    FunctionAgentLoop,
    NoProgress,
    ReplayBuffer,
    ReplayBufferConfig,
    RolloutState,
    Sampler,
    Task,
)

BATCH = 8  # groups of a train step
LEASE_S = float(os.environ.get("LEASE_S", "10"))  # after which the groups of a killed process come back
QUESTIONS = [{"prompt": f"{n} + {n} = ?"} for n in range(500)]


def post(url: str, content: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


async def generate(state: RolloutState) -> None:
    answer = await asyncio.to_thread(post, f"{os.environ['ENGINE']}/generate", {"prompt": str(state.message)})
    state.response_ids = answer["tokens"]
    state.version_spans = ((answer["model_step"], len(answer["tokens"])),)


def open_buffer() -> ReplayBuffer:
    store = os.environ["STORE"]
    if store.startswith("ray:"):
        import ray

        from forebay.ray import RayReplayBuffer

        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        return RayReplayBuffer.connect(store.removeprefix("ray:"))
    return ReplayBufferConfig(policy="staleness", storage=store, max_groups=128, lease_s=LEASE_S).build()


def make_manager() -> DisaggregatedAgentLoopManager:
    buffer = open_buffer()
    task = Task(
        name="sums",
        sampler=Sampler(QUESTIONS, prompt_repeat_k=4),
        agent_loop=FunctionAgentLoop(generate, cancel_on_pause=False),  # a pause waits for its threads
        strategy=AsyncProduceStrategy(
            buffer,
            over_sample_threshold=0.25,
            max_staleness=2,
            reward_fn=lambda state: float(len(state.response_ids or ()) > 5),
            progress=NoProgress(),
        ),
    )
    return DisaggregatedAgentLoopManager(task, buffer)
