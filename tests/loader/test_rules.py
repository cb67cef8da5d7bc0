"""The rules of a loader, in virtual time and in both modes: when batches are acknowledged, what a failure leaves."""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from forebay import (
    AgentLoop,
    AsyncRolloutLoader,
    BufferClosed,
    ChangedDataset,
    EngineRestarted,
    GroupEnd,
    InvalidConfig,
    InvalidDataset,
    InvalidInput,
    RolloutState,
    Status,
    StepProgress,
    Task,
    TooManyFailures,
    WaitTimeout,
    WeightsTooOld,
)
from tests.loader.plane import Engine, ids, loader_of, prompts, simulated, task

MODES = pytest.mark.parametrize("mode", ["in_turns", "ahead"])


async def counts(loader: AsyncRolloutLoader, name: str = "math") -> dict[str, int]:
    ledger = (await loader.ledger())[name]
    return {key: groups for key, groups in ledger.items() if groups}


# --- acknowledging --------------------------------------------------------------------------------------


@MODES
@simulated
async def test_asking_for_the_next_batch_acknowledges_the_one_before(mode: Any) -> None:
    async with loader_of(Engine(), mode=mode, sync_weights_interval=10) as loader:
        steps = []
        async for batch in loader.batches(1, 3):
            assert (await counts(loader))["leased"] == 4
            assert (await counts(loader)).get("trained", 0) == 4 * (batch.step - 1)
            steps.append(batch.step)
        assert steps == [1, 2, 3]
        assert (await counts(loader))["trained"] == 12, "the request that ends the loop acknowledges, too"
        assert loader.next_step == 4


@MODES
@pytest.mark.parametrize("how", ["break", "raise"])
@simulated
async def test_leaving_the_loop_acknowledges_nothing_and_the_next_one_gets_the_batch_again(mode: Any, how: str) -> None:
    async with loader_of(Engine(), mode=mode, sync_weights_interval=10) as loader:
        try:
            async for batch in loader.batches(1, 3):
                left = batch
                if how == "break":
                    break
                raise RuntimeError
        except RuntimeError:
            pass
        assert left.open
        await asyncio.sleep(100)
        assert (await counts(loader))["leased"] == 4
        async for batch in loader.batches(1, 1):
            assert not left.open
            assert ids(batch) == ids(left)
        assert (await counts(loader))["trained"] == 4


