"""Checkpoints of the whole plane: at any moment, exact, into any storage; what is damaged changes nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import (
    AsyncProduceStrategy,
    CheckpointError,
    DamagedData,
    FunctionAgentLoop,
    InvalidInput,
    MemoryStorage,
    ProducerState,
    ReplayBuffer,
    RolloutState,
    Status,
    Storage,
)
from forebay.buffer.internal import internals
from forebay.checkpoint.format import ENVELOPE, open_checkpoint
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import make_group
from forebay.testing.simulate import SimulatedLoop, check_ledger, run
from tests.support import taken
from tests.test_disaggregated import Disaggregated, disaggregated, producing
from tests.test_manager import Plane, by_group, colocated
from tests.test_strategy import Counted, after, answer, at_once, ids, never, simulated, sorted_ids


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut would lose is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[], Path]:
    """A new directory for every call: a simulated test runs several times."""
    made: list[Path] = []

    def make() -> Path:
        made.append(tmp_path / f"checkpoint{len(made)}")
        return made[-1]

    return make


async def held(buffer: ReplayBuffer, name: str = "math") -> dict[int, str]:
    """The status of every group that is there, by its id."""
    records = await buffer.query({"task_name": name})
    return {record.group_id: str(record.status) for record in sorted(records, key=lambda record: record.group_id)}


def edited(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a checkpoint, and seal it again: for what somebody else's program could have written."""
    manifest = json.loads((directory / "manifest.json").read_text())["manifest"]
    change(manifest)
    (directory / "manifest.json").write_bytes(ENVELOPE.seal(json.dumps(manifest).encode()))


def size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


# --- what is in it --------------------------------------------------------------------------------------


def half_way(fresh: Callable[[], Path], model_step: int, *, prompts_only: bool) -> Callable[[], Any]:
    """A producer in the middle, saved and resumed: step 1 trained, 2 leased, 3 buffered, 4 in flight."""

    @simulated
    async def test() -> None:
        plane = disaggregated(loop=by_group(1, 1, 1, 1, 1, 1, 50, 50), interval=4)
        directory = fresh()
        async with producing(plane):
            await taken(plane.manager.get_batch(2, 1))
            leased = await plane.manager.get_batch(2, 2)
            await asyncio.sleep(10)
            assert await plane.ledger() == {"issued": 8, "in_flight": 2, "buffered": 2, "leased": 2, "trained": 2}
            await plane.manager.save(directory, model_step, no_save_replay_buffer=prompts_only)
            await leased.lease.ack()
            assert (await plane.ledger())["trained"] == 4, "the run that was saved continues undisturbed"

        other = disaggregated(loop=after(1), interval=4)
        assert await other.manager.resume(directory) == model_step
        trained = 2 * model_step
        assert await other.ledger() == {"issued": 8, "buffered": 8 - trained, "trained": trained}
        there, under_way = ("init", "init") if prompts_only else ("completed", "aborted")
        expected = dict.fromkeys(range(trained, 6), there) | dict.fromkeys((6, 7), under_way)
        assert await held(other.buffer) == expected
        assert (await internals(other.buffer).position("math"))[0] == 8
        progress = other.manager.progress
        assert (progress.next_consumer_step, sum(progress.consumed.values())) == (model_step + 1, trained)
        assert progress.producer_future_step == (model_step + 1 if prompts_only else 4)
        assert other.manager.model_step == model_step

        await other.manager.continue_produce(model_step)
        async with producing(other):
            seen: list[int | None] = []
            for step in range(model_step + 1, 5):
                seen += ids((await taken(other.manager.get_batch(2, step))).groups)
        assert sorted(seen, key=str) == list(range(trained, 8)), "nothing is skipped, ids are kept"

    return test


@pytest.mark.parametrize("prompts_only", [False, True], ids=["full", "prompts"])
@pytest.mark.parametrize("model_step", [1, 2], ids=["before the lease", "with the lease"])
def test_a_checkpoint_in_the_middle_of_everything_is_exact(
    fresh: Callable[[], Path], model_step: int, prompts_only: bool
) -> None:
    half_way(fresh, model_step, prompts_only=prompts_only)()


