"""What is special about the SQLite store: one writer, refusals, damage, a full disk, views, crashes in between."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from forebay import (
    BufferClosed,
    DamagedData,
    InvalidConfig,
    InvalidInput,
    ReplayBuffer,
    ReplayBufferConfig,
    RolloutState,
    StalenessReplayPolicy,
    Status,
    StorageError,
    StorageInUse,
    StorageVanished,
    UnreadableData,
    UnsupportedPayload,
)
from forebay.buffer.internal import internals
from forebay.core.ledger import Row
from forebay.storage.sqlite import SQLiteStorage, lock
from forebay.testing import make_group
from tests.processes import HANG_S, finished
from tests.support import closed_ledger, draw


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
async def buffer(path: Path) -> AsyncIterator[ReplayBuffer]:
    buffer = ReplayBuffer(storage=SQLiteStorage(path))
    yield buffer
    await buffer.close()


async def reopened(buffer: ReplayBuffer, path: Path) -> ReplayBuffer:
    await buffer.close()
    return ReplayBuffer(storage=SQLiteStorage(path))


async def test_g07_everything_is_there_after_a_reopen(buffer: ReplayBuffer, path: Path) -> None:
    await buffer.put(make_group(group_id=5, score=1.0), "math", model_step=2, tags={"a": 1}, priority=3.0)
    await draw(buffer, 2)
    await buffer.lease_batch({"math": 1}, train_step=3)
    await buffer.discard({"task_name": "none"}, "nothing")
    again = await reopened(buffer, path)
    assert await closed_ledger(again) == {"issued": 3, "buffered": 3}
    assert await again.count("math", Status.ABORTED) == 2
    ((first, _),) = (await again.lease_batch({"math": 1}, train_step=3)).groups
    assert (first.response, first.reward, first.group_id) == ("391", {"score": 1.0}, 5)
    (record,) = await again.query({"place": "leased"})
    assert (dict(record.tags), record.priority, record.deliveries) == ({"a": 1}, 3.0, 2)
    assert (await internals(again).position("math"))[0] == 2
    assert await again.put(make_group(), "math") not in {1, 2, 3}
    await again.close()


async def test_ids_are_never_used_twice_even_if_everything_has_left(buffer: ReplayBuffer, path: Path) -> None:
    first = await buffer.put(make_group(), "math")
    await buffer.get(1, "math", Status.COMPLETED)
    again = await reopened(buffer, path)
    second = await again.put(make_group(), "math")
    assert first is not None
    assert second is not None
    assert second > first
    await again.close()


async def test_another_policy_may_open_the_store_later(buffer: ReplayBuffer, path: Path) -> None:
    for step in (5, 1):
        await buffer.put(make_group(group_id=step), "math", model_step=step)
    await buffer.close()
    again = ReplayBuffer(StalenessReplayPolicy(), SQLiteStorage(path))
    assert [group[0].group_id for group in await again.get(2, "math", Status.COMPLETED)] == [1, 5]
    await again.close()


async def test_payloads_are_not_held_in_memory(buffer: ReplayBuffer) -> None:
    await buffer.put(make_group(tokens=50), "math")
    assert [row.group for row in buffer.storage._engine.table.rows()] == [()]  # type: ignore[attr-defined]


async def test_what_is_not_plain_data_is_refused_before_anything_changed(buffer: ReplayBuffer) -> None:
    bad = [RolloutState(message=[{"role": "user", "content": object()}], response="x", status=Status.COMPLETED)]
    with pytest.raises(UnsupportedPayload, match=r"\$\[0\]\.message\[0\]\.content"):
        await buffer.put_many([make_group(), bad], "math")
    with pytest.raises(UnsupportedPayload):
        await internals(buffer).issue([bad], "math", cursor=0)
    assert await buffer.ledger() == {}


async def test_a_second_process_is_refused_and_told_who_writes(buffer: ReplayBuffer, path: Path) -> None:
    await buffer.put(make_group(), "math")
    code = (
        "import asyncio, sys; from forebay import ReplayBuffer; from forebay.storage.sqlite import SQLiteStorage\n"
        "asyncio.run(ReplayBuffer(storage=SQLiteStorage(sys.argv[1])).ledger())"
    )
    second = await asyncio.to_thread(finished, "-c", code, path)
    assert second.returncode != 0
    assert f"StorageInUse: {path} is open for writing by process {os.getpid()} on " in second.stderr
    with pytest.raises(StorageInUse):
        await ReplayBuffer(storage=SQLiteStorage(path)).ledger()


async def test_any_number_may_read_the_views_meanwhile(buffer: ReplayBuffer, path: Path) -> None:
    await buffer.put(make_group(2, group_id=7, score=0.5), "math", tags={"level": "hard"})
    reader = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        groups = reader.execute("SELECT task_name, group_id, status, place, samples, tags ->> 'level' FROM groups")
        assert groups.fetchall() == [("math", 7, "completed", "buffered", 2, "hard")]
        samples = reader.execute("SELECT group_id, position, status, tokens, reward, prompt, response FROM samples")
        assert samples.fetchall() == [(7, i, "completed", 3, 0.5, "What is 17 times 23?", "391") for i in range(2)]
        await buffer.get(1, "math", Status.COMPLETED)
        assert reader.execute("SELECT count(*) FROM samples").fetchone() == (0,)
    finally:
        reader.close()


def _use_after_fork(storage: SQLiteStorage, answers: multiprocessing.SimpleQueue[str]) -> None:
    try:
        storage._submit(lambda connection: None)
    except StorageError as error:
        answers.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_use_after_fork_is_refused(buffer: ReplayBuffer) -> None:
    await buffer.put(make_group(), "math")
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    child = context.Process(target=_use_after_fork, args=(buffer.storage, answers))
    child.start()
    child.join()
    assert "opened before a fork" in answers.get()


async def test_foreign_newer_and_broken_files_are_refused(tmp_path: Path) -> None:
    foreign, newer, broken = (tmp_path / name for name in ("foreign.db", "newer.db", "broken.db"))
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    await ReplayBuffer(storage=SQLiteStorage(newer)).close()
    made = ReplayBuffer(storage=SQLiteStorage(newer))
    await made.ledger()
    await made.close()
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    broken.write_bytes(b"this is no database" * 100)
    for file, text in ((foreign, "not made by Forebay"), (newer, "version 99"), (broken, "not a SQLite database")):
        with pytest.raises(DamagedData, match=text):
            await ReplayBuffer(storage=SQLiteStorage(file)).ledger()


async def test_a_network_file_system_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "file_system_of", lambda path: "nfs4")
    with pytest.raises(InvalidConfig, match=r"network file system \(nfs4\)"):
        await ReplayBuffer(storage=SQLiteStorage(path)).ledger()
    assert not path.exists()  # noqa: ASYNC240


async def test_g07_a_damaged_payload_costs_its_group_and_nothing_else(buffer: ReplayBuffer, path: Path) -> None:
    await buffer.put_many([make_group(group_id=number) for number in range(4)], "math", model_step=0)
    await buffer.close()
    with sqlite3.connect(path) as connection:
        frame = bytearray(connection.execute("SELECT frame FROM payloads WHERE uid = 2").fetchone()[0])
        frame[-1] ^= 0xFF
        connection.execute("UPDATE payloads SET frame = ? WHERE uid = 2", (bytes(frame),))
        connection.execute("DELETE FROM payloads WHERE uid = 3")
    connection.close()
    again = ReplayBuffer(storage=SQLiteStorage(path))
    assert await again.read(2) is None
    async with again.lease_batch({"math": 2}, train_step=1, timeout_s=HANG_S) as lease:
        assert [group[0].group_id for group in lease.groups] == [0, 3]
    assert await closed_ledger(again) == {"issued": 4, "trained": 2, "failed": 2}
    assert await again.reasons() == {"math": {"its payload was damaged on disk": 2}}
    await again.close()


async def test_a_damaged_payload_is_met_when_it_expires_too(buffer: ReplayBuffer, path: Path) -> None:
    await buffer.put_many([make_group(group_id=number) for number in range(3)], "math", model_step=0)
    await buffer.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE payloads SET frame = x'00' WHERE uid = 2")
    connection.close()
    again = ReplayBuffer(storage=SQLiteStorage(path))
    assert await again.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=9) == {"math": 2}
    assert await closed_ledger(again) == {"issued": 3, "buffered": 2, "failed": 1}
    await again.close()


async def test_a_disk_that_fills_loses_nothing_that_was_acknowledged(buffer: ReplayBuffer, path: Path) -> None:
    await buffer.put_many([make_group(group_id=number) for number in range(3)], "math")
    storage = buffer.storage
    assert isinstance(storage, SQLiteStorage)

    async def pragma(text: str) -> int:
        return int(await storage._do(lambda connection: connection.execute(text).fetchone()[0], alone=True))

    await pragma(f"PRAGMA max_page_count = {await pragma('PRAGMA page_count') + 4}")
    huge = [make_group(2, group_id=100 + number, tokens=9_000) for number in range(8)]
    outcomes = await asyncio.gather(
        buffer.put_many(huge[:4], "math"), buffer.put_many(huge[4:], "math"), return_exceptions=True
    )
    assert all(isinstance(outcome, StorageError) for outcome in outcomes), outcomes
    assert "full" in str(outcomes[0])
    assert await closed_ledger(buffer) == {"issued": 3, "buffered": 3}, "memory is what the disk has"
    async with buffer.lease_batch({"math": 2}, train_step=1) as lease:
        assert [group[0].group_id for group in lease.groups] == [0, 1]
    await pragma("PRAGMA max_page_count = 1000000")
    await buffer.put_many(huge[:4], "math")
    again = await reopened(buffer, path)
    assert await closed_ledger(again) == {"issued": 7, "buffered": 5, "trained": 2}
    await again.close()


def _delete_directory(path: Path) -> None:
    shutil.rmtree(path.parent)


def _delete_files(path: Path) -> None:
    for file in list(path.parent.iterdir()):
        file.unlink()


def _move_directory(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def _replace(path: Path) -> None:
    copy = path.with_name("copy.db")
    shutil.copyfile(path, copy)
    copy.replace(path)


def _delete_log(path: Path) -> None:
    path.with_name(path.name + "-wal").unlink()


@pytest.mark.parametrize("spoil", [_delete_directory, _delete_files, _move_directory, _replace, _delete_log])
async def test_g07_a_store_that_was_deleted_moved_or_replaced_acknowledges_nothing(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    path = tmp_path / "run" / "store.db"
    buffer = ReplayBuffer(storage=SQLiteStorage(path))
    await buffer.put_many([make_group(), make_group()], "math")
    lease = await buffer.lease_batch({"math": 1}, train_step=1)
    spoil(path)
    for _ in range(2):
        with pytest.raises(StorageVanished, match=r"store\.db.* is (missing|another file now).*nothing of this"):
            await lease.ack()
        with pytest.raises(StorageVanished):
            await buffer.put(make_group(), "math")
    assert await closed_ledger(buffer) == {"issued": 2, "buffered": 1, "leased": 1}
    with pytest.raises(StorageVanished):
        await buffer.close()
    await buffer.close()
    again = ReplayBuffer(storage=SQLiteStorage(tmp_path / "new" / "store.db"))
    await again.put(make_group(), "math")
    await again.close()


async def test_a_store_that_is_moved_back_continues(tmp_path: Path) -> None:
    path = tmp_path / "run" / "store.db"
    buffer = ReplayBuffer(storage=SQLiteStorage(path))
    await buffer.put(make_group(), "math")
    lease = await buffer.lease_batch({"math": 1}, train_step=1)
    _move_directory(path)
    with pytest.raises(StorageVanished):
        await lease.ack()
    (tmp_path / "elsewhere").rename(path.parent)
    await lease.ack()
    assert await closed_ledger(await reopened(buffer, path)) == {"issued": 1, "trained": 1}


async def test_many_putters_at_once_share_commits(buffer: ReplayBuffer) -> None:
    await buffer.put(make_group(group_id=999), "math")
    storage = buffer.storage
    assert isinstance(storage, SQLiteStorage)
    commits: list[str] = []
    await storage._do(
        lambda transaction: transaction.connection.set_trace_callback(
            lambda statement: commits.append(statement) if statement == "COMMIT" else None
        ),
        alone=True,
    )
    await asyncio.gather(*(buffer.put(make_group(group_id=number), "math") for number in range(64)))
    assert len(commits) < 32, f"{len(commits)} commits for 64 puts"
    assert await buffer.count("math", Status.COMPLETED) == 65


async def test_groups_that_come_during_a_restore_are_refused_and_not_lost(path: Path) -> None:
    source = ReplayBuffer()
    await source.put_many([make_group(), make_group()], "math")
    snapshot = await source.storage.snapshot()
    storage = SQLiteStorage(path)
    buffer = ReplayBuffer(storage=storage)
    assert await buffer.ledger() == {}

    async def rows() -> AsyncIterator[Row]:
        async for row in snapshot.rows:
            for task_name in ("math", "code"):
                with pytest.raises(InvalidInput, match="is being restored"):
                    await buffer.put(make_group(), task_name)
            yield row

    await storage.restore(snapshot.accounts, snapshot.next_uid, snapshot.next_timestamp_id, rows())
    await buffer.put(make_group(), "math")
    again = await reopened(buffer, path)
    assert await closed_ledger(again) == {"issued": 3, "buffered": 3}
    await again.close()
    await source.close()


async def test_a_restore_that_was_interrupted_leaves_an_empty_store(tmp_path: Path, path: Path) -> None:
    source = ReplayBuffer()
    await source.put_many([make_group() for _ in range(5)], "math")
    await source.save(tmp_path / "checkpoint")
    target = ReplayBuffer(storage=SQLiteStorage(path))
    await target.resume(tmp_path / "checkpoint")
    await target.close()
    with sqlite3.connect(path) as connection:  # as a kill in the middle leaves it
        connection.execute("INSERT INTO meta VALUES ('restoring', 1)")
    connection.close()
    again = ReplayBuffer(storage=SQLiteStorage(path))
    assert await again.ledger() == {}
    await again.resume(tmp_path / "checkpoint")
    assert await closed_ledger(again) == {"issued": 5, "buffered": 5}
    await again.close()


async def test_a_config_names_a_store(tmp_path: Path) -> None:
    buffer = ReplayBufferConfig(storage=f"sqlite:///{tmp_path / 'deep' / 'store.db'}").build()
    await buffer.put(make_group(), "math")
    assert (tmp_path / "deep" / "store.db").exists()
    await buffer.close()
    with pytest.raises(BufferClosed):
        await buffer.put(make_group(), "math")
    with pytest.raises(InvalidConfig, match="synchronous"):
        SQLiteStorage(tmp_path / "x.db", synchronous="OFF")  # type: ignore[arg-type]


async def test_a_link_to_a_store_is_the_same_store(buffer: ReplayBuffer, path: Path) -> None:
    await buffer.put(make_group(), "math")
    link = path.with_name("link.db")
    link.symlink_to(path)
    with pytest.raises(StorageInUse):
        await ReplayBuffer(storage=SQLiteStorage(link)).ledger()


async def test_a_damaged_archived_group_does_not_open_the_ledger(buffer: ReplayBuffer, tmp_path: Path) -> None:
    await buffer.put_many([make_group(), make_group()], "math")
    await buffer.save(tmp_path / "checkpoint", model_step=0)
    async with buffer.lease_batch({"math": 2}, train_step=1):
        pass
    storage = buffer.storage
    assert isinstance(storage, SQLiteStorage)
    await storage._do(lambda connection: connection.execute("UPDATE payloads SET frame = x'00' WHERE uid = 1"))
    await buffer.resume(tmp_path / "checkpoint")
    assert await closed_ledger(buffer) == {"issued": 2, "buffered": 1, "trained": 1}


async def test_a_file_that_a_crash_left_empty_becomes_a_store(path: Path) -> None:
    path.touch()  # noqa: ASYNC240
    buffer = ReplayBuffer(storage=SQLiteStorage(path))
    await buffer.put(make_group(), "math")
    await buffer.close()


async def test_a_directory_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be opened"):
        await ReplayBuffer(storage=SQLiteStorage(tmp_path)).ledger()


async def test_an_intact_payload_that_cannot_be_read_here_is_not_thrown_away(
    buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group(1)
    group[0].extra_fields = {"image": np.ones(3, ml_dtypes.bfloat16)}
    await buffer.put(group, "math")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for call in (buffer.get(1, "math", Status.COMPLETED), buffer.lease_batch({"math": 1}, train_step=1).__aenter__()):
        with pytest.raises(UnreadableData, match="needs the package ml_dtypes"):
            await call
    monkeypatch.undo()
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}
    assert len(await buffer.get(1, "math", Status.COMPLETED)) == 1


async def test_a_row_of_wrong_types_is_refused_by_name(buffer: ReplayBuffer, path: Path) -> None:
    await buffer.put(make_group(), "math")
    await buffer.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE group_rows SET tokens = 'many'")
    connection.close()
    with pytest.raises(DamagedData, match="uid 1 cannot be read"):
        await ReplayBuffer(storage=SQLiteStorage(path)).ledger()


def test_a_mount_hides_what_was_mounted_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    points = ["/dev/sda / ext4", "auto /data autofs", "host:/x /data nfs4", "host:/y /with\\040space cifs"]
    mounts = "".join(f"{point} rw 0 0\n" for point in points)
    monkeypatch.setattr(Path, "read_text", lambda self, **named: mounts)
    assert lock.file_system_of(Path("/data/run/store.db")) == "nfs4"
    assert lock.file_system_of(Path("/with space/store.db")) == "cifs"
    assert lock.file_system_of(Path("/elsewhere")) == "ext4"