@MODES
async def test_closing_gives_open_batches_back_and_returns_what_is_in_flight(mode: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    async with loader_of(Engine(0), mode=mode, storage=url, max_staleness=1) as loader:
        async for _batch in loader.batches(1, 3):
            break
        assert (await counts(loader))["leased"] == 4
    async with loader_of(Engine(0), mode=mode, storage=url, max_staleness=1) as again:
        found = await counts(again)
        assert found.get("leased", 0) == found.get("in_flight", 0) == found.get("trained", 0) == 0
        assert found["buffered"] == found["issued"]


@MODES
@simulated
async def test_an_acknowledged_batch_stays_so_when_the_loop_is_left(mode: Any) -> None:
    async with loader_of(Engine(), mode=mode, max_staleness=1) as loader:
        async for batch in loader.batches(1, 3):
            await batch.ack()
            break
        async for batch in loader.batches(2, 2):
            assert 0 not in ids(batch)
        assert (await counts(loader))["trained"] == 8


@simulated
async def test_an_iterator_ends_when_batches_is_called_again() -> None:
    async with loader_of(Engine()) as loader:
        first = loader.batches(1, 3)
        await anext(first)
        await anext(loader.batches(1, 3))
        with pytest.raises(InvalidInput, match=r"batches\(\) was called again"):
            await anext(first)


@simulated
async def test_a_step_that_was_acknowledged_is_refused() -> None:
    async with loader_of(Engine()) as loader:
        async for _batch in loader.batches(1, 1):
            pass
        await loader.update_weights(lambda: None)
        with pytest.raises(InvalidInput, match="train step 1 was already acknowledged; the next one is 2"):
            await anext(loader.batches(1))
        assert (await anext(loader.batches())).step == 2


# --- leasing ahead --------------------------------------------------------------------------------------


@simulated
async def test_leasing_ahead_acknowledges_only_what_is_acknowledged() -> None:
    async with loader_of(Engine(), max_staleness=3) as loader:
        batches = loader.batches(1, 3, ahead=2)
        first, second = await anext(batches), await anext(batches)
        assert (await counts(loader))["leased"] == 8
        with pytest.raises(InvalidInput, match=r"2 batches are leased.*acknowledge that of step 1"):
            await anext(batches)
        with pytest.raises(InvalidInput, match="step 2 is acknowledged, but the batch of step 1 is still leased"):
            await second.ack()
        with pytest.raises(InvalidInput, match="steps 1, 2 are leased; say which step"):
            await loader.update_weights(lambda: None)
        await loader.update_weights(lambda: None, 1)
        assert not first.open
        assert second.open
        third = await anext(batches)
        await second.ack()
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
        assert third.open
        assert (await counts(loader))["trained"] == 8, "the end of the loop does not acknowledge"


@MODES
@simulated
async def test_a_batch_that_was_given_back_is_asked_for_again(mode: Any) -> None:
    async with loader_of(Engine(), mode=mode, max_staleness=1) as loader:
        seen = []
        async for batch in loader.batches(1, 2):
            seen.append((batch.step, ids(batch)))
            if len(seen) == 1:
                await batch.nack()
        assert seen == [(1, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (2, [4, 5, 6, 7])]


# --- weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "path"), [("push", None), (lambda: None, "weights"), (object(), "weights"), (lambda a, b: 0, None)]
)
@simulated
async def test_what_cannot_load_weights_is_refused_before_anything_happens(load: Any, path: str | None) -> None:
    async with loader_of(Engine()) as loader:
        batch = await anext(loader.batches(1))
        with pytest.raises(InvalidInput, match=r"expected a function of the step, or an Engine|more than one argument"):
            await loader.update_weights(load, path=path)
        assert batch.open


@MODES
@simulated
async def test_two_updates_at_once_take_turns(mode: Any) -> None:
    engine = Engine()
    running: list[int] = []

    async def load(step: int) -> None:
        assert not running
        running.append(step)
        await asyncio.sleep(50)
        running.remove(step)
        engine.load(step)

    async with loader_of(engine, mode=mode, max_staleness=1) as loader:
        await anext(loader.batches(1))
        await asyncio.gather(*[loader.update_weights(load, 1) for _ in range(3)])
        assert (await anext(loader.batches(2))).groups[0][0].version_spans == ((1, 1),)


@simulated
async def test_asking_while_weights_are_loaded_waits_for_them() -> None:
    engine = Engine()
    async with loader_of(engine, max_staleness=3) as loader:
        batches = loader.batches(1, 9, ahead=2)
        await anext(batches)

        async def load(step: int) -> None:
            await asyncio.sleep(50)
            engine.load(step)

        updating = asyncio.ensure_future(loader.update_weights(load, 1))
        await asyncio.sleep(10)
        asking = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(10)
        assert not asking.done()
        await updating
        assert (await asking).step == 2


@MODES
@simulated
async def test_weights_are_loaded_while_nothing_generates_and_acknowledge_the_batch(mode: Any) -> None:
    engine = Engine()
    async with loader_of(engine, mode=mode, max_staleness=1) as loader:
        async for batch in loader.batches(1, 5):
            for state in (state for group in batch.groups for state in group):
                assert state.response_ids == [state.version_spans[0][0]]
            await loader.update_weights(engine.load)
            assert not batch.open
            assert (loader.model_step, engine.weights) == (batch.step, batch.step)


@MODES
@simulated
async def test_a_load_that_raises_leaves_it_paused_until_it_is_repeated(mode: Any) -> None:
    engine = Engine()
    async with loader_of(engine, mode=mode, max_staleness=1) as loader:
        async for batch in loader.batches(1, 2):
            if batch.step == 1:

                async def fail(step: int) -> None:
                    raise OSError("no route")

                with pytest.raises(OSError, match="no route"):
                    await loader.update_weights(fail)
                calls = engine.calls
                await asyncio.sleep(100)
                assert (engine.calls, engine.running) == (calls, 0), "it generates although the load failed"
                with pytest.raises(InvalidInput, match=r"weights of step 1 were not loaded.*update_weights\(load, 1\)"):
                    await anext(loader.batches(2))
                await loader.update_weights(engine.load)
            break
        async for _batch in loader.batches(2, 4):
            await loader.update_weights(engine.load)
        assert (await counts(loader))["trained"] == 16


@MODES
@simulated
async def test_before_the_first_batch_update_weights_needs_the_step(mode: Any) -> None:
    engine = Engine()
    async with loader_of(engine, mode=mode) as loader:
        with pytest.raises(InvalidInput, match="say which step the weights are of"):
            await loader.update_weights(engine.load)
        await loader.update_weights(engine.load, 100)
        batch = await anext(loader.batches(101))
        assert (batch.step, batch.groups[0][0].response_ids) == (101, [100])
        await loader.update_weights(engine.load)
        with pytest.raises(InvalidInput, match="update_weights to step 5, but the weights of step 101"):
            await loader.update_weights(engine.load, 5)


@MODES
@simulated
async def test_weights_that_are_too_old_are_said_with_the_step_and_updating_them_continues(mode: Any) -> None:
    engine = Engine()
    async with loader_of(engine, mode=mode, max_staleness=1) as loader:
        with pytest.raises(WeightsTooOld) as raised:
            async for _batch in loader.batches(1, 5):
                pass
        assert raised.value.step == 3
        assert (await counts(loader))["trained"] == 8
        await loader.update_weights(engine.load)
        assert engine.weights == 2
        steps = [batch.step async for batch in loader.batches(raised.value.step, 4)]
        assert steps == [3, 4]


@simulated
async def test_hooks_are_called_around_the_two_phases() -> None:
    engine, calls = Engine(), []

    async def wake() -> None:
        calls.append(f"wake {engine.running}")

    def sleep() -> None:
        calls.append(f"sleep {engine.running}")

    async with loader_of(engine, on_generate=wake, on_train=sleep) as loader:
        async for batch in loader.batches(1, 2):
            calls.append(f"train {batch.step}")
            await loader.update_weights(engine.load)
        assert calls == ["wake 0", "sleep 0", "train 1", "wake 0", "sleep 0", "train 2"]
        calls.clear()
        await loader.evaluate(task(engine, "held_out", prompts=prompts(2)))
    assert calls == ["wake 0", "sleep 0"]


# --- failures -------------------------------------------------------------------------------------------


@simulated
async def test_the_failure_of_the_producer_surfaces_with_its_cause_and_the_next_call_starts_again() -> None:
    engine = Engine()
    broken = True

    async def generate(state: RolloutState) -> None:
        if broken:
            raise ValueError("bad prompt")
        await engine(state)

    async with loader_of(generate, max_staleness=1) as loader:
        with pytest.raises(TooManyFailures, match="bad prompt"):
            await anext(loader.batches(1))
        broken = False
        assert len((await anext(loader.batches(1))).groups) == 4


class Restarting(AgentLoop):
    """Says that its engine restarted, until it is told of weights again."""

    def __init__(self) -> None:
        self.gone = False

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        await asyncio.sleep(1)
        if self.gone:
            raise EngineRestarted("the server restarted; push the weights again")
        state.response_ids, state.status = [1], Status.COMPLETED
        return state


@MODES
@simulated
async def test_a_restarted_engine_is_said_and_pushing_the_weights_continues(mode: Any) -> None:
    loop = Restarting()
    async with loader_of(loop, mode=mode, max_staleness=1) as loader:
        await anext(loader.batches(1))
        loop.gone = True
        with pytest.raises(EngineRestarted):
            async for _batch in loader.batches(1):
                pass
        step = loader.next_step

        def push() -> None:
            loop.gone = False

        await loader.update_weights(push)
        assert (await anext(loader.batches(step))).step == step


@MODES
@simulated
async def test_a_wait_that_is_too_long_explains_itself_and_loses_nothing(mode: Any) -> None:
    engine = Engine(seconds=50)
    async with loader_of(engine, mode=mode, max_staleness=1, timeout_s=30) as loader:
        with pytest.raises(WaitTimeout, match="step 1") as late:
            await anext(loader.batches(1))
        assert "in flight" in late.value.explanation
        batch = await anext(loader.batches(1, timeout_s=500))
        assert ids(batch) == [0, 1, 2, 3]


@MODES
@simulated
async def test_stop_ends_a_wait_at_once_and_a_loop_after_its_batch(mode: Any) -> None:
    async with loader_of(Engine(seconds=50), mode=mode, max_staleness=1) as loader:
        began = asyncio.get_running_loop().time()
        asyncio.get_running_loop().call_later(10, loader.stop)
        assert [batch async for batch in loader.batches(1, 5)] == []
        assert asyncio.get_running_loop().time() - began < 20
        assert (await counts(loader)).get("leased", 0) == 0
    async with loader_of(Engine(), mode=mode, max_staleness=1) as loader:
        steps = []
        async for batch in loader.batches(1, 5):
            steps.append(batch.step)
            loader.stop()
        assert (steps, (await counts(loader))["trained"]) == ([1], 4)


@MODES
@simulated
async def test_a_cancelled_wait_leaves_nothing_leased(mode: Any) -> None:
    async with loader_of(Engine(seconds=50), mode=mode, max_staleness=1) as loader:
        waiting = asyncio.ensure_future(anext(loader.batches(1)))
        await asyncio.sleep(10)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await counts(loader)).get("leased", 0) == 0
        assert ids(await anext(loader.batches(1))) == [0, 1, 2, 3]


