"""An end that was stored is told, though the process is killed before its callback returns."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from forebay import ReplayBuffer
from forebay.storage.sqlite import SQLiteStorage
from tests.crash.ends_child import GROUPS, TASK

ROOT = Path(__file__).parent.parent.parent


def test_g01_every_end_is_told_at_least_once_over_kills_inside_the_callback(tmp_path: Path) -> None:
    for killed_at in (1, 1, 2, 4, 3, 1, 0):
        child = subprocess.run(
            [sys.executable, "-m", "tests.crash.ends_child", str(tmp_path), str(killed_at)],
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        assert child.returncode == (-signal.SIGKILL if killed_at else 0), child.stderr.decode()
    heard = [int(line) for line in (tmp_path / "heard").read_text().split()]
    ended = _trained(tmp_path)
    assert ended >= GROUPS
    assert len(set(heard)) == ended
    assert len(heard) <= 2 * ended


def _trained(directory: Path) -> int:
    import asyncio

    async def read() -> int:
        async with ReplayBuffer(storage=SQLiteStorage(directory / "store.db")) as buffer:
            return (await buffer.ledger())[TASK]["trained"]

    return asyncio.run(read())
