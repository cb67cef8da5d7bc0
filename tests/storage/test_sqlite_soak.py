"""A store that lives long: the file and its log stay bounded, also with a reader open."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from forebay import ReplayBuffer
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import make_group
from tests.support import closed_ledger

GROUPS, HELD, BATCH = 200_000, 1_000, 200


@pytest.mark.slow
async def test_two_hundred_thousand_groups_through_a_store_of_a_thousand(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    buffer = ReplayBuffer(storage=SQLiteStorage(path), max_groups=HELD)
    await buffer.put_many([make_group(2, tokens=100) for _ in range(HELD)], "math")
    reader = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    sizes: list[tuple[int, int]] = []

    async def produce() -> None:
        for _ in range((GROUPS - HELD) // BATCH):
            await buffer.put_many([make_group(2, tokens=100) for _ in range(BATCH)], "math")

    async def train() -> None:
        for step in range(1, GROUPS // BATCH + 1):
            async with buffer.lease_batch({"math": BATCH}, train_step=step):
                pass
            if step % 100 == 0:
                assert reader.execute("SELECT count(*) FROM groups WHERE place <> 'archived'").fetchone()[0] <= HELD
                await buffer.save(tmp_path / "checkpoint", model_step=step)
                sizes.append((path.stat().st_size, path.with_name("store.db-wal").stat().st_size))

    await asyncio.gather(produce(), train())
    reader.close()
    assert await closed_ledger(buffer) == {"issued": GROUPS, "trained": GROUPS}
    files, logs = zip(*sizes, strict=True)
    # From the first save on the store also keeps what was trained since the last one: a hundred batches.
    assert max(files) <= 1.2 * files[1], sizes
    assert max(logs) <= 96 * 2**20, sizes
    await buffer.close()