@simulated
async def test_a_closed_loader_is_refused() -> None:
    loader = loader_of(Engine())
    async with loader:
        batches = loader.batches(1)
        await anext(batches)
    for call in (lambda: anext(batches), lambda: loader.update_weights(lambda: None), lambda: loader.evaluate("math")):
        with pytest.raises(BufferClosed, match="closed"):
            await call()
    await loader.close()


# --- the end of data ------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("drop_last", [False, True])
@simulated
async def test_the_loop_ends_with_the_data(mode: Any, drop_last: bool) -> None:
    engine = Engine()
    chosen = task(engine, prompts=prompts(5), shuffle=True)
    async with loader_of(engine, tasks=chosen, mode=mode, epochs=2, drop_last=drop_last, max_staleness=1) as loader:
        sizes, seen = [], []
        async for batch in loader.batches():
            sizes.append(len(batch.groups))
            seen += [group[0].extra_fields["number"] for group in batch.groups]
            await loader.update_weights(engine.load)
        assert sizes == ([4, 4] if drop_last else [4, 4, 2])
        if not drop_last:
            assert sorted(seen) == sorted([*range(5)] * 2)
        assert (await counts(loader))["issued"] == 10
        assert [batch async for batch in loader.batches()] == []


@MODES
@simulated
async def test_the_end_of_data_comes_before_weights_that_are_too_old(mode: Any) -> None:
    engine = Engine()
    chosen = task(engine, prompts=prompts(8))
    async with loader_of(engine, tasks=chosen, mode=mode, epochs=1, max_staleness=1) as loader:
        assert [len(batch.groups) async for batch in loader.batches()] == [4, 4]