def test_a_run_continues_with_the_same_mix(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        weights = {"a": 3, "b": 2, "c": 1}
        whole, parts, directory = colocated(weights), colocated(weights), fresh()
        for step in range(1, 9):
            expected = (await taken(whole.manager.produce_batch(4, step, model_step=step - 1))).task_batch_sizes
            if step > 1:
                await parts.manager.save(directory, step - 1)
                parts = colocated(weights)
                await parts.manager.resume(directory)
            assert (await taken(parts.manager.produce_batch(4, step, model_step=step - 1))).task_batch_sizes == expected

    test()


def test_a_colocated_run_continues_where_it_was(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        options: dict[str, Any] = {
            "make": AsyncProduceStrategy, "over_sample_threshold": 1.0, "max_staleness": 1, "loop": by_group(1, 2, 30),
        }  # fmt: skip
        plane = colocated({"a": 2, "b": 1}, **options)
        for step in (1, 2):
            await taken(plane.manager.produce_batch(3, step, model_step=step - 1))
        await plane.manager.save(directory, 2)
        before = {name: await held(plane.buffer, name) for name in "ab"}
        other = colocated({"a": 2, "b": 1}, **options)
        assert await other.manager.resume(directory) == 2
        assert {name: await held(other.buffer, name) for name in "ab"} == before
        assert await other.buffer.ledger() == await plane.buffer.ledger()
        with pytest.raises(InvalidInput, match="train step 2 was already acknowledged"):
            await taken(other.manager.produce_batch(3, 2, model_step=2))
        assert len((await taken(other.manager.produce_batch(3, 3, model_step=2))).groups) == 3

    test()


def test_in_the_block_a_batch_is_in_the_weights_that_were_just_made(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        plane = colocated()
        async with plane.manager.produce_batch(2, 1, model_step=0):
            await plane.manager.save(directory, 1)
        other = colocated()
        assert await other.manager.resume(directory) == 1
        assert await other.ledger() == {"issued": 2, "trained": 2}
        assert other.manager.next_train_step == 2

    test()


def test_prompts_only_are_drawn_again_first_and_owe_one_batch(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        plane = disaggregated(interval=4)
        async with producing(plane):
            for step in (1, 2):
                await taken(plane.manager.get_batch(2, step))
            await asyncio.sleep(5)
            assert await held(plane.buffer) == dict.fromkeys(range(4, 8), "completed")
            await plane.manager.save(directory, 2, no_save_replay_buffer=True)
        calls = Counted(after(1))
        other = disaggregated(loop=calls, interval=4)
        await other.manager.resume(directory)
        assert await held(other.buffer) == dict.fromkeys(range(4, 8), "init")
        numbers = other.manager.progress
        assert (numbers.next_consumer_step, numbers.producer_future_step) == (3, 3)
        assert (numbers.consumed, numbers.target, numbers.target_upto) == ({"math": 4}, {"math": 4}, 2)
        await other.manager.continue_produce(2)
        async with producing(other):
            await asyncio.sleep(1.5)
            assert calls.groups == [4, 5] or sorted(calls.groups) == [4, 5, 6, 7]
            assert sorted_ids((await taken(other.manager.get_batch(2, 3))).groups) == [4, 5]
            await asyncio.sleep(10)
            assert max(calls.groups) == 11, "then new ones, up to the bound"
        assert (await other.ledger())["issued"] == 12

    test()


async def test_a_checkpoint_without_responses_has_a_fraction_of_the_size(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)

    async def long(state: RolloutState) -> None:
        state.response_ids = chance.integers(0, 150_000, 1_000, dtype=np.int32)
        state.logprobs = -chance.random(1_000, dtype=np.float32)
        state.status = Status.COMPLETED

    prompts = [{"prompt": "word " * 200, "prompt_ids": chance.integers(0, 150_000, 200).tolist()} for _ in range(20)]
    plane = disaggregated(loop=long, members=8, prompts=prompts, interval=4)
    async with producing(plane, 5):
        await asyncio.wait_for(plane.buffer.wait_ready({"math": 20}), 30)
        await plane.manager.save(tmp_path / "full", 0)
        await plane.manager.save(tmp_path / "prompts", 0, no_save_replay_buffer=True)
    assert size(tmp_path / "prompts") < 0.05 * size(tmp_path / "full"), "every member had a copy of the prompt"
    other = disaggregated(members=8, prompts=prompts, interval=4)
    await other.manager.resume(tmp_path / "prompts")
    for group in await internals(other.buffer).redraw(20, "math"):
        record = prompts[group[0].group_id or 0]
        assert [list(state.prompt_ids or ()) for state in group] == [record["prompt_ids"]] * 8
        assert [list(state.tokens or ()) for state in group] == [record["prompt_ids"]] * 8, "as they were issued"
        assert {(state.response_ids, state.logprobs, state.reward) for state in group} == {(None, None, None)}


def test_a_manager_manifest_without_replay_buffer_saved_counts_as_saved(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        plane = disaggregated(interval=4)
        async with producing(plane):
            await taken(plane.manager.get_batch(2, 1))
            await asyncio.sleep(5)
            await plane.manager.save(directory, 1)
        edited(directory, lambda manifest: manifest.pop("replay_buffer_saved"))
        other = disaggregated(interval=4)
        await other.manager.resume(directory)
        assert set((await held(other.buffer)).values()) == {"completed"}
        assert (other.manager.progress.producer_future_step, other.manager.progress.target_upto) == (5, 4)

    test()


class Remembers(FunctionAgentLoop):
    """An agent loop that has something to remember."""

    def __init__(self) -> None:
        super().__init__(self.remember)
        self.answered = 0

    async def remember(self, state: RolloutState) -> None:
        self.answered += 1
        answer(state)

    def state_dict(self) -> dict[str, Any]:
        return {"answered": self.answered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.answered = state["answered"]


def test_the_state_of_agent_loops_is_saved_and_restored(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        plane = colocated({"a": 1, "b": 1}, loop={"a": Remembers(), "b": FunctionAgentLoop(at_once)})
        await taken(plane.manager.produce_batch(4, 1, model_step=0))
        await plane.manager.save(directory, 1)
        loop = Remembers()
        other = colocated({"a": 1, "b": 1}, loop={"a": loop, "b": Remembers()})
        await other.manager.resume(directory)
        assert loop.answered == 4
        assert other.loops["b"].answered == 0  # type: ignore[attr-defined]
        third = colocated({"c": 1}, loop=Remembers())
        await third.manager.resume(directory)
        assert third.loops["c"].answered == 0  # type: ignore[attr-defined]

    test()


# --- into other storages --------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["memory", "sqlite"])
@pytest.mark.parametrize("source", ["memory", "sqlite"])
async def test_a_plane_continues_in_another_storage(tmp_path: Path, source: str, target: str) -> None:
    def storage(kind: str, name: str) -> Storage:
        return MemoryStorage() if kind == "memory" else SQLiteStorage(tmp_path / f"{name}.db")

    plane = disaggregated({"a": 2, "b": 1}, buffer=ReplayBuffer(storage=storage(source, "source")), interval=3)
    trained: dict[str, list[int | None]] = {"a": [], "b": []}
    async with producing(plane, 3):
        for step in (1, 2):
            batch = await taken(plane.manager.get_batch(3, step))
            for name, groups in batch.groups_by_task.items():
                trained[name] += ids(groups)
        async with plane.manager.get_batch(3, 3):
            await plane.manager.save(tmp_path / "checkpoint", 2)
    await plane.buffer.close()
    other = disaggregated({"a": 2, "b": 1}, buffer=ReplayBuffer(storage=storage(target, "target")), interval=3)
    assert await other.manager.resume(tmp_path / "checkpoint") == 2
    await other.manager.continue_produce(2)
    async with producing(other, 3):
        for step in (3, 4, 5):
            batch = await taken(other.manager.get_batch(3, step))
            for name, groups in batch.groups_by_task.items():
                trained[name] += ids(groups)
    for name, count in (("a", 10), ("b", 5)):
        assert sorted(trained[name], key=lambda number: number or 0) == list(range(count))
        assert (await other.ledger(name))["trained"] == count
    await other.buffer.close()


@pytest.mark.parametrize("prompts_only", [False, True], ids=["full", "prompts"])
async def test_the_same_store_is_rewound_and_groups_trained_since_are_handed_out_again(
    tmp_path: Path, prompts_only: bool
) -> None:
    def plane() -> Disaggregated:
        return disaggregated(buffer=ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")), interval=4)

    first = plane()
    trained: dict[int, list[int | None]] = {}
    async with producing(first):
        for step in (1, 2, 3, 4):
            trained[step] = ids((await taken(first.manager.get_batch(2, step))).groups)
            if step == 2:
                await first.manager.save(tmp_path / "checkpoint", 2, no_save_replay_buffer=prompts_only)
    await first.buffer.close()

    second = plane()
    assert await second.manager.resume(tmp_path / "checkpoint") == 2
    assert (await second.ledger())["trained"] == 4
    assert second.manager.next_train_step == 3
    await second.manager.continue_produce(2)
    again: dict[int, list[int | None]] = {}
    async with producing(second):
        for step in (3, 4, 5):
            again[step] = ids((await taken(second.manager.get_batch(2, step))).groups)
    assert again[3] + again[4] == trained[3] + trained[4]
    everything = trained[1] + trained[2] + again[3] + again[4] + again[5]
    assert len(set(everything)) == len(everything) == (await second.ledger())["trained"]
    await second.buffer.close()


def test_each_kind_of_manager_continues_from_the_others_checkpoint(fresh: Callable[[], Path]) -> None:
    """The reference cannot."""

    @simulated
    async def test() -> None:
        directory = fresh()
        plane = colocated({"a": 2, "b": 1})
        await taken(plane.manager.produce_batch(3, 1, model_step=0))
        await plane.manager.save(directory, 1)
        other = disaggregated({"a": 2, "b": 1})
        assert await other.manager.resume(directory) == 1
        await other.manager.continue_produce(1)
        async with producing(other, 3):
            assert len((await taken(other.manager.get_batch(3, 2))).groups) == 3
            await other.manager.save(directory, 2)
        third = colocated({"a": 2, "b": 1})
        assert await third.manager.resume(directory) == 2
        batch = await taken(third.manager.produce_batch(3, 3, model_step=2))
        assert batch.task_batch_sizes == {"a": 2, "b": 1}
        assert await third.ledger("a") == {"issued": 6, "trained": 6}

    test()


def test_a_checkpoint_of_a_buffer_alone_continues_at_the_step_after_its_weights(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        buffer = ReplayBuffer()
        await buffer.put(make_group(), "math", model_step=6)
        await buffer.save(directory, model_step=6)
        plane = disaggregated()
        assert await plane.manager.resume(directory) == 6
        assert (plane.manager.next_train_step, plane.manager.bound) == (7, 7)

    test()


# --- other tasks, other settings ------------------------------------------------------------------------


def test_tasks_may_be_added_and_removed(fresh: Callable[[], Path], caplog: pytest.LogCaptureFixture) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        plane = disaggregated({"math": 1, "code": 1, "chess": 1}, interval=4)
        async with producing(plane, 3):
            await taken(plane.manager.get_batch(3, 1))
            await asyncio.sleep(5)
            kept = {name: await held(plane.buffer, name) for name in ("math", "code", "chess")}
            await plane.manager.save(directory, 1)
        caplog.clear()
        other = disaggregated({"math": 1, "go": 3}, interval=4)
        with caplog.at_level(logging.WARNING, "forebay"):
            await other.manager.resume(directory)
        assert "tasks_kept_aside tasks=['chess', 'code']" in caplog.text
        assert {name: await held(other.buffer, name) for name in kept} == kept
        await other.manager.continue_produce(1)
        async with producing(other, 4):
            batch = await taken(other.manager.get_batch(4, 2))
            assert batch.task_batch_sizes == {"math": 1, "go": 3}
            await asyncio.sleep(5)
        assert {name: await held(other.buffer, name) for name in ("code", "chess")} == {
            name: kept[name] for name in ("code", "chess")
        }
        await other.manager.save(directory, 2)
        back = disaggregated({"math": 1, "code": 1, "chess": 1, "go": 1}, interval=4)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "forebay"):
            await back.manager.resume(directory)
        assert caplog.text == ""
        assert await held(back.buffer, "code") == kept["code"]

    test()


def test_another_batch_size_is_accepted_after_a_resume(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        plane = disaggregated(interval=4)
        async with producing(plane):
            await taken(plane.manager.get_batch(2, 1))
            await asyncio.sleep(5)
            await plane.manager.save(directory, 1)
        other = disaggregated(interval=4)
        await other.manager.resume(directory)
        await other.manager.continue_produce(1)
        async with producing(other, 5):
            batch = await taken(other.manager.get_batch(5, 2))
            assert len(batch.groups) == 5
            assert {2, 3} < set(ids(batch.groups)), "the oldest first"

    test()


def test_a_stricter_limit_than_before_holds_from_the_first_batch_on(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        plane = disaggregated(max_staleness=7)
        async with producing(plane):
            await asyncio.sleep(5)
            await taken(plane.manager.get_batch(2, 1))
            await plane.manager.save(directory, 5)
        other = disaggregated(loop=after(1))
        await other.manager.resume(directory)
        async with producing(other):
            getting = asyncio.ensure_future(other.manager.get_batch(2, 6).__aenter__())
            await asyncio.sleep(5)
            await other.manager.continue_produce(5)
            batch = await getting
            assert {spans for group in batch.groups for state in group for spans in state.version_spans} == {(5, 3)}

    test()


# --- the life of it -------------------------------------------------------------------------------------


def test_nothing_is_generated_after_a_resume_before_the_weights_are_there(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        plane = disaggregated(interval=2)
        async with producing(plane):
            await asyncio.sleep(5)
            await plane.manager.save(directory, 0)
        calls = Counted(at_once)
        other = disaggregated(loop=calls, interval=2)
        await other.manager.resume(directory)
        assert other.manager.producer_state is ProducerState.PAUSED
        async with producing(other):
            await asyncio.sleep(100)
            assert calls.samples == []
            for step in (1, 2):
                assert len((await taken(other.manager.get_batch(2, step))).groups) == 2, "what is there is handed out"
            assert calls.samples == []
            await other.manager.continue_produce(2)
            await taken(other.manager.get_batch(2, 3))

    test()


def test_a_resume_while_the_producer_runs_is_refused_and_in_a_pause_it_works(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        plane = disaggregated()
        async with producing(plane):
            await taken(plane.manager.get_batch(2, 1))
            await plane.manager.save(directory, 1)
        other = disaggregated(loop=after(1))
        await other.manager.pause_produce()
        async with producing(other):
            await asyncio.sleep(1)
            await other.manager.continue_produce(0)
            with pytest.raises(InvalidInput, match="produce_loop is running; resume before it is started"):
                await other.manager.resume(directory)
        third = disaggregated()
        await third.manager.pause_produce()
        async with producing(third):
            assert await third.manager.resume(directory) == 1
            await third.manager.continue_produce(1)
            assert len((await taken(third.manager.get_batch(2, 2))).groups) == 2

    test()


def test_a_resume_while_a_batch_is_produced_is_refused(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        await colocated().manager.save(directory, 0)
        plane = colocated(loop=after(5))
        going = asyncio.ensure_future(plane.manager.produce_batch(1, 1, model_step=0).__aenter__())
        await asyncio.sleep(1)
        with pytest.raises(InvalidInput, match="a batch is being produced; resume before that"):
            await plane.manager.resume(directory)
        await going

    test()


def test_a_plane_can_be_saved_after_its_shutdown(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        plane = disaggregated(loop=after(1))
        async with producing(plane):
            await taken(plane.manager.get_batch(2, 1))
        await plane.manager.save(directory, 1)
        assert await disaggregated().manager.resume(directory) == 1

    test()


def test_weights_before_the_last_acknowledged_step_are_refused(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        plane = colocated()
        for step in (1, 2):
            await taken(plane.manager.produce_batch(2, step, model_step=step - 1))
        with pytest.raises(InvalidInput, match="weights of step 1, but the batches up to step 2 were acknowledged"):
            await plane.manager.save(directory, 1)
        assert not directory.exists()
        with pytest.raises(InvalidInput, match="model_step is -1"):
            await plane.manager.save(directory, -1)
        await plane.manager.save(directory, 2)

    test()


def saved_at(number: int | None, directory: Path, *, prompts_only: bool, seed: int) -> tuple[int, bool]:
    """Save a run at the given event and continue it in another run; returns the events, and whether it was saved."""
    events, saved = 0, False

    async def main() -> None:
        nonlocal events, saved
        plane = disaggregated({"a": 2, "b": 1}, loop=by_group(1, 2, 3), over_sample_threshold=0.5, interval=2)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        saving: list[asyncio.Task[None]] = []
        acknowledged = 0

        def save() -> None:
            work = plane.manager.save(directory, acknowledged, no_save_replay_buffer=prompts_only)
            saving.append(loop.create_task(work))

        if number is not None:
            loop.at_event(number, save)
        trained: dict[int, list[tuple[str, int]]] = {}
        async with producing(plane, 3):
            for step in range(1, 5):
                async with plane.manager.get_batch(3, step) as batch:
                    await asyncio.sleep(0.5)
                    acknowledged = step  # the weights are there, the acknowledgement is not
                trained[step] = named(batch.groups_by_task)
                if step % 2 == 0:
                    await plane.manager.pause_produce()
                    await plane.manager.continue_produce(step)
            events = loop.events
            if not saving:
                return
            (error,) = await asyncio.gather(*saving, return_exceptions=True)
        if error is not None:
            assert "were acknowledged" in str(error)  # a step ended between the call and the snapshot
            return
        saved = True
        await go_on(directory, trained)

    run(main, seed=seed, max_events=100_000)
    return events, saved


async def go_on(directory: Path, trained: dict[int, list[tuple[str, int]]]) -> None:
    other = disaggregated({"a": 2, "b": 1}, loop=after(1), interval=2)
    model_step = await other.manager.resume(directory)
    check_ledger(await other.buffer.ledger())
    assert other.manager.next_train_step == model_step + 1
    everything = [group for step in trained for group in trained[step] if step <= model_step]
    assert sum(line["trained"] for line in (await other.buffer.ledger()).values()) == len(everything)
    await other.manager.continue_produce(model_step)
    async with producing(other, 3):
        for step in (model_step + 1, model_step + 2):
            everything += named((await taken(other.manager.get_batch(3, step))).groups_by_task)
    assert len(set(everything)) == len(everything), "a group was trained twice"
    for name, line in (await other.buffer.ledger()).items():
        mine = [group for task, group in everything if task == name]
        there = await held(other.buffer, name)
        assert not set(mine) & set(there)
        ended = line["failed"] + line["filtered"] + line["discarded"]
        assert len(mine) + len(there) + ended == (await internals(other.buffer).position(name))[0], "a group is missing"


def named(groups: Mapping[str, list[list[RolloutState]]]) -> list[tuple[str, int]]:
    return [(name, group[0].group_id or 0) for name in groups for group in groups[name]]


@pytest.mark.parametrize("prompts_only", [False, True], ids=["full", "prompts"])
@pytest.mark.parametrize("stride", [31, pytest.param(9, marks=pytest.mark.slow)])
def test_g04_a_checkpoint_begun_at_any_point_is_exact(tmp_path: Path, stride: int, prompts_only: bool) -> None:
    events, _ = saved_at(None, tmp_path, prompts_only=prompts_only, seed=3)
    numbers = range(3, events - 5, stride)
    refused = 0
    for number in numbers:
        try:
            _, saved = saved_at(number, tmp_path / str(number), prompts_only=prompts_only, seed=3)
            refused += not saved
        except BaseException as error:
            raise AssertionError(f"saved at event {number}: {error!r}") from error
    assert refused < len(numbers) / 10


def test_a_resume_does_not_skip_a_step_acknowledged_between_the_call_and_the_snapshot(
    fresh: Callable[[], Path],
) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        plane = colocated()
        await taken(plane.manager.produce_batch(2, 1, model_step=0))
        batch = await plane.manager.produce_batch(2, 2, model_step=1)
        ready = plane.buffer._session.ready

        async def slowly() -> Any:
            plane.buffer._session.ready = ready  # type: ignore[method-assign]
            await asyncio.sleep(10)
            return await ready()

        plane.buffer._session.ready = slowly  # type: ignore[method-assign]
        saving = asyncio.create_task(plane.manager.save(directory, 1))
        await asyncio.sleep(1)  # its first look is behind it
        await batch.lease.ack()
        with pytest.raises(InvalidInput, match="up to step 2 were acknowledged: resuming from it would skip them"):
            await saving
        assert not (directory / "manifest.json").exists()

    test()


# --- bad input ------------------------------------------------------------------------------------------


async def untouched(plane: Plane[Any]) -> None:
    """A plane that a failed resume left as it was: the next one works."""
    assert not any(line["issued"] for line in (await plane.buffer.ledger()).values())
    assert plane.manager.progress.next_consumer_step == 1
    assert not plane.manager.progress.begun


async def a_checkpoint(directory: Path) -> None:
    plane = colocated()
    async with plane.manager.produce_batch(2, 1, model_step=0):
        await plane.manager.save(directory, 0)


def damage_the_records(directory: Path) -> None:
    (file,) = directory.glob("*.fbr")
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)


def cut_the_records(directory: Path) -> None:
    (file,) = directory.glob("*.fbr")
    file.write_bytes(file.read_bytes()[:-10])


def alter_the_manifest(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"next_consumer_step": 1', '"next_consumer_step": 9'))


def make_it_newer(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"version":2', '"version":3'))


def make_it_foreign(directory: Path) -> None:
    (directory / "manifest.json").write_text('{"name": "my web app", "icons": []}')


def damage_the_progress(directory: Path) -> None:
    edited(directory, lambda manifest: manifest["extra"]["manager"]["progress"].update(next_consumer_step=-3))


def lose_the_progress(directory: Path) -> None:
    edited(directory, lambda manifest: manifest["extra"]["manager"].pop("progress"))


def break_the_manager(directory: Path) -> None:
    edited(directory, lambda manifest: manifest["extra"].update(manager=["not", "ours"]))


def break_the_loops(directory: Path) -> None:
    edited(directory, lambda manifest: manifest["extra"]["manager"].update(agent_loops=[1]))


def lose_the_weights(directory: Path) -> None:
    edited(directory, lambda manifest: manifest.update(model_step=None))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_the_records, "altered"),
        (cut_the_records, "bytes; its manifest says"),
        (alter_the_manifest, "does not match its checksum"),
        (make_it_newer, "use a newer one"),
        (make_it_foreign, "is not the manifest of a checkpoint"),
        (damage_the_progress, "the progress in a checkpoint cannot be read"),
        (lose_the_progress, "the progress in a checkpoint cannot be read"),
        (break_the_manager, "the state of the manager in the checkpoint at .* is damaged"),
        (break_the_loops, "the state of the manager in the checkpoint at .* is damaged"),
        (lose_the_weights, "does not say which weights it goes with"),
    ],
)
@pytest.mark.parametrize("make", [colocated, disaggregated])
def test_an_invalid_checkpoint_is_refused_and_changes_nothing(
    tmp_path: Path, damage: Callable[[Path], None], says: str, make: Callable[..., Plane[Any]]
) -> None:
    async def main() -> None:
        await a_checkpoint(tmp_path / "checkpoint")
        await a_checkpoint(tmp_path / "good")
        damage(tmp_path / "checkpoint")
        plane = make()
        with pytest.raises(DamagedData, match=says):
            await plane.manager.resume(tmp_path / "checkpoint")
        await untouched(plane)
        assert await plane.manager.resume(tmp_path / "good") == 0

    run(main)


@simulated
async def test_a_directory_without_a_checkpoint_is_refused() -> None:
    plane = colocated()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        await plane.manager.resume("/nowhere/at/all")
    await untouched(plane)


def test_a_file_is_no_checkpoint(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        file = fresh()
        file.write_text("x")
        plane = colocated()
        with pytest.raises(InvalidInput, match="is a file"):
            await plane.manager.save(file, 0)
        with pytest.raises(InvalidInput, match="is a file"):
            await plane.manager.save(file / "below", 0)
        with pytest.raises(InvalidInput, match="is a file"):
            await plane.manager.resume(file)
        assert file.read_text() == "x"

    test()


def test_a_manifest_of_another_program_is_not_overwritten(fresh: Callable[[], Path]) -> None:
    @simulated
    async def test() -> None:
        directory = fresh()
        directory.mkdir()
        make_it_foreign(directory)
        with pytest.raises(InvalidInput, match="would overwrite it"):
            await colocated().manager.save(directory, 0)

    test()


@pytest.mark.parametrize("make", [colocated, disaggregated])
def test_a_buffer_that_is_not_empty_is_refused(tmp_path: Path, make: Callable[..., Plane[Any]]) -> None:
    async def main() -> None:
        await a_checkpoint(tmp_path / "checkpoint")
        plane = make()
        await plane.buffer.put(make_group(), "math")
        with pytest.raises(InvalidInput, match="resume into an empty one"):
            await plane.manager.resume(tmp_path / "checkpoint")
        assert await plane.ledger() == {"issued": 1, "buffered": 1}
        assert plane.manager.next_train_step == 1

    run(main)


class Unsaveable(FunctionAgentLoop):
    def __init__(self, state: Any) -> None:
        super().__init__(at_once)
        self.state = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


@pytest.mark.parametrize("state", [object(), {"rate": float("nan")}, RuntimeError("no state now")])
def test_the_old_checkpoint_stays_when_saving_fails_in_the_middle(tmp_path: Path, state: Any) -> None:
    async def main() -> None:
        loop = Unsaveable({"fine": 1})
        plane = colocated(loop=loop)
        await taken(plane.manager.produce_batch(2, 1, model_step=0))
        await plane.manager.save(tmp_path / "checkpoint", 1)
        before = {file.name: file.read_bytes() for file in (tmp_path / "checkpoint").iterdir()}
        loop.state = state
        await taken(plane.manager.produce_batch(2, 2, model_step=1))
        with pytest.raises((InvalidInput, RuntimeError)):
            await plane.manager.save(tmp_path / "checkpoint", 2)
        assert {file.name: file.read_bytes() for file in (tmp_path / "checkpoint").iterdir()} == before
        assert await colocated().manager.resume(tmp_path / "checkpoint") == 1
        loop.state = {"fine": 2}
        await plane.manager.save(tmp_path / "checkpoint", 2)
        with open_checkpoint(tmp_path / "checkpoint") as checkpoint:
            assert checkpoint.manifest.extra["manager"]["agent_loops"] == {"math": {"fine": 2}}

    run(main)


def test_a_save_that_is_cancelled_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        plane = disaggregated(loop=never)
        async with producing(plane):
            await asyncio.sleep(1)
            await plane.manager.save(tmp_path / "checkpoint", 0)
            for waited in range(1, 30):
                saving = asyncio.ensure_future(plane.manager.save(tmp_path / "checkpoint", 0))
                for _ in range(waited):
                    await asyncio.sleep(0)
                saving.cancel()
                await asyncio.wait([saving])
                with open_checkpoint(tmp_path / "checkpoint") as checkpoint:
                    checkpoint.verify()
                    assert checkpoint.manifest.model_step == 0

    run(main)


def test_a_process_stopped_at_any_point_of_a_save_locks_nobody_out(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    window: list[int] = []

    async def main(directory: Path, number: int | None) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        plane = colocated()
        async with plane.manager.produce_batch(3, 1, model_step=0):
            if number is not None:
                loop.at_event(number, kill)
            window[:] = [loop.events]
            await plane.manager.save(directory, 0)
            window.append(loop.events)

    run(lambda: main(tmp_path / "whole", None))
    first, last = window
    for number in range(first + 1, last + 1):
        directory = tmp_path / str(number)
        with pytest.raises(Killed):
            run(lambda directory=directory, number=number: main(directory, number))  # type: ignore[misc]
        run(lambda directory=directory: main(directory, None))  # type: ignore[misc]
