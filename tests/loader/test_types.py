"""The types of both loaders, as users see them: `mypy` checks this file, and the calls also run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_type

from forebay import AsyncBatch, AsyncRolloutLoader, Batch, Evaluation, RolloutLoader, RolloutState, Task
from forebay.core.ledger import LedgerLine
from forebay.loader.held import Batches

PROMPTS = [{"prompt": f"question {number}"} for number in range(8)]
Groups = list[list[RolloutState]]


async def generate(state: RolloutState) -> None:
    state.response, state.response_ids = "four", [4]


def make_task() -> Task:
    return Task("math", PROMPTS, generate, reward=lambda state: 1.0, group_size=2)


def test_the_synchronous_loader_has_the_types_of_plain_values(tmp_path: Path) -> None:
    with RolloutLoader(make_task(), batch_groups=2, checkpoints=tmp_path, progress=None) as loader:
        assert_type(loader, RolloutLoader)
        assert_type(loader.native, AsyncRolloutLoader)
        assert_type(loader.resume(load=lambda step: None), int | None)
        batches = loader.batches(1, 2, ahead=1, timeout_s=None)
        assert_type(batches, Iterator[Batch])
        for batch in batches:
            assert_type(batch, Batch)
            assert_type(batch.step, int)
            assert_type(batch.open, bool)
            assert_type(batch.groups, Groups)
            assert_type(batch.groups_by_task, dict[str, Groups])
            assert_type(batch.shard(0, 1), Groups)
            assert_type(batch.stats(), dict[str, float])
            with batch as entered:
                assert_type(entered, Batch)
            loader.update_weights(lambda: None)
        assert_type(loader.save(2), Path)
        assert_type(loader.state_dict(), dict[str, Any])
        assert_type(loader.next_step, int)
        assert_type(loader.model_step, int)
        assert_type(loader.ledger(), dict[str, LedgerLine])
        assert_type(loader.stats(), dict[str, float])
        assert_type(loader.explain_wait(), str)
        assert_type(loader.evaluate("math"), Evaluation)
        loader.stop()


async def test_the_asynchronous_loader_has_the_same_types(tmp_path: Path) -> None:
    async with AsyncRolloutLoader(make_task(), batch_groups=2, checkpoints=tmp_path, progress=None) as loader:
        assert_type(loader, AsyncRolloutLoader)
        assert_type(await loader.resume(load=lambda step: None), int | None)
        batches = loader.batches(1, 2, ahead=1, timeout_s=None)
        assert_type(batches, Batches)
        async for batch in batches:
            assert_type(batch, AsyncBatch)
            assert_type(batch.step, int)
            assert_type(batch.open, bool)
            assert_type(batch.groups, Groups)
            async with batch as entered:
                assert_type(entered, AsyncBatch)
            await loader.update_weights(lambda: None)
        assert_type(await loader.save(2), Path)
        assert_type(loader.state_dict(), dict[str, Any])
        assert_type(loader.next_step, int)
        assert_type(await loader.ledger(), dict[str, LedgerLine])
        assert_type(await loader.stats(), dict[str, float])
        assert_type(await loader.explain_wait(), str)
        assert_type(await loader.evaluate("math"), Evaluation)
        loader.stop()


def refused_by_mypy(loader: RolloutLoader, batch: Batch) -> None:
    """Never called. Each comment is an error of mypy itself if the line is accepted."""
    loader.batches("1")  # type: ignore[arg-type]
    loader.batches(1, 2, 3)  # type: ignore[call-arg]
    loader.save()  # type: ignore[call-arg]
    loader.save("1")  # type: ignore[arg-type]
    loader.update_weights()  # type: ignore[call-arg]
    loader.resume(load=1)  # type: ignore[arg-type]
    loader.set_weight("math", "1")  # type: ignore[arg-type]
    batch.reject([], 1)  # type: ignore[arg-type]
    Task("math", PROMPTS, generate, group_size="2")  # type: ignore[arg-type]
    Task("math", PROMPTS, lambda state: None)  # type: ignore[arg-type, return-value]


async def refused_by_mypy_async(loader: AsyncRolloutLoader) -> None:
    """Never called."""
    AsyncRolloutLoader(make_task(), batch_groups="2")  # type: ignore[arg-type]
    AsyncRolloutLoader(make_task(), batch_groups=2, mode="both")  # type: ignore[arg-type]
    loader.batches("1")  # type: ignore[arg-type]
    await loader.save("1")  # type: ignore[arg-type]
    for _ in loader.batches(1):  # type: ignore[attr-defined]
        pass
