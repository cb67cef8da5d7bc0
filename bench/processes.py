"""Producers in several processes on one store: how the groups per second grow, and what a group costs.

    python bench/processes.py [--quick]

Each producer process has an engine that sleeps: a fixed number of answers at a time, each as long as the other. So one
producer has a ceiling of its own, and n producers should have n times as much; what is missing is the price of sharing.
The trainer takes batches as fast as they come. Beside it: one producer and the trainer in one process, in memory.
Round trips are counted in the processes themselves: every statement that they send to PostgreSQL, for all purposes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _harness import Verdict, arguments, table
from forebay import (
    AsyncProduceStrategy,
    DisaggregatedAgentLoopManager,
    FunctionAgentLoop,
    ManagedTask,
    NoProgress,
    ReplayBuffer,
    ReplayBufferConfig,
    RolloutState,
    Sampler,
)

ROOT = Path(__file__).resolve().parents[1]
BATCH, SLOTS, ANSWER_S = 32, 4, 0.2
QUESTIONS = [{"prompt": f"question {n}"} for n in range(10_000)]
TOKENS = list(range(200))


def make_manager(buffer: ReplayBuffer) -> DisaggregatedAgentLoopManager:
    slots = asyncio.Semaphore(SLOTS * 2)  # two samples a group

    async def answer(state: RolloutState) -> None:
        async with slots:
            await asyncio.sleep(ANSWER_S)
        state.response_ids = TOKENS

    strategy = AsyncProduceStrategy(buffer, over_sample_threshold=1.0, max_staleness=10_000, progress=NoProgress())
    task = ManagedTask(
        name="math", sampler=Sampler(QUESTIONS, group_size=2), agent_loop=FunctionAgentLoop(answer), strategy=strategy
    )
    return DisaggregatedAgentLoopManager(task, buffer)


def open_buffer(store: str) -> ReplayBuffer:
    if store.startswith("ray:"):
        import ray

        from forebay.ray import RayReplayBuffer

        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        return RayReplayBuffer.connect(store.removeprefix("ray:"))
    return ReplayBufferConfig(policy="staleness", storage=store).build()


class Counted:
    """Statements that this process sends to PostgreSQL."""

    def __init__(self) -> None:
        self.n = 0
        try:
            import asyncpg
        except ModuleNotFoundError:
            return
        for name in ("fetch", "fetchrow", "fetchval", "execute", "executemany", "copy_records_to_table"):
            setattr(asyncpg.Connection, name, self._counting(getattr(asyncpg.Connection, name)))

    def _counting(self, method: Any) -> Any:
        async def counting(*args: Any, **kwargs: Any) -> Any:
            self.n += 1
            return await method(*args, **kwargs)

        return counting


async def produce(store: str) -> None:
    """A producer process, until SIGTERM; prints how many statements it sent."""
    counted = Counted()
    manager = make_manager(open_buffer(store))
    producing = asyncio.create_task(manager.produce_loop(BATCH))
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait((producing, waiting), return_when=asyncio.FIRST_COMPLETED)
    print(json.dumps({"statements": counted.n, "cpu_s": time.process_time()}), flush=True)
    await manager.shutdown()
    await manager.replay_buffer.close()


async def consume(manager: DisaggregatedAgentLoopManager, steps: int, first: int = 1) -> float:
    """Groups per second over the steps."""
    began = time.perf_counter()
    for step in range(first, first + steps):
        async with manager.get_batch(BATCH, step, timeout_s=300):
            pass
    return steps * BATCH / (time.perf_counter() - began)


def start(store: str) -> subprocess.Popen[str]:
    """A producer process."""
    command = [sys.executable, __file__, "--produce", store]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT / "bench")


async def measure(store: str, producers: int, steps: int) -> dict[str, float]:
    counted = Counted()
    manager = make_manager(open_buffer(store))
    with ExitStack() as stack:
        processes = []
        for _ in range(producers):
            process = stack.enter_context(start(store))
            stack.callback(process.kill)
            processes.append(process)
        await manager.continue_produce(0)
        while len(manager.run.agreed.producers(manager.run.owners)) < producers:
            await asyncio.sleep(0.05)
            await manager.run.read()
        await consume(manager, 2)  # until everything is warm
        sent = counted.n
        rate = await consume(manager, steps, first=3)
        own = counted.n - sent
        for process in processes:
            process.send_signal(signal.SIGTERM)
        found = [
            json.loads(await asyncio.to_thread(process.stdout.readline)) for process in processes if process.stdout
        ]
        for process in processes:
            await asyncio.to_thread(process.wait, 60)
    ledger = (await manager.ledger())["math"]
    finished = ledger["issued"] - ledger["in_flight"]
    await manager.shutdown()
    await manager.replay_buffer.close()
    statements = sum(each["statements"] for each in found) / finished + own / (steps * BATCH)
    return {"groups_per_s": rate, "statements": statements, "cpu_ms": 1_000 * sum(e["cpu_s"] for e in found) / finished}


async def in_memory(steps: int) -> float:
    manager = make_manager(ReplayBufferConfig(policy="staleness").build())
    producing = asyncio.create_task(manager.produce_loop(BATCH))
    await consume(manager, 1)
    rate = await consume(manager, steps, first=2)
    await manager.shutdown()
    await producing
    return rate


def main() -> None:
    if sys.argv[1:2] == ["--produce"]:
        asyncio.run(produce(sys.argv[2]))
        return
    options = arguments(__doc__)
    verdict = Verdict("processes", options)
    steps = 3 if options.quick else 12
    ceiling = SLOTS / ANSWER_S
    rows = [["memory, one process", "1", f"{asyncio.run(in_memory(steps)):.1f}", "", "", ""]]
    sys.path.insert(0, str(ROOT))
    import ray
    from tests.storage.postgres_server import Server

    from forebay.ray import RayReplayBuffer

    server = Server()  # ends with this process
    for name in ("PostgreSQL", "Ray"):
        if name == "Ray":
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        rates = {}
        for producers in (1, 2, 4):
            store = f"{server.dsn}#bench_{producers}"
            if name == "Ray":
                store = f"ray:bench_{producers}"
                RayReplayBuffer.create(f"bench_{producers}", ReplayBufferConfig(policy="staleness"))
            found = asyncio.run(measure(store, producers, steps * producers))
            rates[producers] = found["groups_per_s"]
            statements = f"{found['statements']:.1f}" if name == "PostgreSQL" else ""
            scaled = f"{rates[producers] / rates[1]:.2f}x"
            cpu = f"{found['cpu_ms']:.1f} ms"
            rows.append([name, str(producers), f"{rates[producers]:.1f}", scaled, statements, cpu])
            if name == "PostgreSQL" and producers == 4:
                verdict.at_most("PostgreSQL/round trips per group at 4", found["statements"], 6, "round trips")
            if name == "Ray":
                RayReplayBuffer.destroy(f"bench_{producers}")
        verdict.at_least(f"{name}/4 producers", rates[4] / rates[1], 3.2, "x")
    print(f"an engine that sleeps allows {ceiling:.0f} groups/s a producer")
    table(["store", "producers", "groups/s", "scaling", "round trips a group", "CPU a group"], rows)
    verdict.finish()


if __name__ == "__main__":
    main()