@MODES
@simulated
async def test_tasks_that_end_at_different_times_leave_their_seats_to_the_others(mode: Any) -> None:
    engine = Engine()
    tasks = [task(engine, "long", prompts=prompts(9)), task(engine, "short", prompts=prompts(3))]
    async with loader_of(engine, tasks=tasks, mode=mode, epochs=1, max_staleness=1) as loader:
        sizes = []
        async for batch in loader.batches():
            sizes.append({name: len(groups) for name, groups in batch.groups_by_task.items() if groups})
            await loader.update_weights(engine.load)
    assert sum(size.get("long", 0) for size in sizes) == 9
    assert sum(size.get("short", 0) for size in sizes) == 3
    assert [sum(size.values()) for size in sizes] == [4, 4, 4]


@MODES
@simulated
async def test_groups_that_fail_or_are_filtered_shorten_the_last_batches(mode: Any) -> None:
    engine = Engine()

    async def generate(state: RolloutState) -> None:
        if state.extra_fields["number"] == 3:
            raise ValueError("never")
        await engine(state)

    def keep(group: list[RolloutState]) -> bool:
        return bool(group[0].extra_fields["number"] != 5)

    chosen = task(generate, prompts=prompts(10), filters=[keep], over_issue=0.5)
    async with loader_of(generate, tasks=chosen, mode=mode, epochs=1, max_staleness=1) as loader:
        seen: list[int] = []
        async for batch in loader.batches():
            seen += [group[0].extra_fields["number"] for group in batch.groups]
            await loader.update_weights(engine.load)
        assert sorted(seen) == [0, 1, 2, 4, 6, 7, 8, 9]
        assert await counts(loader) == {"issued": 10, "trained": 8, "filtered": 1, "failed": 1}


# --- checkpoints ----------------------------------------------------------------------------------------


