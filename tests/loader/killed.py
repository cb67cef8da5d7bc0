"""Runs of training processes that are killed at chosen moments, for every storage."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.crash.manager_child import Trained
from tests.lives import lives
from tests.loader.child import SAVE_EVERY, Doom
from tests.loader.history import check_accounts, check_history, last_step, lines, reported

__all__ = ["EARLY", "FEW", "many", "train_and_kill"]

FEW = [
    Doom("updated", 2),  # steps were acknowledged, and nothing was saved
    Doom("saving", 1, 1, after=True),  # a checkpoint may be there in part
    Doom("trained", 2 * SAVE_EVERY + 1),  # in the body, right after a save that found this batch leased
    Doom("resuming", 1, 2),
]
EARLY = [
    Doom("started", 1, 1, after=True),
    Doom("training", 1),
    Doom("resuming", 1, 1, after=True),
    Doom("trained", 2, 1, after=True),
]
"""Moments before the first save."""

_EVENTS = {"started": 1, "resuming": 1, "resumed": 1, "training": 6, "trained": 6, "updated": 6, "saving": 2}
"""Events, and up to which one of them a process may live."""


def many(kills: int, seed: int) -> list[Doom]:
    chance = random.Random(seed)
    dooms = []
    for _ in range(kills):
        event = chance.choice(list(_EVENTS))
        number, operation = chance.randint(1, _EVENTS[event]), chance.choice([0, 1, 2, 3, chance.randrange(40)])
        dooms.append(Doom(event, number, operation, chance.random() < 0.5))
    return dooms


def train_and_kill(
    directory: Path, url: str, mode: str, dooms: list[Doom], after_kill: Callable[[int], None] = lambda number: None
) -> Trained:
    """Kill a process at each of these moments, let the last one end, and hold what they left against each other."""
    with lives("tests.loader.child") as children:
        for number, doom in enumerate(dooms):
            children.live(directory, url, mode, 0, doom)
            after_kill(number)
        last = last_step(directory) + 2 * SAVE_EVERY
        children.live(directory, url, mode, last, killed=False)
    assert len(lines(directory, "started")) == len(dooms) + 1
    trained = check_history(directory, last)
    check_accounts(reported(directory), trained)
    return trained
