"""What goes wrong around a batch: hooks that raise, cancels in a narrow place, outages, batches that come back."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay import (
    AsyncRolloutLoader,
    InvalidInput,
    RolloutLoader,
    RolloutState,
    StorageError,
    StorageUnavailable,
    Task,
)
from forebay.loader import progress as loader_progress
from tests.loader.plane import Engine, ids, loader_of, prompts, simulated, task
from tests.loader.test_rules import MODES, counts, names_in
from tests.processes import HANG_S

# --- a batch that its caller never saw ------------------------------------------------------------------


class Once:
    """Raises the first time that it is called."""

    def __init__(self, error: BaseException) -> None:
        self._errors = [error]

    def __call__(self) -> None:
        if self._errors:
            raise self._errors.pop()


@simulated
async def test_a_batch_whose_hook_raised_is_given_back_and_comes_again() -> None:
    async with loader_of(Engine(), on_train=Once(RuntimeError("no memory")), sync_weights_interval=10) as loader:
        batches = loader.batches(1, 3)
        with pytest.raises(RuntimeError, match="no memory"):
            await anext(batches)
        assert (await counts(loader)).get("leased", 0) == 0
        batch = await anext(batches)
        assert (batch.step, ids(batch)) == (1, [0, 1, 2, 3])
        assert "trained" not in await counts(loader)


def test_an_interrupt_in_a_hook_gives_the_batch_back() -> None:
    hook = Once(KeyboardInterrupt())
    with RolloutLoader(task(Engine(0)), batch_groups=4, progress=None, mode="in_turns", on_train=hook) as loader:
        batches = loader.batches(1, 3)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        with pytest.raises(InvalidInput, match="no batch is leased or acknowledged"):
            loader.update_weights(lambda: None)
        assert next(batches).step == 1
        assert loader.ledger()["math"]["trained"] == 0


@simulated
async def test_a_cancel_after_the_batch_was_leased_gives_it_back() -> None:
    """The last report of the progress takes a moment to end, as a call of a database does."""

    async def state_of(*args: Any) -> Any:
        try:
            await asyncio.sleep(1_000)
        except asyncio.CancelledError:
            await asyncio.sleep(10)
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_progress, "_state", state_of)
        async with loader_of(Engine(), mode="ahead", progress=lambda state: None) as loader:
            asking = asyncio.ensure_future(anext(loader.batches(1, 5)))
            while not (await loader.ledger()).get("math", {}).get("leased"):  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert "leased" not in await counts(loader)
            assert ids(await anext(loader.batches(1))) == [0, 1, 2, 3]


@MODES
@pytest.mark.parametrize("name", ["resize", "shrink"])
@simulated
async def test_a_cancel_while_a_step_is_cut_to_its_tokens_gives_it_back(mode: Any, name: str) -> None:
    engine = Engine()

    async def generate(state: RolloutState) -> None:
        await engine(state)
        state.response_ids, state.logprobs = [1] * (20 if state.extra_fields["number"] < 10 else 60), None

    asked = Task("math", prompts(), generate, reward=lambda state: 1.0, shuffle=False)
    async with AsyncRolloutLoader(
        asked, batch_tokens=210, mode=mode, sync_weights_interval=100, progress=None
    ) as loader:
        cutting = asyncio.Event()
        work = getattr(loader.plane, name)

        async def slow(*args: Any) -> None:
            if not cutting.is_set():
                cutting.set()
                await asyncio.sleep(10)
            await work(*args)

        setattr(loader.plane, name, slow)

        async def train() -> None:
            async for _ in loader.batches(1, 9):
                pass

        training = asyncio.ensure_future(train())
        await cutting.wait()
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        seen: list[int] = []
        async for batch in loader.batches(loader.next_step, loader.next_step + 5):
            seen += ids(batch)
        assert len(set(seen)) == len(seen)
        trained = (await counts(loader))["trained"]
        await loader.plane.close()
        assert await counts(loader) == {"issued": trained + (left := (await counts(loader)).get("buffered", 0)),
                                        "trained": trained} | ({"buffered": left} if left else {})  # fmt: skip


# --- batches that come back -----------------------------------------------------------------------------


@simulated
async def test_a_returned_batch_of_several_leased_ones_comes_again_before_later_steps() -> None:
    async with loader_of(Engine(), mode="ahead", sync_weights_interval=10) as loader:
        batches = loader.batches(1, 4, ahead=2)
        first, second = await anext(batches), await anext(batches)
        await first.ack()
        await second.nack()
        again = await anext(batches)
        assert (again.step, ids(again)) == (2, ids(second))
        third = await anext(batches)
        await again.nack()
        again = await anext(batches)
        assert (again.step, third.open) == (2, True)
        await again.ack()
        assert (await anext(batches)).step == 4, "step 3 is leased"
        await third.ack()


@simulated
async def test_leasing_ahead_ends_with_all_batches_leased() -> None:
    async with loader_of(Engine(), mode="ahead", sync_weights_interval=10) as loader:
        assert [batch.step async for batch in loader.batches(1, 2, ahead=2)] == [1, 2]
    async with loader_of(Engine(), mode="ahead", sync_weights_interval=10) as loader:
        batches = loader.batches(1, 4, ahead=2)
        held = [await anext(batches), await anext(batches)]
        loader.stop()
        assert await anext(batches, None) is None
        assert all(batch.open for batch in held)


@MODES
@simulated
async def test_a_batch_that_was_given_back_is_not_saved_as_trained(mode: Any) -> None:
    async with loader_of(Engine(), mode=mode, checkpoints=tempfile.mkdtemp(), max_staleness=1) as loader:
        with pytest.raises(RuntimeError):
            async with await anext(loader.batches(1, 3)):
                raise RuntimeError
        with pytest.raises(InvalidInput, match=r"save names step 1, but the last batch .* is that of step 0"):
            await loader.save(1)
        with pytest.raises(InvalidInput, match="no batch is leased or acknowledged"):
            await loader.update_weights(lambda: None)
        assert (await anext(loader.batches())).step == 1


@MODES
@pytest.mark.parametrize("error", [StorageUnavailable("away"), StorageError("the disk is full")])
@simulated
async def test_an_acknowledgement_that_an_outage_delayed_is_carried_out_by_the_next_loop(
    mode: Any, error: StorageError
) -> None:
    async with loader_of(Engine(), mode=mode, sync_weights_interval=10, storage_retry_s=0.01) as loader:
        storage: Any = loader.buffer.storage
        settle, write_plan = storage.settle, storage.write_plan

        async def away(*args: Any, **options: Any) -> None:
            storage.write_plan = away  # the plan counts the step already
            raise error

        first = await anext(loader.batches(1, 3))
        storage.settle = away
        with pytest.raises(type(error)):
            await first.ack()
        storage.settle, storage.write_plan = settle, write_plan
        if mode == "ahead":  # the producer met the outage, too
            with pytest.raises(type(error)):
                await anext(loader.batches())
        second = await anext(loader.batches())
        assert (second.step, (await counts(loader))["trained"]) == (2, 4)
        assert not set(ids(first)) & set(ids(second))


@simulated
async def test_groups_that_a_full_disk_kept_from_returning_are_returned_when_it_is_freed() -> None:
    """They fail to return in the pause of an update, so that no producer learns of it."""
    engine = Engine()
    async with loader_of(engine, mode="ahead", max_staleness=2) as loader:
        storage: Any = loader.buffer.storage
        put, full = storage.put, False

        async def put_unless_full(*args: Any, **options: Any) -> Any:
            if full:
                raise StorageError("the disk is full")
            return await put(*args, **options)

        storage.put = put_unless_full
        await anext(loader.batches(1, 9))
        engine.seconds = 1_000.0
        while not (await counts(loader)).get("in_flight"):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(1)
        full = True
        await loader.update_weights(engine.load)
        with pytest.raises(StorageError):
            await anext(loader.batches())
        full, engine.seconds = False, 1.0
        steps = [batch.step async for batch in loader.batches(loader.next_step, 4)]
        assert steps[-1] == 4
        await loader.plane.close()
        assert "in_flight" not in await counts(loader)


# --- weights, evaluation, prompts -----------------------------------------------------------------------


@MODES
@simulated
async def test_weights_are_not_loaded_during_an_evaluation_that_begins_at_the_same_time(mode: Any) -> None:
    engine = Engine()
    async with loader_of(engine, mode=mode, max_staleness=1) as loader:
        await anext(loader.batches(1, 1))
        updated, evaluated = await asyncio.gather(
            loader.update_weights(engine.load),
            loader.evaluate(task(engine, prompts=prompts(8))),
            return_exceptions=True,
        )
        assert isinstance(updated, InvalidInput) != isinstance(evaluated, InvalidInput), "one of them is refused"
        if not isinstance(evaluated, BaseException):
            answers = {token for group in evaluated.groups for state in group for token in state.response_ids or ()}
            assert answers == {evaluated.model_step}


@simulated
async def test_an_evaluation_that_fails_leaves_the_phase_of_generating() -> None:
    phases: list[str] = []
    async with loader_of(
        Engine(), on_generate=lambda: phases.append("generate"), on_train=lambda: phases.append("train")
    ) as loader:
        with pytest.raises(InvalidInput, match="there is no task 'unknown'"):
            await loader.evaluate("unknown")
    assert phases == ["generate", "train"]


@MODES
@simulated
async def test_new_prompts_for_a_task_whose_data_has_ended_are_drawn(mode: Any) -> None:
    engine = Engine()
    short = task(engine, prompts=prompts(6))
    async with loader_of(engine, tasks=short, epochs=1, mode=mode, sync_weights_interval=99) as loader:
        assert [len(batch.groups) async for batch in loader.batches()] == [4, 2]
        await loader.set_prompts("math", prompts(8, "new"))
        again = [batch async for batch in loader.batches()]
        assert [len(batch.groups) for batch in again] == [4, 4]
        messages = {str(group[0].message) for batch in again for group in batch.groups}
        assert len(messages) == 8
        assert all("new" in message for message in messages)


def test_a_refused_update_does_not_end_one_that_runs_in_another_thread() -> None:
    begun, refused = threading.Event(), threading.Event()
    with RolloutLoader(task(Engine(0)), batch_groups=4, progress=None, max_staleness=2) as loader:
        batches = loader.batches(1, 5)
        next(batches)

        def load(step: int) -> None:
            begun.set()
            assert refused.wait(HANG_S)

        updating = threading.Thread(target=lambda: loader.update_weights(load))
        updating.start()
        assert begun.wait(HANG_S)
        with pytest.raises(InvalidInput):
            loader.update_weights(lambda: None, 99)
        refused.set()
        assert next(batches).step == 2
        updating.join()


# --- checkpoints ----------------------------------------------------------------------------------------


@simulated
async def test_a_run_that_was_resumed_from_an_earlier_step_continues_from_its_own_checkpoints() -> None:
    directory = Path(tempfile.mkdtemp())
    options: dict[str, Any] = {"checkpoints": directory, "keep_checkpoints": 10}
    for first, last in ((1, 5), (3, 4)):
        engine = Engine()
        async with loader_of(engine, **options) as loader:
            assert await loader.resume(engine.load, path=None if first == 1 else directory / "step_2") in (None, 2)
            async for batch in loader.batches(first, last):
                await loader.update_weights(engine.load)
                await loader.save(batch.step)
    assert names_in(directory) == ["step_1", "step_2", "step_3", "step_4", "step_4.abandoned", "step_5.abandoned"]
    async with loader_of(Engine(), **options) as loader:
        assert await loader.resume() == 4


@simulated
async def test_what_a_save_that_was_killed_left_is_deleted() -> None:
    directory = Path(tempfile.mkdtemp())
    async with loader_of(Engine(), checkpoints=directory, keep_checkpoints=2, sync_weights_interval=9) as loader:
        async for batch in loader.batches(1, 4):
            await loader.save(batch.step)
            if batch.step == 2:
                (directory / "step_2" / "manifest.json").unlink()
    assert names_in(directory) == ["step_3", "step_4"]


# --- ends -----------------------------------------------------------------------------------------------


@simulated
async def test_the_buffer_is_closed_if_an_agent_loop_cannot_be() -> None:
    class Broken(Engine):
        def close(self) -> None:
            raise OSError("cannot close")

    loader = loader_of(Broken())
    loop: Any = loader.tasks["math"].agent_loop
    loop.close = Broken().close
    with pytest.raises(OSError, match="cannot close"):
        async with loader:
            await anext(loader.batches(1))
    with pytest.raises(Exception, match="closed"):
        await loader.buffer.ledger()


async def test_a_signal_while_an_async_loader_closes_does_not_kill_it_and_handlers_are_restored() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))

    async def generate(state: RolloutState) -> None:
        try:
            await asyncio.sleep(0.01 if (state.group_id or 0) < 4 else HANG_S)
        except asyncio.CancelledError:
            os.kill(os.getpid(), signal.SIGUSR2)
            await asyncio.sleep(0.01)
            raise
        state.response, state.response_ids = "answer", [1]

    try:
        async with loader_of(generate, mode="ahead", max_staleness=3, stop_on=(signal.SIGUSR2,)) as loader:
            async for _ in loader.batches(1, 50):
                os.kill(os.getpid(), signal.SIGUSR2)
                await asyncio.sleep(0.01)
        assert not heard, "they were for the loader"
        os.kill(os.getpid(), signal.SIGUSR2)
        assert len(heard) == 1
    finally:
        signal.signal(signal.SIGUSR2, before)


# --- ranks ----------------------------------------------------------------------------------------------


class Hub:
    """Ranks that are threads of this process."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.queues = [[queue.Queue[bytes]() for _ in range(world_size)] for _ in range(2)]