@MODES
@simulated
async def test_resume_continues_after_the_newest_checkpoint_and_keeps_the_last_ones(mode: Any) -> None:
    tmp_path = Path(tempfile.mkdtemp())
    engine = Engine()
    options: dict[str, Any] = {
        "mode": mode,
        "checkpoints": tmp_path / "saves",
        "max_staleness": 1,
        "keep_checkpoints": 2,
    }
    trained: list[int] = []
    async with loader_of(engine, **options) as loader:
        assert await loader.resume(engine.load) is None
        assert loader.state_dict() == {"path": None, "step": None}
        async for batch in loader.batches(1, 7):
            await loader.update_weights(engine.load)
            if batch.step <= 6:
                trained += ids(batch)
            if batch.step % 2 == 0:
                await loader.save(batch.step)
        path = tmp_path / "saves" / "step_6"
        assert loader.state_dict() == {"path": str(path), "step": 6}
    assert names_in(tmp_path / "saves") == ["step_4", "step_6"]
    engine = Engine()
    async with loader_of(engine, **options) as again:
        assert await again.resume(engine.load) == 6
        assert (engine.weights, again.model_step, again.next_step) == (6, 6, 7)
        async for batch in again.batches(7, 9):
            trained += ids(batch)
            await again.update_weights(engine.load)
    assert sorted(trained) == [*range(36)]
    async with loader_of(Engine(), **options) as unsaved:
        unsaved.load_state_dict({"path": None, "step": None})
        assert await unsaved.resume() is None, "a trainer that had saved nothing begins at step 0"
        assert unsaved.next_step == 1
    async with loader_of(Engine(), **options) as unsaved:
        with pytest.raises(InvalidInput, match="names no checkpoint"):
            unsaved.load_state_dict({"step": 4})

        def fail(step: int) -> None:
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            await unsaved.resume(fail)
        assert await unsaved.resume(engine.load) == 6
        assert (await anext(unsaved.batches())).step == 7
    async with loader_of(Engine(), **options) as earlier:
        earlier.load_state_dict({"path": str(tmp_path / "saves" / "step_4"), "step": 4})
        assert await earlier.resume() == 4


def names_in(directory: Path) -> list[str]:
    return sorted(found.name for found in directory.iterdir())


def delete_one_file_and_die(path: Path) -> None:
    next(path.iterdir()).unlink()
    raise KeyboardInterrupt


@simulated
async def test_a_process_that_dies_while_it_deletes_a_checkpoint_leaves_no_half_of_it() -> None:
    tmp_path = Path(tempfile.mkdtemp())
    options: dict[str, Any] = {"checkpoints": tmp_path, "max_staleness": 1, "keep_checkpoints": 1}
    async with loader_of(Engine(), **options) as loader:
        async for batch in loader.batches(1, 3):
            await loader.update_weights(lambda: None)
            if batch.step < 3:
                await loader.save(batch.step)
                assert names_in(tmp_path) == [f"step_{batch.step}"]
                continue
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("shutil.rmtree", delete_one_file_and_die)
                with pytest.raises(KeyboardInterrupt):
                    await loader.save(3)
            assert names_in(tmp_path) == ["step_2.deleted", "step_3"]
    async with loader_of(Engine(), **options) as again:
        assert await again.resume() == 3
        await anext(again.batches(4))
        await again.save(4)
    assert names_in(tmp_path) == ["step_4"]


@MODES
@simulated
async def test_save_counts_open_batches_up_to_its_step_as_trained_and_is_refused_below(mode: Any) -> None:
    tmp_path = Path(tempfile.mkdtemp())
    async with loader_of(Engine(), mode=mode, checkpoints=tmp_path, max_staleness=3) as loader:
        batches = loader.batches(1, 4)
        await anext(batches)
        second = await anext(batches)
        await loader.save(1)
        assert second.open, "a batch of a later step is not trained"
        await loader.save(2)
        assert not second.open
        with pytest.raises(InvalidInput, match=r"save\(1\), but the batches up to step 2 were acknowledged"):
            await loader.save(1)


