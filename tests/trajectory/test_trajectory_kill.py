"""G7, G8: trajectories that were acknowledged survive kill -9 at any moment; store and checkpoint are always whole."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from forebay.trajectory.restore import random_state
from tests.trajectory.crash_child import Buffer, check_batch, check_trajectory

ROOT = Path(__file__).parent.parent.parent


class Account:
    """What the children reported, over all their lives."""

    def __init__(self) -> None:
        self.tried = self.acknowledged = self.saved = -1  # the last id of each
        self.kills_at_work = self.saves = 0

    def read(self, lines: list[str]) -> None:
        for line in lines:
            word, *numbers = line.split()
            assert word != "error", line
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


class Lives:
    """The warm process that makes children."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trajectory.crash_child"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[bytes] = self._process.stdin
        self._out = self._process.stdout.fileno()
        self._rest = b""

    def live_and_die(self, directory: Path, seed: int, retain: str, events: int, seconds: float) -> list[str]:
        """Fork a child, let it report so many events, and kill it a moment later; the lines that it wrote."""
        self._in.write(f"{directory} {seed} {retain}\n".encode())
        self._in.flush()
        lines: list[str] = []
        pid, doomed = None, False
        deadline = time.monotonic() + 60.0
        while not lines or not lines[-1].startswith("dead"):
            left = deadline - time.monotonic()
            if pid is not None and left <= 0:
                os.kill(pid, signal.SIGKILL)
                pid, deadline = None, time.monotonic() + 60.0
                continue
            assert left > 0, "the child does not die"
            for line in self._read(left):
                lines.append(line)
                if line.startswith("pid"):
                    pid = int(line.split()[1])
                if pid is not None and not doomed and len(lines) > events:
                    doomed, deadline = True, time.monotonic() + seconds
        assert lines.pop() == f"dead {int(signal.SIGKILL)}", lines[-3:]
        return [line for line in lines if not line.startswith("pid")]

    def _read(self, timeout_s: float) -> Iterator[str]:
        if select.select([self._out], [], [], timeout_s)[0]:
            data = os.read(self._out, 2**16)
            assert data, "the warm process ended"
            *whole, self._rest = (self._rest + data).split(b"\n")
            yield from (line.decode().strip() for line in whole)

    def close(self) -> None:
        self._in.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def lives() -> Iterator[Lives]:
    found = Lives()
    try:
        yield found
    finally:
        found.close()


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
        events, seconds = chance.randrange(24), chance.uniform(0.0, 0.02)
        account.read(children.live_and_die(directory, seed * 10_000 + life, retain, events, seconds))
        check_store(directory, account, window, read_only=True)
        check_checkpoint(directory, account, retain)
        if life % 2:  # else the next child finds what this one left
            check_store(directory, account, window, auto_save=True, retain=retain)
    return account


def test_g07_acknowledged_trajectories_survive_fifty_kills(tmp_path: Path) -> None:
    accounts = []
    with lives() as children:
        for part, retain in enumerate(("all", "window")):
            accounts.append(kill_often(children, tmp_path / str(part), 26, seed=part, retain=retain))
    for account in accounts:
        # Otherwise nothing was shown.
        assert account.acknowledged > 20
        assert account.kills_at_work > 5
        assert account.saves > 0


def test_g07_a_trajectory_store_that_is_killed_while_it_is_made_can_be_opened(tmp_path: Path) -> None:
    with lives() as children:
        for life, seconds in enumerate(np.linspace(0.0, 0.03, 12)):
            account = Account()
            account.read(children.live_and_die(tmp_path / str(life), life, "all", 0, float(seconds)))
            check_store(tmp_path / str(life), account, 0, auto_save=True)


@pytest.mark.slow
def test_g07_acknowledged_trajectories_survive_five_hundred_kills(tmp_path: Path) -> None:
    with lives() as children:
        for part in range(10):
            kill_often(children, tmp_path / str(part), 50, seed=100 + part, retain=("all", "window")[part % 2])
