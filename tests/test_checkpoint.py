"""Saving and resuming a buffer: every storage, any policy, any moment; relative to the weights."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import (
    CheckpointError,
    DamagedData,
    FIFOReplayPolicy,
    FreshestReplayPolicy,
    InvalidInput,
    MemoryStorage,
    ReplayBuffer,
    StalenessReplayPolicy,
    Status,
    Storage,
    checkpoint_exists,
)
from forebay.buffer.checkpoints import save_storage
from forebay.buffer.internal import internals
from forebay.checkpoint.files import FileOps
from forebay.checkpoint.format import open_checkpoint
from forebay.storage.local.pandas import PandasStorage
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import make_group
from tests.support import closed_ledger, draw

MakeStorage = Callable[[Path], Storage]
STORAGES: dict[str, MakeStorage] = {
    "memory": lambda path: MemoryStorage(),
    "pandas": lambda path: PandasStorage(),
    "sqlite": lambda path: SQLiteStorage(path / "store.db"),
}


async def busy(storage: Storage) -> ReplayBuffer:
    """A buffer with something at every place: group ids 0, 1 drawn (1 came back), 10 to 15 by hand."""
    buffer = ReplayBuffer(StalenessReplayPolicy(), storage)
    await buffer.set_limits("math", stale_threshold=7)
    drawn = await draw(buffer, 2)
    for state in drawn[1]:
        state.status, state.response_ids = Status.COMPLETED, np.arange(4)
    await buffer.put(drawn[1], "math", model_step=3, tags={"level": "hard"}, priority=0.5)
    for number in range(10, 14):
        await buffer.put(make_group(group_id=number, score=0.5), "math", model_step=1)
    await buffer.put(make_group(group_id=14, status=Status.ABORTED), "math", model_step=1)
    await buffer.get(1, "math", Status.COMPLETED)
    return buffer


@pytest.mark.parametrize("source", list(STORAGES))
@pytest.mark.parametrize("target", list(STORAGES))
async def test_g04_a_checkpoint_restores_into_any_storage_under_any_policy(
    source: str, target: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    buffer = await busy(STORAGES[source](tmp_path / "a"))
    lease = await buffer.lease_batch({"math": 1}, train_step=2)
    await buffer.save(tmp_path / "checkpoint", model_step=1)
    other = ReplayBuffer(FreshestReplayPolicy(), STORAGES[target](tmp_path / "b"))
    assert await other.resume(tmp_path / "checkpoint") == 1
    assert await closed_ledger(other) == {"issued": 7, "buffered": 6, "trained": 1}
    records = {record.group_id: record for record in await other.query({})}
    assert {g: str(r.status) for g, r in records.items()} == {
        0: "aborted", 1: "completed", 11: "completed", 12: "completed", 13: "completed", 14: "aborted",
    }  # fmt: skip
    assert (dict(records[1].tags), records[1].priority, records[1].oldest_step) == ({"level": "hard"}, 0.5, 3)
    assert (await internals(other).position("math"))[0] == 2
    groups = await other.get(9, "math", Status.COMPLETED)
    assert [group[0].group_id for group in groups] == [1, 11, 12, 13]
    assert isinstance(groups[0][0].response_ids, np.ndarray)
    assert isinstance(groups[1][0].response_ids, list)
    assert [group[0].group_id for group in await internals(other).redraw(9, "math")] == [0, 14]
    await lease.ack()  # the buffer that was saved continues undisturbed
    await buffer.close()
    await other.close()


async def test_a_lease_that_is_in_the_weights_is_saved_as_trained_and_a_later_one_is_not(tmp_path: Path) -> None:
    buffer = ReplayBuffer()
    await buffer.put_many([make_group(group_id=number) for number in (1, 2)], "math")
    await buffer.lease_batch({"math": 1}, train_step=5)
    await buffer.lease_batch({"math": 1}, train_step=6)
    await buffer.save(tmp_path / "at5", model_step=5)
    await buffer.save(tmp_path / "unknown")
    for name, ledger in (
        ("at5", {"issued": 2, "buffered": 1, "trained": 1}),
        ("unknown", {"issued": 2, "buffered": 2}),
    ):
        other = ReplayBuffer()
        await other.resume(tmp_path / name)
        assert await closed_ledger(other) == ledger


async def test_a_checkpoint_exists_once_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    assert not checkpoint_exists(path)
    path.mkdir()
    assert not checkpoint_exists(path)
    await ReplayBuffer().save(path, model_step=0)
    assert checkpoint_exists(path)
    assert checkpoint_exists(str(path))
    assert not checkpoint_exists(path / "manifest.json")


async def test_limits_and_the_staleness_bound_survive(tmp_path: Path) -> None:
    buffer = ReplayBuffer()
    await buffer.set_limits("math", stale_threshold=2)
    await buffer.put(make_group(), "math", model_step=0)
    await buffer.save(tmp_path / "checkpoint", model_step=0)
    other = ReplayBuffer()
    await other.resume(tmp_path / "checkpoint")
    with pytest.raises(TimeoutError):
        await other.lease_batch({"math": 1}, train_step=3, timeout_s=0)
    assert await other.count("math", Status.EXPIRED) == 1


async def test_a_durable_store_is_rewound_to_the_weights(tmp_path: Path) -> None:
    storage = SQLiteStorage(tmp_path / "store.db")
    buffer = ReplayBuffer(storage=storage)
    await buffer.put_many([make_group(group_id=number) for number in range(6)], "math", model_step=0)
    for step in (1, 2):
        async with buffer.lease_batch({"math": 1}, train_step=step):
            pass
    await buffer.save(tmp_path / "checkpoint", model_step=2)
    for step in (3, 4):
        async with buffer.lease_batch({"math": 1}, train_step=step):
            pass
    await draw(buffer)
    assert await closed_ledger(buffer) == {"issued": 7, "in_flight": 1, "buffered": 2, "trained": 4}
    await buffer.close()

    again = ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db"))
    assert await again.resume(tmp_path / "checkpoint") == 2
    assert await closed_ledger(again) == {"issued": 7, "buffered": 5, "trained": 2}
    async with again.lease_batch({"math": 4}, train_step=3) as lease:
        assert [group[0].group_id for group in lease.groups] == [2, 3, 4, 5]
        assert {state.status for group in lease.groups for state in group} == {Status.COMPLETED}
    await again.save(tmp_path / "checkpoint", model_step=3)
    assert await again.query({"place": "archived"}) == []
    await again.close()


async def test_a_rewound_group_that_is_too_old_by_now_is_reset(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db"))
    await buffer.set_limits("math", stale_threshold=2)
    await buffer.put_many([make_group(group_id=1), make_group(group_id=2)], "math", model_step=0)
    await buffer.save(tmp_path / "checkpoint", model_step=1)
    for _ in range(2):
        async with buffer.lease_batch({"math": 1}, train_step=2):
            pass
    await buffer.resume(tmp_path / "checkpoint")
    assert len(await buffer.get(1, "math", Status.COMPLETED)) == 1, "fresh for the step that is next"
    await buffer.set_limits("math", stale_threshold=1)
    assert await buffer.get(1, "math", Status.COMPLETED) == []
    assert await buffer.count("math", Status.EXPIRED) == 1
    await buffer.close()


async def test_nothing_is_kept_for_a_rewind_before_the_first_checkpoint(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db"))
    await buffer.put(make_group(), "math")
    async with buffer.lease_batch({"math": 1}, train_step=1):
        pass
    assert await buffer.query({}) == []
    await buffer.close()


async def test_g04_a_group_that_is_acknowledged_while_the_first_checkpoint_is_written_comes_back(
    tmp_path: Path,
) -> None:
    loop = asyncio.get_running_loop()
    buffer = ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db"))
    await buffer.put(make_group(), "math", model_step=0)
    lease = await buffer.lease_batch({"math": 1}, train_step=1)

    class Trainer(FileOps):
        def replace(self, *args: Any, **options: Any) -> None:
            asyncio.run_coroutine_threadsafe(lease.ack(), loop).result()
            super().replace(*args, **options)

    await save_storage(buffer.storage, tmp_path / "checkpoint", model_step=0, files=Trainer())
    assert await closed_ledger(buffer) == {"issued": 1, "trained": 1}
    await buffer.resume(tmp_path / "checkpoint")
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}
    await buffer.close()


@pytest.mark.parametrize("kind", list(STORAGES))
async def test_a_checkpoint_describes_one_moment_while_everything_continues(kind: str, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=STORAGES[kind](tmp_path))
    await buffer.put_many([make_group(1, group_id=number, tokens=1) for number in range(150)], "math")
    done = False

    async def go_on() -> None:
        number = 1_000
        while not done:
            async with buffer.lease_batch({"math": 2}, train_step=1) as lease:
                for group in lease.groups:
                    group[0].response = "changed by the trainer"
            for _ in range(2):
                number += 1
                await buffer.put(make_group(1, group_id=number, tokens=1), "math")
            taken = await buffer.get(1, "math", Status.COMPLETED)
            taken[0][0].response = "changed by the taker"
            await buffer.put(make_group(1, group_id=number + 10_000, tokens=1), "math")
            await asyncio.sleep(0)

    others = asyncio.create_task(go_on())
    for round_ in range(3):
        await buffer.save(tmp_path / f"checkpoint{round_}")
        restored = ReplayBuffer()
        await restored.resume(tmp_path / f"checkpoint{round_}")
        ledger = await closed_ledger(restored)
        assert ledger["issued"] == ledger.get("buffered", 0) + ledger.get("trained", 0)
        for group in await restored.get(1_000, "math", Status.COMPLETED):
            assert group[0].response == "391"
    done = True
    await others
    await buffer.close()


async def test_resuming_into_a_used_buffer_or_from_nothing_is_refused(tmp_path: Path) -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math")
    await buffer.save(tmp_path / "checkpoint")
    with pytest.raises(InvalidInput, match="resume into an empty one"):
        await buffer.resume(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        await ReplayBuffer().resume(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(InvalidInput, match="is a file"):
        await buffer.save(file)
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}


async def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    buffer = ReplayBuffer()
    await buffer.put_many([make_group() for _ in range(20)], "math")
    await buffer.save(tmp_path / "checkpoint")
    (file,) = (tmp_path / "checkpoint").glob("*.fbr")
    content = bytearray(file.read_bytes())
    content[len(content) - 100] ^= 1
    file.write_bytes(content)
    other = ReplayBuffer()
    with pytest.raises(DamagedData, match="altered"):
        await other.resume(tmp_path / "checkpoint")
    assert await other.ledger() == {}
    await other.put(make_group(), "math")


async def test_g08_a_disk_that_fills_while_saving_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    class Full(FileOps):
        def write(self, descriptor: int, parts: list[bytes]) -> None:  # type: ignore[override]
            raise OSError(errno.ENOSPC, "No space left on device")

    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math")
    await buffer.save(tmp_path / "checkpoint", model_step=1)
    await buffer.put(make_group(), "math")
    with pytest.raises(CheckpointError, match="No space left"):
        await save_storage(buffer.storage, tmp_path / "checkpoint", model_step=2, files=Full())
    with open_checkpoint(tmp_path / "checkpoint") as checkpoint:
        checkpoint.verify()
        assert checkpoint.manifest.model_step == 1
    await buffer.save(tmp_path / "checkpoint", model_step=3)
    other = ReplayBuffer(FIFOReplayPolicy())
    assert await other.resume(tmp_path / "checkpoint") == 3
    assert await closed_ledger(other) == {"issued": 2, "buffered": 2}


async def test_a_cancelled_save_leaves_no_trace(tmp_path: Path) -> None:
    buffer = ReplayBuffer()
    await buffer.put_many([make_group() for _ in range(300)], "math")
    saving = asyncio.ensure_future(buffer.save(tmp_path / "checkpoint"))
    for _ in range(100_000):
        await asyncio.sleep(0)
        if list(tmp_path.glob("checkpoint/*.fbr")):  # noqa: ASYNC240
            break
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert list(tmp_path.glob("checkpoint/*")) == []  # noqa: ASYNC240
    await buffer.save(tmp_path / "checkpoint")