async def test_a_run_on_a_durable_store_that_saved_nothing_starts_over(tmp_path: Path) -> None:
    options: dict[str, Any] = {"storage": f"sqlite:///{tmp_path}/run.db", "checkpoints": tmp_path, "max_staleness": 1}
    for _ in range(2):
        engine = Engine(0)
        async with loader_of(engine, **options) as loader:
            assert await loader.resume(engine.load) is None
            seen: list[int] = []
            async for batch in loader.batches(1, 3):
                seen += ids(batch)
                await loader.update_weights(engine.load)
            await loader.plane.close()
            held = [record.group_id for record in await loader.buffer.query({"place": "buffered"})]
            line = (await loader.ledger())["math"]
        assert len(set(seen)) == line["trained"] == 12, "what the first one trained counts no longer"
        assert not set(seen) & set(held)
        assert len(seen) + len(held) == line["issued"]


@pytest.mark.parametrize("saved", [0, 2])
async def test_no_token_of_weights_that_are_lost_is_handed_out_after_a_resume(tmp_path: Path, saved: int) -> None:
    """The numbers of those weights belong to others now. The groups of that time are generated again."""
    options: dict[str, Any] = {"storage": f"sqlite:///{tmp_path}/run.db", "checkpoints": tmp_path, "max_staleness": 2}
    trained: dict[int, list[int]] = {}
    for life, first, last in ((0, 1, 5), (1, saved + 1, 8)):
        engine = Engine(0)

        async def answer(state: RolloutState, engine: Engine = engine, life: int = life) -> None:
            await engine(state)
            state.response = f"life {life}"

        async with loader_of(answer, **options) as loader:
            assert await loader.resume(engine.load) == (saved or None if life else None)
            async for batch in loader.batches(first, last):
                for state in (state for group in batch.groups for state in group):
                    [version] = state.response_ids or []
                    assert state.version_spans == ((version, 1),)
                    assert state.response == f"life {life}" or version <= saved, "of weights that do not exist"
                trained[batch.step] = ids(batch)
                await loader.update_weights(engine.load)
                if batch.step == saved:
                    await loader.save(saved)
            await loader.plane.close()
            held = [record.group_id for record in await loader.buffer.query({"place": "buffered"})]
            drawn = (await loader.ledger())["math"]["issued"]
    assert sorted([*held, *(group_id for groups in trained.values() for group_id in groups)]) == [*range(drawn)]


@simulated
async def test_resume_after_the_first_batch_is_refused() -> None:
    tmp_path = Path(tempfile.mkdtemp())
    async with loader_of(Engine(), checkpoints=tmp_path) as loader:
        await anext(loader.batches(1))
        with pytest.raises(InvalidInput, match="resume before the first batch"):
            await loader.resume()
    async with loader_of(Engine()) as loader:
        assert await loader.resume() is None
        with pytest.raises(InvalidInput, match="checkpoints=DIRECTORY"):
            await loader.save(1)


@simulated
async def test_a_group_size_that_changes_at_resume_is_refused() -> None:
    tmp_path = Path(tempfile.mkdtemp())
    async with loader_of(Engine(), checkpoints=tmp_path) as loader:
        await anext(loader.batches(1))
        await loader.save(1)
    engine = Engine()
    async with loader_of(engine, tasks=task(engine, group_size=3), checkpoints=tmp_path) as other:
        with pytest.raises(ChangedDataset, match="group_size"):
            await other.resume()


# --- evaluation -----------------------------------------------------------------------------------------


@MODES
@simulated
async def test_evaluate_answers_each_record_once_while_nothing_is_drawn_for_training(mode: Any) -> None:
    engine = Engine()
    held_out = task(engine, "held_out", prompts=prompts(7), group_size=1)
    async with loader_of(engine, mode=mode, max_staleness=1) as loader:
        async for batch in loader.batches(1, 3):
            await loader.update_weights(engine.load)
            drawn = (await counts(loader))["issued"]
            evaluating = asyncio.ensure_future(loader.evaluate(held_out, max_in_flight=2))
            await asyncio.sleep(1.5)
            with pytest.raises(InvalidInput, match="during evaluate"):
                await loader.update_weights(engine.load)
            with pytest.raises(InvalidInput, match="already running"):
                await loader.evaluate("math")
            result = await evaluating
            issued = (await counts(loader))["issued"]
            assert issued - drawn <= 8, "draws that had begun may end, others wait"
            assert (result.model_step, len(result.groups)) == (batch.step, 7)
            assert [group[0].response_ids for group in result.groups] == [[batch.step]] * 7
            assert result.reward_mean() == 1.0
        assert "held_out" not in await loader.ledger()
        with pytest.raises(InvalidInput, match="there is no task 'maths'; expected one of math"):
            await loader.evaluate("maths")


