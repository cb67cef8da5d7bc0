"""G7: what was acknowledged survives kill -9, at any moment; a store and a checkpoint are always whole."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from forebay import ReplayBuffer, StalenessReplayPolicy, Status
from forebay.buffer.internal import internals
from forebay.checkpoint.format import open_checkpoint
from forebay.storage.sqlite import SQLiteStorage
from tests.crash.child import TASK, answer
from tests.lives import lives
from tests.support import closed_ledger

EVENTS, CALLS = 60, 2_000  # opening takes 2,000 calls, an event 500


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


async def check(directory: Path, account: Account) -> None:
    """Open what the child left, and compare."""
    buffer = ReplayBuffer(StalenessReplayPolicy(), SQLiteStorage(directory / "store.db"), max_groups=40)
    ledger = await closed_ledger(buffer, TASK)
    records = {record.group_id: record for record in await buffer.query({"place": "buffered"})}
    assert "in_flight" not in ledger, "its holder is dead"
    assert "leased" not in ledger, "its holder is dead"
    position, _ = await internals(buffer).position(TASK)
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
    directory.mkdir(exist_ok=True)
    with lives("tests.crash.child") as children:
        for life in range(kills):
            account.read(children.live(directory, life, chance.randrange(EVENTS), chance.randrange(CALLS)))
            asyncio.run(check(directory, account))
    return account


@pytest.mark.parametrize("kills", [20, pytest.param(50, marks=pytest.mark.slow)])
def test_g07_what_was_acknowledged_survives_kills(tmp_path: Path, kills: int) -> None:
    account = kill_often(tmp_path, kills, seed=1)
    assert len(account.acked) > kills, "the children hardly got to work"


@pytest.mark.slow
def test_g07_what_was_acknowledged_survives_two_thousand_kills(tmp_path: Path) -> None:
    for part in range(20):
        kill_often(tmp_path / str(part), 100, seed=part)
