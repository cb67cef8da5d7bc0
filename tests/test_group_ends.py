"""`on_group_end` is told of every group that leaves for good, off the event loop, and can break nothing."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from forebay import (
    AsyncReplayBufferConfig,
    End,
    FunctionAgentLoop,
    GroupEnd,
    InvalidConfig,
    MemoryStorage,
    ReplayBuffer,
    RolloutState,
    Sampler,
    Status,
    Storage,
    SyncProduceStrategy,
)
from forebay.produce import NoProgress
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import make_group
from tests.support import closed_ledger, turns


@pytest.fixture(params=["memory", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return MemoryStorage() if request.param == "memory" else SQLiteStorage(tmp_path / "store.db")


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_callback_is_told_of_every_end_with_task_group_delivery_sessions_reason_and_step(
    asynchronous: bool, storage: Storage
) -> None:
    heard: list[GroupEnd] = []

    async def hear(event: GroupEnd) -> None:
        heard.append(event)

    group = make_group(group_id=-5)
    group[0].session_id, group[1].session_id = 7, "eight"
    async with ReplayBuffer(storage=storage, on_group_end=hear if asynchronous else heard.append) as buffer:
        await buffer.put(group, "math")
        await buffer.put(make_group(group_id=-6), "math")
        async with buffer.lease_batch({"math": 1}, train_step=3):
            pass
        await buffer.discard({"group_id": -6}, "no text: \udcff" + "x" * 1_000)
    assert heard == [
        GroupEnd("math", -5, 1, (7, "eight"), End.TRAINED, None, 3),
        GroupEnd("math", -6, 0, (), End.DISCARDED, f"no text: ?{'x' * 190}", None),
    ]


async def test_a_plain_callback_runs_in_a_thread_of_its_own_and_the_loop_goes_on() -> None:
    release = threading.Event()
    names: list[str] = []

    def hear(event: GroupEnd) -> None:
        names.append(threading.current_thread().name)
        assert release.wait(30)

    buffer = ReplayBuffer(on_group_end=hear)
    for _ in range(2):
        await buffer.put(make_group(), "math")
    await buffer.get(2, "math", Status.COMPLETED)
    while not names:
        await turns()
    await buffer.put(make_group(), "math")  # the callback hangs, and nobody else does
    assert await buffer.count("math", Status.COMPLETED) == 1
    release.set()
    await buffer.close()
    assert len(names) == 2
    assert set(names) == {"forebay-group-end"}


async def test_an_exception_in_the_callback_is_logged_and_counted_and_stops_nothing(
    caplog: pytest.LogCaptureFixture, storage: Storage
) -> None:
    heard: list[int] = []

    def hear(event: GroupEnd) -> None:
        heard.append(event.group_id)
        if event.group_id == -1:
            raise RuntimeError("the session server is away")

    async with ReplayBuffer(storage=storage, on_group_end=hear) as buffer:
        for group_id in (-1, -2):
            await buffer.put(make_group(group_id=group_id), "math")
        await buffer.get(2, "math", Status.COMPLETED)
        while (stats := await buffer.stats())["forebay/on_group_end/told"] < 1:
            await turns()
        assert (stats["forebay/on_group_end/told"], stats["forebay/on_group_end/failed"]) == (1, 1)
    assert heard == [-1, -2]
    assert "on_group_end_failed task=math group=-1" in caplog.text
    assert "the session server is away" in caplog.text


async def test_ends_that_were_stored_and_not_told_are_told_by_the_next_buffer(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    hung = asyncio.Event()

    async def hang(event: GroupEnd) -> None:
        hung.set()
        await asyncio.Event().wait()

    first = ReplayBuffer(storage=SQLiteStorage(path), on_group_end=hang)
    await first.put(make_group(group_id=-3), "math")
    await first.get(1, "math", Status.COMPLETED)
    await hung.wait()
    task = first._session.group_ends._task  # type: ignore[union-attr]
    assert task is not None
    task.cancel()  # as if the process were gone
    await asyncio.wait((task,))
    await first.close()
    heard: list[GroupEnd] = []
    async with ReplayBuffer(storage=SQLiteStorage(path), on_group_end=heard.append):
        pass
    assert [event.group_id for event in heard] == [-3]


async def test_without_a_callback_nothing_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    for told in (0, 1):
        heard: list[GroupEnd] = []
        more: dict[str, Any] = {"on_group_end": heard.append} if told else {}
        async with ReplayBuffer(storage=SQLiteStorage(path), **more) as buffer:
            await buffer.put(make_group(), "math")
            await buffer.get(1, "math", Status.COMPLETED)
            assert ("forebay/on_group_end/told" in await buffer.stats()) == bool(told)
        assert len(heard) == told


async def test_a_run_tells_of_trained_filtered_failed_and_stale_groups_exactly_once() -> None:
    heard: list[GroupEnd] = []

    async def answer(state: RolloutState) -> None:
        number = int(state.message[0]["content"][1:])
        state.session_id = number
        if number % 5 == 1:
            raise RuntimeError("no answer")
        state.response_ids = [number % 5]

    buffer = AsyncReplayBufferConfig().build(on_group_end=heard.append)
    strategy = SyncProduceStrategy(
        buffer,
        is_valid_sample_fn=lambda group: group[0].response_ids != [2] or "dull",
        max_tries=1,
        progress=NoProgress(),
    )
    sampler = Sampler([{"prompt": f"q{number}"} for number in range(40)], shuffle=False)
    loop = FunctionAgentLoop(answer)
    for step in (1, 2, 3):
        await strategy.produce_batch(loop, sampler, 4, "math", train_step=step, model_step=step - 1)
        async with buffer.lease_batch({"math": 4}, train_step=step):
            pass
    await strategy.close()
    ledger = await closed_ledger(buffer)
    await buffer.close()
    assert len({(event.task_name, event.group_id, event.delivery) for event in heard}) == len(heard)
    for end in End:
        assert sum(event.end is end for event in heard) == ledger.get(end, 0)
    assert ledger["trained"] == 12
    assert ledger["failed"]
    assert ledger["filtered"]
    assert all(event.session_ids for event in heard if event.end is not End.FAILED)


def test_a_callback_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="on_group_end is 3"):
        ReplayBuffer(on_group_end=3)  # type: ignore[arg-type]


def test_a_buffer_that_moves_to_another_event_loop_goes_on_telling() -> None:
    heard: list[GroupEnd] = []
    buffer = ReplayBuffer(on_group_end=heard.append)

    async def take(*, close: bool) -> None:
        await buffer.put(make_group(), "math")
        await buffer.get(1, "math", Status.COMPLETED)
        if close:
            await buffer.close()

    asyncio.run(take(close=False))
    asyncio.run(take(close=True))
    assert len(heard) == 2