# --- tokens, progress, ends -----------------------------------------------------------------------------


@MODES
@simulated
async def test_a_step_is_filled_up_to_a_number_of_tokens(mode: Any) -> None:
    engine = Engine()

    async def generate(state: RolloutState) -> None:
        await engine(state)
        number = state.extra_fields["number"]
        state.response_ids, state.logprobs = [1] * (1 + number % 5), [0.0] * (1 + number % 5)

    chosen = task(generate, prompts=prompts(200), group_size=1)
    loader = AsyncRolloutLoader(chosen, batch_tokens=60, mode=mode, max_staleness=1, epochs=1, progress=None)
    async with loader:
        tokens, seen = [], []
        async for batch in loader.batches():
            tokens.append(sum(state.num_tokens for group in batch.groups for state in group))
            seen += ids(batch)
            await loader.update_weights(engine.load)
    assert sorted(seen) == [*range(200)]
    assert max(tokens) <= 60
    assert min(tokens[:-1]) >= 50, tokens


@MODES
@simulated
async def test_no_record_is_left_when_steps_are_filled_by_tokens(mode: Any) -> None:
    engine = Engine()
    for seed in range(10):
        chance = random.Random(seed)
        lengths = [chance.randrange(1, 40) for _ in range(37)]

        async def generate(state: RolloutState, lengths: list[int] = lengths) -> None:
            await engine(state)
            state.response_ids = [1] * lengths[state.extra_fields["number"]]
            state.logprobs = None

        chosen = task(generate, prompts=prompts(37), group_size=2)
        engine.weights = 0
        async with AsyncRolloutLoader(
            chosen, batch_tokens=150, mode=mode, max_staleness=1, epochs=1, progress=None
        ) as loader:
            seen: list[int] = []
            async for batch in loader.batches():
                seen += ids(batch)
                await loader.update_weights(engine.load)
            assert sorted(seen) == [*range(37)], f"seed {seed}"
            assert await counts(loader) == {"issued": 37, "trained": 37}


@simulated
async def test_a_step_that_was_not_handed_out_is_refused() -> None:
    directory = Path(tempfile.mkdtemp())
    async with loader_of(Engine(), checkpoints=directory) as loader:
        batch = await anext(loader.batches(1))
        for call in (lambda: loader.update_weights(lambda: None, 101), lambda: loader.save(10)):
            with pytest.raises(InvalidInput, match="the last batch that is leased or acknowledged is that of step 1"):
                await call()
        assert batch.open


@simulated
async def test_the_mean_reward_of_a_batch_is_that_of_its_samples() -> None:
    rewards = {number: float(number) for number in range(8)}
    chosen = task(Engine(), reward=lambda state: rewards[state.rollout_id or 0])
    async with loader_of(None, tasks=chosen) as loader:
        assert (await anext(loader.batches(1))).reward_mean == 3.5


@simulated
async def test_a_rollout_of_several_segments_counts_once_in_the_mean_reward() -> None:
    class Segments(AgentLoop):
        async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> list[RolloutState]:
            number = state.rollout_id or 0
            states = [state.__copy__() for _ in range(1 + number)]
            for state in states:
                state.response_ids, state.status = [1], Status.COMPLETED
            return states

    chosen = task(Segments(), reward=lambda state: float(state.rollout_id or 0), group_size=2)
    async with loader_of(None, tasks=chosen, batch_groups=1) as loader:
        batch = await anext(loader.batches(1))
        assert ([len(group) for group in batch.groups], batch.reward_mean) == ([3], 0.5)


@simulated
async def test_a_function_that_fills_in_nothing_is_told_so() -> None:
    async def nothing(state: RolloutState) -> None: ...

    async with loader_of(nothing) as loader:
        with pytest.raises(TooManyFailures, match="the function left response, response_ids and input_ids empty"):
            await anext(loader.batches(1))


@simulated
async def test_a_wait_reports_its_progress() -> None:
    reports: list[StepProgress] = []
    engine = Engine(seconds=3)
    async with loader_of(engine, max_staleness=1, progress=reports.append) as loader:
        async for _batch in loader.batches(1, 1):
            pass
    assert [report.done for report in reports] == [False] * (len(reports) - 1) + [True]
    assert (reports[-1].groups, reports[-1].missing) == (4, {})
    first = reports[0]
    assert (first.step, first.groups, first.wanted, first.missing) == (1, 0, 4, {"math": 4})
    assert first.in_flight >= 4
    assert first.describe().startswith(f"{first.in_flight} in flight, waits for math (4), 0 tokens/s")


