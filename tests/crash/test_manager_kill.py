"""G4 on a real process: a run that is killed again and again skips no prompt and trains none twice.

A training process is killed at a random call after it did so many things (also none: while it opens its store or
resumes), and the last one finishes. Then what the final weights were trained on, the log, and the store are held
against each other.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from forebay import ReplayBuffer, StalenessReplayPolicy
from forebay.buffer.internal import internals
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing.simulate import check_ledger
from tests.crash.manager_child import BATCH, TASKS, Trained, fate, read_weights
from tests.lives import lives

EVENTS, CALLS = 30, 20_000  # an event takes 12,000 calls
LAST_STEPS = 5


def logged(directory: Path) -> tuple[Trained, int]:
    """What the log says was trained: a resume forgets what came after its step. And all acknowledgements, ever."""
    trained: Trained = {}
    acked = 0
    for line in (directory / "log").read_text().splitlines():
        word, number, *groups = line.split()
        step = int(number)
        if word == "resumed":
            trained = {earlier: trained[earlier] for earlier in trained if earlier <= step}
        elif word == "trained":
            names = [identity.split(":") for identity in groups]
            trained[step] = [(task_name, int(group_id)) for task_name, group_id in names]
        elif word == "acked":
            acked += 1
    return trained, acked


async def account_for_all(directory: Path, trained: Trained) -> None:
    """Every group that was drawn is there exactly once: trained, filtered, failed, or still held."""
    seen = [identity for groups in trained.values() for identity in groups]
    assert len(seen) == len(set(seen)), "a group was trained twice"
    buffer = ReplayBuffer(StalenessReplayPolicy(), SQLiteStorage(directory / "store.db"))
    ledger = await buffer.ledger()
    check_ledger(ledger)
    assert set(ledger) == set(TASKS)
    for task_name, line in ledger.items():
        drawn, _ = await internals(buffer).position(task_name)
        mine = {group_id for name, group_id in seen if name == task_name}
        held = [record.group_id for record in await buffer.query({"task_name": task_name, "place": "buffered"})]
        assert len(held) == len(set(held)), f"{task_name}: held twice"
        assert not mine & set(held), f"{task_name}: trained, and still held: {mine & set(held)}"
        assert mine | set(held) <= set(range(drawn)), f"{task_name}: never drawn"
        ended = set(range(drawn)) - mine - set(held)
        ends = {group_id: fate(task_name, group_id) for group_id in ended}
        lost = [group_id for group_id, end in ends.items() if end == "trained"]
        assert not lost, f"{task_name}: neither trained nor held nor ended for a reason: {lost}"
        assert all(fate(task_name, group_id) == "trained" for group_id in mine)
        assert line == {
            "issued": drawn,
            "in_flight": 0,
            "buffered": len(held),
            "leased": 0,
            "trained": len(mine),
            "filtered": sum(end == "filtered" for end in ends.values()),
            "failed": sum(end == "failed" for end in ends.values()),
            "discarded": 0,
        }
    buffer.storage._check()  # type: ignore[attr-defined]
    await buffer.close()


def kill_often(
    directory: Path, kind: str, kills: int, seed: int, dooms: list[tuple[int, int]] | None = None
) -> tuple[int, int]:
    """How many steps were acknowledged in all, and how many of them are in the final weights."""
    chance = random.Random(seed)
    directory.mkdir(exist_ok=True)
    with lives("tests.crash.manager_child") as children:
        for life in range(kills):
            doom = dooms[life] if dooms else (chance.randrange(EVENTS), chance.randrange(CALLS))
            children.live(directory, kind, seed * 1_000 + life, LAST_STEPS, *doom)
        children.live(directory, kind, seed * 1_000 + kills, LAST_STEPS, killed=False)
    (last,) = directory.glob("weights-*.json")
    model_step = int(last.stem.split("-")[1])
    trained = read_weights(directory, model_step)
    assert sorted(trained) == list(range(1, model_step + 1)), "a step is missing"
    assert all(len(groups) == BATCH for groups in trained.values())
    from_log, acked = logged(directory)
    assert from_log == trained, "the log and the weights disagree"
    asyncio.run(account_for_all(directory, trained))
    return acked, model_step


@pytest.mark.parametrize("kind", ["colocated", "disaggregated"])
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_g04_a_process_that_is_killed_some_times_skips_nothing_and_trains_nothing_twice(
    tmp_path: Path, kills: int, kind: str
) -> None:
    acked, kept = kill_often(tmp_path, kind, kills, seed=1)
    assert acked > kept > 2 * kills, "the children hardly got to work"


def kill_in_outages(directory: Path, part: str, kind: str, kills: int) -> None:
    """Kill every life but the last while a part of the world is away; calls are counted from its outage on."""
    chance = random.Random(3)
    kill_often(directory, f"{kind} {part}", kills, seed=3, dooms=[(1, chance.randrange(150)) for _ in range(kills)])
    lives = (directory / "log").read_text().split("resumed ")[1:]
    assert len(lives) == kills + 1
    assert all("outage " in life for life in lives[:-1]), "a life was not killed in its outage"


@pytest.mark.parametrize("part", ["engine", "reward", "storage"])
def test_g03_kills_in_an_outage_lose_nothing(tmp_path: Path, part: str) -> None:
    kill_in_outages(tmp_path, part, "disaggregated", 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["colocated", "disaggregated"])
@pytest.mark.parametrize("part", ["engine", "reward", "storage"])
def test_g03_twenty_kills_in_outages_lose_nothing(tmp_path: Path, part: str, kind: str) -> None:
    kill_in_outages(tmp_path, part, kind, 20)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["colocated", "disaggregated"])
def test_g04_a_process_that_is_killed_a_hundred_times_skips_nothing_and_trains_nothing_twice(
    tmp_path: Path, kind: str
) -> None:
    for part in range(4):
        kill_often(tmp_path / str(part), kind, 25, seed=10 + part)
