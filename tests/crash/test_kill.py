"""G7: what was acknowledged survives kill -9, at any moment; a store and a checkpoint are always whole."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay import ReplayBuffer, StalenessReplayPolicy, Status
from forebay.checkpoint import open_checkpoint
from forebay.storage.sqlite import SQLiteStorage
from tests.crash.child import TASK, answer
from tests.support import closed_ledger

ROOT = Path(__file__).parent.parent.parent


class Account:
    """What the children reported, over all their lives: for every group the last state that it may be in."""

    def __init__(self) -> None:
        self.issued: set[int] = set()
        self.put: set[int] = set()
        self.acked: set[int] = set()
        self.tried: dict[str, set[int]] = {"issue": set(), "put": set(), "ack": set()}
        self.saved = False

    def read(self, lines: list[str]) -> int:
        for line in lines:
            word, verb, *numbers = line.split()
            ids = {int(number) for number in numbers}
            if word == "try":
                self.tried[verb] |= ids
            elif verb == "issue":
                self.issued |= ids
            elif verb == "put":
                self.put |= ids
            elif verb == "ack":
                self.acked |= ids
            elif verb == "save":
                self.saved = True
        return len(lines)


def live_and_die(directory: Path, seed: int, seconds: float) -> list[str]:
    """Run a child and kill it so many seconds after it opened the store; the lines that it finished."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.child", str(directory), str(seed)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"did open \n", child.communicate()
    deadline = time.monotonic() + seconds
    os.set_blocking(child.stdout.fileno(), False)
    output = b""
    while time.monotonic() < deadline:
        output += child.stdout.read() or b""
        assert child.poll() is None, child.communicate()
    child.kill()
    os.set_blocking(child.stdout.fileno(), True)
    output += child.communicate()[0]
    return output.decode().split("\n")[:-1]


async def check(directory: Path, account: Account) -> None:
    """Open what the child left, and compare."""
    buffer = ReplayBuffer(StalenessReplayPolicy(), SQLiteStorage(directory / "store.db"), max_groups=40)
    ledger = await closed_ledger(buffer, TASK)
    records = {record.group_id: record for record in await buffer.query({"place": "buffered"})}
    assert "in_flight" not in ledger, "its holder is dead"
    assert "leased" not in ledger, "its holder is dead"
    position, _ = await buffer.position(TASK)
    assert account.issued <= set(range(position)) <= account.issued | account.tried["issue"]
    assert not account.acked & set(records), "an acknowledged group is there again"
    for group_id in account.issued - account.tried["ack"]:
        assert group_id in records, f"group {group_id} is lost"
    for group_id, record in records.items():
        group = await buffer.read(record.uid)
        assert group is not None
        if record.status is Status.COMPLETED:
            assert [state.response for state in group] == [answer(group_id)] * 2
        elif group_id in account.put - account.tried["ack"]:
            pytest.fail(f"group {group_id} was put, and is {record.status}")
    gone = set(range(position)) - set(records)
    assert account.acked <= gone <= account.acked | account.tried["ack"]
    assert ledger.get("trained", 0) == len(gone)
    buffer.storage._check()  # type: ignore[attr-defined]
    await buffer.close()
    if account.saved:
        with open_checkpoint(directory / "checkpoint") as checkpoint:
            checkpoint.verify()


def kill_often(directory: Path, kills: int, seed: int) -> Account:
    chance = random.Random(seed)
    account = Account()
    for life in range(kills):
        account.read(live_and_die(directory, life, chance.uniform(0.0, 0.25)))
        asyncio.run(check(directory, account))
    return account


def test_g07_what_was_acknowledged_survives_fifty_kills(tmp_path: Path) -> None:
    account = kill_often(tmp_path, 50, seed=1)
    assert len(account.acked) > 50, "the children hardly got to work"


@pytest.mark.slow
def test_g07_what_was_acknowledged_survives_two_thousand_kills(tmp_path: Path) -> None:
    for part in range(20):
        kill_often(tmp_path / str(part), 100, seed=part)
