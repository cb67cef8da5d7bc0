"""What all processes of the run share: the loader, with its task and its store. Producers and the trainer import it.

The environment says where things are: STORE (a postgresql:// URL, or ray:NAME), ENGINE (the URL of this process's
engine).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import urllib.request
from pathlib import Path
from typing import Any

from forebay import AsyncRolloutLoader, FunctionAgentLoop, ReplayBuffer, ReplayBufferConfig, RolloutState, Task

LEASE_S = float(os.environ.get("LEASE_S", "10"))  # after which the groups of a killed process return to the store
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


def storage() -> ReplayBuffer | ReplayBufferConfig:
    store = os.environ["STORE"]
    if store.startswith("ray:"):
        import ray

        from forebay.ray import RayReplayBuffer

        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        return RayReplayBuffer.connect(store.removeprefix("ray:"))
    return ReplayBufferConfig(policy="staleness", storage=store, max_groups=128, lease_s=LEASE_S)


def make_loader(checkpoints: Path | None = None) -> AsyncRolloutLoader:
    task = Task(
        "sums",
        QUESTIONS,
        FunctionAgentLoop(generate, cancel_on_pause=False),  # a pause waits for its threads
        reward=lambda state: float(len(state.response_ids or ()) > 5),
        group_size=4,
        over_issue=0.25,
    )
    return AsyncRolloutLoader(
        task,
        batch_groups=8,
        max_staleness=2,
        storage=storage(),
        checkpoints=checkpoints,
        keep_checkpoints=1,
        timeout_s=600,
        produce=False,  # the trainer's loader starts no producer: `forebay produce` does that in other processes
    )
