"""The same trainer as `tiny_grpo`, with its engine behind HTTP: OpenAIAgentLoop and a server in another process.

    cd examples && python -m openai_server.train --steps 60
    cd examples && python -m openai_server.train --base-url http://127.0.0.1:8000        # a server of your own

For vLLM or SGLang: point --base-url at it, replace `update_weights` by its way to take new weights, `Policy` by your
model, and `tokenize` your prompts. The data plane stays as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from forebay import (
    AsyncProduceStrategy,
    AsyncReplayBufferConfig,
    DisaggregatedAgentLoopManager,
    NoProgress,
    OpenAIAgentLoop,
    SampleParams,
    Sampler,
    Task,
)
from tiny_grpo.grpo import train_step
from tiny_grpo.model import Policy, PolicyConfig
from tiny_grpo.tasks import CONTEXT, END, MAX_ANSWER_TOKENS, TASKS, VOCABULARY, reward, task_records
from tiny_grpo.warm_start import warm_start

BATCH, SAMPLES, WARM_START_STEPS = 16, 8, 60


@contextmanager
def started_server() -> Iterator[str]:
    """The address of a server in a process of its own, which ends with us."""
    command = [sys.executable, "-m", "openai_server.server", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


async def update_weights(client: httpx.AsyncClient, policy: Policy, step: int, directory: Path) -> None:
    """Have the server generate with the weights of `step`."""
    path = directory / "weights.pt"
    await asyncio.to_thread(torch.save, policy.state_dict(), path)
    answer = await client.post("/update_weights", json={"path": str(path), "model_step": step})
    answer.raise_for_status()


async def train(base_url: str, steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy = Policy(PolicyConfig(vocabulary=VOCABULARY, context=CONTEXT))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)
    await asyncio.to_thread(warm_start, policy, tuple(TASKS), steps=WARM_START_STEPS, seed=seed)

    params = SampleParams(max_tokens=MAX_ANSWER_TOKENS, temperature=1.0, stop_token_ids=(END,))
    buffer = AsyncReplayBufferConfig().build()
    strategy = AsyncProduceStrategy(
        buffer,
        over_sample_threshold=0.5,
        enable_partial_rollout=True,
        max_staleness=1,
        reward_fn=reward,
        progress=NoProgress(),
    )
    with tempfile.TemporaryDirectory() as scratch:
        async with (
            OpenAIAgentLoop(f"{base_url}/v1", "tiny", sample_params=params, max_concurrency=128) as agent_loop,
            httpx.AsyncClient(base_url=base_url, timeout=60) as client,
        ):
            tasks = [
                Task(
                    name=name,
                    sampler=Sampler(task_records(name, 4_000, seed), prompt_repeat_k=SAMPLES, seed=seed),
                    agent_loop=agent_loop,
                    strategy=strategy,
                )
                for name in TASKS
            ]
            await update_weights(client, policy, 0, Path(scratch))
            async with DisaggregatedAgentLoopManager(tasks, buffer) as manager:
                producer = asyncio.create_task(manager.produce_loop(BATCH))
                for step in range(1, steps + 1):
                    async with manager.get_batch(BATCH, step, timeout_s=600) as batch:
                        await asyncio.to_thread(train_step, policy, optimizer, batch.groups, temperature=1.0)
                    await manager.pause_produce()  # aborts what is under way: the connection is closed, tokens are kept
                    await update_weights(client, policy, step, Path(scratch))
                    await manager.continue_produce(step)
                    if step % 10 == 0 or step == steps:
                        print(f"step {step:>4}   mean reward {batch.raw_reward_mean or 0.0:.2f}", flush=True)
                ledger = await manager.ledger()
            await asyncio.gather(producer, return_exceptions=True)
    await buffer.close()
    for name, line in ledger.items():
        closed = line["issued"] == sum(line.values()) - line["issued"]
        print(f"ledger of {name}, {'closed' if closed else 'OPEN'}: {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-url", help="of a running server (default: one is started)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; expected at least 1")
    if options.base_url is not None:
        asyncio.run(train(options.base_url, options.steps, options.seed))
        return
    with started_server() as base_url:
        asyncio.run(train(base_url, options.steps, options.seed))


if __name__ == "__main__":
    main()