@simulated
async def test_a_progress_that_raises_does_not_stop_the_loop() -> None:
    def show(state: StepProgress) -> None:
        raise RuntimeError("no")

    async with loader_of(Engine(seconds=3), progress=show) as loader:
        assert [batch.step async for batch in loader.batches(1, 1)] == [1]


@simulated
async def test_group_ends_are_reported() -> None:
    ends: list[GroupEnd] = []
    async with loader_of(Engine(), on_group_end=ends.append) as loader:
        async for _batch in loader.batches(1, 1):
            pass
    assert {(end.task_name, end.group_id) for end in ends} == {("math", number) for number in range(4)}


# --- bad input ------------------------------------------------------------------------------------------


async def answer(state: RolloutState) -> None:
    state.response_ids = [1]


def not_async(state: RolloutState) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"generate": not_async},
            InvalidConfig,
            "generate of task 'math' is .*not_async.*; expected an async function",
        ),
        ({"generate": 3}, InvalidConfig, "generate of task 'math' is 3"),
        ({"prompts": []}, InvalidDataset, "the prompts of task 'math' are empty"),
        ({"prompts": 5}, InvalidDataset, "int is not a data set"),
        ({"group_size": 0}, InvalidInput, "group_size is 0"),
        ({"weight": -1}, InvalidConfig, "weight of task 'math' is -1"),
        ({"reward": 1.0}, InvalidConfig, "reward of task 'math' is 1.0; expected a function"),
        ({"name": ""}, InvalidInput, "task"),
    ],
)
def test_a_bad_task_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"name": "math", "prompts": prompts(3), "generate": answer} | arguments
    with pytest.raises(error, match=message):
        Task(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_groups": None}, "either batch_groups .* or batch_tokens"),
        ({"batch_tokens": 5}, "either batch_groups .* or batch_tokens"),
        ({"batch_groups": 0}, "batch_groups is 0"),
        ({"mode": "sideways"}, "mode is 'sideways'; expected 'in_turns' or 'ahead'"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"max_token_staleness": 2, "max_staleness": 1}, "max_token_staleness=2 is over max_staleness=1"),
        ({"max_groups": 3}, "max_groups"),
        ({"storage": "redis://"}, "unknown storage 'redis://'"),
        ({"tasks": [task(answer), task(answer)]}, "two tasks are named 'math'"),
        ({"tasks": []}, "there is no task"),
        ({"tasks": ["math"]}, "'math' is not a task"),
        ({"max_groups": 5, "tasks": [task(answer, "a", over_issue=1.0), task(answer, "b")]}, "one task could fill it"),
        ({"mode": "ahead", "on_train": print}, "on_generate and on_train"),
        ({"produce": False}, "produce=False needs mode='ahead'"),
        ({"epochs": 0}, "epochs is 0"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"keep_checkpoints": 0}, "keep_checkpoints is 0"),
    ],
)
def test_a_loader_that_cannot_work_is_refused_when_it_is_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        loader_of(answer, **options)


@pytest.mark.parametrize("value", ["good", float("nan"), None, [1.0]])
@simulated
async def test_a_reward_that_is_not_a_number_is_said(value: Any) -> None:
    chosen = task(Engine(), reward=lambda state: value)
    async with loader_of(None, tasks=chosen, timeout_s=10_000) as loader:
        with pytest.raises(Exception, match="reward") as raised:
            await anext(loader.batches(1))
        assert repr(value) in str(raised.value)


def test_signals_are_handled_while_the_loader_is_open() -> None:
    async def main() -> int:
        before = signal.getsignal(signal.SIGUSR1)
        async with loader_of(Engine(0.0), stop_on=(signal.SIGUSR1,)) as loader:
            async for batch in loader.batches(1, 100):
                if batch.step == 3:
                    signal.raise_signal(signal.SIGUSR1)
                    await asyncio.sleep(0.05)
                await loader.update_weights(lambda: None)
        assert signal.getsignal(signal.SIGUSR1) in (before, signal.SIG_DFL)
        return batch.step

    assert asyncio.run(main()) == 3
