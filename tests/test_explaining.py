"""What a stuck run says of itself: which stage, which group, for how long, and at which attempt."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from forebay import (
    AgentLoopManager,
    AsyncProduceStrategy,
    DisaggregatedAgentLoopManager,
    FunctionAgentLoop,
    ManagedTask,
    MemoryStorage,
    ReplayBuffer,
    RolloutState,
    Sampler,
    Status,
    Storage,
    SyncProduceStrategy,
    Timeouts,
    WaitTimeout,
)
from forebay.agent_loop.openai import OpenAIAgentLoop
from forebay.core import aio as threads
from forebay.produce import NoProgress
from forebay.testing.simulate import run
from tests.processes import HANG_S
from tests.support import taken


def answer(state: RolloutState) -> None:
    state.response_ids, state.response, state.status = [1, 2], "x", Status.COMPLETED


async def at_once(state: RolloutState) -> None:
    answer(state)


async def forever(state: Any) -> Any:
    await asyncio.get_running_loop().create_future()


def manager_of(
    generate: Any = at_once,
    dataset: Any = None,
    max_groups: int | None = None,
    max_bytes: int | None = None,
    storage: Storage | None = None,
    **options: Any,
) -> DisaggregatedAgentLoopManager:
    buffer = ReplayBuffer(storage=storage, max_groups=max_groups, max_bytes=max_bytes)
    strategy = AsyncProduceStrategy(buffer, progress=NoProgress(), **options)
    sampler = Sampler([{"prompt": "q"}] * 9 if dataset is None else dataset)
    task = ManagedTask(name="math", sampler=sampler, agent_loop=FunctionAgentLoop(generate), strategy=strategy)
    return DisaggregatedAgentLoopManager([task], buffer)


async def stuck(manager: DisaggregatedAgentLoopManager, seconds: float = 100) -> str:
    """What the error of a batch that does not come says."""
    async with manager:
        producer = asyncio.create_task(manager.produce_loop(2))
        with pytest.raises(WaitTimeout) as late:
            await taken(manager.get_batch(2, 1, timeout_s=seconds))
    await producer
    return late.value.explanation


def test_g11_a_hung_engine_shows_as_generating() -> None:
    text = run(lambda: stuck(manager_of(forever)))
    assert "generating: 2 groups, the oldest (group 0, attempt 1) for 100.0 s" in text
    assert "judging" not in text


def test_g11_a_hung_reward_shows_as_judging() -> None:
    text = run(lambda: stuck(manager_of(reward_fn=forever)))
    assert "judging: 2 groups, the oldest (group 0, attempt 1) for 100.0 s" in text
    assert "generating:" not in text


def test_g11_a_reward_that_raises_shows_with_its_error() -> None:
    def away(state: RolloutState) -> float:
        raise ConnectionError("503")

    text = run(lambda: stuck(manager_of(reward_fn=away)))
    assert "judging: 2 groups" in text
    assert "repeated after the reward raised ConnectionError: 503" in text


def test_g11_an_engine_that_is_away_shows_with_the_time_that_is_left() -> None:
    async def refused(state: RolloutState) -> None:
        raise ConnectionRefusedError("refused")

    text = run(lambda: stuck(manager_of(refused)))
    assert "is unreachable (ConnectionRefusedError: refused); giving up in 500 s" in text


def test_g11_attempts_show() -> None:
    async def aborted(state: RolloutState) -> None:
        if state.group_id:
            await forever(state)
        state.finish_reason = "abort"

    text = run(lambda: stuck(manager_of(aborted, max_groups=2, max_tries=1000), seconds=20))
    assert "resting:" in text
    assert "(group 0, attempt 7)" in text
    assert "although no pause was requested" in text


async def test_g11_a_hung_data_set_shows_as_drawing() -> None:
    begun, released = threading.Event(), threading.Event()

    class Hanging:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Any:
            begun.set()
            released.wait()
            return {"prompt": "q"}

    manager = manager_of(dataset=Hanging())
    async with manager:
        producer = asyncio.create_task(manager.produce_loop(2))
        try:
            assert await threads.in_thread(lambda: begun.wait(HANG_S))
            with pytest.raises(WaitTimeout) as late:
                await taken(manager.get_batch(2, 1, timeout_s=0))
        finally:
            released.set()
    await producer
    assert "drawing: for " in late.value.explanation


async def test_g11_a_hung_data_set_does_not_hold_up_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CANCEL_GRACE_S", 0.05)
    released = threading.Event()

    class Hanging:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Any:
            released.wait()
            return {"prompt": "q"}

    manager = manager_of(dataset=Hanging(), timeouts=Timeouts(cancel_timeout_s=0.05, pause_timeout_s=0.05))
    try:
        async with manager:
            producer = asyncio.create_task(manager.produce_loop(2))
            with pytest.raises(WaitTimeout):
                await taken(manager.get_batch(2, 1, timeout_s=0.2))
        await producer
        assert not released.is_set()
    finally:
        released.set()


async def test_g03_a_reward_that_hangs_takes_one_thread_and_delays_no_other_group() -> None:
    released = threading.Event()

    def reward(state: RolloutState) -> float:
        if state.group_id == 0:
            released.wait()
        return 1.0

    timeouts = Timeouts(judge_timeout_s=0.02, cancel_timeout_s=0.02, pause_interval_s=0.02)
    manager = manager_of(
        dataset=[{"prompt": f"q{i}"} for i in range(1000)],
        reward_fn=reward,
        reward_concurrency=4,
        over_sample_threshold=1.0,
        max_staleness=1,
        timeouts=timeouts,
    )
    try:
        async with manager:
            producer = asyncio.create_task(manager.produce_loop(2))
            for step in range(1, 11):
                async with manager.get_batch(2, step, timeout_s=HANG_S):
                    pass
                await manager.pause_produce()
                await manager.continue_produce(step)
            pool = manager.tasks["math"].strategy.judge.pool
            async with asyncio.timeout(HANG_S):  # rewards of other groups may run at this moment
                while pool.running > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert (await manager.ledger())["math"]["failed"] == 0
        await producer
    finally:
        released.set()


async def test_g11_a_save_that_waits_for_a_thread_shows(tmp_path: Path) -> None:
    released = threading.Event()
    hung = [threads.start_thread(released.wait) for _ in range(threads.FILES.max_threads)]
    manager = manager_of()
    try:
        async with asyncio.timeout(HANG_S):
            while threads.FILES.running < threads.FILES.max_threads:  # noqa: ASYNC110  threads tell nobody
                await asyncio.sleep(0.001)
            saving = asyncio.create_task(manager.save(tmp_path / "checkpoint", 0))
            while not threads.FILES.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        said = "all 8 threads of the pool 'files' (checkpoints and other files) are busy, 1 calls wait"
        assert (await manager.explain_wait()).count(said) == 1
        assert said in await manager.replay_buffer.explain_wait()
    finally:
        released.set()
    await asyncio.gather(*hung, saving)
    assert "threads of the pool" not in await manager.explain_wait()
    await manager.shutdown()


def test_a_colocated_timeout_says_what_hangs() -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        strategy = SyncProduceStrategy(buffer, progress=NoProgress())
        sampler = Sampler([{"prompt": "q"}])
        task = ManagedTask(name="math", sampler=sampler, agent_loop=FunctionAgentLoop(forever), strategy=strategy)
        async with AgentLoopManager([task], buffer) as manager:
            with pytest.raises(WaitTimeout) as late:
                await taken(manager.produce_batch(4, 1, model_step=0, timeout_s=20))
        assert "generating: 4 groups, the oldest (group 0, attempt 1) for 20.0 s" in late.value.explanation
        assert (await buffer.ledger())["math"]["buffered"] == 4

    run(main)


class SlowToStore(MemoryStorage):
    async def put(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(1000)
        return await super().put(*args, **kwargs)


def test_g11_a_hung_storage_shows_as_storing() -> None:
    text = run(lambda: stuck(manager_of(storage=SlowToStore())))
    assert "storing: 2 groups, the oldest (group 0, attempt 1) for 100.0 s" in text
    assert "generating:" not in text


def test_the_age_of_the_oldest_generation_and_the_limits_are_figures() -> None:
    async def main() -> None:
        async def slowly(state: RolloutState) -> None:
            await asyncio.sleep(50 if state.group_id == 0 else 20)
            answer(state)

        manager = manager_of(slowly, max_groups=8, max_bytes=1_000_000)
        async with manager:
            producer = asyncio.create_task(manager.produce_loop(2))
            await asyncio.sleep(30)
            figures = await manager.stats()
            assert figures["forebay/math/produce/oldest_generation_s"] == 30
            assert figures["forebay/math/produce/generating"] == 1
            assert (figures["forebay/max_groups"], figures["forebay/max_bytes"]) == (8, 1_000_000)
        await producer
        assert "forebay/max_groups" not in await manager_of().stats()

    run(main)


def test_generation_times_of_a_batch_are_over_all_tasks() -> None:
    async def main() -> None:
        buffer = ReplayBuffer()

        def task(name: str, seconds: float) -> ManagedTask:
            async def generate(state: RolloutState) -> None:
                await asyncio.sleep(seconds)
                answer(state)

            strategy = SyncProduceStrategy(buffer, progress=NoProgress())
            sampler = Sampler([{"prompt": "q"}])
            loop = FunctionAgentLoop(generate)
            return ManagedTask(name=name, sampler=sampler, agent_loop=loop, strategy=strategy, weight=10 - seconds)

        manager = AgentLoopManager([task("quick", 1), task("slow", 9)], buffer)
        async with manager, manager.produce_batch(10, 1, model_step=0) as batch:
            assert (batch.group_gen_p50_s, batch.group_gen_p99_s) == (1, 9)
            by_task = {name: result.group_gen_p99_s for name, result in batch.task_results.items()}
            assert by_task == {"quick": 1, "slow": 9}

    run(main)


def test_the_defaults_are_those_of_the_guide() -> None:
    async def unused(state: RolloutState) -> None: ...

    manager = manager_of()
    assert manager._patiently.retry_s == 60
    assert FunctionAgentLoop(unused).outage.down_timeout_s == 600
    assert OpenAIAgentLoop("http://127.0.0.1:1/v1", "policy").outage.down_timeout_s == 600
    assert AsyncProduceStrategy(ReplayBuffer()).settings.tail_after == 3


def test_counters_survive_a_resume(tmp_path: Path) -> None:
    async def main() -> None:
        first = manager_of(reward_fn=lambda state: 0.5)
        async with first:
            producer = asyncio.create_task(first.produce_loop(2))
            async with first.get_batch(2, 1, timeout_s=100):
                pass
            await first.pause_produce()
            await first.save(tmp_path / "checkpoint", 1)
        await producer
        before = await first.stats()
        second = manager_of(reward_fn=lambda state: 0.5)
        await second.resume(tmp_path / "checkpoint")
        after = await second.stats()
        for name in ("attempts", "groups", "samples", "tokens", "completed"):
            key = f"forebay/math/produce/{name}"
            assert after[key] == before[key] > 0, name

    run(main)


def test_a_batch_says_how_old_its_groups_are_and_what_they_are_like() -> None:
    async def main() -> None:
        async def generate(state: RolloutState) -> None:
            await asyncio.sleep(1)
            answer(state)

        async def reward(state: RolloutState) -> float:
            await asyncio.sleep(2)
            return 0.25

        manager = manager_of(generate, reward_fn=reward, max_staleness=2)
        async with manager:
            producer = asyncio.create_task(manager.produce_loop(2))
            for step in (1, 2, 3):
                async with manager.get_batch(2, step, timeout_s=100) as batch:
                    figures = batch.stats()
                assert figures["forebay/math/batch/staleness_max"] == step - 1
                assert figures["forebay/math/batch/staleness_mean"] == step - 1
                assert figures["forebay/math/batch/reward_mean"] == 0.25
                assert figures["forebay/math/batch/response_tokens_mean"] == 2
                assert figures["forebay/math/batch/acceptance_rate"] == 1
                assert figures["forebay/math/batch/judge_mean_s"] == 2
        await producer

    run(main)
