"""What a run of killed and interrupted processes must have left: weights, log and store that agree."""

from __future__ import annotations

import json
from pathlib import Path

from tests.crash.manager_child import TASKS, Trained, fate
from tests.loader.child import BATCH, Account, Weights

__all__ = ["check_accounts", "check_history", "last_step", "lines", "reported"]


def lines(directory: Path, event: str) -> list[list[str]]:
    """The words of all lines of an event."""
    found = [line.split() for line in (directory / "log").read_text().splitlines()]
    return [words for words in found if words[0] == event]


def last_step(directory: Path) -> int:
    """The step of the last weights that were saved; 0 if none were."""
    return max((int(path.stem.split("-")[1]) for path in directory.glob("weights-*.json")), default=0)


def logged(directory: Path) -> Trained:
    """What was trained, by the log: a resume forgets what came after its step."""
    trained: Trained = {}
    for line in (directory / "log").read_text().splitlines():
        event, *words = line.split()
        if event == "resumed":
            trained = {step: groups for step, groups in trained.items() if step <= int(words[0])}
        elif event == "trained":
            pairs = [word.split(":") for word in words[1:]]
            trained[int(words[0])] = [(name, int(group_id)) for name, group_id in pairs]
    return trained


def check_resumes(directory: Path) -> None:
    """Every process resumed from the last save, or from one that was begun after it."""
    saved, begun = 0, {0}
    for line in (directory / "log").read_text().splitlines():
        event, *words = line.split()
        if event == "saving":
            begun.add(int(words[0]))
        elif event == "saved":
            saved, begun = int(words[0]), {int(words[0])}
        elif event == "resumed":
            assert int(words[0]) in begun, f"resumed from step {words[0]}, but step {saved} was saved"


def check_history(directory: Path, step: int) -> Trained:
    """The weights of a step have every step before it once, no group twice, and are what the log says."""
    weights = Weights(directory)
    weights.load(step)
    trained = weights.trained
    assert sorted(trained) == list(range(1, step + 1)), "a step is missing"
    assert all(len(groups) == BATCH for groups in trained.values())
    seen = [identity for groups in trained.values() for identity in groups]
    assert len(seen) == len(set(seen)), "a group was trained twice"
    assert logged(directory) == trained, "the log and the weights disagree"
    check_resumes(directory)
    return trained


def reported(directory: Path) -> dict[str, Account]:
    """What the store said when the last process ended."""
    content = json.loads((directory / "accounts.json").read_text())
    return {name: Account(**account) for name, account in content.items()}


def check_accounts(accounts: dict[str, Account], trained: Trained) -> None:
    """Every group that was drawn is there exactly once: trained, filtered, failed, or held."""
    assert set(accounts) == set(TASKS)
    seen = [identity for groups in trained.values() for identity in groups]
    for name, (line, drawn, held) in accounts.items():
        mine = {group_id for task_name, group_id in seen if task_name == name}
        assert len(held) == len(set(held)), f"{name}: held twice"
        assert not mine & set(held), f"{name}: trained, and held: {mine & set(held)}"
        assert mine | set(held) <= set(range(drawn)), f"{name}: never drawn"
        ends = {group_id: fate(name, group_id) for group_id in set(range(drawn)) - mine - set(held)}
        lost = [group_id for group_id, end in ends.items() if end == "trained"]
        assert not lost, f"{name}: neither trained nor held nor ended for a reason: {lost}"
        assert all(fate(name, group_id) == "trained" for group_id in mine)
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
