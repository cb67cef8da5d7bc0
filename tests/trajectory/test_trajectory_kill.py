"""G7, G8: trajectories that were acknowledged survive kill -9 at any moment; store and checkpoint are always whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from forebay.trajectory.restore import random_state
from tests.lives import Lives, lives
from tests.trajectory.crash_child import Buffer, check_batch, check_trajectory

CHILD = "tests.trajectory.crash_child"
EVENTS, CALLS = 24, 3_000  # opening takes 2,400 calls, an event 2,000
STRIDE = 201


class Account:
    """What the children reported, over all their lives."""

    def __init__(self) -> None:
        self.tried = self.acknowledged = self.saved = -1  # the last id of each
        self.kills_at_work = self.saves = 0

    def read(self, lines: list[str]) -> None:
        for line in lines:
            word, *numbers = line.split()
            if word == "try":
                self.tried = max(self.tried, int(numbers[1]))
            elif word == "did":
                self.acknowledged = max(self.acknowledged, int(numbers[1]))
            elif word == "durable":
                self.acknowledged = max(self.acknowledged, int(numbers[0]))
            elif word == "saved":
                self.saved = max(self.saved, int(numbers[0]) - 1)
                self.saves += 1
        self.kills_at_work += any(line.startswith("try") for line in lines)


def check_store(directory: Path, account: Account, window: int, **options: Any) -> None:
    """Everything that was acknowledged is there, bit for bit, and nothing that was not tried."""
    if account.acknowledged < 0 and options.get("read_only"):
        return  # it may have died while it made the catalogue, which a reader does not mend
    with Buffer(sample_window_size=window, auto_save_path=directory / "store", arrays="numpy", **options) as buffer:
        stats = buffer.get_stats()
        assert stats["left_out_damaged"] == 0, "nothing is committed before it is whole"
        last = int(stats["next_id"]) - 1
        assert account.acknowledged <= last <= account.tried
        first = max(last - window + 1, 0) if window else 0
        assert len(buffer) == last - first + 1
        for key in range(first, last + 1):
            check_trajectory(buffer.trajectory(key), key)
        if last >= 0:
            check_batch(buffer.sample(512))
        buffer._check()


def check_checkpoint(directory: Path, account: Account, retain: str) -> None:
    """It is the last one that was reported, or one that was being saved when the child died."""
    if account.saved < 0:
        return
    with Buffer(sample_window_size=0, arrays="numpy") as buffer:
        buffer.load_checkpoint(directory / "checkpoint")
        last = int(buffer.get_stats()["next_id"]) - 1
        assert account.saved <= last <= account.tried
        first = last + 1 - len(buffer)
        assert len(buffer) == last + 1 if retain == "all" else len(buffer) >= min(20, last + 1)
        for key in range(max(first, last - 40), last + 1):
            check_trajectory(buffer.trajectory(key), key)
        check_batch(buffer.sample(256))
        assert random_state(buffer._generator)["key"][1] == 0


def kill_often(children: Lives, directory: Path, kills: int, seed: int, retain: str) -> Account:
    chance = random.Random(seed)
    account = Account()
    directory.mkdir(parents=True)
    window = 0 if retain == "all" else 20
    for life in range(kills):
        doom = chance.randrange(EVENTS), chance.randrange(CALLS)
        account.read(children.live(directory, seed * 10_000 + life, retain, *doom))
        check_store(directory, account, window, read_only=True)
        check_checkpoint(directory, account, retain)
        if life % 2:  # else the next child finds what this one left
            check_store(directory, account, window, auto_save=True, retain=retain)
    return account


def test_g07_acknowledged_trajectories_survive_thirty_kills(tmp_path: Path) -> None:
    accounts = []
    with lives(CHILD) as children:
        for part, retain in enumerate(("all", "window")):
            accounts.append(kill_often(children, tmp_path / str(part), 15, seed=part, retain=retain))
    for account in accounts:
        # Otherwise nothing was shown.
        assert account.acknowledged > 20
        assert account.kills_at_work > 5
        assert account.saves > 0


def test_g07_a_trajectory_store_that_is_killed_while_it_is_made_can_be_opened(tmp_path: Path) -> None:
    with lives(CHILD) as children:
        for life, calls in enumerate(range(0, 12 * STRIDE, STRIDE)):
            account = Account()
            account.read(children.live(tmp_path / str(life), life, "all", 0, calls))
            check_store(tmp_path / str(life), account, 0, auto_save=True)


@pytest.mark.slow
def test_g07_acknowledged_trajectories_survive_five_hundred_kills(tmp_path: Path) -> None:
    for part in range(10):
        with lives(CHILD) as children:
            kill_often(children, tmp_path / str(part), 50, seed=100 + part, retain=("all", "window")[part % 2])