class ThreadBroadcast:
    """One rank of a hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank, self.world_size = hub, rank, hub.world_size

    def scatter(self, parts: Sequence[bytes] | None) -> bytes:
        if parts is None:
            return self.hub.queues[0][self.rank].get(timeout=HANG_S)
        for rank in range(1, self.world_size):
            self.hub.queues[0][rank].put(parts[rank])
        return parts[0]

    def gather(self, part: bytes) -> list[bytes] | None:
        if self.rank:
            self.hub.queues[1][self.rank].put(part)
            return None
        return [part] + [self.hub.queues[1][rank].get(timeout=HANG_S) for rank in range(1, self.world_size)]


def run_ranks(body: Any, **options: Any) -> list[list[int]]:
    """The steps that each of two ranks got. `body(rank, loader, batch)` trains."""
    hub = Hub(2)
    steps: list[list[int]] = [[], []]

    async def generate(state: RolloutState) -> None:
        state.response_ids = [1] * (90 if state.extra_fields["number"] == 20 else 10)
        state.response, state.logprobs = "answer", None

    def train(rank: int) -> None:
        asked = Task("math", prompts(), generate, reward=lambda state: 1.0, shuffle=False)
        broadcast = ThreadBroadcast(hub, rank)
        with RolloutLoader(
            asked, progress=None, mode="in_turns", sync_weights_interval=99, broadcast=broadcast, **options
        ) as loader:
            for batch in loader.batches(1, 12):
                assert batch.groups
                steps[rank].append(batch.step)
                body(rank, loader, batch)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return steps


def test_every_rank_gets_a_group_of_a_step_that_one_long_group_fills() -> None:
    assert run_ranks(lambda rank, loader, batch: None, batch_tokens=100) == [[*range(1, 13)]] * 2


def test_any_rank_can_stop_the_loop() -> None:
    def stop_at_2(rank: int, loader: RolloutLoader, batch: Any) -> None:
        if rank == 1 and batch.step == 2:
            loader.stop()

    assert run_ranks(stop_at_2, batch_groups=4) == [[1, 2], [1, 2]]


def test_advantages_over_the_whole_batch_are_refused_for_the_part_of_a_rank() -> None:
    def pack(rank: int, loader: RolloutLoader, batch: Any) -> None:
        with pytest.raises(InvalidInput, match="reinforce_pp"):
            batch.packed(max_tokens=1_000, advantages="reinforce_pp")
        with pytest.raises(InvalidInput, match="reinforce_pp"):
            batch.padded(pad_id=0, advantages="reinforce_pp")
        assert batch.packed(max_tokens=1_000)

    run_ranks(pack, batch_groups=4)
