"""Tasks that change while a loader runs: weights, tasks that are added or removed, other prompts."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forebay import AsyncBatch, ChangedDataset, InvalidConfig, InvalidInput
from tests.loader.plane import Engine, loader_of, prompts, simulated, task

MODES = pytest.mark.parametrize("mode", ["in_turns", "ahead"])


def sizes(batch: AsyncBatch) -> dict[str, int]:
    return {name: len(groups) for name, groups in batch.groups_by_task.items() if groups}


@MODES
@simulated
async def test_a_weight_changes_the_steps_that_were_not_handed_out(mode: Any) -> None:
    engine = Engine()
    tasks = [task(engine, "a"), task(engine, "b")]
    async with loader_of(engine, tasks=tasks, mode=mode, max_staleness=2) as loader:
        seen = []
        async for batch in loader.batches(1, 6):
            seen.append(sizes(batch))
            if batch.step == 2:
                await loader.set_weight("b", 3.0)
            await loader.update_weights(engine.load)
        assert seen[:2] == [{"a": 2, "b": 2}] * 2
        assert seen[2:] == [{"a": 1, "b": 3}] * 4
        with pytest.raises(InvalidInput, match="there is no task 'c'; expected one of a, b"):
            await loader.set_weight("c", 1.0)
        with pytest.raises(InvalidConfig, match="weight of task 'a' is -1"):
            await loader.set_weight("a", -1)
        await loader.set_weight("a", 0)
        with pytest.raises(InvalidConfig, match="weights of all tasks"):
            await loader.set_weight("b", 0)


@MODES
@simulated
async def test_a_task_is_added_and_removed_while_batches_are_leased(mode: Any) -> None:
    engine = Engine()
    async with loader_of(engine, tasks=task(engine, "m"), mode=mode, max_staleness=2) as loader:
        seen, trained = [], Counter[tuple[str, int]]()
        async for batch in loader.batches(1, 9):
            seen.append(sizes(batch))
            if batch.step == 2:
                await loader.add_task(task(engine, "a"))  # sorts before the other: another account has the plan then
                with pytest.raises(InvalidConfig, match="there already is a task 'a'"):
                    await loader.add_task(task(engine, "a"))
            if batch.step == 5:
                await loader.remove_task("m")
                with pytest.raises(InvalidInput, match="there is no task 'm'"):
                    await loader.remove_task("m")
            if batch.step == 7:
                await loader.add_task(task(engine, "m"))
            assert batch.open
            trained.update((group[0].task_name or "", group[0].group_id or 0) for group in batch.groups)
            await loader.update_weights(engine.load)
        assert seen == [{"m": 4}] * 2 + [{"m": 2, "a": 2}] * 3 + [{"a": 4}] * 2 + [{"m": 2, "a": 2}] * 2
        assert max(trained.values()) == 1
        for name, line in (await loader.ledger()).items():
            assert line["trained"] == sum(n for (task_name, _), n in trained.items() if task_name == name)
            first = sorted(group_id for task_name, group_id in trained if task_name == name)
            assert first == [*range(len(first))], "groups of a removed task are kept, in their order"
        await loader.remove_task("m")
        with pytest.raises(InvalidConfig, match="there is no task"):
            await loader.remove_task("a")


@MODES
@simulated
async def test_weights_stay_when_a_task_is_added(mode: Any) -> None:
    engine = Engine()
    async with loader_of(engine, tasks=task(engine, "a"), mode=mode, max_staleness=1) as loader:
        async for batch in loader.batches(1, 6):
            await loader.update_weights(engine.load)
            if batch.step == 3:
                await loader.add_task(task(engine, "b"))  # the plan stays with the account of the first
            assert loader.model_step == batch.step
        assert sizes(batch) == {"a": 2, "b": 2}


@MODES
@simulated
async def test_the_groups_of_a_removed_task_are_discarded_if_asked(mode: Any) -> None:
    engine = Engine()
    tasks = [task(engine, "a"), task(engine, "b", over_issue=1.0, partial_rollout=True)]
    async with loader_of(engine, tasks=tasks, mode=mode, max_staleness=2) as loader:
        batches = loader.batches(1, 3)
        leased = await anext(batches)
        await loader.remove_task("b", keep=False)
        line = (await loader.ledger())["b"]
        assert (line["leased"], line["in_flight"], line["buffered"]) == (2, 0, 0)
        reasons = (await loader.buffer.reasons()).get("b", {})
        assert line["discarded"] == sum(n for reason, n in reasons.items() if "task_removed" in reason)
        await leased.ack()
        assert (await loader.ledger())["b"]["trained"] == 2
        assert sizes(await anext(batches)) == {"a": 4}


@MODES
@simulated
async def test_other_prompts_open_a_generation_that_resumes(mode: Any) -> None:
    directory, engine = Path(tempfile.mkdtemp()), Engine()
    easy, hard = prompts(50, "easy"), prompts(30, "hard")

    def options(given: list[dict[str, Any]]) -> dict[str, Any]:
        chosen = task(engine, prompts=given, shuffle=True)
        return {"tasks": chosen, "mode": mode, "checkpoints": directory, "max_staleness": 1}

    def texts(batch: AsyncBatch) -> list[str]:
        return [group[0].message[0]["content"] for group in batch.groups]

    async with loader_of(engine, **options(easy)) as loader:
        seen = []
        async for batch in loader.batches(1, 8):
            seen.append(texts(batch))
            if batch.step == 3:
                await loader.set_prompts("math", hard)
            await loader.update_weights(engine.load)
            if batch.step == 6:
                await loader.save(6)
    flat = [text for batch_texts in seen for text in batch_texts]
    assert len(set(flat)) == len(flat)
    assert all("easy" in text for text in flat[:12])
    assert all("hard" in text for text in flat[-8:])
    async with loader_of(engine, **options(easy)) as wrong:
        with pytest.raises(ChangedDataset, match="generation 1"):
            await wrong.resume()
    engine.weights = 6
    async with loader_of(engine, **options(easy)) as again:
        await again.set_prompts("math", hard)  # before anything was drawn: the prompts of the generation that was saved
        assert await again.resume(engine.load) == 6
        rest = []
        async for batch in again.batches(7, 8):
            rest += texts(batch)
            await again.update_weights(engine.load)
    assert sorted(rest) == sorted(flat[24:])


@simulated
async def test_bad_prompts_are_refused_and_change_nothing() -> None:
    engine = Engine()
    async with loader_of(engine) as loader:
        with pytest.raises(InvalidInput, match="the prompts of task 'math' are empty"):
            await loader.set_prompts("math", [])
        with pytest.raises(InvalidInput, match="there is no task 'x'"):
            await loader.set_prompts("x", prompts(3))
        assert len((await anext(loader.batches(1))).groups) == 4
