"""The same trainer as `tiny_grpo`, with its engine behind HTTP: OpenAIAgentLoop and a server in another process.

    cd examples && python -m openai_server.train --steps 60
    cd examples && python -m openai_server.train --base-url http://127.0.0.1:8000        # a server of your own

For vLLM or SGLang: point --base-url at it, replace `push_weights` by a `VLLMControl` or `SGLangControl`, `Policy` by
your model, and give the tasks a `tokenize`. The loader stays as it is.
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

from forebay import AsyncRolloutLoader, OpenAIAgentLoop, SampleParams, Task
from tiny_grpo.grpo import train_step
from tiny_grpo.model import Policy, PolicyConfig
from tiny_grpo.tasks import CONTEXT, END, MAX_ANSWER_TOKENS, TASKS, VOCABULARY, reward, task_records
from tiny_grpo.warm_start import warm_start

BATCH, SAMPLES, WARM_START_STEPS = 16, 8, 60


@contextmanager
def started_server() -> Iterator[str]:
    """The address of a server in a new process, which ends with this block."""
    command = [sys.executable, "-m", "openai_server.server", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


async def train(base_url: str, steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy = Policy(PolicyConfig(vocabulary=VOCABULARY, context=CONTEXT))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4, weight_decay=0.0)
    await asyncio.to_thread(warm_start, policy, tuple(TASKS), steps=WARM_START_STEPS, seed=seed)

    params = SampleParams(max_tokens=MAX_ANSWER_TOKENS, temperature=1.0, stop_token_ids=(END,))
    agent_loop = OpenAIAgentLoop(f"{base_url}/v1", "tiny", sample_params=params, max_concurrency=128)
    tasks = [
        Task(
            name,
            task_records(name, 4_000, seed),
            agent_loop,
            reward=reward,
            group_size=SAMPLES,
            seed=seed,
            over_issue=0.5,
            partial_rollout=True,  # new weights interrupt answers: the connection is closed, the tokens are kept
        )
        for name in TASKS
    ]
    with tempfile.TemporaryDirectory() as scratch:
        async with (
            httpx.AsyncClient(base_url=base_url, timeout=60) as client,
            AsyncRolloutLoader(tasks, batch_groups=BATCH, max_staleness=1, timeout_s=600) as loader,
        ):

            async def push_weights(step: int) -> None:
                path = Path(scratch) / "weights.pt"
                await asyncio.to_thread(torch.save, policy.state_dict(), path)
                answer = await client.post("/update_weights", json={"path": str(path), "model_step": step})
                answer.raise_for_status()

            await loader.update_weights(push_weights, 0)
            async for batch in loader.batches(1, steps):
                tensors = batch.padded(pad_id=END, shifted=True)
                await asyncio.to_thread(train_step, policy, optimizer, tensors, temperature=1.0)
                await loader.update_weights(push_weights)
                if batch.step % 10 == 0 or batch.step == steps:
                    print(f"step {batch.step:>4}   mean reward {batch.raw_reward_mean or 0.0:.2f}", flush=True)
            ledger = await loader.ledger()
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
